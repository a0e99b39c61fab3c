"""The supervisor as it runs on a node: a real process with real children."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from islandctl.config.budget import BY_BUDGET
from islandctl.errors import RunError
from islandctl.fleet import node, supervisor
from islandctl.fleet.job import RestartPolicy, SupervisorState
from tests.disk import files_at_most, fill, mounted, needs_mount

from .kept import FOREVER, HOST, SCRIPT, Kept, until


def test_keeps_a_child_and_tells_how_it_ended(kept: Kept) -> None:
    kept.start("import os; print('hello from', os.environ['ISLANDCTL_RUN'], os.environ['ISLANDCTL_JOB'])")
    state = kept.ended()
    assert (state.outcome, state.code, state.restarts) == ("finished", 0, 0)
    assert f"hello from {kept.mark} cell a/node-0" in kept.log


def test_absent_folder_is_absent(tmp_path: Path) -> None:
    assert node.state(HOST, (tmp_path / "nothing").as_posix()).state == "absent"


def test_restarts_with_backoff_up_to_the_limit(kept: Kept) -> None:
    kept.start("import sys; print('life', flush=True); sys.exit(3)")
    state = kept.ended()
    assert (state.outcome, state.code, state.restarts) == ("failed", 3, 3)
    assert "exit code 3; 3 restarts without progress" in state.reason
    assert kept.log.count("life") == 4
    assert "restart 1 in 0.1 s" in kept.log
    assert state.last == "exit code 3"


def test_every_life_of_the_child_has_a_name(kept: Kept) -> None:
    pid = kept.start("import os, sys; print('life', os.environ['ISLANDCTL_LIFE']); sys.exit(3)")
    assert kept.ended().life == f"{pid}.3"
    assert [line for line in kept.log.splitlines() if line.startswith("life")] == [
        f"life {pid}.{n}" for n in range(4)
    ]


def test_the_childs_own_words_about_its_last_end_are_kept(kept: Kept) -> None:
    program = """
        import json, os, pathlib, sys, time
        if not pathlib.Path("again").exists():
            pathlib.Path("again").touch()
            json.dump({"outcome": "failed", "retry": True, "reason": "disk full"}, open("outcome.json", "w"))
            sys.exit(1)
        os.unlink("outcome.json")
        time.sleep(60)
    """
    kept.start(program, outcome=str(kept.root / "outcome.json"))
    until(lambda: kept.state.restarts == 1 and kept.state.state == "running", "the second life")
    assert kept.state.last == "disk full"
    os.kill(kept.state.supervisor_pid or 0, signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "state lost")
    assert (kept.state.orphans, kept.state.last) == (True, "disk full")
    supervisor.end_marked(kept.mark, None, 0.0)
    assert kept.state.orphans is False


@pytest.mark.slow
def test_progress_resets_the_limit(kept: Kept) -> None:
    program = """
        import json, sys
        with open("metrics", "a") as file:
            lives = len(open("metrics").readlines())
            file.write(json.dumps({"attempt": 1, "step": lives}) + "\\n")
        sys.exit(0 if lives == 6 else 1)
    """
    kept.start(program, progress=str(kept.root / "metrics"))
    state = kept.ended()
    assert (state.outcome, state.restarts) == ("finished", 6)


@pytest.mark.slow
def test_the_same_steps_again_are_no_progress(kept: Kept) -> None:
    program = """
        import json, sys
        with open("metrics", "a") as file:
            for step in range(30):
                file.write(json.dumps({"attempt": 1, "step": step}) + "\\n")
        sys.exit(1)
    """
    kept.start(program, progress=str(kept.root / "metrics"))
    state = kept.ended()
    assert state.outcome == "failed"
    assert "exit code 1; 3 restarts without progress" in state.reason


def test_progress_is_read_from_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert supervisor.furthest(str(path)) == supervisor.furthest(None) == (0, 0)
    path.write_text('ep": 90}\n{"attempt": 1, "step": 40}\n{"attempt": 2, "step": 7}\n[]\n{"attempt": 3, "st')
    assert supervisor.furthest(str(path)) == (2, 7)


def outcome(kept: Kept, told: dict[str, Any], code: int) -> SupervisorState:
    program = f"""
        import json, sys
        json.dump({told!r}, open("outcome.json", "w"))
        sys.exit({code})
    """
    kept.start(program, outcome=str(kept.root / "outcome.json"))
    return kept.ended()


@pytest.mark.slow
def test_outcome_finished_is_final_even_with_a_bad_exit_code(kept: Kept) -> None:
    state = outcome(kept, {"outcome": "finished"}, 1)
    assert (state.outcome, state.code, state.restarts) == ("finished", 1, 0)


@pytest.mark.slow
def test_outcome_failed_without_retry_is_final(kept: Kept) -> None:
    state = outcome(kept, {"outcome": "failed", "retry": False, "reason": "replicas differ"}, 1)
    assert (state.outcome, state.reason, state.restarts) == ("failed", "replicas differ", 0)


@pytest.mark.slow
def test_outcome_failed_with_retry_is_tried_again(kept: Kept) -> None:
    state = outcome(kept, {"outcome": "failed", "retry": True, "reason": "link"}, 1)
    assert (state.outcome, state.restarts) == ("failed", 3)


@pytest.mark.slow
def test_an_old_outcome_does_not_count(kept: Kept) -> None:
    (kept.root / "outcome.json").write_text(json.dumps({"outcome": "finished"}))
    kept.start("import sys; sys.exit(4)", outcome=str(kept.root / "outcome.json"))
    assert kept.ended().outcome == "failed"


@pytest.mark.slow
def test_exit_code_zero_without_the_promised_outcome_is_no_end(kept: Kept) -> None:
    kept.start("pass", outcome=str(kept.root / "outcome.json"))
    state = kept.ended()
    assert (state.outcome, state.restarts) == ("failed", 3)


@pytest.mark.slow
def test_a_signal_is_told_as_such(kept: Kept) -> None:
    kept.start("import os; os.kill(os.getpid(), 9)", restart=RestartPolicy(limit=0))
    state = kept.ended()
    assert (state.outcome, state.code, state.signal) == ("failed", None, 9)
    assert state.reason.startswith("killed by signal 9 (SIGKILL)")


@pytest.mark.slow
def test_a_command_that_does_not_exist(kept: Kept) -> None:
    kept.start("", argv=("/no/such/program",))
    assert kept.ended().code == 127
    assert "cannot start /no/such/program" in kept.log


def test_environment_files_and_setup_lines(kept: Kept) -> None:
    secret = "p(a$s\"s\nx'`"
    (kept.root / "secret.json").write_text(json.dumps({"TOKEN": secret}))
    kept.start(
        "import json, os; json.dump([os.environ['TOKEN'], os.environ['FROM_SETUP']], open('seen', 'w'))",
        env_files=(str(kept.root / "secret.json"),),
        setup=("FROM_SETUP='a b'", "export FROM_SETUP"),
    )
    kept.ended()
    assert json.loads(kept.written("seen")) == [secret, "a b"]
    assert secret not in "".join(path.read_text() for path in kept.folder.rglob("*") if path.is_file())


def test_stop_kills_a_child_that_ignores_term(kept: Kept) -> None:
    kept.start("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER)
    kept.written("ready")
    state = node.stop(HOST, kept.folder.as_posix(), 20)
    assert (state.state, state.outcome, state.signal) == ("ended", "stopped", 9)
    assert kept.left() == []


@pytest.mark.slow
def test_stop_gives_the_child_time_to_end_itself(kept: Kept) -> None:
    program = """
        import signal, sys, time
        def end(*_):
            time.sleep(0.5)
            open("saved", "w").write("yes")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        open("ready", "w").write("1")
        time.sleep(600)
    """
    kept.start(program, stop_timeout_s=20.0)
    kept.written("ready")
    state = node.stop(HOST, kept.folder.as_posix(), 20)
    assert (state.outcome, state.code) == ("stopped", 0)
    assert kept.written("saved") == "yes"


def test_stop_ends_a_grandchild_in_another_session(kept: Kept) -> None:
    grandchild = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FOREVER}"
    program = f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {grandchild!r}], start_new_session=True)
        time.sleep(600)
    """
    kept.start(program)
    kept.written("ready")
    assert len(kept.left()) == 3  # supervisor, child, grandchild
    assert node.stop(HOST, kept.folder.as_posix(), 20).outcome == "stopped"
    assert kept.left() == []


