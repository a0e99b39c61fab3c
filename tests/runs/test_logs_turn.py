"""Logs that begin new pieces while their processes run: nothing is missed or doubled."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from islandctl.config.lines import LOG_BYTES
from islandctl.config.paths import log_pieces
from islandctl.fleet import node, supervisor
from islandctl.fleet.job import SupervisorState
from islandctl.fleet.local import LocalHost
from islandctl.runs.logs import LogReader
from islandctl.runs.relay import _Start
from tests.fleet.kept import HOST, SCRIPT, Kept, until
from tests.relay.live import prepare

from . import builders as make
from .test_logs import Shaky

ROOT = Path(supervisor.__file__).parent.parent.parent
NUM_LINES = 600


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    supervisor.end_marked(kept.mark, None, 0.0)
    assert kept.left() == []


def pieces(kept: Kept, log: str) -> list[str]:
    return log_pieces(path.name for path in (kept.folder / "logs").iterdir()).get(log, [])


def test_what_torchrun_prints_is_followed_while_it_turns(kept: Kept, tmp_path: Path) -> None:
    """Its place is taken by a module that prints much. The supervisor, which had opened the log, is killed."""
    chatter = f"""
        import os, time
        print("pid", os.getpid(), flush=True)
        for number in range({NUM_LINES}):
            print("line", number, "x" * 40, flush=True)
            while number == {NUM_LINES // 2} and not os.path.exists("go"):
                time.sleep(0.02)
            time.sleep(0.01)
        open("done", "w").write("1")
        time.sleep(600)
    """
    (tmp_path / "chatter.py").write_text(textwrap.dedent(chatter))
    argv = (sys.executable, "-m", "islandctl.worker.recorded", "chatter")
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}", LOG_BYTES: "8000"}
    pid = kept.start("", argv=argv, env=env)
    record = make.record()
    folder = {"folder": str(kept.folder)}
    cell = record.cells[0].model_copy(update={"nodes": (record.cells[0].nodes[0].model_copy(update=folder),)})
    record = record.model_copy(update={"cells": (cell,)})
    lines, seen = list[str](), set[str]()
    with LogReader(record, make.plan(), print, reach=Shaky()) as reader:

        def follow() -> bool:
            seen.update(pieces(kept, "node-0"))
            lines.extend(line.text for line in reader.more())
            return (tmp_path / "done").exists()

        until(lambda: follow() or len(seen) > 1, "a second piece while the child's first life lasts")
        assert kept.state.restarts == 0
        os.kill(pid, signal.SIGKILL)
        until(lambda: kept.state.state == "lost", "state lost")
        (tmp_path / "go").touch()
        until(follow, "all lines")
        until(lambda: follow() and any(f"line {NUM_LINES - 1} " in line for line in lines), "the last line")
    assert len([line for line in lines if line.startswith("pid ")]) == 1
    told = [line.split()[1] for line in lines if line.startswith("line ")]
    assert told == [str(number) for number in range(NUM_LINES)]
    assert len(seen) > 2
    assert len(pieces(kept, "node-0")) <= 4


def test_the_relays_log_turns_while_it_runs(kept: Kept, tmp_path: Path) -> None:
    data = prepare(tmp_path / "relay")
    kept.folder = data / "node-0"
    argv = (sys.executable, "-m", "islandctl.relay", str(data))
    kept.start("", argv=argv, env={"PYTHONPATH": str(ROOT), LOG_BYTES: "80"}, name="relay", stop_timeout_s=60.0)
    until(lambda: pieces(kept, "relay") == ["relay.log", "relay.1.log"], "a second piece")
    state: SupervisorState = node.state(HOST, kept.folder.as_posix())
    assert (state.state, state.restarts) == ("running", 0)
    assert node.stop(HOST, kept.folder.as_posix(), 60).outcome == "stopped"
    assert "listens at" in (kept.folder / "logs" / "relay.log").read_text()
    assert "relay ended" in (kept.folder / "logs" / "relay.1.log").read_text()


def test_a_relay_that_does_not_come_up_is_quoted_from_its_newest_piece(kept: Kept) -> None:
    from islandctl.errors import PreflightError

    (kept.folder / "logs").mkdir(parents=True)
    (kept.folder / "logs" / "relay.log").write_text("2030-01-31 12:00:01 ERROR an old trouble\n")
    (kept.folder / "logs" / "relay.1.log").write_text("2030-01-31 12:00:02 ERROR the port is taken (end it)\n")
    start = _Start(LocalHost("here"), kept.folder.as_posix())
    kept.script = SCRIPT
    kept.start("raise SystemExit(3)", name="relay")
    kept.ended()
    start._looked -= 2.0
    with pytest.raises(PreflightError, match="the port is taken") as told:
        start.check()
    assert told.value.hint == "end it"
    assert start.log.endswith("/relay.1.log")
