"""What Slurm says of a partition's nodes, before anything is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.config.slurm import Slurm, partitions_of, sbatch_options
from islandctl.fleet.checks.slurm import TOLD, judge_nodes
from islandctl.fleet.slurm_text import SlurmNode
from tests.sshd import site_profile


def node(name: str, state: str = "idle", **more: Any) -> SlurmNode:
    known = {"answers": True, "limit_s": 3600.0, "open": True, "partition": "gpu", "usual": True}
    return SlurmNode(name, state, **{**known, **more})


def test_all_fit() -> None:
    (verdict,) = judge_nodes([node("a"), node("b", "mixed")], Slurm.model_validate({"time": "1 h"}), 2, "west")
    assert (verdict.level, verdict.text) == ("ok", "gpu: 2 of 2 nodes can be used")
    assert judge_nodes([], Slurm(), 2, "west") == []


def test_what_keeps_a_job_from_its_nodes() -> None:
    bad = [node("a", "drained", reason="bad GPU (root)"), node("b", "idle", answers=False)]
    verdicts = judge_nodes([*bad, node("c")], Slurm.model_validate({"time": "2 h"}), 2, "west")
    assert [(one.level, one.place, one.text) for one in verdicts] == [
        ("fail", "", "gpu: 1 of 3 nodes can be used, and the run needs 2"),
        ("fail", "", "slurm.time is 2 h, and partition gpu allows 60 min"),
        ("warn", "west/a", "drained: bad GPU (root)"),
        ("warn", "west/b", "idle, does not answer: no reason given"),
    ]
    assert "60 min at most" in verdicts[1].hint
    (shut,) = judge_nodes([node("a", open=False)], Slurm(), 1, "west")
    assert (shut.level, shut.text) == ("fail", "partition gpu takes no jobs now")
    # two partitions: the longer limit counts, and each node once
    both = [node("a", partition="one"), node("a", partition="two", limit_s=None), node("b", partition="two")]
    (fine,) = judge_nodes(both, Slurm.model_validate({"time": "10 d"}), 2, "west")
    assert fine.text == "one/two: 2 of 2 nodes can be used"
    many = judge_nodes([node(f"n{at}", "down") for at in range(TOLD + 3)] + [node("up")], Slurm(), 1, "west")
    assert [one.level for one in many] == ["warn"] * (TOLD + 1)
    assert many[-1].text == "3 more nodes cannot be used: n8, n9, n10"


@pytest.mark.parametrize(
    ("partition", "extra", "found"),
    [
        (None, (), None),
        ("gpu", (), "gpu"),
        ("gpu", ("--exclusive", "--partition=other"), "other"),
        (None, ("-pother",), "other"),
        (None, ("-p", "-x"), "-x"),
    ],
)
def test_where_a_job_goes(partition: str | None, extra: tuple[str, ...], found: str | None) -> None:
    assert partitions_of(Slurm.model_construct(partition=partition, extra=extra)) == found


def test_a_job_that_only_asks_is_short_and_comes_but_once() -> None:
    slurm = {"partition": "gpu", "account": "me", "time": "24 h", "extra": ["--exclusive", "--time=9"]}
    site = site_profile(
        "west", ["login"], {}, "/w", scheduler="slurm", slurm=slurm, gpu={"type": "H100", "count": 8, "per_node": 4}
    )
    asked = sbatch_options(site, 2, 4, limit_s=601.0)
    assert asked[-4:] == ("--exclusive", "--time=9", "--time=11", "--no-requeue")
    assert {"--nodes=2", "--gres=gpu:4", "--partition=gpu", "--account=me", "--mem=0"} <= {*asked}
    assert not any(option.startswith(("--signal", "--requeue")) for option in asked)
    assert set(sbatch_options(site, 2, 4)) > {"--requeue", "--time=1440"}