@pytest.mark.slow
def test_a_crash_leaves_no_orphans_to_the_next_life(kept: Kept) -> None:
    program = """
        import os, subprocess, sys
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open("orphans", "a") as file:
            file.write(f"{orphan.pid}\\n")
        os.kill(os.getpid(), 9)
    """
    kept.start(program)
    kept.ended()
    orphans = [int(line) for line in (kept.root / "orphans").read_text().split()]
    assert len(orphans) == 4
    assert [pid for pid in orphans if supervisor.birth(pid) is not None] == []


def test_a_checkpoint_at_our_own_term_after_a_crash_is_no_stop(kept: Kept) -> None:
    """kill -9 of the middle process: what is left below gets TERM, checkpoints, and says that it was stopped."""
    below = """
        import json, pathlib, signal, sys, time
        def stop(*_):
            told = {"outcome": "stopped", "retry": True, "reason": "stopped by a signal"}
            pathlib.Path("outcome.json").write_text(json.dumps(told))
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        pathlib.Path("ready").write_text("1")
        time.sleep(600)
    """
    middle = f"""
        import os, pathlib, signal, subprocess, sys, time
        lives = pathlib.Path("lives")
        pathlib.Path("ready").unlink(missing_ok=True)
        lives.write_text((lives.read_text() if lives.exists() else "") + "x")
        subprocess.Popen([sys.executable, "-c", {textwrap.dedent(below)!r}])
        while not pathlib.Path("ready").exists():
            time.sleep(0.01)
        if lives.read_text() == "x":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    kept.start(middle, outcome=str(kept.root / "outcome.json"), stop_timeout_s=5.0)
    until(lambda: kept.state.restarts == 1 and kept.state.state == "running", "the second life")
    assert "crash: killed by signal 9 (SIGKILL); restart 1" in kept.log
    until(lambda: kept.written("lives") == "xx" and (kept.root / "ready").exists(), "the second life's child")
    state = node.stop(HOST, kept.folder.as_posix(), 10.0)
    assert (state.outcome, state.reason) == ("stopped", "stopped by a signal")


def test_foreign_processes_are_left_alone(kept: Kept) -> None:
    env = {**os.environ, "ISLANDCTL_RUN": kept.mark + "-other", "ISLANDCTL_JOB": "cell a/node-0"}
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env, start_new_session=True)
    try:
        kept.start(FOREVER)
        kept.written("ready")
        node.stop(HOST, kept.folder.as_posix(), 20)
        assert other.poll() is None
        supervisor._kill(other.pid, supervisor.birth(other.pid) + 1, signal.SIGKILL)
        assert other.poll() is None  # the same number, but born at another time: not ours
    finally:
        other.kill()
        other.wait()


def test_a_second_start_is_refused(kept: Kept) -> None:
    pid = kept.start(FOREVER)
    with pytest.raises(RunError, match="runs already"):
        kept.start(FOREVER)
    again = subprocess.run(
        [sys.executable, str(SCRIPT), "start", str(kept.folder)], capture_output=True, text=True, timeout=30
    )
    assert again.returncode == 1
    assert json.loads(again.stdout)["reason"] == f"supervisor {pid} runs already"
    loop = subprocess.run([sys.executable, str(SCRIPT), "keep", str(kept.folder)], capture_output=True, timeout=30)
    assert b"another supervisor holds" in loop.stderr
    until(lambda: kept.state.state == "running", "the child")


@pytest.mark.slow
def test_hangup_does_not_end_it(kept: Kept) -> None:
    pid = kept.start(FOREVER)
    kept.written("ready")
    child = kept.state.child_pid
    os.kill(pid, signal.SIGHUP)
    os.kill(child, signal.SIGHUP)
    time.sleep(0.3)
    state = kept.state
    assert (state.state, state.child_pid, state.supervisor_pid) == ("running", child, pid)
    assert os.getsid(pid) == pid != os.getsid(0)
    assert os.getsid(child) == child


def test_killed_supervisor_is_lost_and_its_successor_ends_the_leftovers(kept: Kept) -> None:
    pid = kept.start(FOREVER)
    kept.written("ready")
    child = kept.state.child_pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "state lost")
    assert kept.state.reason == "the supervisor was killed"
    assert supervisor.birth(child) is not None  # training went on
    (kept.root / "ready").unlink()
    kept.start(FOREVER)
    kept.written("ready")
    assert supervisor.birth(child) is None
    state = kept.state
    assert state.state == "running"
    assert state.child_pid != child
    assert node.stop(HOST, kept.folder.as_posix(), 20).outcome == "stopped"


@pytest.mark.slow
def test_stop_of_a_lost_supervisor_ends_its_child(kept: Kept) -> None:
    os.kill(kept.start(FOREVER), signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "state lost")
    state = node.stop(HOST, kept.folder.as_posix(), 5)
    assert (state.state, state.outcome) == ("ended", "stopped")
    assert kept.left() == []


@pytest.mark.slow
def test_a_successor_believes_the_outcome_that_was_told_meanwhile(kept: Kept) -> None:
    program = """
        import json, os, time
        open("ready", "w").write("1")
        while not os.path.exists("go"):
            time.sleep(0.02)
        json.dump({"outcome": "finished", "reason": "all steps done"}, open("outcome.json", "w"))
    """
    pid = kept.start(program, outcome=str(kept.root / "outcome.json"))
    kept.written("ready")
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "state lost")
    (kept.root / "go").touch()
    kept.written("outcome.json")
    until(lambda: kept.left() == [], "the child's end")
    kept.start(program, outcome=str(kept.root / "outcome.json"))
    state = kept.ended()
    assert (state.outcome, state.reason, state.restarts) == ("finished", "all steps done", 0)


@pytest.mark.slow
def test_a_successor_starts_again_what_had_been_stopped(kept: Kept) -> None:
    pid = kept.start(FOREVER, outcome=str(kept.root / "outcome.json"))
    kept.written("ready")
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "state lost")
    (kept.root / "outcome.json").write_text(json.dumps({"outcome": "stopped"}))
    (kept.root / "ready").unlink()
    kept.start(FOREVER, outcome=str(kept.root / "outcome.json"))
    kept.written("ready")
    assert kept.state.state == "running"
    node.stop(HOST, kept.folder.as_posix(), 20)


@pytest.mark.slow
def test_an_old_outcome_does_not_count_though_two_supervisors_were_lost(kept: Kept) -> None:
    """The second one was lost while it still ended what the first had left, before it had a child of its own."""
    told = kept.root / "outcome.json"
    told.write_text(json.dumps({"outcome": "finished"}))
    pid = kept.start("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER, outcome=str(told))
    kept.written("ready")
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "the first one's loss")
    pid = kept.start(FOREVER, outcome=str(told))
    assert kept.state.state == "starting"
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "the second one's loss")
    node.end_leftovers(HOST, kept.mark, 0.0)
    (kept.root / "ready").unlink()
    kept.start(FOREVER, outcome=str(told))
    kept.written("ready")
    assert kept.state.state == "running"
    node.stop(HOST, kept.folder.as_posix(), 20)


@pytest.mark.slow
def test_after_a_reboot_the_state_is_lost(kept: Kept) -> None:
    kept.start(FOREVER)
    kept.written("ready")
    node.stop(HOST, kept.folder.as_posix(), 20)
    path = kept.folder / "state.json"
    told = json.loads(path.read_text())
    (kept.folder / "exit.json").unlink()
    path.write_text(json.dumps({**told, "state": "running", "boot_id": "another", "supervisor_pid": os.getpid()}))
    assert (kept.state.state, kept.state.kind, kept.state.reason) == ("lost", "node-lost", "the node was rebooted")
    # The same number, but another process than the one that wrote it.
    path.write_text(json.dumps({**told, "state": "running", "supervisor_pid": os.getpid(), "supervisor_birth": 1}))
    assert (kept.state.state, kept.state.reason) == ("lost", "the supervisor was killed")


@pytest.mark.slow
def test_term_to_the_supervisor_is_a_stop(kept: Kept) -> None:
    pid = kept.start(FOREVER)
    kept.written("ready")
    os.kill(pid, signal.SIGTERM)
    state = kept.ended()
    assert (state.outcome, state.kind, state.reason) == ("stopped", "preempted", "the supervisor got SIGTERM")
    (kept.root / "ready").unlink()
    until(lambda: kept.left() == [], "the supervisor has gone")
    kept.start(FOREVER)  # as a scheduler does once the machine is there again
    kept.written("ready")
    assert (kept.state.restarts, kept.state.last_end) == (1, "preempted: the supervisor got SIGTERM")
    assert node.stop(HOST, kept.folder.as_posix(), 20).kind == ""


@pytest.mark.slow
def test_a_new_start_after_the_end_is_a_new_life(kept: Kept) -> None:
    kept.start(FOREVER)
    node.stop(HOST, kept.folder.as_posix(), 20)
    (kept.root / "ready").unlink(missing_ok=True)
    kept.start(FOREVER)
    kept.written("ready")
    assert kept.state.state == "running"
    assert node.stop(HOST, kept.folder.as_posix(), 20).outcome == "stopped"


def test_the_file_is_python_3_8_and_depends_on_nothing() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for found in ast.walk(tree)
        for name in (
            [alias.name for alias in found.names]
            if isinstance(found, ast.Import)
            else [found.module or ""]
            if isinstance(found, ast.ImportFrom)
            else []
        )
    }
    assert imported <= set(sys.stdlib_module_names)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert supervisor.command(["begin"]) == 2
    assert "usage" in capsys.readouterr().err
    with contextlib.suppress(ValueError):
        assert supervisor.ending(-999) == "killed by signal 999"


@needs_mount
def test_a_full_disk_swallows_neither_the_training_nor_the_last_word(tmp_path: Path) -> None:
    go = tmp_path / "go"
    program = f"""
        import os, time
        open('ready', 'w').write('1')
        while not os.path.exists({str(go)!r}): time.sleep(0.02)
        raise SystemExit(3)
    """
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        kept = Kept(disk)
        kept.start(program)
        kept.written("ready")
        filler = fill(disk)
        go.touch()
        state = kept.ended()
        assert (state.outcome, state.code, state.restarts) == ("failed", 3, 3)
        assert re.search("exit code 3; it left no word: the disk of .* is full; 3 restarts without pro", state.reason)
        filler.unlink()
        kept.start("pass")  # the end that could not be told in full is an end all the same
        until(lambda: kept.state.outcome == "finished", "the second end")
        until(lambda: kept.left() == [], "the supervisor has gone")


@needs_mount
def test_a_full_disk_stops_neither_the_state_nor_the_budget(tmp_path: Path) -> None:
    """The space for the next writing is held by the file that the last one has replaced."""
    go, seconds = tmp_path / "go", "used.json"
    program = f"""
        import os, time
        first = os.environ['ISLANDCTL_LIFE'].endswith('.0')
        if first: open('ready', 'w').write('1')
        while not (first and os.path.exists({str(go)!r})): time.sleep(0.02)
        raise SystemExit(3)
    """
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        kept = Kept(disk)
        kept.start(program, budget_s=600.0)
        kept.written("ready")
        before = json.loads((kept.folder / seconds).read_text())["seconds"]
        fill(disk)
        go.touch()
        until(lambda: kept.state.state == "running" and kept.state.restarts == 1, "the second life")
        assert kept.state.last.startswith("exit code 3; it left no word: the disk of")
        assert supervisor.birth(kept.state.child_pid) is not None
        until(lambda: kept.state.beat_age_s > supervisor.BEAT_S / 2, "some time")
        until(lambda: kept.state.beat_age_s < supervisor.BEAT_S / 2, "the next beat")
        assert json.loads((kept.folder / seconds).read_text())["seconds"] > before + 1.0
        assert node.stop(HOST, kept.folder.as_posix(), 20).outcome == "stopped"
        assert not list(kept.folder.glob("*.reserved"))
        assert not list(kept.folder.glob("*.tmp"))


def test_a_full_disk_takes_whole_lines_or_none(tmp_path: Path) -> None:
    with open(tmp_path / "log", "ab", buffering=0) as file:
        with files_at_most(50):
            for number in range(4):
                supervisor.append_line(file.fileno(), f"line {number} of twenty bytes"[:19])
        supervisor.append_line(file.fileno(), "space again")
    assert (tmp_path / "log").read_text() == "line 0 of twenty by\nline 1 of twenty by\nspace again\n"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_state_that_is_written_again_and_again_is_never_seen_in_part(tmp_path: Path, replaced: bool) -> None:
    path = str(tmp_path / "state.json")
    if replaced:  # killed between the link and the replacement
        supervisor.write_json(path, {"number": -1}, hold=True)
        os.unlink(path + supervisor.RESERVED)
        os.link(path, path + supervisor.RESERVED)
    seen: list[dict[str, Any] | None] = []
    for number in range(200):
        with open(path if number else os.devnull) as late:
            supervisor.write_json(path, {"number": number, "rest": "x" * (number % 7) * 500}, hold=True)
            content = late.read()
            assert not number or json.loads(content)["number"] == number - 1
        seen.append(supervisor.read_json(path))
    assert [one and one["number"] for one in seen] == list(range(200))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["state.json", "state.json.reserved"]
    assert os.stat(path).st_nlink == 1


def test_workers_that_a_lost_supervisor_left_get_the_time_of_a_stop(kept: Kept) -> None:
    """They are well, and save before they end: the rest of a child that has crashed gets less time for that."""
    kept.patch(CRASH_GRACE_S=0.1)
    program = """
        import os, signal, time
        def save(*_):
            time.sleep(0.6)
            open('saved', 'w').write('1')
            raise SystemExit(0)
        signal.signal(signal.SIGTERM, save)
        open('ready', 'w').write('1')
        time.sleep(600)
    """
    pid = kept.start(program, stop_timeout_s=15.0)
    kept.written("ready")
    os.kill(pid, signal.SIGKILL)
    until(lambda: kept.state.state == "lost", "state lost")
    (kept.root / "ready").unlink()
    kept.start(program, stop_timeout_s=15.0)
    kept.written("ready")
    assert (kept.root / "saved").exists()
    assert (kept.state.restarts, kept.state.last) == (0, "the supervisor was killed")
    node.stop(HOST, kept.folder.as_posix(), 20)


SPENDER = """
    import os, time
    spent = os.path.join(os.path.dirname(os.environ['OUTCOME']), 'node-0', 'spent')
    while not os.path.exists(spent): time.sleep(0.02)
    open(os.environ['OUTCOME'], 'w').write('{"outcome": "stopped", "retry": false, "reason": "stopped on request"}')
