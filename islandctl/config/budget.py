"""What a run may cost, in money or in time."""

from __future__ import annotations

from typing import Annotated

from islandctl.config.model import Settings
from islandctl.config.units import Seconds, Usd, parse_seconds, within
from islandctl.errors import UsageError

BY_BUDGET = "stopped by budget"
"""Begins the reason of every end that a budget caused."""


class Budget(Settings):
    """What the run may use up, over all its attempts. Both keys: what is reached first. Left out: no limit."""

    cost: Usd | None = None
    """Over all sites. Turned into hours by the plan's price, at the upper end of its range; needs ``price.gpu``."""
    hours: Annotated[Seconds, within(parse_seconds, least="1 s", most="3650 d")] | None = None
    """Time in which the run's workers are kept, restarts and waiting included; the pause before a resume is not."""

    @property
    def limited(self) -> bool:
        """Is there any limit?"""
        return self.cost is not None or self.hours is not None


def parse_budget(text: str) -> Budget:
    """``24 h`` or ``800 USD``, as given to ``resume --budget``.

    Raises:
        UsageError: neither.
    """
    try:
        return Budget(cost=text) if "USD" in text else Budget(hours=text)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(
            f"--budget '{text}' is neither a time nor an amount of money",
            hint="for example --budget '24 h' or '800 USD'",
        ) from error
