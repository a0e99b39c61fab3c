"""The shipped butterfly recipe, made small: four cells on one local site, launched, killed, resumed, finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from islandctl.ledger.entries import Commit
from islandctl.ledger.joint import joint_checkpoints

from .local import RECIPE, Machine, ending, kill, merged, steps_of
from .tensors import model_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CELLS = [f"east-{number}" for number in range(4)]
SHIPPED = Path(__file__).parents[2] / "recipes/butterfly-8.yaml"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with ending(Machine(tmp_path)) as made:
        yield made


def small(machine: Machine, steps: int) -> Path:
    """The recipe with the sizes of the others here."""
    shipped = yaml.safe_load(SHIPPED.read_text())
    parts = ("model", "data", "training", "evaluation", "worker")
    recipe = (
        shipped | {part: RECIPE[part] for part in parts} | {"relay": RECIPE["relay"], "checkpoint": {"every": 10}}
    )
    changes = {"training": {"steps": steps}, "exchange": {"cells": 4, "window": 10, "fragments": 2, "overlap": 2}}
    path = machine.root / "butterfly.yaml"
    path.write_text(json.dumps(merged(recipe, changes | {"name": "small"})))
    return path


def test_four_cells_of_one_site_end_with_equal_weights(machine: Machine) -> None:
    steps = 80
    site = machine.site("east", gpu={"count": 4, "per_node": 4}, cpu={"cores": 4, "memory": "8 GiB"})
    started = machine.islandctl(
        "launch", str(small(machine, steps)), "--site", str(site), "--run", "pairs", "--detach"
    )
    assert started.returncode == 0, started.stderr + started.stdout
    assert [cell["name"] for cell in machine.status("pairs")["cells"]] == CELLS
    machine.until_trained("pairs", 12, cells=CELLS)
    kill(machine.workers("pairs", "east-2"))
    machine.until("pairs", lambda seen: seen["cells"][2]["restarts"] == 1 and seen["joint_checkpoint"] is not None)
    machine.kill_everything("pairs")
    resumed = machine.islandctl("resume", "pairs", "--detach")
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout

    done = machine.until("pairs", lambda seen: seen["state"] in ("finished", "failed"), deadline_s=250)
    assert (done["state"], steps_of(done)) == ("finished", [steps] * 4), done
    finals = [machine.cell("pairs", cell) / "checkpoints" / f"step-{steps:08}-attempt-2" for cell in CELLS]
    weights = [model_hashes(final) for final in finals]
    assert weights[0]
    assert all(one == weights[0] for one in weights[1:])
    bits = [cell["bits_per_byte"][-1] for cell in done["cells"]]
    assert all(one == bits[0] for one in bits[1:])
    assert joint_checkpoints(machine.ledger("pairs"), 4)[-1].step == steps

    commits = [entry for entry in machine.ledger("pairs") if isinstance(entry, Commit)]
    rounds = {(one.fragment, one.window, one.pair) for one in commits}
    assert len(rounds) == 2 * 2 * (8 + 2)  # two fragments, two pairs; eight windows and the last two rounds
    assert all(tuple(part.cell for part in one.named) == one.pair for one in commits)
    told = machine.metrics("pairs", "east-0", "exchange")
    assert all(one["distance"] for one in told)
    assert machine.islandctl("stop", "pairs").returncode == 0
    assert machine.processes("pairs") == {}
