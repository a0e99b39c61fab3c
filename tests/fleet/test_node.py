"""Files and supervisors on a node, over this machine and over SSH alike."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet import node, node_files, supervisor
from islandctl.fleet.connect import connect, this_machine
from islandctl.fleet.host import Host
from islandctl.fleet.job import SupervisorJob
from tests.sshd import Sshd


@pytest.fixture(params=["local", "ssh"], scope="module")
def host(request: pytest.FixtureRequest, server: Sshd) -> Iterator[Host]:
    if request.param == "local":
        host = this_machine()
    else:
        host = connect(server.site(), server.host, known_hosts=server.folder / "of_run", on_message=print)
    yield host
    host.close()


def test_files_are_written_whole_with_their_mode(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "ü'\"$HOME"
    secret = b'p(a$s"s\nx\0'
    node.write_files(host, str(folder), {"token": (secret, 0o600), "sub/cell.json": (b"{}", 0o644)})
    assert (folder / "token").read_bytes() == secret
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert (folder / "sub" / "cell.json").stat().st_mode & 0o777 == 0o644
    node.write_files(host, str(folder), {"token": (b"new", 0o600)})
    assert (folder / "token").read_bytes() == b"new"
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == []


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_names_the_place(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r": (Not a directory|File exists): '/") as caught:
        node.write_files(host, str(tmp_path / "file" / "x"), {"a": (b"", 0o600)})
    assert caught.value.message.startswith(host.label)


def test_reading_on_from_an_offset_loses_and_doubles_nothing(host: Host, tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    assert node.read(host, str(log)) == node.Piece(b"", 0, 0)
    log.write_bytes(b"one\ntwo\n")
    first = node.read(host, str(log), 0, 5)
    assert (first.data, first.size, first.end) == (b"one\nt", 8, 5)
    with log.open("ab") as file:
        file.write(b"three\n")
    rest, beyond, missing = node.read_many(
        host, [(str(log), first.end, 1000), (str(log), 99, 10), (str(tmp_path / "none"), 7, 10)]
    )
    assert first.data + rest.data == log.read_bytes()
    assert (beyond.data, beyond.size) == (b"", 14)
    assert (missing.data, missing.size) == (b"", 0)
    assert node.read_many(host, []) == []


def test_read_tail_begins_with_a_whole_line(host: Host, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first\nsecond\nthird\n")
    assert node.read_tail(host, str(tmp_path / "log"), 10) == b"third\n"
    assert node.read_tail(host, str(tmp_path / "log"), 1000) == b"first\nsecond\nthird\n"
    assert node.read_tail(host, str(tmp_path / "none"), 10) == b""


@settings(max_examples=200, derandomize=True)
@given(st.lists(st.text("ab", max_size=6), max_size=12), st.booleans(), st.integers(0, 14), st.integers(1, 9))
def test_tail_offset_is_where_the_last_lines_begin(lines: list[str], ended: bool, wanted: int, block: int) -> None:
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    whole = text.splitlines(keepends=True)
    with tempfile.NamedTemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        offset = node_files._tail_offset(file.name, wanted, block)
    assert text[offset:] == "".join(whole[max(0, len(whole) - wanted) :] if wanted else [])


def test_tail_offsets_of_many_files(host: Host, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("1\n2\n3\n")
    assert node.tail_offset(host, str(tmp_path / "log"), 2) == 2
    assert node.tail_offsets(host, [str(tmp_path / "log"), str(tmp_path / "none")], 1) == [4, 0]


@pytest.mark.slow
def test_sizes(host: Host, tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("abc")
    (tmp_path / "sub").mkdir()
    assert node.sizes(host, [str(tmp_path), str(tmp_path / "none")]) == [{"rank-0.log": 3}, {}]


def test_remove_is_held_inside_the_work_folder(host: Host, tmp_path: Path) -> None:
    work, outside = tmp_path / "work", tmp_path / "outside"
    (work / "runs" / "a").mkdir(parents=True)
    outside.mkdir()
    (outside / "precious").touch()
    (work / "link").symlink_to(outside)
    for path in (outside, work, work / ".." / "outside", work / "link" / "precious", Path("/")):
        with pytest.raises(PreflightError, match="does not lie below"):
            node.remove(host, str(work), str(path))
    assert node.remove(host, str(work), str(work / "runs" / "a")) is True
    assert node.remove(host, str(work), str(work / "runs" / "a")) is False
    assert node.remove(host, str(work), str(work / "link")) is True
    assert (outside / "precious").exists()


def test_checkpoints_with_and_without_a_whole_manifest(host: Host, tmp_path: Path) -> None:
    assert node.list_checkpoints(host, str(tmp_path)) == []
    for name, text in (("step-00000100-attempt-1", '{"step": 100}'), ("step-00000200-attempt-1", '{"st')):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").write_text(text)
    (tmp_path / "checkpoints" / ".tmp-step").mkdir()
    whole, cut = node.list_checkpoints(host, str(tmp_path))
    assert (whole.manifest, whole.raw) == ({"step": 100}, b'{"step": 100}')
    assert (cut.name, cut.manifest) == ("step-00000200-attempt-1", None)


def test_free_port_can_be_bound_and_waited_for(host: Host) -> None:
    port = node.free_port(host)
    assert node.wait_port(host, port, timeout_s=0.0) is False
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.listen()
        assert node.wait_port(host, port, timeout_s=5.0) is True


def test_a_supervisor_over_ssh_starts_at_once_and_outlives_the_link(server: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    host = connect(server.site(), server.host, known_hosts=known, on_message=print)
    mark, folder = f"mark-{os.getpid()}-ssh", str(server.home / "island work" / "node-0")
    job = SupervisorJob(
        run="test", mark=mark, name="east/node-0", argv=("sleep", "600"), cwd="/", env={}, stop_timeout_s=1.0
    )
    began = time.monotonic()
    node.start(host, supervisor.__file__, sys.executable, folder, job)
    assert time.monotonic() - began < 5  # seconds, not the ten minutes of the child
    host.close()
    again = connect(server.site(), server.host, known_hosts=known, on_message=print)
    try:
        running, absent = node.states(again, [folder, folder + "-none"])
        assert (running.state, absent.state) == ("running", "absent")
        assert running.beat_age_s is not None
        assert running.beat_age_s < 5
        assert sorted(left.job for left in node.leftovers(again, mark)) == ["east/node-0"] * 2
        assert node.stop(again, folder, 20.0).outcome == "stopped"
        assert node.leftovers(again, mark) == []
    finally:
        node.end_leftovers(again, mark, 0.0)
        again.close()


@pytest.mark.slow
def test_a_stop_that_takes_too_long_is_unknown_not_failed(host: Host, tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-{host.label}"
    job = SupervisorJob(
        run="test",
        mark=mark,
        name="east/node-0",
        argv=("sh", "-c", "trap '' TERM; touch ready; sleep 600 & wait; wait"),
        cwd=str(tmp_path),
        env={},
        stop_timeout_s=600.0,
    )
    folder = str(tmp_path / "node-0")
    node.start(host, supervisor.__file__, sys.executable, folder, job)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    try:
        with pytest.raises(UnreachableError, match="has not ended within"):
            node.stop(host, folder, 0.3)
        assert node.state(host, folder).state == "stopping"
    finally:
        assert node.end_leftovers(host, mark, 0.0) == []
    assert node.leftovers(host, mark) == []


VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(st.dictionaries(st.from_regex(r"T[A-Z0-9_]{1,8}", fullmatch=True), VALUES, min_size=30))
def test_values_of_the_environment_arrive_as_they_are(values: dict[str, str]) -> None:
    """Through the job's file, a shell that runs set-up lines, and the supervisor."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "a $(folder)")
        folder.mkdir()
        program = "import json, os; json.dump(dict(os.environ), open('seen', 'w'))"
        job = SupervisorJob(
            run="test",
            mark=f"mark-{os.getpid()}",
            name="node-0",
            argv=(sys.executable, "-c", program),
            cwd=str(folder),
            env={**values, "T_NASTY": 'p(a$s"s\nx'},
            setup=(":",),
        )
        here = this_machine()
        node.start(here, supervisor.__file__, sys.executable, str(folder / "node-0"), job)
        deadline = time.monotonic() + 60
        while node.state(here, str(folder / "node-0")).state != "ended" and time.monotonic() < deadline:
            time.sleep(0.05)
        seen = json.loads((folder / "seen").read_text())
        assert {key: seen[key] for key in job.env} == job.env
