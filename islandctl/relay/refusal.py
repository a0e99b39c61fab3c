"""A request that the relay does not carry out."""

from __future__ import annotations

from islandctl.ledger.entries import Halt


class Refusal(Exception):
    """``code`` is for programs, ``message`` for people."""

    def __init__(self, code: str, message: str, *, halt: Halt | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.halt = halt
        """An entry that must be written because of this request."""
