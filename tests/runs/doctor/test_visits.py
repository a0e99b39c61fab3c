"""When a Slurm site's nodes are asked in a job, and how long that may take."""

from __future__ import annotations

import pytest

from islandctl.fleet.checks.base import Tier
from islandctl.fleet.checks.registry import all_checks, pick
from islandctl.runs.doctor.visits import LIGHT_S, RELAY_S, time_limit, wanted


@pytest.mark.parametrize(
    ("tier", "only", "job"),
    [
        ("quick", (), False),
        ("standard", (), True),
        ("deep", (), True),
        ("quick", ("gpus", "relay"), False),
        ("quick", ("wan",), True),
        ("quick", ("matrix-rate",), True),
        ("standard", ("login",), True),
        ("standard", ("slurm", "forwarding"), False),
    ],
)
def test_a_job_where_only_it_leads_to_what_is_asked(tier: Tier, only: tuple[str, ...], job: bool) -> None:
    assert wanted(pick(all_checks(), tier, only, ()), tier) is job


def test_it_lasts_as_long_as_its_checks_may_take() -> None:
    known = {check.name: check for check in all_checks()}
    assert time_limit([known["gpus"]], "standard", None) == LIGHT_S
    disk = time_limit([known["gpus"], known["disk-rate"]], "standard", None)
    assert disk == LIGHT_S + known["disk-rate"].deadline_s
    relay = time_limit([known["relay"]], "standard", None)
    assert relay == LIGHT_S + RELAY_S + known["relay"].deadline_s
    whole = time_limit(pick(all_checks(), "standard", (), ()), "standard", None)
    assert whole <= 40 * 60
    assert time_limit(pick(all_checks(), "deep", (), ()), "deep", None) > whole + 1800
