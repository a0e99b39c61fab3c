"""The relay's folder: what has a name is whole, what was answered is durable, and damage is told by line."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

import pytest

from islandctl.config.exchange import Late
from islandctl.errors import ExchangeError, LedgerError, UsageError
from islandctl.ledger.chain import verify
from islandctl.ledger.joint import JointCheckpoint
from islandctl.ledger.packet import digest, unpack
from islandctl.relay import store as store_module
from islandctl.relay.rounds import Welcome
from islandctl.relay.service import Service
from islandctl.relay.store import DiskError, Store

from .builders import CELLS, CONFIG, RUN, packet


def serve(store: Store) -> Service:
    return Service(
        store, run=RUN, config_hash=CONFIG, cells=CELLS, num_fragments=2, late=Late(), clock=time.monotonic
    )


def put(store: Store, service: Service, content: bytes, piece: int = 50) -> Welcome:
    staged = store.stage()
    try:
        for at in range(0, len(content), piece):
            staged.write(content[at : at + piece])
        header, packet_hash = staged.finish()
        assert packet_hash == digest(content)
        place = (header.attempt, header.fragment, header.window, header.cell, header.chunk)
        return service.put(header, packet_hash, staged.num_bytes, lambda: staged.keep(place))
    finally:
        staged.discard()


def test_a_packet_and_the_ledger_survive_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert put(store, serve(store), packet(0)) is Welcome.STORE
    store.close()
    store = Store(tmp_path)
    service = serve(store)
    assert put(store, service, packet(0)) is Welcome.SAME
    put(store, service, packet(1))
    counted = [(cell.packets, cell.bytes_up) for cell in service.status().cells]
    assert counted == [(0, 0), (1, len(packet(1)))]  # packets as bytes: since this start
    entries = store.entries(-1, 100)
    assert [entry.kind for entry in entries] == ["genesis", "commit"]
    verify(entries)
    assert store.path((1, 0, 0, 0, 0)).read_bytes() == packet(0)
    assert list((tmp_path / "staging").iterdir()) == []
    store.close()


def test_a_damaged_packet_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    service = serve(store)
    with pytest.raises(ExchangeError, match="cell 0, fragment 0, window 0, chunk 0"):
        put(store, service, packet(0)[:-1] + b"?")
    with pytest.raises(ExchangeError, match="does not match"):
        put(store, service, packet(0)[:-1])
    with pytest.raises(ExchangeError, match="not a packet"):
        put(store, service, b"GET / HTTP/1.1" * 20)
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path] == []
    store.close()


def test_a_torn_last_line_is_cut_off_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    serve(store).stop("enough")
    store.close()
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for length in (second + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        with caplog.at_level(logging.WARNING):
            store = Store(tmp_path)
        assert f"{path}:2: cut off" in caplog.text
        assert [entry.kind for entry in store.entries(-1, 10)] == ["genesis"]
        serve(store).stop("again")
        store.close()
        store = Store(tmp_path)
        assert len(store.entries(-1, 10)) == 2
        store.close()


@pytest.mark.parametrize("damage", ["byte", "drop", "garbage"])
def test_damage_elsewhere_is_a_hard_error_that_names_the_line(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    service = serve(store)
    for cell in (0, 1):
        service.checkpoint(1, cell, 10, "m", (0, 0))
    store.close()
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "byte":
        lines[1] = lines[1].replace(b'"step":10', b'"step":11')
    elif damage == "drop":
        del lines[1]
    else:
        lines[1] = b"?" * 10 + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=r"ledger\.jsonl:2: "):
        Store(tmp_path)
    path.write_bytes(b"")
    Store(tmp_path).close()


def test_a_second_relay_is_told_who_serves_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


class FullDisk:
    """The file system takes ``room`` more bytes, then it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        self._write = store_module.write_all
        monkeypatch.setattr(store_module, "write_all", self)

    def __call__(self, file: object, content: bytes | bytearray) -> None:
        part = content[: self.room]
        self._write(file, part)  # type: ignore[arg-type]
        self.room -= len(part)
        if len(part) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_refuses_the_packet_and_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, store = FullDisk(monkeypatch), Store(tmp_path)
    service = serve(store)
    for room in (0, 10, 300):
        disk.room = room
        with pytest.raises(DiskError, match="disk full") as full:
            put(store, service, packet(0))
        assert full.value.code == "disk"
        assert list((tmp_path / "staging").iterdir()) == []
        assert store.places(1) == []
    disk.room = 10**9
    assert put(store, service, packet(0)) is Welcome.STORE
    store.close()


def test_a_full_disk_at_the_commit_keeps_the_packets_and_commits_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, store = FullDisk(monkeypatch), Store(tmp_path)
    service = serve(store)
    put(store, service, packet(0))
    disk.room = len(packet(1)) + 40
    with pytest.raises(DiskError, match="ledger entry 1"):
        put(store, service, packet(1))
    assert len(store.entries(-1, 10)) == 1
    assert (tmp_path / "ledger.jsonl").read_bytes().count(b"\n") == 1
    disk.room = 10**9
    service.tick()
    assert [entry.kind for entry in store.entries(-1, 10)] == ["genesis", "commit"]
    store.close()
    store = Store(tmp_path)
    verify(store.entries(-1, 10))
    store.close()


def test_lines_come_in_order_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    service = serve(store)
    for step in range(20):
        service.checkpoint(1, 0, step, "m", (0, 0))
    assert [entry.seq for entry in store.entries(4, 3)] == [5, 6, 7]
    assert store.entries(20, 10) == []
    monkeypatch.setattr(store_module, "ANSWER_BYTES", 1000)
    seen: list[int] = []
    while part := store.entries(seen[-1] if seen else -1, 1000):
        seen += [entry.seq for entry in part]
        assert len(part) < 10
    assert seen == list(range(21))
    store.close()


def test_prune_keeps_what_a_cell_may_need(tmp_path: Path) -> None:
    store = Store(tmp_path)
    service = serve(store)

    def go(window: int, version: int, fragments: tuple[int, ...] = (0, 1)) -> None:
        for fragment in fragments:
            for cell in (0, 1):
                put(store, service, packet(cell, fragment, window, version=version))

    go(0, 0)
    go(1, 1)
    go(2, 2, (0,))  # of fragment 1 this round is in flight at the checkpoint
    keep = JointCheckpoint(attempt=1, step=30, manifests=("a", "b"), versions=(3, 2))
    go(2, 2, (1,))
    go(3, 3)
    assert store.prune(keep.model_copy(update={"attempt": 0}), 1) == 0
    assert store.prune(keep, 1) == 10
    left = {(fragment, window) for _, fragment, window, _, _ in store.places(1)}
    assert left == {(0, 3), (1, 2), (1, 3)}
    for place in store.places(1):
        unpack(store.path(place).read_bytes())
    store.close()
    store = Store(tmp_path)
    assert serve(store).status().rounds_committed == 8
    store.close()


def test_prune_deletes_older_attempts_once_the_present_has_two_joint_checkpoints(tmp_path: Path) -> None:
    store = Store(tmp_path)
    service = serve(store)
    put(store, service, packet(0))
    service.rewind(0, (), (0, 0))
    put(store, service, packet(0, attempt=2))
    keep = JointCheckpoint(attempt=2, step=30, manifests=("a", "b"), versions=(0, 0))
    assert store.prune(keep, 2) == 1
    assert (store.places(1), len(store.places(2))) == ([], 1)
    store.close()
