"""How things look: exact texts, and never wider than 100 columns."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from islandctl.cli import follow, output
from islandctl.cli.follow import Events, Lines, closing_lines, exit_code
from islandctl.cli.look import StatusView, age, brief, count, duration, sparkline
from islandctl.relay.messages import JointCheckpoint
from islandctl.runs.status import CellView, Culprit, NodeView, RelayView, RunStatus


def view(**changes: object) -> RunStatus:
    cells = tuple(
        CellView(
            cell=index,
            name=name,
            site=name,
            state="training",
            step=1_234_567,
            bits_per_byte=tuple((step, 8.0 / (step + 1)) for step in range(60)),
            tokens_per_s=123_456.0,
            heartbeat_age_s=86_400.0,
            rounds_sent=99_999,
            rounds_late=99_999,
            rounds_skipped=99_999,
            restarts=3,
            source="relay",
            nodes=(NodeView(node=0, label=f"{name}/local", state="running"),),
        )
        for index, name in enumerate(("a-cell-with-a-name-of-forty-two-characters", "west"))
    )
    fields: dict[str, object] = {
        "run": "demo",
        "state": "running",
        "attempt": 2,
        "created": "2030-01-31T12:00:00Z",
        "config_hash": "c",
        "step": 1_234_567,
        "steps": 2_000_000,
        "eta_s": 3723.0,
        "cells": cells,
        "relay": RelayView(state="answering", rounds_committed=12, rounds_empty=1, rounds_open=1),
    }
    return RunStatus.model_validate({**fields, **changes})


def text(status: RunStatus, width: int = output.WIDTH, **more: Any) -> str:
    stream = io.StringIO()
    console = output.console(stream)
    console.width = width
    console.print(StatusView(status, **more), crop=False)
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_fits_the_terminal(width: int) -> None:
    lines = text(view(), width).splitlines()
    assert max(len(line) for line in lines) <= width
    (row,) = (line for line in lines if line.startswith("west") and "training" in line)
    assert "1234567" in row
    assert "0.1333" in row
    assert "123 k" in row
    assert ("99999" in row) == (width == 100)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_cells_of_unequal_pace_are_told_apart_and_compared_by_windows(width: int) -> None:
    whole = view(steps=60)
    paced = [
        cell.model_copy(update={"step": step, "steps": 2 * step, "window": 2, "windows": 4})
        for cell, step in zip(whole.cells, (70, 36), strict=True)
    ]
    lines = text(whole.model_copy(update={"cells": tuple(paced)}), width).splitlines()
    assert max(len(line) for line in lines) <= width
    rows = [line.split() for line in lines if "training" in line]
    told = [(row[2], row[3]) for row in rows]
    assert told == ([("70", "0.1333"), ("36", "0.1333")] if width == 60 else [("70/140", "2/4"), ("36/72", "2/4")])
    assert next(iter(Lines().new(whole.model_copy(update={"cells": tuple(paced)})))).startswith("demo: running")


def test_the_bar_shows_how_far_the_slowest_cell_is() -> None:
    bar = text(view(step=25, steps=100)).splitlines()[1]
    assert bar.count("━") * 3 == bar.count("─")
    assert text(view(step=None)).splitlines()[1].count("━") == 0


def test_the_next_command_can_be_typed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(tmp_path / "bin" / "islandctl")])
    monkeypatch.chdir(tmp_path)
    assert "next        bin/islandctl resume demo\n" in text(view(state="failed", hint="islandctl resume demo"))


def test_events_and_foot_come_last() -> None:
    shown = text(view(), events=[("12:00:00", "joint checkpoint at step 20")], foot="Ctrl-C detaches")
    assert shown.splitlines()[-3:] == ["12:00:00  joint checkpoint at step 20", "", "Ctrl-C detaches"]


def test_shows_what_the_user_asks_for() -> None:
    shown = text(view())
    for part in (
        "demo",
        "running",
        "1234567/2000000",
        "ETA 1 h 02 min",
        "attempt 2",
        "12 committed, 1 empty in this attempt, 1 open",
    ):
        assert part in shown
    assert "0.1333 " in shown
    assert "▁" in shown
    assert "123 k" in shown
    assert "training" in shown
    assert "99999" in shown
    (row,) = (line for line in shown.splitlines() if line.startswith("west ") and "training" in line)
    assert "…" not in row
    assert "no joint one yet" in shown
    assert "west        restarted 3 times" in shown


def test_a_failure_shows_the_culprits_last_lines_and_the_next_command() -> None:
    culprit = Culprit(
        site="west", cell="west", node="west/h1", rank=2, reason="disk [full]", lines=("OSError [Errno 28]",)
    )
    shown = text(view(state="failed", detail="west: disk [full]", hint="islandctl resume demo", culprit=culprit))
    assert "last lines of west/h1:" in shown
    assert "OSError [Errno 28]" in shown
    assert "west: disk [full]" in shown
    assert "next        islandctl resume demo" in shown


def test_no_escapes_where_no_terminal_is() -> None:
    assert "\x1b" not in text(view())


def test_a_relay_that_ended_with_its_run_is_no_trouble() -> None:
    assert "the relay ended with the run" in text(view(state="finished", relay=RelayView(state="ended")))


def test_a_relay_that_was_killed_did_not_end_with_its_run() -> None:
    killed = RelayView(state="lost", detail="the supervisor was killed")
    assert "the relay is lost: the supervisor was killed" in text(view(state="stopped", relay=killed))
    cleared = RelayView(state="ended", detail="its supervisor was lost")
    assert "the relay has ended: its supervisor was lost" in text(view(state="stopped", relay=cleared))


def test_why_the_workers_last_ended_stays_in_sight() -> None:
    west = view().cells[1].model_copy(update={"last_end": "disk full", "restarts": 1})
    assert "west        restarted 1 time, last: disk full\n" in text(view(cells=(west,)))
    now = west.model_copy(update={"state": "restarting", "detail": "disk full"})
    assert text(view(cells=(now,))).count("disk full") == 1


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, "-"), (3.4, "3 s"), (130, "2 min 10 s"), (3723, "1 h 02 min"), (187_200, "2 d 4 h")],
)
def test_duration(seconds: float | None, expected: str) -> None:
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("number", "expected"), [(None, "-"), (950, "950"), (1234, "1.23 k"), (12_345, "12.3 k"), (4.56e6, "4.56 M")]
)
def test_count(number: float | None, expected: str) -> None:
    assert count(number) == expected


def test_brief() -> None:
    assert [brief(seconds) for seconds in (None, 3.4, 125, 7300, 200_000)] == ["-", "3 s", "2 min", "2 h", "2 d"]


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([8.0, 4.0, 1.0]) == "█▄▁"
    assert len(sparkline(range(100), width=12)) == 12


def test_age() -> None:
    assert age("2030-01-31T12:00:00Z", datetime(2030, 1, 31, 12, 1, tzinfo=UTC)) == 60.0


def test_plain_lines_come_once_an_evaluation() -> None:
    lines = Lines()
    first = view(cells=[view().cells[1].model_copy(update={"bits_per_byte": ((0, 8.0),), "cell": 0})], steps=10)
    then = first.model_copy(
        update={"cells": (first.cells[0].model_copy(update={"bits_per_byte": ((0, 8.0), (5, 4.0))}),)}
    )
    assert list(lines.new(first)) == ["demo: running", "west: step 0/10  8.0000 bits per byte"]
    assert list(lines.new(first)) == []
    assert list(lines.new(then)) == ["west: step 5/10  4.0000 bits per byte  123 k tokens/s  ETA 1 h 02 min"]
    degraded = then.model_copy(update={"state": "degraded", "detail": "west is lost"})
    assert list(lines.new(degraded)) == []
    assert list(lines.new(degraded)) == ["demo: degraded: west is lost"]
    assert list(lines.new(degraded)) == []
    assert list(lines.new(then.model_copy(update={"state": "finished"}))) == ["demo: finished"]


def test_evaluations_of_the_past_get_no_rate_of_today() -> None:
    def seen(*curve: tuple[int, float]) -> RunStatus:
        return view(cells=[view().cells[1].model_copy(update={"bits_per_byte": curve})], steps=10)

    late = list(Lines().new(seen((0, 8.0), (2, 6.0), (4, 5.0))))
    assert len(late) == 4
    assert not any("tokens/s" in line or "ETA" in line for line in late)
    lines = Lines()
    list(lines.new(seen()))  # from the beginning on
    missed, newest = lines.new(seen((0, 8.0), (2, 6.0)))
    assert (missed, newest.partition("byte")[2]) == (
        "west: step 0/10  8.0000 bits per byte",
        "  123 k tokens/s  ETA 1 h 02 min",
    )


def test_where_a_budget_ends_the_run_stands_in_place_of_the_eta() -> None:
    shown = text(view(step=40, steps=100, eta_s=30.0, budget_step=60, budget_left_s=10.0))
    assert "step 40/100  budget ends it at step 60, in 10 s\n" in shown
    assert "ETA" not in shown


def test_a_loop_that_is_never_evaluated_tells_its_steps_and_loss() -> None:
    def seen(step: int, loss: float | None = 2.5) -> RunStatus:
        changes = {"bits_per_byte": (), "step": step, "loss": loss, "cell": 0}
        return view(cells=[view().cells[1].model_copy(update=changes)], steps=100)

    lines = Lines()
    said = [line for step in range(follow.QUIET + 1) for line in lines.new(seen(step))]
    assert said == ["demo: running", "west: step 15/100  loss 2.5000  123 k tokens/s  ETA 1 h 02 min"]
    assert [line for _ in range(3 * follow.QUIET) for line in lines.new(seen(15))] == []  # it stands still
    assert list(lines.new(seen(16, None))) == ["west: step 16/100  123 k tokens/s  ETA 1 h 02 min"]
    assert " loss " in text(seen(3))
    assert "2.5000" in text(seen(3))
    assert "bits per byte" not in text(seen(3))
    assert "bits per byte" in text(view())


def test_a_wait_for_a_round_is_no_news_unless_it_lasts() -> None:
    lines, running = Lines(), view(cells=[])
    waiting = running.model_copy(update={"state": "waiting", "detail": "waits for fragment 1"})
    assert list(lines.new(running)) == ["demo: running"]
    for _ in range(3):
        for status in (waiting, waiting, running, running, running):
            assert list(lines.new(status)) == []
    said = [line for status in 9 * [waiting] + 3 * [running] for line in lines.new(status)]
    assert said == ["demo: waiting: waits for fragment 1", "demo: running"]


class Looks:
    """Gives one status after another, as a watcher does."""

    run = "demo"

    def __init__(self, *looks: RunStatus) -> None:
        self._looks = iter(looks)

    def look(self) -> RunStatus:
        return next(self._looks)


def test_json_lines_until_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(follow, "PAUSE_S", 0.0)
    follow.json_lines(Looks(view(), view(step=7), view(state="finished")))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["running", "running", "finished"]
    assert json.loads(lines[1])["step"] == 7


@pytest.mark.parametrize("then_ended", [True, False])
def test_who_ends_the_relay_himself_need_not_be_told_to(then_ended: bool, capsys: pytest.CaptureFixture[str]) -> None:
    done = view(state="finished", hint="islandctl stop demo ends its relay")
    follow.follow(Looks(done), then_ended=then_ended)  # type: ignore[arg-type]
    assert ("ends its relay" in capsys.readouterr().out) is not then_ended


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("stopped", 1)])
def test_the_exit_code_mirrors_the_outcome(state: str, code: int) -> None:
    assert exit_code(view(state=state)) == code


def test_a_run_that_its_budget_stopped_ends_with_six() -> None:
    assert exit_code(view(state="stopped", detail="stopped by budget: 12.0 h of 12.0 h used")) == 6


def test_events_tell_what_changed_and_nothing_else() -> None:
    events = Events()
    first = view()
    east, west = first.cells

    def then(**changes: Any) -> RunStatus:
        return first.model_copy(update={"cells": (east, west.model_copy(update=changes))})

    joint = JointCheckpoint(step=20, attempt=1, manifests=("a", "b"), versions=(1,))
    assert list(events.new(then(state="lost"))) == []
    assert list(events.new(first)) == ["west is training again"]
    assert list(events.new(first)) == []
    assert list(events.new(first.model_copy(update={"joint_checkpoint": joint}))) == ["joint checkpoint at step 20"]
    assert list(events.new(then(state="restarting", detail="killed", restarts=4))) == [
        "west was started again, restart 4",
        "west is restarting: killed",
    ]
    events.new(first)
    assert list(Events().new(first)) == []


def test_events_of_rounds_and_of_the_end() -> None:
    events, first = Events(), view()
    list(events.new(first))
    cells = (first.cells[0], first.cells[1].model_copy(update={"rounds_skipped": 100_000, "state": "finished"}))
    assert list(events.new(first.model_copy(update={"cells": cells}))) == [
        "west is through",
        "west: 100000 rounds were committed without its packet so far",
    ]


def test_the_last_line_says_where_the_record_lies_and_what_to_type() -> None:
    lines = list(closing_lines(view(state="finished"), "/records/demo"))
    assert lines == [
        "bits per byte on held-out text: 8.0000 at step 0, 0.1333 at step 59",
        "record: /records/demo; next: islandctl checkpoints demo",
    ]
    unheard = [cell.model_copy(update={"bits_per_byte": (), "loss": 2.5}) for cell in view().cells]
    assert next(closing_lines(view(cells=unheard, step=60), "/records/demo")) == "loss: 2.5000 at step 60"
    failed = list(closing_lines(view(state="failed", hint="islandctl resume demo"), "/records/demo"))
    assert failed[-1] == "record: /records/demo; next: islandctl resume demo"


def test_what_the_headline_says_is_not_said_twice() -> None:
    full = "no checkpoint at step 40: the disk is full"
    cells = [cell.model_copy(update={"detail": full if cell.name == "west" else "waits"}) for cell in view().cells]
    shown = text(view(state="degraded", detail=f"west: {full}", cells=cells))
    assert shown.count(full) == 1
    assert "waits" in shown


def test_a_long_reason_stays_on_one_line_where_no_terminal_is() -> None:
    reason = "west/h1: " + "a/long/path/" * 20
    shown = text(view(state="failed", detail=reason, hint=reason))
    assert f"demo  failed  attempt 2  {reason}\n" in shown
    assert f"next        {reason}\n" in shown
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, color_system=None, width=80).print(
        StatusView(view(state="failed", detail=reason))
    )
    assert max(map(len, stream.getvalue().splitlines())) <= 80
