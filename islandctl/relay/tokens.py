"""Who may ask: bearer tokens and their roles. Only the tokens' hashes lie on the relay's disk."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from islandctl.errors import ConfigError

Role = int | Literal["controller"]
"""A cell's index, or the controller."""


def token_hash(token: str) -> str:
    """What ``tokens.json`` holds of a token: its SHA-256, hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """The run's tokens.

    Args:
        roles: SHA-256 of a token → ``controller``, or a cell's index as text.
        num_cells: cells of the run.

    Raises:
        ConfigError: a role or hash is wrong.
    """

    def __init__(self, roles: Mapping[str, str], num_cells: int) -> None:
        self._roles: list[tuple[bytes, Role]] = []
        for hashed, role in roles.items():
            known = role == "controller" or (role.isascii() and role.isdigit() and int(role) < num_cells)
            if not known or len(hashed) != 64:
                raise ConfigError(
                    f"tokens: role '{role}' is neither 'controller' nor a cell's index, or its hash is wrong"
                )
            self._roles.append((hashed.lower().encode(), "controller" if role == "controller" else int(role)))

    @classmethod
    def read(cls, path: Path, num_cells: int) -> Tokens:
        """Read ``tokens.json``.

        Raises:
            ConfigError: it is missing or wrong.
        """
        try:
            roles = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(roles, dict) or not all(isinstance(role, str) for role in roles.values()):
            raise ConfigError(f"{path}: expected hash → role, as text")
        return cls(roles, num_cells)

    def role(self, authorization: bytes) -> Role | None:
        """The role behind an ``Authorization`` header; None: none. Takes the same time for every wrong token."""
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        presented = hashlib.sha256(token.strip()).hexdigest().encode()
        found: Role | None = None
        for hashed, role in self._roles:
            if hmac.compare_digest(hashed, presented):
                found = role
        return found
