"""``status.json``: the relay's view of the run as a file, for readers on its own machine.

Reading it takes no connection and no HTTP library. Written once a second and never synced: whoever finds it old asks
the relay itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from islandctl.config.model import Model
from islandctl.relay.messages import RelayStatus

NAME = "status.json"
LAST_NAME = "status-at-end.json"
"""The same as a relay has left it that ended in good order."""
WRITE_EVERY_S = 1.0
FRESH_S = 3.0
"""Older: the relay is gone, or too busy to be believed."""


class Glance(Model):
    """The file's content."""

    at: float
    """Seconds since 1970 when it was written, by the clock of the machine that also reads it."""
    status: RelayStatus


def tell(folder: Path, status: RelayStatus, now: float) -> None:
    """Write the file into the relay's folder, atomically."""
    aside = folder / f"{NAME}.new"
    aside.write_text(Glance(at=now, status=status).model_dump_json(), encoding="utf-8")
    os.replace(aside, folder / NAME)


def told_by_file(folder: Path, now: float) -> RelayStatus | None:
    """The relay's view with ages as of ``now``; None when there is no fresh file."""
    try:
        glance = Glance.model_validate_json((folder / NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    age_s = now - glance.at
    if not 0 <= age_s <= FRESH_S:
        return None
    cells = tuple(
        cell.model_copy(update={"age_s": _later(cell.age_s, age_s), "still_s": _later(cell.still_s, age_s)})
        for cell in glance.status.cells
    )
    return glance.status.model_copy(update={"cells": cells})


def _later(then: float | None, by_s: float) -> float | None:
    return None if then is None else then + by_s
