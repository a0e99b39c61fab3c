"""Which checkpoints are listed, and which of them can be gone back to."""

from __future__ import annotations

import pytest

from islandctl.cli.main import main
from islandctl.errors import HostKeyError
from islandctl.ledger.joint import Unjoined
from islandctl.runs import checkpoints, record
from islandctl.runs.checkpoints import Survey, rows_of
from islandctl.runs.reach import Reach

from . import builders as make

CELLS = make.CELLS
JOINT = [make.joint(step) for step in (20, 40, 60)]


def test_what_was_tidied_away_is_left_out() -> None:
    held = {(1, 40): ["east", "west"], (1, 60): ["east", "west"]}
    rows = rows_of(JOINT, [], held, CELLS)
    assert [(row.step, row.resumable) for row in rows] == [(40, True), (60, True)]


def test_what_one_cell_has_lost_cannot_be_gone_back_to() -> None:
    held = {(1, 20): ["east"], (1, 40): ["east", "west"], (1, 60): ["east"]}
    rows = rows_of(JOINT, [], held, CELLS)
    assert [(row.step, row.joint, row.resumable, row.note) for row in rows] == [
        (20, True, False, "gone from west"),
        (40, True, True, ""),
        (60, True, False, "gone from west"),
    ]


def test_the_newest_is_named_also_when_it_is_gone_from_everywhere() -> None:
    rows = rows_of(JOINT, [], {(1, 40): ["east", "west"]}, CELLS)
    assert [(row.step, row.note) for row in rows] == [(40, ""), (60, "gone from east, west")]


def test_files_of_an_old_line_do_not_bring_back_what_was_tidied_away() -> None:
    held = {(1, 10): ["east"], (1, 60): ["east", "west"]}
    rest = [Unjoined(attempt=1, step=30, reason="west has none")]
    rows = rows_of(JOINT, rest, held, CELLS)
    assert [(row.step, row.note) for row in rows] == [(10, "not of the run's present line"), (60, "")]


def test_silence_is_no_proof_that_something_is_gone() -> None:
    rows = rows_of(JOINT[:1], [], {(1, 20): ["east"]}, CELLS, all_asked=False)
    assert [(row.resumable, row.note) for row in rows] == [(False, "not seen on west")]


def test_where_nobody_could_be_asked_no_absence_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = Survey(run="demo", rows=(), unreachable=("east: no answer",))
    monkeypatch.setattr(record, "load", lambda name: make.record())
    monkeypatch.setattr(record, "load_plan_of", lambda made: make.plan())
    monkeypatch.setattr(checkpoints, "survey", lambda *args: silent)
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", "demo"])
    assert ended.value.code == 5
    assert "no checkpoint yet" not in capsys.readouterr().err


def test_a_refused_host_key_is_no_damaged_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Reach, site: str, host: str) -> None:
        raise HostKeyError("east/east-1: the host key has changed", hint="ssh-keygen -R east-1")

    monkeypatch.setattr(Reach, "host", refused)
    with Reach(make.plan(), "demo", lambda line: None) as reach, pytest.raises(HostKeyError):
        checkpoints.verify(make.record(), reach, JOINT[0])
