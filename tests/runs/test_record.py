"""The record on disk: taken once, written whole, private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from islandctl.config.paths import RunFolder
from islandctl.errors import UsageError
from islandctl.runs import record as records
from islandctl.runs.files import only_one, write_whole
from islandctl.runs.record import KeptRecord

from . import builders as make


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))


def test_create_then_load_gives_the_same() -> None:
    made = records.create(make.plan(), "demo", launcher_pid=7)
    assert records.load("demo") == made
    assert records.load_plan_of(made) == make.plan()
    assert made.mark.startswith("demo.")
    assert made.phase == "launching"


def test_two_launches_of_one_name() -> None:
    records.create(make.plan(), "demo", launcher_pid=7)
    with pytest.raises(UsageError, match="demo exists") as caught:
        records.create(make.plan(), "demo", launcher_pid=8)
    assert "islandctl status demo" in caught.value.hint
    assert "--run" in caught.value.hint


def test_a_launch_that_failed_before_it_had_started_anything_leaves_its_name_free() -> None:
    first = records.create(make.plan(), "demo", launcher_pid=7)
    records.change(first, phase="failed", reason="no answer")
    second = records.create(make.plan(steps=7), "demo", launcher_pid=8)
    assert records.load("demo") == second
    assert (second.phase, second.steps) == ("launching", 7)
    assert second.mark != first.mark
    assert records.load_plan_of(second).recipe.training.steps == 7


def test_a_name_is_kept_by_whatever_may_still_be_of_use() -> None:
    relay = KeptRecord(name="relay", python="p", code="c", supervisor="s", folder="/r/node-0")
    first = records.create(make.plan(), "demo", launcher_pid=7)
    for changes in ({"phase": "failed", "relay": relay}, {"phase": "stopped"}, {"phase": "launching"}):
        kept = records.change(first, **changes)
        with pytest.raises(UsageError, match="demo exists"):
            records.create(make.plan(), "demo", launcher_pid=8)
        assert records.load("demo") == kept
    with only_one(RunFolder.of("demo").root / "lock", "islandctl stop demo"):
        records.change(first, phase="failed")
        with pytest.raises(UsageError, match="at work"):
            records.create(make.plan(), "demo", launcher_pid=8)


def test_marks_are_unique() -> None:
    first, second = (records.create(make.plan(), None, launcher_pid=7) for _ in range(2))
    assert first.run != second.run
    assert first.mark != second.mark
    assert first.run.startswith("tiny-")


def test_default_names_count_up_and_stay_short() -> None:
    assert records.default_name("tiny", "20300131", []) == "tiny-20300131-1"
    assert records.default_name("tiny", "20300131", ["tiny-20300131-1"]) == "tiny-20300131-2"
    assert len(records.default_name("x" * 42, "20300131", [])) <= 42


def test_the_newest_run_is_the_default() -> None:
    first = records.create(make.plan(), "a", launcher_pid=7)
    records.create(make.plan(), "b", launcher_pid=7)
    records.change(first, created="2990-01-01T00:00:00Z")
    assert records.load().run == "a"


def test_no_run_yet() -> None:
    with pytest.raises(UsageError, match="no run yet"):
        records.load()


def test_an_unknown_run_names_the_nearest() -> None:
    records.create(make.plan(), "demo-1", launcher_pid=7)
    with pytest.raises(UsageError, match="demo-2") as caught:
        records.load("demo-2")
    assert "demo-1" in caught.value.hint


@pytest.mark.parametrize("name", ["", "Demo", "a/b", "..", "-a", "a b", "x" * 43])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a run's name"):
        records.create(make.plan(), name, launcher_pid=7)


def test_a_record_of_another_kind_is_named() -> None:
    records.create(make.plan(), "demo", launcher_pid=7)
    RunFolder.of("demo").record.write_text('{"run": "demo"}')
    with pytest.raises(UsageError, match=r"run\.json"):
        records.load("demo")
    assert records.load_all() == []


def test_a_changed_plan_is_refused() -> None:
    made = records.create(make.plan(), "demo", launcher_pid=7)
    RunFolder.of("demo").plan.write_text(make.plan(steps=7).model_dump_json())
    with pytest.raises(UsageError, match="not the one that was launched"):
        records.check_plan_of(made, records.load_plan_of(made))


def test_a_plan_that_is_none_is_named() -> None:
    made = records.create(make.plan(), "demo", launcher_pid=7)
    RunFolder.of("demo").plan.write_text("{}")
    with pytest.raises(UsageError, match=r"plan\.json: recipe"):
        records.load_plan_of(made)
    RunFolder.of("demo").plan.unlink()
    with pytest.raises(UsageError, match="missing"):
        records.load_plan_of(made)


def test_everything_is_private() -> None:
    records.create(make.plan(), "demo", launcher_pid=7)
    root = RunFolder.of("demo").root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}


def test_write_whole_leaves_nothing_aside(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"1")
    write_whole(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"2"
    assert os.listdir(tmp_path) == ["a"]


def test_one_command_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "demo" / "lock"
    with pytest.raises(UsageError, match="no run called demo"), only_one(lock, "islandctl stop demo"):
        pass
    assert not lock.parent.exists()
    lock.parent.mkdir()
    with (
        only_one(lock, "islandctl stop demo"),
        pytest.raises(UsageError, match=r"islandctl stop demo \(process \d+\) is at work"),
        only_one(lock, "islandctl resume demo"),
    ):
        pass
    with only_one(lock, "islandctl resume demo"):
        assert "resume" in lock.read_text()
