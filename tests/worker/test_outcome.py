"""outcome.json: what the supervisor may repeat, and that the first word stands."""

import json
from pathlib import Path

import pytest
import torch

from islandctl.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    ExchangeError,
    NotFiniteError,
    RelayError,
    UnreachableError,
)
from islandctl.worker.outcome import Outcome, release_outcome, reserve_outcome, write_outcome
from tests.disk import fill, mounted, needs_mount


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (ConfigError("x"), False),
        (CheckpointError("x"), False),
        (DivergenceError("x"), False),
        (NotFiniteError("x"), False),
        (RelayError("x", code="held_out"), False),
        (RelayError("x", code="stale"), False),
        (RelayError("x", code="slow"), True),
        (ExchangeError("x"), True),
        (UnreachableError("x"), True),
        (RuntimeError("x\ny"), True),
        (MemoryError("x"), True),
        (OSError(28, "no space"), True),
        (KeyError("x"), False),
        (ValueError("x"), False),
        (NotImplementedError("x"), False),
    ],
)
def test_what_a_repetition_would_meet_again_is_not_repeated(error: Exception, retry: bool) -> None:
    assert Outcome.of(error, step=3, rank=1).retry is retry


def test_an_unexpected_error_is_one_line_and_leads_to_the_log() -> None:
    outcome = Outcome.of(RuntimeError("first\nsecond"), step=3, rank=1)
    assert (outcome.reason, outcome.hint) == ("RuntimeError: first", "see islandctl logs")
    assert Outcome.of(ValueError(), step=0, rank=0).reason == "ValueError: no message"


def test_a_rank_that_lost_another_says_so() -> None:
    outcome = Outcome.of(RuntimeError("[x/gloo/pair.cc:1] Connection closed by peer"), step=3, rank=1)
    assert outcome.reason.startswith("rank 1 has lost another rank of its cell")
    assert outcome.retry


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out-of-memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out-of-memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
            "out-of-memory",
        ),
        (OSError(12, "Cannot allocate memory"), "out-of-memory"),
        (RuntimeError("[x/gloo/pair.cc:1] Connection closed by peer"), "peer-lost"),
        (RuntimeError("NCCL error: remote process exited"), "peer-lost"),
        (OSError(28, "no space"), ""),
    ],
)
def test_what_a_restart_depends_on_is_told_in_a_word(error: Exception, kind: str) -> None:
    outcome = Outcome.of(error, step=3, rank=1)
    assert (outcome.kind, outcome.retry) == (kind, True)
    assert ("training.batch" in outcome.hint) is (kind == "out-of-memory")
    wrapped = CheckpointError("could not be read")
    wrapped.__cause__ = error
    assert Outcome.of(wrapped, step=3, rank=1).kind == ("out-of-memory" if kind == "out-of-memory" else "")


def test_the_first_word_stands_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    write_outcome(path, Outcome.of(ConfigError("cause", hint="do"), step=3, rank=1))
    write_outcome(path, Outcome.of(RuntimeError("consequence"), step=3, rank=0))
    told = json.loads(path.read_text())
    assert (told["outcome"], told["retry"], told["reason"], told["hint"], told["rank"]) == (
        "failed",
        False,
        "cause",
        "do",
        1,
    )
    assert [each.name for each in tmp_path.iterdir()] == ["outcome.json"]


def test_a_disk_that_takes_no_outcome_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_outcome(tmp_path / "missing" / "outcome.json", Outcome.ended("finished", "", step=1))
    assert "cannot write" in caplog.text


@needs_mount
def test_a_disk_that_has_filled_up_takes_the_last_word_that_was_provided_for(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "outcome.json"
        reserve_outcome(path, 0)
        reserve_outcome(path, 1)
        fill(disk)
        write_outcome(path, Outcome.of(ConfigError("ü" * 5000, hint="do"), step=3, rank=1))
        release_outcome(path, 0)
        assert Outcome.model_validate_json(path.read_bytes()).reason == "ü" * 2000
        assert sorted(each.name for each in disk.iterdir()) == ["filler", "outcome.json"]
