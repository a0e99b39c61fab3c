"""``python -m islandctl.worker.preflight``: does this node hold the text? Asked by a launch, before any worker runs.

On stdin: ``data`` (of the recipe), ``sequence``, ``num_cells``. The last line on stdout: ``files``, ``bytes`` and
``held_out`` (the hash of the held-out text), or ``error`` and ``hint``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from islandctl.config.recipe import DataRecipe
from islandctl.errors import ConfigError
from islandctl.worker.text import per_epoch, read_text


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """Read the text as a worker will."""
    try:
        text = read_text(DataRecipe.model_validate(asked["data"]), sequence=asked["sequence"])
        per_epoch(text.training, sequence=asked["sequence"], num_cells=asked["num_cells"])
    except ConfigError as error:
        return {"error": error.message, "hint": error.hint}
    size = len(text.training) + len(text.held_out)
    return {"files": text.num_files, "bytes": size, "held_out": text.held_out_hash}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(look(json.load(sys.stdin))) + "\n")
