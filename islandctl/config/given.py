"""An exchange that a program gives, not a recipe: every fault in one line."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from islandctl.config.exchange import Exchange as Keys
from islandctl.config.faults import explain
from islandctl.config.idle import idle
from islandctl.config.recipe import Recipe
from islandctl.errors import ConfigError, UsageError

HINT = "its keys are those of a recipe's exchange"


class Exchange(Keys):
    """How the cells exchange: the keys of the recipe's section ``exchange``; see docs/configuration.md.

    Raises:
        ConfigError: a key is not known, a value is not allowed, or a key means nothing beside the others.
    """

    def __init__(self, **keys: Any) -> None:
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise ConfigError(f"exchange: {'; '.join(map(str, explain(error, Keys)))}", hint=HINT) from None
        in_vain = [str(fault) for fault in idle({"exchange": keys}, Recipe)]
        if in_vain:
            raise ConfigError("; ".join(in_vain), hint=HINT)


def exchange_of(given: object) -> Keys:
    """The exchange itself, or made of its keys.

    Raises:
        UsageError: it is neither.
        ConfigError: see ``Exchange``.
    """
    if isinstance(given, Keys):
        return given
    try:
        keys = dict(given)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise UsageError(
            f"exchange is {type(given).__name__}, not how the cells exchange", hint="islandctl.Exchange(window=50, …)"
        ) from None
    return Exchange(**keys)
