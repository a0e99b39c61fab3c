"""Why a child ended, in a word and a cause; what follows from it; and children that hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from islandctl.fleet import node, supervisor
from islandctl.fleet.job import RestartPolicy, Watchdog
from tests.disk import fill, mounted, needs_mount

from .kept import FOREVER, HOST, SCRIPT, Kept, until

NONE = RestartPolicy(limit=0)
REPOSITORY = SCRIPT.parent.parent.parent


def ended(rank: int, code: int, at: float = 5.0) -> dict[str, Any]:
    """What torchrun tells of one rank; a negative code is a signal."""
    by = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
    return {"rank": rank, "pid": 70 + rank, "at": at, **by}


@pytest.mark.parametrize(
    ("code", "ranks", "signalled", "said", "kind", "cause", "rank"),
    [
        (3, None, None, {}, "crash", "torchrun (process 69): exit code 3", None),
        (
            -11,
            None,
            None,
            {},
            "crash",
            "torchrun (process 69): killed by signal 11 (SIGSEGV); its 4 ranks were stopped by us",
            None,
        ),
        (
            137,
            None,
            None,
            {},
            "crash",
            "torchrun (process 69): exit code 137, which is how a shell tells signal 9 (SIGKILL)",
            None,
        ),
        (
            1,
            [ended(0, 1), ended(3, -6), ended(2, -9)],
            None,
            {"outcome": "failed", "kind": "peer-lost", "reason": "rank 0 has lost another rank", "rank": 0},
            "crash",
            "rank 2 (process 72): killed by signal 9 (SIGKILL); the other 3 ranks were stopped by us",
            2,
        ),
        (
            1,
            [ended(0, 1)],
            None,
            {"outcome": "failed", "kind": "peer-lost", "reason": "rank 0 has lost another rank", "rank": 0},
            "peer-lost",
            "rank 0 has lost another rank",
            0,
        ),
        (
            1,
            [ended(1, -9), ended(0, 1)],
            None,
            {"outcome": "failed", "reason": "RuntimeError: Broken pipe", "rank": 0},
            "crash",
            "rank 1 (process 71): killed by signal 9 (SIGKILL)",
            1,
        ),
        (1, [ended(1, 1), ended(0, 1, 4.0)], None, {}, "crash", "rank 0 (process 70): exit code 1; the", 0),
        (1, [ended(1, 1)], None, {"outcome": "failed", "reason": "disk full", "rank": 1}, "crash", "disk full", 1),
        (
            1,
            [ended(1, 1)],
            None,
            {"outcome": "failed", "kind": "out-of-memory", "reason": "MemoryError: x", "rank": 1},
            "out-of-memory",
            "MemoryError: x",
            1,
        ),
        (1, [], 15, {}, "preempted", "ended by signal 15 (SIGTERM) from outside", None),
        (-15, None, None, {}, "preempted", "ended by signal 15 (SIGTERM) from outside", None),
        (0, None, None, {"outcome": "stopped", "retry": True, "reason": "by a signal"}, "preempted", "by a", None),
        (
            -9,
            None,
            None,
            {"outcome": "stopped", "retry": True, "reason": "by a signal"},
            "crash",
            "torchrun (process 69): ki",
            None,
        ),
    ],
)
def test_a_word_and_a_cause(
    tmp_path: Path,
    code: int,
    ranks: list[dict[str, Any]] | None,
    signalled: int | None,
    said: dict[str, Any],
    kind: str,
    cause: str,
    rank: int | None,
) -> None:
    told = tmp_path / "ranks.json"
    job = {"name": "n", "mark": "m", "argv": ["x"], "ranks": [0, 1, 2, 3], "ranks_ended": str(told)}
    (tmp_path / "job.json").write_text(json.dumps(job))
    if ranks is not None:
        told.write_text(json.dumps({"ranks": ranks, "signal": signalled}))
    kept = supervisor.Supervisor(str(tmp_path))
    kept.pid = 69
    why = kept._why(code, said)
    assert (why["kind"], why["rank"]) == (kind, rank)
    assert why["cause"].startswith(cause)


@pytest.mark.parametrize(
    ("job", "code", "cause"),
    [
        ({}, -9, "killed by signal 9 (SIGKILL)"),
        ({"ranks": [0]}, -9, "killed by signal 9 (SIGKILL)"),
        ({"ranks": [0, 1], "ranks_ended": "r", "setup": ["module load x"]}, 3, "exit code 3"),
        ({"ranks": [0, 1], "ranks_ended": "r", "setup": ["x"]}, -9, "torchrun (process 0): killed by signal 9"),
    ],
)
def test_torchrun_is_named_only_where_it_was_torchrun(
    tmp_path: Path, job: dict[str, Any], code: int, cause: str
) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"name": "n", "mark": "m", "argv": ["x"], **job}))
    assert supervisor.Supervisor(str(tmp_path))._why(code, {})["cause"].startswith(cause)


def test_a_killed_torchrun_is_named_where_its_restart_is_told(kept: Kept) -> None:
    program = f"import os\nif os.environ['ISLANDCTL_LIFE'].endswith('.0'): os.kill(os.getpid(), 9)\n{FOREVER}"
    kept.start(program, ranks=(0, 1), ranks_ended=str(kept.root / "ranks.json"))
    kept.written("ready")
    assert re.fullmatch(
        r"crash: torchrun \(process \d+\): killed by signal 9 \(SIGKILL\); its 2 ranks were stopped by us",
        kept.state.last_end,
    )
    assert f"islandctl: {kept.state.last_end}; restart 1 in" in kept.log
    assert node.stop(HOST, kept.folder.as_posix(), 20).outcome == "stopped"


def test_a_child_that_is_the_only_rank_ends_as_that_rank(tmp_path: Path) -> None:
    job = {"name": "n", "mark": "m", "argv": ["x"], "ranks": [0]}
    (tmp_path / "job.json").write_text(json.dumps(job))
    keeper = supervisor.Supervisor(str(tmp_path))
    why = keeper._why(-9, {})
    assert (why["cause"], why["signal"], why["rank"]) == ("killed by signal 9 (SIGKILL)", 9, 0)
    keeper.trouble = "cannot start x: No such file or directory"
    assert keeper._why(127, {})["rank"] is None


@needs_mount
def test_no_word_where_the_disk_is_full(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 1 << 20) as folder:
        (folder / "job.json").write_text(json.dumps({"name": "n", "mark": "m", "argv": ["x"]}))
        kept = supervisor.Supervisor(str(folder))
        assert kept._why(1, {})["cause"] == "exit code 1"
        filler = fill(folder)
        assert kept._why(1, {})["cause"] == f"exit code 1; it left no word: the disk of {folder} is full"
        said = {"outcome": "failed", "reason": "RuntimeError: x", "rank": 0}
        assert kept._why(1, said)["cause"] == "RuntimeError: x"
        filler.unlink()


def test_out_of_memory_twice_at_the_same_step_is_final(kept: Kept) -> None:
    """The first time a word of its own, the second time the kernel, whose count has grown."""
    cgroups = kept.root / "cgroups"
    for name in ("memory.events", "memory/memory.oom_control"):
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text("low 0\noom_kill 1\n")
    kept.patch(CGROUPS=str(cgroups))
    program = f"""
        import json, os, pathlib
        if os.environ["ISLANDCTL_LIFE"].endswith(".0"):
            told = {{"outcome": "failed", "retry": True, "kind": "out-of-memory", "reason": "MemoryError: no"}}
            pathlib.Path("outcome.json").write_text(json.dumps(told))
            raise SystemExit(1)
        for name in ("memory.events", "memory/memory.oom_control"):
            pathlib.Path({str(cgroups)!r}, name).write_text("low 0\\noom_kill 2\\n")
        os.kill(os.getpid(), 9)
    """
    kept.start(program, outcome=str(kept.root / "outcome.json"))
    state = kept.ended()
    assert (state.outcome, state.kind, state.signal, state.restarts) == ("failed", "out-of-memory", 9, 1)
    assert state.last_end == "out-of-memory: MemoryError: no"
    found = (
        r"killed by signal 9 \(SIGKILL\); the kernel did it for lack of memory \(.*: oom_kill rose from 1 to 2\); "
    )
    assert re.fullmatch(found + "out of memory for the second time without a step further", state.reason)


@pytest.fixture
def little_memory(tmp_path: Path) -> Iterator[Path]:
    """An interpreter that first enters a cgroup of its own with 100 MiB."""
    own = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    v1, v2 = Path("/sys/fs/cgroup/memory" + own.get("memory", "/")), Path("/sys/fs/cgroup" + own.get("", "/"))
    base, limit = (v1, "memory.limit_in_bytes") if "memory" in own else (v2, "memory.max")
    made = base / f"islandctl-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / limit).write_text(str(100 << 20))
        for name, most in (("memory.memsw.limit_in_bytes", str(100 << 20)), ("memory.swap.max", "0")):
            if (made / name).exists():
                (made / name).write_text(most)
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no cgroup with a limit of its own can be made here: {error}")
    entering = tmp_path / "python"
    entering.write_text(f'#!/bin/sh\necho $$ > "{made}/cgroup.procs" || exit 9\nexec "{sys.executable}" "$@"\n')
    entering.chmod(0o755)
    yield entering
    until(lambda: not (made / "cgroup.procs").read_text(), "the cgroup is empty")
    made.rmdir()


def test_the_kernels_own_kill_is_told_as_such(kept: Kept, little_memory: Path) -> None:
    kept.python = str(little_memory)
    kept.start("held = b'x' * (400 << 20)", restart=NONE)
    state = kept.ended()
    assert (state.outcome, state.kind, state.signal) == ("failed", "out-of-memory", 9)
    assert re.search(
        r"the kernel did it for lack of memory \(.*/islandctl-test-.*: oom_kill rose from 0 to \d", state.reason
    )
    until(lambda: kept.left() == [], "the supervisor has gone")


def test_what_is_taken_from_outside_is_no_failure_of_its_own(kept: Kept) -> None:
    program = """
        import os
        if int(os.environ["ISLANDCTL_LIFE"].rpartition(".")[2]) < 2:
            os.kill(os.getpid(), 15)
    """
    kept.start(program, restart=RestartPolicy(limit=0, backoff_s=0.05, backoff_limit_s=0.1))
    state = kept.ended()
    assert (state.outcome, state.restarts, state.last_kind) == ("finished", 2, "preempted")
    assert "preempted: ended by signal 15 (SIGTERM) from outside; restart 2 in 0.1 s" in kept.log


def test_a_port_that_is_taken_is_told_with_its_holder(kept: Kept) -> None:
    kept.patch(PORT_PATIENCE_S=0.1)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        kept.start("pass", binds=(("127.0.0.1", port),), restart=NONE)
        state = kept.ended()
        assert f"port {port} is held by process {os.getpid()} (" in state.reason
        left = supervisor.remains(kept.mark, [str(kept.folder)], [], patience_s=0.0)
        assert left["ports"] == [port]
        assert left["taken"][0].startswith(f"port {port} is held by process {os.getpid()} (")
    until(lambda: kept.left() == [], "the supervisor has gone")
    kept.start("pass", binds=(("127.0.0.1", port),), restart=NONE)
    assert kept.ended().outcome == "finished"
    assert node.remains(HOST, kept.mark, [kept.folder.as_posix()]).taken == ()


def test_a_child_that_hangs_shows_where_and_is_started_again(kept: Kept) -> None:
    kept.patch(LOOK_S=0.1)
    program = """
        import os, pathlib, threading
        if not os.environ["ISLANDCTL_LIFE"].endswith(".0"):
            raise SystemExit
        from islandctl.worker.pulse import Pulse
        pulse = Pulse(pathlib.Path(os.environ["NODE"]), 0)
        def waits_for_ever():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        for step in range(1, 6):
            pulse.beat("training", step)
        pulse.beat("waiting")
        waits_for_ever()
    """
    more = {"env": {"NODE": str(kept.folder), "PYTHONPATH": str(REPOSITORY)}, "ranks": (0,)}
    kept.start(program, watchdog=Watchdog(least_s=1.5, factor=2.0), **more)
    state = kept.ended()
    assert (state.outcome, state.restarts, state.last_kind) == ("finished", 1, "hung")
    assert re.search(r"no sign of life for \d.* from rank 0 \(process \d+\), waiting at step 5", state.last)
    assert "in waits_for_ever" in kept.log


def test_when_silence_counts_as_a_hang(tmp_path: Path) -> None:
    whole = {"rank": 1, "pid": 7, "birth": 1, "dump_signal": 3, "step": 4}

    def tell(**pulse: Any) -> None:
        (tmp_path / "pulse-1.json").write_text(json.dumps({**whole, **pulse}))

    (tmp_path / "pulse-0.json").write_text("{}")
    watch = supervisor.Watch(str(tmp_path), {"least_s": 10.0, "factor": 5.0})
    assert not list(tmp_path.glob("pulse-*")), "what an earlier life has left"
    now = watch._looked

    def passes(seconds: float) -> str:
        nonlocal now
        told = ""
        for _ in range(round(seconds / 3)):
            now += 3
            told = watch.look(now)
        return told

    (tmp_path / "pulse-5.json").write_text('{"rank": 5}')  # not one of ours
    assert passes(60) == ""
    tell(state="training", beats=1)
    assert passes(9) == ""
    tell(state="training", beats=2)
    assert passes(9) == ""
    assert passes(6) == "no sign of life for 12.0 s from rank 1 (process 7), training at step 4"
    tell(state="training", beats=3, step_s=4.0)
    assert passes(21) == ""  # five usual steps are twenty seconds
    assert passes(3).endswith("; a step usually takes 4.0 s") or passes(3).endswith("a step usually takes 4.0 s")
    tell(state="checkpointing", beats=4)
    assert passes(60) == ""
    assert passes(6) != ""
    tell(state="resting", beats=4)
    assert passes(600) == ""
    tell(state="training", beats=5)
    assert passes(3) == ""
    now += 3600  # the machine slept, and so did whoever looks
    assert watch.look(now) == ""
    assert passes(12) != ""


def test_the_childs_log_goes_on_in_a_new_piece(kept: Kept) -> None:
    kept.patch(LOG_BYTES=1000, LOG_PIECES=3)
    kept.start("print('x' * 1000); raise SystemExit(3)", restart=RestartPolicy(limit=4, backoff_s=0.01))
    kept.ended()
    names = sorted(path.name for path in (kept.folder / "logs").glob("node-0*"))
    assert names == ["node-0.2.log", "node-0.3.log", "node-0.4.log"]


def test_memory_of_accelerators() -> None:
    """Lines as nvidia-smi prints them; the last card is one that is shared out (MIG) and tells nothing."""
    cards = ["GPU-aa, 0, 4", "GPU-bb, 1, 71234", "GPU-cc, 2, 523", "GPU-dd, 3, 40000", "GPU-ee, 4, [N/A]"]
    held, hidden = supervisor.card_memory(cards, [f"GPU-bb, {os.getpid()}", "GPU-cc, 4000000"])
    assert held[0].startswith(f"accelerator 1: 71234 MiB in use by process {os.getpid()} (")
    assert held[1:] == [
        "accelerator 2: 523 MiB in use by process 4000000 (not visible here)",
        "accelerator 3: 40000 MiB in use by no process that is visible here",
        "accelerator 4: memory in use is not told ([N/A])",
    ]
    assert hidden
    assert supervisor.card_memory(["GPU-aa, 0, 4"], []) == ([], False)


def test_accelerators_are_looked_at_where_there_are_some(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    folders = [kept.folder.as_posix()]  # workers ran here
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$1" in *gpu=*) echo "GPU-aa, 0, 3";; esac\n')
    smi.chmod(0o755)
    found = node.remains(HOST, kept.mark, folders)
    assert (found.accelerators, found.held) == (1, ())
    assert node.remains(HOST, kept.mark).accelerators is None
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert "nvidia-smi does not tell: " in node.remains(HOST, kept.mark, folders).held[0]


def oldest_python() -> str | None:
    """An interpreter of the oldest version that a node may have."""
    candidates = ["python3.8", *map(str, Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8"))]
    for name in candidates:
        try:
            if subprocess.run([name, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0:
                return name
        except OSError:
            continue
    return None


@pytest.mark.skipif(oldest_python() is None, reason="no Python 3.8 here to run the supervisor on")
def test_a_life_on_the_oldest_python(kept: Kept) -> None:
    kept.python = str(oldest_python())
    watchdog = Watchdog(least_s=600.0, factor=2.0)
    program = f"import os\nif os.environ['ISLANDCTL_LIFE'].endswith('.0'): os.kill(os.getpid(), 9)\n{FOREVER}"
    kept.start(program, binds=(("127.0.0.1", node.free_port(HOST)),), watchdog=watchdog)
    kept.written("ready")
    assert (kept.state.restarts, kept.state.last_end) == (1, "crash: killed by signal 9 (SIGKILL)")
    look = "import supervisor as s; s.remains('m', [], [1]); s.memory_kills(); s.card_memory(['u, 0, 9'], [])"
    folder = str(SCRIPT.parent)
    done = subprocess.run([kept.python, "-W", "error", "-c", look], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert node.stop(HOST, kept.folder.as_posix(), 20).outcome == "stopped"
    assert sys.version_info >= (3, 9)  # else the rest of the suite has shown it
