"""What the doctor has found: rows, and what follows from them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from islandctl.config.model import Model
from islandctl.config.secrets import hide
from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet.checks.base import Check, Level, Scope, Tier, Verdict

ORDER: tuple[Level, ...] = ("fail", "unknown", "warn", "ok", "skipped")
"""The worst first."""


class Row(Model):
    """One check of one place."""

    check: str
    """Its name, as --only and --skip take it."""
    scope: Scope
    """What it was asked about."""
    tier: Tier
    """The first tier that runs it."""
    site: str
    """Empty: all sites together."""
    place: str
    """``site/host``, a cell, a site, or ``all sites``."""
    level: Level
    """``unknown``: no answer. ``skipped``: not asked, the text says why; it is no pass."""
    text: str
    """What was found, or why nothing was."""
    value: float | None = None
    """The figure behind it."""
    unit: str = ""
    """Of the figure."""
    threshold: str = ""
    """What it was held against."""
    source: str = ""
    """Where the threshold comes from."""
    hint: str = ""
    """What to type or do next."""
    seconds: float
    """How long it took."""


class Written(Model):
    """One value that --write-profile has put into a profile."""

    profile: str
    """The file."""
    key: str
    """For example ``wan.up``."""
    before: str | None
    """As it was written; null: the key was not there."""
    after: str
    """As it is written now."""


class DoctorReport(Model):
    """Everything that was asked."""

    version: Literal[1] = 1
    """Grows when a field changes its meaning."""
    tier: Tier
    """As asked for."""
    sites: tuple[str, ...]
    """Names of the sites."""
    rows: tuple[Row, ...]
    """The worst first, site by site."""
    measured: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Site → key of its profile → what was measured: bit/s, B/s, bytes, seconds, FLOP/s."""
    written: tuple[Written, ...] = ()
    """With --write-profile."""
    seconds: float
    """How long all of it took."""

    def count(self, level: Level) -> int:
        """Rows of a level."""
        return sum(row.level == level for row in self.rows)

    @property
    def exit_code(self) -> int:
        """4: something failed; 5: something did not answer, so its state is unknown; else 0."""
        if self.count("fail"):
            return PreflightError.exit_code
        return UnreachableError.exit_code if self.count("unknown") else 0


def row(check: Check, verdict: Verdict, *, site: str, place: str, seconds: float) -> Row:
    """One verdict as a row; what the verdict leaves out is the check's own."""
    wrong = verdict.level in ("fail", "warn", "unknown")
    return Row(
        check=check.name,
        scope=check.scope,
        tier=check.tier,
        site=site,
        place=verdict.place or place,
        level=verdict.level,
        text=hide(verdict.text),
        value=verdict.value,
        unit=verdict.unit,
        threshold=verdict.threshold or check.threshold,
        source=check.source,
        hint=verdict.hint or (check.remedy if wrong else ""),
        seconds=round(seconds, 3),
    )


def in_order(rows: Sequence[Row], sites: Sequence[str]) -> tuple[Row, ...]:
    """Site by site, the worst first; what concerns all sites comes last."""

    def key(one: Row) -> tuple[int, int]:
        return sites.index(one.site) if one.site in sites else len(sites), ORDER.index(one.level)

    return tuple(sorted(rows, key=key))
