"""From facts to a view: what is concluded, and above all what is not."""

from __future__ import annotations

import pytest

from islandctl.relay.messages import CellStatus
from islandctl.runs.record import RunRecord
from islandctl.runs.status import Facts, Outcome, RunStatus
from islandctl.runs.watch import ALIVE_S, SILENT_AFTER_S, combine

from . import builders as make


def look(facts: Facts, record: RunRecord | None = None) -> RunStatus:
    return combine(record or make.record(), facts)


def test_a_healthy_run_is_running_with_all_figures() -> None:
    view = look(make.facts())
    assert (view.state, view.step, view.steps) == ("running", 40, 100)
    assert view.eta_s == pytest.approx(60 * 100 / 200)
    east = view.cells[0]
    assert (east.state, east.step, east.rounds_sent, east.source) == ("training", 40, 3, "relay")
    assert east.bits_per_byte[-1] == (40, 3.5)
    assert view.culprit is None


def test_an_unreachable_node_is_not_failed() -> None:
    gone = make.node(1, trouble="west/local: no answer within 20 s")
    quiet = make.relay({0: make.heartbeat(0)})
    view = look(make.facts(west=gone, relay=quiet))
    assert view.cells[1].state == "unreachable"
    assert view.state == "degraded"
    assert "no answer" in view.detail


def test_an_unreachable_node_with_a_fresh_heartbeat_goes_on() -> None:
    view = look(make.facts(west=make.node(1, trouble="no answer")))
    assert view.cells[1].state == "training"
    assert "not reachable" in view.cells[1].detail


def test_nobody_answers_is_unknown() -> None:
    view = look(make.facts(make.node(0, trouble="x"), make.node(1, trouble="y"), relay=None, relay_trouble="z"))
    assert view.state == "unknown"
    assert view.eta_s is None


def test_a_dead_relay_is_degraded_and_the_files_tell() -> None:
    view = look(
        make.facts(
            make.node(0, make.running(), heartbeat=make.heartbeat(0)),
            make.node(1, make.running(), heartbeat=make.heartbeat(1, step=38)),
            relay=None,
            relay_trouble="connection refused",
            relay_state=make.ended("failed"),
        )
    )
    assert view.state == "degraded"
    assert view.relay.state == "ended"
    assert view.cells[1].source == "files"
    assert view.step == 38


def test_the_first_to_fail_is_named_with_reason_hint_and_lines() -> None:
    victim = make.node(0, make.ended("failed", reason="exit code 1"), lines=("Connection closed by peer",))
    spoken = Outcome(outcome="failed", reason="disk full", hint="free some space", rank=0, at=7.0, step=7)
    cause = make.node(1, make.ended("failed", reason="disk full"), outcome=spoken, lines=("OSError: [Errno 28]",))
    view = look(make.facts(victim, cause))
    assert view.state == "failed"
    assert view.culprit is not None
    assert (view.culprit.cell, view.culprit.rank, view.culprit.reason) == ("west", 0, "disk full")
    assert view.culprit.lines == ("OSError: [Errno 28]",)
    assert view.hint == "free some space"
    assert "rank 0" in view.detail


def test_a_failure_without_a_word_still_has_a_next_command() -> None:
    view = look(make.facts(make.node(0, make.ended("failed", reason="killed by SIGKILL"))))
    assert view.culprit is not None
    assert "SIGKILL" in view.detail
    assert view.hint.startswith("islandctl logs demo")


@pytest.mark.parametrize(
    ("east", "west", "expected"),
    [
        ("finished", "finished", "finished"),
        ("stopped", "stopped", "stopped"),
        ("finished", "stopped", "stopped"),
        ("finished", "failed", "failed"),
    ],
)
def test_ends(east: str, west: str, expected: str) -> None:
    view = look(make.facts(make.node(0, make.ended(east)), make.node(1, make.ended(west))))
    assert view.state == expected
    assert view.ended


def test_one_cell_done_while_the_other_trains_is_running() -> None:
    view = look(make.facts(make.node(0, make.ended("finished"))))
    assert view.state == "running"


def test_all_supervisors_lost_is_failed_with_resume_as_next_command() -> None:
    lost = make.running(state="lost")
    view = look(make.facts(make.node(0, lost), make.node(1, lost), relay=None))
    assert view.state == "failed"
    assert view.hint == "islandctl resume demo"


def test_lost_after_a_stop_is_stopped() -> None:
    lost = make.running(state="lost")
    view = look(make.facts(make.node(0, lost), make.node(1, lost), relay=None), make.record(phase="stopped"))
    assert view.state == "stopped"


def test_a_restarting_worker_is_degraded() -> None:
    view = look(make.facts(make.node(0, make.running(state="backoff", restarts=2, reason="exit code 1"))))
    assert (view.state, view.cells[0].state, view.cells[0].restarts) == ("degraded", "restarting", 2)


