"""A script with two ranks, sharded by FSDP2, whose optimizer the checkpoint does not know: it comes back exactly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from islandctl.config.recipe import Recipe

from .rehearsal import Run, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = """
import atexit, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import islandctl

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
island = islandctl.attach(model, optimizer, state={"schedule": schedule})
torch.manual_seed(dist.get_rank())  # the checkpoint has its own random states: this counts in the first life only
for step in island.steps():
    loss = model(torch.randn(4, 6)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); schedule.step()
    island.step(loss=loss.detach())
    if island.done == 9 and sys.argv[1] == "falls":
        os.kill(os.getpid(), signal.SIGKILL)
island.finish()
atexit.register(print, "the end of all")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread's end"))).start()
"""


def recipe(*words: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "own",
            "training": {"steps": 12, "batch": 4, "sequence": 6},
            "exchange": {"mode": "none", "fragments": 2},
            "checkpoint": {"every": 4},
            "worker": {"command": ["python", *words]},
        }
    )


def test_two_sharded_ranks_of_a_script_come_back_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ends = []
    for name, lives in (("straight", ["stays"]), ("hurt", ["falls", "stays"])):
        run = Run(tmp_path / name, recipe(str(script), "stays"), ranks=(2,))
        cell = run.cells[0]
        for word in lives:
            cell.script = [os.fspath(script), word]
            if word == "falls":
                cell.start()
                cell.gone()
                assert cell.checkpoints()[-1] == "step-00000008-attempt-1"
            else:
                assert cell.run()["outcome"] == "finished"
                assert cell.log().endswith("a thread's end\nthe end of all\n")  # what a script leaves behind is done
        ends.append((cell.weights(), cell.losses()))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert any(key.startswith("optimizer/") and key.endswith("/max_exp_avg_sq") for key in ends[0][0])
    assert all(tensor.isfinite().all() for tensor in ends[0][0].values())
