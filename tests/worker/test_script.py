"""A script of the user's own that cannot work: told in one line, and not tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.config.recipe import Recipe

from .rehearsal import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


JOINED = """
import torch.distributed as dist
dist.init_process_group("gloo")
raise LookupError(f"rank {dist.get_rank()} of {dist.get_world_size()}")
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (JOINED, "LookupError: rank 0 of 1"),
        ("import nowhere\n", "ModuleNotFoundError: No module named 'nowhere'"),
        ("print('done')\n", "train.py ended without islandctl.attach()"),
    ],
)
def test_a_faulty_script_is_told_in_one_line(
    tmp_path: Path, script: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)  # of whoever has prepared the machine for something else
    path = tmp_path / "train.py"
    path.write_text(script)
    plan = {
        "name": "faulty",
        "training": {"steps": 5, "batch": 1, "sequence": 8},
        "exchange": {"mode": "none", "fragments": 2},
        "worker": {"command": ["python", str(path)]},
    }
    cell = Run(tmp_path / "run", Recipe.model_validate(plan)).cells[0]
    cell.script = [str(path)]
    outcome = cell.run()
    assert (outcome["outcome"], outcome["retry"]) == ("failed", False)
    assert reason in outcome["reason"]