def test_heartbeats_of_an_earlier_attempt_do_not_count() -> None:
    view = look(make.facts(), make.record(attempt=2))
    assert {cell.state for cell in view.cells} == {"starting"}
    assert view.cells[0].step is None
    assert view.state == "launching"


def test_a_silent_cell_is_said_to_be_silent() -> None:
    view = look(make.facts(relay=make.relay(age_s=SILENT_AFTER_S + 1)))
    assert {cell.state for cell in view.cells} == {"silent"}
    assert view.state == "degraded"


def test_waiting_shows_what_for() -> None:
    beats = {
        0: make.heartbeat(0, state="waiting", message="waits for the commit of fragment 1"),
        1: make.heartbeat(1),
    }
    view = look(make.facts(relay=make.relay(beats)))
    assert (view.state, view.detail) == ("waiting", "waits for the commit of fragment 1")


def test_a_halt_is_a_failure() -> None:
    view = look(make.facts(relay=make.relay(halted="anchors differ in fragment 2")))
    assert view.state == "failed"
    assert "anchors differ" in view.detail


def test_away_cells_are_named() -> None:
    status = make.relay()
    cells = (status.cells[0], CellStatus(cell=1, name="west", away=True, heartbeat=make.heartbeat(1), age_s=1.0))
    view = look(make.facts(relay=status.model_copy(update={"cells": cells})))
    assert view.state == "degraded"
    assert "west" in view.detail


def test_a_launch_that_was_cut_short_is_not_launching_for_ever() -> None:
    absent = make.running(state="absent")
    facts = make.facts(make.node(0, absent), make.node(1, absent), relay=None, launcher_alive=True)
    assert look(facts, make.record(phase="launching")).state == "launching"
    cut = facts.model_copy(update={"launcher_alive": False})
    view = look(cut, make.record(phase="launching"))
    assert view.state == "failed"
    assert "islandctl stop" in view.hint


def test_workers_without_their_supervisor_train_on() -> None:
    lost = make.node(1, make.running(state="lost"))
    view = look(make.facts(west=lost))
    assert (view.cells[1].state, view.state) == ("training", "degraded")
    assert view.detail == "west/local: the supervisor was killed; the workers train on"
    assert view.hint.startswith("islandctl resume demo")
    stale = look(make.facts(west=lost, relay=make.relay(age_s=ALIVE_S + 1)))
    assert stale.cells[1].state == "lost"
    said = lost.model_copy(update={"outcome": Outcome(outcome="finished")})
    done = look(make.facts(east=make.node(0, make.ended("finished")), west=said))
    assert (done.state, done.cells[1].state) == ("finished", "finished")


def test_last_words_that_nobody_asked_for_are_no_end() -> None:
    beats = {0: make.heartbeat(0), 1: make.heartbeat(1, state="stopped", message="stopped by a signal")}
    view = look(make.facts(relay=make.relay(beats)))
    assert (view.cells[1].state, view.detail) == ("restarting", "west is restarting: stopped by a signal")
    asked = look(make.facts(relay=make.relay(beats)), make.record(phase="stopping"))
    assert asked.cells[1].state == "stopped"


def test_what_never_began() -> None:
    view = look(
        make.facts(
            make.node(0, make.running(state="absent")), make.node(1, make.running(state="absent")), relay=None
        ),
        make.record(phase="failed", reason="no space"),
    )
    assert (view.state, view.detail, view.relay.state) == ("failed", "no space", "absent")
    assert {cell.state for cell in view.cells} == {"stopped"}


def test_an_away_cell_is_told_with_what_the_others_do() -> None:
    cells = (CellStatus(cell=0, name="east", heartbeat=make.heartbeat(0), age_s=1.0), CellStatus(cell=1, name="west",
             heartbeat=make.heartbeat(1), age_s=1.0, away=True))  # fmt: skip
    view = look(make.facts(relay=make.relay(cells=cells)))
    assert (view.state, view.detail) == ("degraded", "west counts as away; the others wait for it")


def test_a_run_is_finished_when_its_processes_are_gone() -> None:
    said = {cell: make.heartbeat(cell, state="finished", step=100) for cell in (0, 1)}
    seen = look(make.facts(relay=make.relay(said)))
    assert seen.state == "running"
    assert "the last processes end" in seen.detail


def test_a_run_that_its_budget_stopped_says_so_and_how_to_go_on() -> None:
    reason = "stopped by budget: 12.0 h of 12.0 h used"
    first = make.node(0, make.ended("stopped").model_copy(update={"reason": reason}))
    view = look(make.facts(first, make.node(1, make.ended("stopped"))))
    assert (view.state, view.detail) == ("stopped", reason)
    assert view.hint.startswith("islandctl resume ")
    assert "--budget" in view.hint
