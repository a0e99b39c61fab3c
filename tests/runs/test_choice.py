"""Which checkpoint a resume takes."""

from __future__ import annotations

import pytest

from islandctl.errors import CheckpointError, UsageError
from islandctl.ledger.joint import JointCheckpoint, Unjoined
from islandctl.runs.choice import choose

from .builders import joint


def clean(_: JointCheckpoint) -> list[str]:
    return []


def test_takes_the_newest() -> None:
    choice = choose([joint(10), joint(20)], [], clean)
    assert choice.step == 20
    assert choice.passed_over == ()


def test_says_why_not_a_newer_one() -> None:
    def faults(candidate: JointCheckpoint) -> list[str]:
        return ["west: model.distcp is 12 bytes short"] if candidate.step == 20 else []

    unjoined = [Unjoined(attempt=1, step=30, reason="cell west has no checkpoint at step 30")]
    choice = choose([joint(10), joint(20)], unjoined, faults)
    assert choice.step == 10
    assert choice.passed_over == (
        "step 30: cell west has no checkpoint at step 30",
        "step 20: west: model.distcp is 12 bytes short",
    )


def test_verifies_only_what_it_needs() -> None:
    seen: list[int] = []

    def faults(candidate: JointCheckpoint) -> list[str]:
        seen.append(candidate.step)
        return []

    choose([joint(10), joint(20)], [], faults)
    assert seen == [20]


def test_never_checkpointed_starts_at_the_beginning() -> None:
    choice = choose([], [], clean)
    assert (choice.step, choice.joint) == (0, None)
    assert "step 0" in choice.text


def test_all_damaged_is_an_error_not_a_silent_restart() -> None:
    with pytest.raises(CheckpointError, match="hash differs") as caught:
        choose([joint(10)], [], lambda _: ["east: hash differs"])
    assert "--from 0" in caught.value.hint


def test_of_many_damaged_ones_the_newest_are_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        choose([joint(step) for step in range(1, 9)], [], lambda _: ["gone"])
    assert caught.value.message.endswith("step 8: gone; step 7: gone; step 6: gone; and 5 older ones likewise")


def test_from_takes_exactly_that_step() -> None:
    choice = choose([joint(10), joint(20)], [], clean, step=10)
    assert choice.step == 10
    assert "--from 10" in choice.passed_over[0]


def test_from_zero_is_the_beginning() -> None:
    assert choose([joint(10)], [], clean, step=0).joint is None


def test_from_an_unknown_step_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="at step 15") as caught:
        choose([joint(10), joint(20)], [], clean, step=15)
    assert "10, 20" in caught.value.hint


def test_from_a_damaged_step_is_refused() -> None:
    with pytest.raises(CheckpointError, match="hash differs"):
        choose([joint(10), joint(20)], [], lambda _: ["east: hash differs"], step=10)