"""


def test_a_budget_is_counted_over_restarts_and_ends_the_job_in_good_order(kept: Kept) -> None:
    outcome = kept.root / "cell a" / "outcome.json"
    more = {"env": {"OUTCOME": str(outcome)}, "outcome": str(outcome)}
    kept.start(SPENDER, budget_s=2.0, **more)
    state = kept.ended()
    assert (state.outcome, state.restarts) == ("stopped", 0)
    assert re.fullmatch(r"stopped by budget: [2-9]\.\d s of 2\.0 s used", state.reason)
    used = json.loads((kept.folder / "used.json").read_text())["seconds"]
    assert state.budget_left_s == 0.0
    (kept.folder / "spent").unlink()
    outcome.unlink()
    kept.start(SPENDER, budget_s=used + 2.0, **more)  # a resume with a higher budget: what was used counts
    assert "stopped by budget" in kept.ended().reason
    assert used + 2.0 <= json.loads((kept.folder / "used.json").read_text())["seconds"] < used + 10.0


def test_a_job_that_does_not_heed_its_budget_is_ended(kept: Kept) -> None:
    kept.folder.mkdir(parents=True)
    (kept.folder / "used.json").write_text(json.dumps({"seconds": 3 + supervisor.BUDGET_GRACE_S}))
    kept.start("import time; time.sleep(600)", budget_s=3.0)
    state = kept.ended()
    assert (state.outcome, state.reason) == ("stopped", "stopped by budget: 15.1 min of 3.0 s used")
    assert supervisor.BY_BUDGET == BY_BUDGET
    assert supervisor.span(12 * 3600) == "12.0 h"
