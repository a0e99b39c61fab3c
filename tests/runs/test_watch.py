"""From facts to a view: what is concluded, and above all what is not."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.config.pace import Pace
from islandctl.relay.messages import CellStatus
from islandctl.runs.cells import FRESH_S, SILENT_AFTER_S, told_by_relay
from islandctl.runs.record import KeptRecord, RunRecord
from islandctl.runs.status import Facts, Outcome, RunStatus
from islandctl.runs.watch import combine

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


def test_a_budget_that_ends_the_run_first_is_told() -> None:
    def with_left(seconds: float | None) -> RunStatus:
        return look(make.facts(make.node(0, make.running(budget_left_s=seconds))))

    short = with_left(10.0)
    assert (short.budget_left_s, short.budget_step) == (10.0, 40 + 10 * 200 // 100)
    assert short.eta_s == pytest.approx(30.0)
    assert (with_left(31.0).budget_left_s, with_left(31.0).budget_step) == (31.0, None)
    assert (with_left(None).budget_left_s, with_left(None).budget_step) == (None, None)


def test_cells_of_unequal_pace_are_shown_by_their_own_steps_and_the_run_by_its_own() -> None:
    record = make.record(steps=100)
    paces = [Pace(window=20, own=own, fragments=2, warmup=0) for own in (28, 14)]
    cells = [cell.model_copy(update={"pace": pace}) for cell, pace in zip(record.cells, paces, strict=True)]
    record = record.model_copy(update={"cells": tuple(cells)})
    beats = {0: make.heartbeat(0, step=56, steps=140), 1: make.heartbeat(1, step=21, steps=70, tokens_per_s=100.0)}
    view = look(make.facts(relay=make.relay(beats)), record)
    east, west = view.cells
    assert [(one.step, one.steps, one.window, one.windows) for one in (east, west)] == [
        (56, 140, 2, 5),
        (21, 70, 1, 5),
    ]
    assert (view.step, view.steps) == (30, 100)
    assert view.eta_s == pytest.approx((70 - 21) * 100 / 100)
    assert look(make.facts()).cells[0].steps is None


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
    view = look(make.facts(make.node(0, make.running(state="backoff", restarts=2, last="exit code 1"))))
    assert (view.state, view.detail) == ("degraded", "east is restarting: exit code 1")
    east = view.cells[0]
    assert (east.state, east.restarts, east.last_end) == ("restarting", 2, "exit code 1")


def test_a_rank_that_was_killed_is_told_before_those_that_lost_it() -> None:
    lost = Outcome(outcome="failed", retry=True, kind="peer-lost", reason="rank 0 has lost another rank", rank=0)
    why = "rank 1 (process 7): killed by signal 9 (SIGKILL)"
    killed = make.ended("failed", kind="crash", rank=1, signal=9, reason=why)
    view = look(make.facts(make.node(0, killed, outcome=lost)))
    assert view.culprit is not None
    assert (view.culprit.rank, view.culprit.kind) == (1, "crash")
    assert view.detail == f"east, node {view.culprit.node}: {why}"
    assert view.cells[0].detail == why
    witness = lost.model_copy(update={"kind": "", "reason": "RuntimeError: Broken pipe"})
    assert look(make.facts(make.node(0, killed, outcome=witness))).cells[0].detail == why
    starved = make.ended("failed", kind="out-of-memory", rank=1, signal=9, reason="killed by signal 9 (SIGKILL)")
    view = look(make.facts(make.node(0, starved, outcome=lost)))
    assert "out-of-memory: killed by signal 9 (SIGKILL)" in view.detail
    assert "data.limit_bytes" in view.hint


def test_a_node_is_called_by_its_scheduler_s_name_once_that_is_known() -> None:
    view = look(make.facts(make.node(0, make.running(node="gpu-0417")), make.node(1, make.running(state="pending"))))
    assert view.cells[0].nodes[0].label == "east/gpu-0417"
    assert view.cells[1].nodes[0].label == make.record().cells[1].nodes[0].label
    failed = make.ended("failed", kind="crash", rank=0, reason="exit code 3", node="gpu-0417")
    view = look(make.facts(make.node(0, failed)))
    assert view.culprit is not None
    assert view.culprit.node == "east/gpu-0417"
    assert view.detail == "east, node east/gpu-0417, rank 0: exit code 3"


def test_a_cell_that_was_taken_away_is_said_to_be_preempted() -> None:
    taken = make.ended("stopped", kind="preempted", reason="the supervisor got SIGTERM")
    view = look(make.facts(make.node(0, taken)))
    assert (view.state, view.detail) == ("degraded", "east is stopped: preempted: the supervisor got SIGTERM")
    assert view.cells[0].nodes[0].kind == "preempted"
    view = look(make.facts(make.node(0, taken), make.node(1, taken)))
    assert (view.state, view.detail) == ("stopped", "preempted: the supervisor got SIGTERM")
    rebooted = make.running(state="lost", kind="node-lost", reason="the node was rebooted")
    assert look(make.facts(make.node(0, rebooted))).cells[0].detail == "node-lost: the node was rebooted"


def test_heartbeats_of_an_earlier_attempt_do_not_count() -> None:
    view = look(make.facts(), make.record(attempt=2))
    assert {cell.state for cell in view.cells} == {"starting"}
    assert view.cells[0].step is None
    assert view.state == "launching"


def test_a_cell_that_went_away_before_its_first_step_is_where_the_attempt_began() -> None:
    """Its workers told 0, since they were not restored yet, and now its files cannot be read either."""
    beats = {cell: make.heartbeat(cell, attempt=2, step=0, tokens=0, state="starting") for cell in (0, 1)}
    beats = {cell: beat.model_copy(update={"bits_per_byte": (), "loss": None}) for cell, beat in beats.items()}
    status = make.relay(beats).model_copy(update={"joint_checkpoints": (make.joint(60),)})
    view = look(make.facts(relay=status), make.record(attempt=2))
    assert [(cell.step, cell.tokens) for cell in view.cells] == [(60, None), (60, None)]
    assert view.step == 60
    first = {cell: beat.model_copy(update={"attempt": 1}) for cell, beat in beats.items()}
    assert look(make.facts(relay=make.relay(first))).cells[0].step == 0


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
    assert (view.state, view.detail) == ("failed", "the launch was cut short: the process that was at it is gone")
    assert view.hint.startswith("islandctl stop demo clears up what it started")
    again = look(cut, make.record(phase="launching", attempt=2))
    assert (again.state, again.hint) == ("failed", "islandctl resume demo begins it again")
    unknown = look(
        cut.model_copy(update={"nodes": (make.node(0), make.node(1, absent))}), make.record(phase="launching")
    )
    assert (unknown.state, "what runs on east/local is not known" in unknown.detail) == ("unknown", True)
    some = look(make.facts(launcher_alive=False), make.record(phase="launching"))
    assert (some.state, some.cells[0].state) == ("degraded", "training")
    assert some.detail.endswith("is gone; workers run all the same")


def test_workers_without_their_supervisor_train_on() -> None:
    lost = make.node(1, make.running(state="lost", orphans=True))
    view = look(make.facts(west=lost))
    assert (view.cells[1].state, view.state) == ("training", "degraded")
    assert view.detail == "west/local: the supervisor was killed; the workers train on"
    assert view.hint.startswith("islandctl resume demo")
    said = lost.model_copy(update={"outcome": Outcome(outcome="finished")})
    done = look(make.facts(east=make.node(0, make.ended("finished")), west=said))
    assert (done.state, done.cells[1].state) == ("finished", "finished")


def test_a_fresh_heartbeat_is_no_life_where_no_process_is() -> None:
    gone = make.running(state="lost", orphans=False)
    view = look(make.facts(make.node(0, gone), make.node(1, gone)))
    assert ({cell.state for cell in view.cells}, view.state) == ({"lost"}, "failed")
    assert view.hint == "islandctl resume demo"


@pytest.mark.parametrize("word", ["stopped", "failed"])
@pytest.mark.parametrize("phase", ["launched", "stopping"])
def test_last_words_are_no_end_before_the_supervisor_says_so(word: str, phase: str) -> None:
    beats = {0: make.heartbeat(0), 1: make.heartbeat(1, state=word, message="a signal came")}
    facts = make.facts(
        relay=make.relay(beats), at_work="islandctl stop demo (process 7)" if phase != "launched" else ""
    )
    view = look(facts, make.record(phase=phase, reason="stopped by hand"))
    west = view.cells[1]
    assert (west.state, west.detail) == ("ending", "its workers have ended (a signal came); its supervisor decides")
    assert view.state == ("degraded" if phase == "launched" else "running")
    away = make.node(1, trouble="no answer")
    assert look(make.facts(west=away, relay=make.relay(beats))).cells[1].state == "ending"


@pytest.mark.parametrize("word", ["stopped", "training", "waiting", "finished"])
def test_what_an_earlier_life_said_is_over(word: str) -> None:
    def west(**state: Any) -> RunStatus:
        old = make.heartbeat(1, state=word, life="7.0")
        return look(
            make.facts(west=make.node(1, make.running(**state)), relay=make.relay({0: make.heartbeat(0), 1: old}))
        )

    again = west(supervisor_pid=7, restarts=1, last="killed by SIGKILL")
    assert (again.cells[1].state, again.cells[1].step, again.state) == ("restarting", 40, "degraded")
    assert again.detail == "west is restarting: killed by SIGKILL"
    resumed = west(supervisor_pid=8)
    assert (resumed.cells[1].state, resumed.state, resumed.step) == ("starting", "running", 40)
    assert resumed.detail == "the workers of west are starting"
    assert west(supervisor_pid=7, state="starting").cells[1].state == "starting"
    assert west(supervisor_pid=7).cells[1].state != "starting"


def test_a_word_without_figures_gets_those_of_the_files() -> None:
    filed = make.heartbeat(1, step=47, life="7.0", rounds_applied=5)
    bare = make.heartbeat(1, state="starting", step=0, tokens=0, bits_per_byte=(), life="7.1", rounds_applied=0)
    back = make.node(1, make.running(supervisor_pid=7, restarts=1), heartbeat=filed)
    west = look(make.facts(west=back, relay=make.relay({0: make.heartbeat(0), 1: bare}))).cells[1]
    assert (west.state, west.step, west.rounds_sent, west.source) == ("starting", 47, 5, "relay")
    assert west.bits_per_byte[-1] == (40, 3.5)
    fresh = look(make.facts(west=back, relay=make.relay({0: make.heartbeat(0)})))
    assert (fresh.cells[1].state, fresh.cells[1].step, fresh.step) == ("restarting", 47, 40)


@pytest.mark.parametrize("step", [0, 40])
def test_a_cell_whose_file_has_steps_of_this_life_is_not_starting(step: int) -> None:
    """The word comes every few seconds; what it says before the first step is over when the file has that step."""
    filed = make.heartbeat(1, step=47, life="7.1", tokens_per_s=150.0)
    word = make.heartbeat(1, state="starting", step=step, tokens_per_s=0.0, life="7.1")
    west = make.node(1, make.running(supervisor_pid=7, restarts=1), heartbeat=filed)
    view = look(make.facts(west=west, relay=make.relay({0: make.heartbeat(0), 1: word}))).cells[1]
    assert (view.state, view.step, view.tokens_per_s, view.source) == ("training", 47, 150.0, "relay")
    assert not told_by_relay(make.relay({1: word}), 1, 1), "else nobody would read the file"
    older = west.model_copy(update={"heartbeat": filed.model_copy(update={"life": "7.0"})})
    view = look(make.facts(west=older, relay=make.relay({0: make.heartbeat(0), 1: word}))).cells[1]
    assert (view.state, view.step) == ("starting", 47)


def test_a_command_at_work_is_told_and_none_is_hinted_at() -> None:
    cells = {"east": make.node(0, make.ended("stopped")), "west": make.node(1, make.ended("stopped"))}
    stopped = look(make.facts(**cells), make.record(phase="stopped"))
    assert (stopped.state, stopped.hint) == ("stopped", "islandctl resume demo")
    resuming = make.facts(**cells, at_work="islandctl resume demo (process 7)")
    view = look(resuming, make.record(phase="stopped"))
    assert (view.state, view.detail, view.hint) == ("launching", "islandctl resume demo (process 7) is at work", "")


def test_a_stop_that_was_cut_short() -> None:
    view = look(make.facts(), make.record(phase="stopping"))
    assert (view.state, view.hint) == ("degraded", "islandctl stop demo")
    held = make.facts(west=make.node(1, make.ended("stopped")), at_work="islandctl stop demo (process 7)")
    view = look(held, make.record(phase="stopping", reason="stopped by hand"))
    assert (view.state, view.detail) == ("running", "stopped by hand")


def test_how_the_relay_came_to_its_end() -> None:
    relay = KeptRecord(name="relay", python="python", code="/code", supervisor="/s.py", folder="/relay/node-0")

    def of(state: Any) -> tuple[str, str]:
        view = look(
            make.facts(relay=None, relay_trouble="refused", relay_state=state), make.record(relay=relay)
        ).relay
        return view.state, view.detail

    assert of(make.ended("stopped", reason="asked to stop")) == ("ended", "")
    assert of(make.ended("stopped", reason="its supervisor was lost")) == ("ended", "its supervisor was lost")
    assert of(make.running(state="lost", reason="the supervisor was killed")) == ("lost", "the supervisor was killed")
    assert of(make.running()) == ("unreachable", "refused")


def test_cells_that_start_without_a_relay_are_not_said_to_train() -> None:
    view = look(make.facts(relay=None, relay_trouble="refused"))
    assert (view.state, view.detail) == ("degraded", "the relay does not answer: refused")


def test_cells_that_stand_still_without_a_relay_are_not_said_to_train() -> None:
    silent = {"state": "waiting", "tokens_per_s": 0.0, "message": "waits: the relay does not answer"}
    view = look(
        make.facts(
            make.node(0, make.running(), heartbeat=make.heartbeat(0, **silent)),
            make.node(1, make.running(), heartbeat=make.heartbeat(1, **silent)),
            relay=None,
            relay_trouble="refused",
        )
    )
    names = ", ".join(cell.name for cell in view.cells)
    assert view.detail == (
        f"the relay does not answer; standing still until it does, at most for late.relay_away: {names}: refused"
    )
    assert view.eta_s is None


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


def rates(status: RunStatus) -> list[float | None]:
    return [cell.tokens_per_s for cell in status.cells]


@pytest.mark.parametrize(
    ("west", "state"),
    [
        (make.running(state="lost", orphans=False), "lost"),
        (make.running(state="backoff", restarts=1), "restarting"),
        (make.running(state="starting", supervisor_pid=8), "starting"),
        (make.ended("stopped"), "stopped"),
    ],
)
def test_a_cell_that_does_not_train_has_no_rate_and_the_run_no_eta(west: Any, state: str) -> None:
    view = look(make.facts(west=make.node(1, west)))
    assert view.cells[1].state == state
    assert rates(view) == [200.0, None]
    assert view.eta_s is None


def test_a_cell_that_counts_as_away_is_said_to_be_away() -> None:
    told = make.relay()
    away = told.cells[1].model_copy(update={"away": True, "age_s": 55.0})
    view = look(make.facts(relay=told.model_copy(update={"cells": (told.cells[0], away)})))
    assert (view.cells[1].state, rates(view), view.eta_s) == ("away", [200.0, None], None)
    assert (view.state, view.detail) == ("degraded", "west counts as away; the others wait for it")


@pytest.mark.parametrize("word", ["training", "waiting"])
def test_a_rate_holds_while_steps_come(word: str) -> None:
    beats = {cell: make.heartbeat(cell, state=word, tokens_per_s=20.0) for cell in (0, 1)}  # a step takes 5 s
    limit = FRESH_S + 3 * 5.0
    assert rates(look(make.facts(relay=make.relay(beats, still_s=limit - 1)))) == [20.0, 20.0]
    stuck = look(make.facts(relay=make.relay(beats, still_s=limit + 1)))
    assert (rates(stuck), stuck.eta_s) == ([None, None], None)
    assert stuck.cells[0].detail == ("no new step for 26 s" if word == "training" else "")
    late = look(make.facts(relay=make.relay(beats, age_s=FRESH_S + 1, still_s=FRESH_S + 2)))
    assert rates(late) == [None, None]


def test_an_evaluation_makes_no_steps_and_keeps_the_rate() -> None:
    beats = {cell: make.heartbeat(cell, state="evaluating") for cell in (0, 1)}
    assert rates(look(make.facts(relay=make.relay(beats, still_s=500.0)))) == [200.0, 200.0]
    silent = look(make.facts(relay=make.relay(beats, age_s=FRESH_S + 1, still_s=500.0)))
    assert rates(silent) == [None, None]


def from_files(age_s: float | None) -> RunStatus:
    cells = [
        make.node(cell, make.running(), heartbeat=make.heartbeat(cell), heartbeat_age_s=age_s) for cell in (0, 1)
    ]
    return look(make.facts(*cells, relay=None, relay_trouble="no answer"))


def test_without_a_relay_files_tell_whether_the_cells_train_on() -> None:
    on = from_files(2.0)
    assert on.detail == "the relay does not answer; the cells train on: no answer"
    assert (rates(on), on.eta_s) == ([200.0, 200.0], pytest.approx(30.0))
    still = from_files(14.0)
    assert still.detail == (
        "the relay does not answer; not known to train on: east (nothing new in its files for 14 s), "
        "west (nothing new in its files for 14 s): no answer"
    )
    assert {cell.state for cell in still.cells} == {"silent"}
    assert (rates(still), still.eta_s) == ([None, None], None)


def test_a_heartbeat_that_is_not_fresh_says_nothing_of_an_unreachable_node() -> None:
    told = make.relay()
    old = told.cells[1].model_copy(update={"age_s": 59.0})
    told = told.model_copy(update={"cells": (told.cells[0], old)})
    west = look(make.facts(west=make.node(1, trouble="no answer"), relay=told)).cells[1]
    assert (west.state, west.detail) == ("unreachable", "no answer; its last heartbeat came 59 s ago")


def test_a_stop_that_was_proven_stays_proven_when_a_host_is_switched_off() -> None:
    gone = make.node(1, trouble="no route to host")
    facts = make.facts(make.node(0, make.ended("stopped")), gone, relay=None, relay_state=make.ended("stopped"))
    view = look(facts, make.record(phase="stopped", reason="stopped by hand"))
    assert (view.state, view.detail) == ("stopped", "stopped by hand; west/local cannot be asked now")
    assert view.hint == "islandctl resume demo"
    through = look(facts, make.record(phase="stopped", reason="finished"))
    assert (through.state, through.detail) == ("finished", "west/local cannot be asked now")
    assert look(facts, make.record(phase="launched")).state == "degraded"


def test_a_cell_without_checkpoints_is_amiss_and_says_what_to_do() -> None:
    beats = {0: make.heartbeat(0), 1: make.heartbeat(1, message="no checkpoint at step 30: /data: No space left")}
    view = look(make.facts(relay=make.relay(beats)))
    assert (view.state, view.detail) == ("degraded", "west: no checkpoint at step 30: /data: No space left")
    assert view.hint == "free space on west/local below /data; the next one is tried as planned"
    assert view.eta_s is not None


def test_a_cell_in_a_queue_is_no_trouble() -> None:
    reason = "job 12: Resources: waits for nodes to become free"
    queued = make.node(1, make.running(state="pending", reason=reason))
    late = make.relay({0: make.heartbeat(0)})
    away = late.model_copy(
        update={"cells": (late.cells[0], late.cells[1].model_copy(update={"away": True}))}
    )  # the relay does not know why
    view = look(make.facts(west=queued, relay=away))
    assert (view.cells[1].state, view.cells[1].detail) == ("pending", reason)
    assert (view.state, view.detail, view.hint) == ("running", f"west is pending: {reason}", "")
    assert view.eta_s is None
    stands = make.relay({0: make.heartbeat(0, state="waiting", message="waits for a round", tokens_per_s=0.0)})
    assert look(make.facts(west=queued, relay=stands)).state == "waiting"
    both = make.facts(make.node(0, queued.state), queued, relay=make.relay({}))
    assert (look(both).state, look(both).ended) == ("pending", False)


def test_a_cell_whose_job_was_cancelled_says_so() -> None:
    said = "Slurm's job 12 ended: CANCELLED by 1000"
    taken = make.node(1, make.ended("stopped", kind="preempted", reason=said))
    view = look(make.facts(west=taken))
    assert view.state == "degraded"
    assert view.detail == f"west is stopped: preempted: {said}"
    assert view.hint == "islandctl resume demo starts again what has ended"
    gone = make.node(
        1, make.running(state="lost", orphans=False, reason="Slurm's job 12 is not known to Slurm any more")
    )
    assert look(make.facts(west=gone)).cells[1].detail == "Slurm's job 12 is not known to Slurm any more"
