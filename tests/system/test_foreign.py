"""A script of the user's own, recipes/foreign, on two local sites: it survives kills, and resumes exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.load import load_recipe

from .local import SITE, Machine, ending, kill, steps_of
from .tensors import model_hashes, state_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FOREIGN = Path(__file__).parents[2] / "recipes" / "foreign"
STEPS = 40


class Foreign(Machine):
    """The machine, with the shipped recipe: fewer steps, and a link that gives time to break things."""

    def recipe(self, steps: int, **changes: Any) -> Path:
        whole = load_recipe(FOREIGN / "recipe.yaml").value.model_dump(mode="json", exclude_defaults=True)
        whole["training"]["steps"] = steps
        whole["checkpoint"] = {"every": 10}
        whole["exchange"] |= {"window": 10}
        whole["relay"] = {"emulate": {"bandwidth": "100 Mbit/s", "rtt": "150 ms"}}
        whole["worker"] |= {"restart": {"backoff": "200 ms"}}
        shutil.copy(FOREIGN / "train.py", self.root)
        path = self.root / "recipe.yaml"
        path.write_text(json.dumps(whole))
        return path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    with ending(Foreign(tmp_path_factory.mktemp("foreign"))) as made:
        done = made.launch(STEPS, "straight")
        assert done.returncode == 0, done.stderr + done.stdout
        yield made


def last(machine: Machine, run: str, cell: str, attempt: int = 1) -> Path:
    return machine.cell(run, cell) / "checkpoints" / f"step-{STEPS:08d}-attempt-{attempt}"


def check_same(machine: Machine, run: str, attempt: int) -> None:
    for cell in ("east", "west"):
        assert state_hashes(last(machine, run, cell, attempt)) == state_hashes(last(machine, "straight", cell))
        assert machine.losses(run, cell) == machine.losses("straight", cell)
    assert machine.packets(run) == machine.packets("straight")


def test_it_learns_and_the_cells_end_alike(machine: Foreign) -> None:
    losses = machine.losses("straight", "east")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1] - 1.0
    assert losses != machine.losses("straight", "west")
    weights = [model_hashes(last(machine, "straight", cell)) for cell in ("east", "west")]
    assert weights[0] == weights[1] != {}
    assert (machine.cell("straight", "east") / "script" / "train.py").read_text() == (
        FOREIGN / "train.py"
    ).read_text()


def test_killed_workers_come_back_and_a_resume_is_exact(machine: Foreign) -> None:
    started = machine.launch(STEPS, "hurt", "--detach")
    assert started.returncode == 0, started.stderr
    machine.until_joint("hurt", 10)
    kill(machine.workers("hurt", "west"))
    machine.until_joint("hurt", 20)
    machine.kill_everything("hurt")
    (machine.root / "train.py").write_text("raise SystemExit('the run keeps the script of its launch')\n")
    resumed = machine.islandctl("resume", "hurt")
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "train.py has changed; the run keeps the one of its launch" in resumed.stderr
    status = machine.status("hurt")
    assert (status["state"], status["attempt"], steps_of(status)) == ("finished", 2, [STEPS, STEPS])
    check_same(machine, "hurt", 2)


def test_the_plan_says_what_it_cannot_know(machine: Foreign) -> None:
    sites = [part for name in ("east", "west") for part in ("--site", str(machine.root / f"{name}.yaml"))]
    shown = machine.islandctl("plan", str(machine.recipe(STEPS)), *sites)
    assert shown.returncode == 0, shown.stderr
    assert "python train.py --lr 3e-3, 134 k parameters" in shown.stdout
    assert "what it needs of memory and time is not known to the plan" in shown.stdout
    assert "feasible" in shown.stdout


def test_a_faulty_script_ends_the_run_in_one_line(tmp_path: Path) -> None:
    script = "import islandctl, os\ngetattr(islandctl, os.environ['FAULTY_API_KEY'])\n"
    reason = "AttributeError: module 'islandctl' has no attribute '***'"
    with ending(Machine(tmp_path)) as made:
        (tmp_path / "train.py").write_text(script)
        recipe = {
            "name": "faulty",
            "training": {"steps": 5, "batch": 1, "sequence": 8},
            "exchange": {"mode": "none"},
            "worker": {"command": "python train.py", "files": ["train.py"], "secrets": ["FAULTY_API_KEY"]},
        }
        secret = made.env["FAULTY_API_KEY"] = "never_to_be_seen"
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        (tmp_path / "alone.yaml").write_text(json.dumps(SITE | {"name": "alone", "work_dir": str(tmp_path / "work")}))
        done = made.islandctl(
            "launch", str(tmp_path / "recipe.yaml"), "--site", str(tmp_path / "alone.yaml"), "--run", "faulty"
        )
        assert done.returncode == 1
        assert reason in done.stderr + done.stdout
        assert secret not in done.stderr + done.stdout
        files = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert [path.name for path in files] == ["secrets.json"]
