"""What a cell's job asks Slurm for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from islandctl.config.site import SiteProfile
from islandctl.config.slurm import Slurm, sbatch_options


def site(gpu: str = "H100-SXM", count: int = 8, per_node: int = 4, **slurm: Any) -> SiteProfile:
    return SiteProfile.model_validate(
        {
            "name": "west",
            "scheduler": "slurm",
            "hosts": ["login"],
            "gpu": {"type": gpu, "count": count, "per_node": per_node},
            "wan": {"up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "1 ms"},
            "cpu": {"cores": 96, "memory": "512 GiB"},
            "slurm": slurm or None,
        }
    )


def test_a_cell_of_whole_nodes_takes_them_whole() -> None:
    assert sbatch_options(site(), 2, 4) == (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--mem=0",
        "--gres=gpu:4",
        "--signal=TERM@300",
        "--requeue",
    )


def test_a_cell_in_a_part_of_a_node_takes_its_part() -> None:
    options = sbatch_options(site(), 1, 1)
    assert options[2:5] == ("--cpus-per-task=24", "--mem=131072M", "--gres=gpu:1")
    # a site that uses half of its node is no whole node either
    assert sbatch_options(site(count=2), 1, 2)[2:5] == ("--cpus-per-task=48", "--mem=262144M", "--gres=gpu:2")


def test_the_profile_has_its_own_terms_and_the_last_word() -> None:
    options = sbatch_options(
        site(
            partition="gpu", account="lab", qos="high", constraint="ib&nvme", time="36.5 h", margin="90 s",
            gres="gpu:h100:4", memory="400 GiB", extra=["--exclusive", "--no-requeue"],
        ),
        2,
        4,
    )  # fmt: skip
    assert options[3:] == (
        "--mem=409600M",
        "--gres=gpu:h100:4",
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        "--constraint=ib&nvme",
        "--time=2190",
        "--signal=TERM@90",
        "--requeue",
        "--exclusive",
        "--no-requeue",
    )


def test_accelerators_are_not_asked_for_where_there_are_none_or_they_come_with_the_node() -> None:
    for profile in (site("cpu"), site(gres="none")):
        assert not any(option.startswith("--gres") for option in sbatch_options(profile, 1, 4))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"extra": ["exclusive"]}, "'exclusive' is no option of sbatch"),
        ({"extra": ["--nodes=3"]}, "'--nodes' is islandctl's own business"),
        ({"extra": ["-N3"]}, "'-N3' is islandctl's own business"),
        ({"extra": ["--array=1-4"]}, "a cell is one job"),
        ({"extra": ["--clusters=far"]}, "'--clusters' is islandctl's own business"),
        ({"time": "5 min", "margin": "300 s"}, "margin 300 s must be shorter than time 300 s"),
        ({"time": "10 s"}, "at least 1 min"),
    ],
)
def test_what_cannot_be_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Slurm.model_validate(section)
