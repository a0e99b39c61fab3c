"""One tree of errors. Each class is a kind of trouble with its exit code.

    IslandError
    ├── UsageError            2    a command was held wrong
    │   └── ConfigError       2    a profile, recipe or plan is wrong (file:line:column)
    ├── InfeasibleError       3    the plan cannot work
    ├── PreflightError        4    a node is not fit for the run
    │   └── HostKeyError      4    a host key is unknown or has changed
    ├── UnreachableError      5    no answer: the state is unknown, not failed
    ├── BudgetError           6    stopped by budget
    └── RunError              1    the run failed
        ├── ExchangeError     1    a round could not be carried out
        │   └── DivergenceError 1  replicas no longer agree
        ├── CheckpointError   1    a checkpoint cannot be written or trusted
        ├── LedgerError       1    the run's trace is broken
        └── RelayError        1    the relay refused a request

A message names the place (file:line:column, or site/node/rank); the hint is what to type or do next.
"""

from __future__ import annotations


class IslandError(Exception):
    """Base of every error that islandctl raises on purpose.

    Args:
        message: one line: place, then cause.
        hint: one line: the next command or action. Empty when there is none.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # where the error is met as a traceback, in a program of one's own


class UsageError(IslandError):
    """A command was held wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A profile, recipe or plan is wrong. The message starts with file:line:column where there is one."""


class InfeasibleError(IslandError):
    """The plan cannot work; the message names the binding constraint."""

    exit_code = 3


class PreflightError(IslandError):
    """A node is not fit for the run."""

    exit_code = 4


class HostKeyError(PreflightError):
    """A host key is unknown or has changed."""


class UnreachableError(IslandError):
    """No answer from a host or the relay. What runs there is unknown, not failed."""

    exit_code = 5


class BudgetError(IslandError):
    """The run was stopped by its budget."""

    exit_code = 6


class RunError(IslandError):
    """The run failed."""


class ExchangeError(RunError):
    """A round could not be carried out."""


class NotFiniteError(ExchangeError):
    """A loss or a parameter is no longer a number, and nothing was exchanged. A repetition would give the same."""


class DivergenceError(ExchangeError):
    """Replicas that must be identical are not. The message names cell, fragment and window."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, found or trusted."""


class LedgerError(RunError):
    """The ledger's chain is broken: an entry was lost, changed or put in. The message names it."""


class RelayError(RunError):
    """The relay refused a request.

    Args:
        code: the relay's machine-readable reason, for example ``stale``, ``closed``, ``exists``, ``halted``.
    """

    def __init__(self, message: str, *, code: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code
