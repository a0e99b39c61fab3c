"""A real relay process: TLS, kill -9 under load, restarts, and how it tells what is wrong at the start."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from islandctl.errors import ConfigError, RelayError, UnreachableError
from islandctl.ledger.chain import verify
from islandctl.ledger.packet import digest
from islandctl.relay.certificate import write_certificate
from islandctl.relay.client import RelayClient
from islandctl.relay.messages import Heartbeat

from .builders import packet
from .live import TOKENS, LiveRelay, prepare


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRelay]:
    folder = prepare(tmp_path_factory.mktemp("relay"), limits={"header_deadline": "500 ms"})
    live = LiveRelay(folder)
    yield live
    assert live.end() == 0


@pytest.fixture
def start() -> Iterator[Callable[[Path], LiveRelay]]:
    """Starts relays; none outlives the test."""
    started: list[LiveRelay] = []

    def begin(folder: Path) -> LiveRelay:
        started.append(LiveRelay(folder))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.kill()


def test_a_round_through_the_client(relay: LiveRelay) -> None:
    with relay.client("0") as usa, relay.client("1") as asia, relay.client("controller") as controller:
        large = packet(0, payload=os.urandom(3 << 20))
        usa.put(large)
        usa.put(large)
        with pytest.raises(RelayError) as refused:
            asia.fetch(1, 0, 0, 0, 0)
        assert refused.value.code == "early"
        asia.put(packet(1))
        assert asia.fetch(1, 0, 0, 0, 0) == large
        entries = controller.entries(-1, 1)
        assert verify(entries) == controller.status().ledger_hash
        usa.heartbeat(
            Heartbeat(
                attempt=1, cell=0, state="training", step=1, steps=2, tokens=3, tokens_per_s=4, loss=float("nan")
            )
        )
        assert controller.status().cells[0].heartbeat is not None
        assert "islandctl_cell_step" in controller.metrics_text()
        for cell, client in enumerate((usa, asia)):
            entry = client.register_checkpoint(10, f"m{cell}", [1, 0], 1)
            assert entry.kind == "checkpoint"
        (joint,) = controller.status().joint_checkpoints
        with pytest.raises(RelayError) as refused:
            usa.stop("not mine")
        assert refused.value.code == "forbidden"
        assert controller.stop("enough").kind == "stop"
        assert usa.halt("enough", 0, 1).kind == "halt"
        assert controller.rewind(10, joint.manifests, joint.versions).attempt == 2


def test_a_refusal_reaches_the_client_while_it_still_sends(relay: LiveRelay) -> None:
    large = os.urandom(8 << 20)
    with relay.client("1") as asia:
        for _ in range(3):
            with pytest.raises(RelayError) as refused:
                asia.put(packet(1, 1, 5, attempt=9, payload=large))
            assert refused.value.code == "stale"
        with pytest.raises(RelayError) as refused:
            asia.put(packet(0, 1, 5, payload=large))
        assert refused.value.code == "forbidden"


def test_a_wrong_token_is_told(relay: LiveRelay) -> None:
    with RelayClient(relay.url, "wrong", relay.folder / "ca.pem") as client, pytest.raises(RelayError) as refused:
        client.status()
    assert refused.value.code == "token"
    assert "wrong" not in str(refused.value)


def test_another_certificate_is_not_trusted(relay: LiveRelay, tmp_path: Path) -> None:
    write_certificate(tmp_path / "key.pem", tmp_path / "ca.pem", ["127.0.0.1"], common_name="other")
    other = RelayClient(relay.url, TOKENS["0"], tmp_path / "ca.pem", retry_s=0)
    with other, pytest.raises(UnreachableError) as refused:
        other.put(packet(0))
    assert "another relay answers there" in refused.value.hint
    with pytest.raises(ConfigError, match="certificate"):
        RelayClient(relay.url, "x", tmp_path / "missing.pem")


def test_a_name_that_the_certificate_does_not_hold_is_not_trusted(relay: LiveRelay) -> None:
    url = relay.url.replace("127.0.0.1", "127.0.0.2")
    with RelayClient(url, TOKENS["0"], relay.folder / "ca.pem") as client, pytest.raises(UnreachableError):
        client.status()


def test_nobody_there_is_unreachable_not_failed(relay: LiveRelay) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{taken.getsockname()[1]}"
        with RelayClient(url, "x", relay.folder / "ca.pem", retry_s=0.2) as client:
            for ask in (client.status, lambda: client.put(packet(0)), lambda: client.entries(0, 1)):
                with pytest.raises(UnreachableError, match="no answer"):
                    ask()


def test_the_key_is_nobody_elses(relay: LiveRelay) -> None:
    assert (relay.folder / "key.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("sent", [b"", b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_header_that_does_not_end_is_given_up(relay: LiveRelay, sent: bytes) -> None:
    trust = ssl.create_default_context(cafile=str(relay.folder / "ca.pem"))
    address = ("127.0.0.1", relay.address["port"])
    with socket.create_connection(address, 10) as raw, trust.wrap_socket(raw, server_hostname="127.0.0.1") as tls:
        tls.sendall(sent)
        tls.settimeout(10)
        try:
            answer = tls.recv(1)
        except (ConnectionError, ssl.SSLError):
            answer = b""
        assert answer == b""


@pytest.mark.parametrize("sent", [b"\0" * 100, b"GARBAGE\r\n\r\n", b"PUT / HTTP/1.1\r\nContent-Length: -5\r\n\r\n"])
def test_garbage_leaves_it_alive(relay: LiveRelay, sent: bytes) -> None:
    trust = ssl.create_default_context(cafile=str(relay.folder / "ca.pem"))
    address = ("127.0.0.1", relay.address["port"])
    with socket.create_connection(address, 10) as raw, trust.wrap_socket(raw, server_hostname="127.0.0.1") as tls:
        tls.sendall(sent)
    with socket.create_connection(address, 10) as raw:
        raw.sendall(sent)
    with relay.client("controller") as client:
        assert client.status().run == "tale"


def complaint(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "islandctl.relay", str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_second_relay_on_the_folder_names_the_first(relay: LiveRelay) -> None:
    code, said = complaint(relay.folder)
    assert code == 2
    assert f"process {relay.process.pid}" in said


def test_a_taken_port_is_told_in_one_line(relay: LiveRelay, tmp_path: Path) -> None:
    code, said = complaint(prepare(tmp_path / "second", port=relay.address["port"]))
    assert code == 4
    assert f"port {relay.address['port']}: Address already in use" in said
    assert said.count("\n") == 1


def test_wrong_settings_are_told_in_one_line(tmp_path: Path) -> None:
    assert complaint(tmp_path)[0] == 2
    folder = prepare(tmp_path, cells=[])
    code, said = complaint(folder)
    assert (code, said.count("\n")) == (2, 1)
    assert f"{folder}/relay.json: cells" in said
    (folder / "relay.json").write_text(
        json.dumps({"run": "tale", "config_hash": "c", "cells": ["a", "b"], "num_fragments": 1})
    )
    (folder / "key.pem").write_text("no key")
    code, said = complaint(folder)
    assert code == 2
    assert "key.pem" in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_under_puts_loses_nothing(tmp_path: Path, start: Callable[[Path], LiveRelay], seed: int) -> None:
    """Two cells put for all they can; the relay is killed again and again; what was answered is there afterwards."""
    folder = prepare(tmp_path / "relay")
    live = start(folder)
    (folder / "relay.json").write_text(
        json.dumps(json.loads((folder / "relay.json").read_text()) | {"port": live.address["port"]})
    )
    acknowledged: dict[tuple[int, int, int], bytes] = {}
    failures: list[Exception] = []
    over = threading.Event()

    def train(cell: int) -> None:
        try:
            with live.client(str(cell), retry_s=30) as client:
                window = 0
                while not over.is_set():
                    content = packet(cell, 0, window, version=window, payload=bytes([seed, cell]) * 40_000)
                    client.put(content)
                    acknowledged[cell, 0, window] = content
                    seen = 0
                    while not over.is_set() and seen < window + 1:
                        with contextlib.suppress(UnreachableError):
                            seen = client.status().rounds_committed
                    window += 1
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=[cell]) for cell in (0, 1)]
    for thread in threads:
        thread.start()
    for kill in range(3):
        before, end = len(acknowledged), time.monotonic() + 20
        while len(acknowledged) < before + 3 + seed + kill and time.monotonic() < end:
            time.sleep(0.003)
        live.kill()
        live = start(folder)
    before, end = len(acknowledged), time.monotonic() + 20
    while len(acknowledged) < before + 2 and time.monotonic() < end:
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    live.kill()
    live = start(folder)
    with live.client("controller") as client:
        entries = client.entries(-1, 1)
        verify(entries)
        named = {
            (part.cell, entry.fragment, entry.window): part.chunks[0]
            for entry in entries
            if entry.kind == "commit"
            for part in entry.named
        }
        assert len(acknowledged) >= 15
        for (cell, fragment, window), content in acknowledged.items():
            assert (folder / f"packets/1/{fragment}/{window}/{cell}.0").read_bytes() == content
            if (cell, fragment, window) in named:
                assert named[cell, fragment, window] == digest(content)
        both = min(sum(1 for place in acknowledged if place[0] == cell) for cell in (0, 1))
        assert client.status().rounds_committed >= both
    assert live.end() == 0


@pytest.mark.slow
def test_a_put_outlasts_a_restart(tmp_path: Path, start: Callable[[Path], LiveRelay]) -> None:
    folder = prepare(tmp_path / "relay")
    live = start(folder)
    told = json.loads((folder / "relay.json").read_text()) | {"port": live.address["port"]}
    (folder / "relay.json").write_text(json.dumps(told))
    with live.client("0", retry_s=30) as usa:
        usa.put(packet(0))
        live.kill()
        waiting = threading.Thread(target=usa.put, args=[packet(0, 1)])
        waiting.start()
        live = start(folder)
        waiting.join(30)
        assert not waiting.is_alive()
        assert usa.fetch(1, 1, 0, 0, 0) == packet(0, 1)
    assert live.end() == 0
