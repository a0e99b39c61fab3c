"""One line of the list of all runs, as the records have it: nobody is asked."""

from __future__ import annotations

from islandctl.config.model import Model
from islandctl.runs.record import Phase, RunRecord


class Listed(Model):
    """One run in the list of all runs."""

    run: str
    """Its name."""
    created: str
    """UTC, ISO 8601."""
    last_known: str
    """As a command last saw it: `finished`, `stopped` or `failed` once it was seen so, else the phase."""
    phase: Phase
    """What the controller last did; see below."""
    reason: str
    """Why, when that needs a word; of a launched run how it was seen to have ended."""
    attempt: int
    """Counts the resumes, from 1."""
    config_hash: str
    """Of what decides the result: recipe and cells."""
    plan_hash: str
    """Of the whole plan."""
    sites: tuple[str, ...]
    """Sites of its cells."""

    @classmethod
    def of(cls, record: RunRecord) -> Listed:
        """The record's line."""
        known = {key: getattr(record, key) for key in cls.model_fields if key != "sites"}
        return cls(**known, sites=tuple(dict.fromkeys(cell.site for cell in record.cells)))
