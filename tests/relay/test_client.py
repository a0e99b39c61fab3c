"""The client against answers that are broken off, wrong, or not a relay's."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from islandctl.errors import RelayError, UnreachableError
from islandctl.relay import client as module
from islandctl.relay.certificate import write_certificate
from islandctl.relay.client import RelayClient
from islandctl.relay.messages import Heartbeat

from .builders import packet

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., RelayClient]]:
    """A client whose requests go to a function."""
    write_certificate(tmp_path / "key.pem", tmp_path / "ca.pem", ["relay"], common_name="relay")
    clients: list[RelayClient] = []

    def connected(handler: Handler, retry_s: float = 20) -> RelayClient:
        client = RelayClient("https://relay", "secret", tmp_path / "ca.pem", retry_s=retry_s)
        client.close()
        client._http = httpx.Client(transport=httpx.MockTransport(handler), base_url="https://relay")
        clients.append(client)
        return client

    yield connected
    for client in clients:
        client.close()


class Broken(httpx.SyncByteStream):
    """Some bytes, then the connection is lost."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __iter__(self) -> Iterator[bytes]:
        yield self._content
        raise httpx.ReadError("connection lost")


def test_fetch_goes_on_where_it_broke_off(connect: Callable[..., RelayClient]) -> None:
    whole, asked = packet(0, payload=b"x" * 1000), []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("range"))
        first = int(asked[-1].removeprefix("bytes=").removesuffix("-")) if asked[-1] else 0
        rest = whole[first:]
        status = 206 if first else 200
        return (
            httpx.Response(status, stream=Broken(rest[:500]))
            if len(rest) > 500
            else httpx.Response(status, content=rest)
        )

    assert connect(handler).fetch(1, 0, 0, 0, 0) == whole
    assert asked == [None, "bytes=500-", "bytes=1000-"]


def test_put_is_repeated_whole_until_there_is_room(connect: Callable[..., RelayClient]) -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        if len(bodies) == 1:
            raise httpx.ConnectError("refused")
        if len(bodies) == 2:
            return httpx.Response(507, json={"error": "disk", "message": "disk full"})
        return httpx.Response(201, json={})

    drawn = random.getstate()
    connect(handler).put(packet(0))
    assert bodies == [packet(0)] * 3
    assert random.getstate() == drawn  # it is the training's, and in its checkpoints


@pytest.mark.parametrize("code", ["exists", "closed", "stale", "halted"])
def test_a_refusal_is_not_repeated(connect: Callable[..., RelayClient], code: str) -> None:
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(409, json={"error": code, "message": "no"})

    with pytest.raises(RelayError) as refused:
        connect(handler).put(packet(0))
    assert (refused.value.code, len(asked)) == (code, 1)


@pytest.mark.parametrize(
    "strange",
    [
        httpx.Response(200, text="<html>login</html>"),
        httpx.Response(404, text="nginx"),
        httpx.Response(302, headers={"Location": "https://elsewhere"}),
        httpx.Response(200, json={"entries": [{"kind": "new"}]}),
        httpx.Response(502, text="bad gateway"),
    ],
)
def test_what_is_no_relay_is_unreachable(connect: Callable[..., RelayClient], strange: httpx.Response) -> None:
    client = connect(lambda _: strange, 0)
    for ask in (client.status, lambda: client.entries(0, 0), lambda: client.stop("x")):
        with pytest.raises(UnreachableError, match="https://relay"):
            ask()


def test_no_packet_is_refused_before_it_is_sent(connect: Callable[..., RelayClient]) -> None:
    client = connect(lambda _: httpx.Response(201))
    for content in (b"", b"ISLP", b"x" * 100, packet(0)[:40]):
        with pytest.raises(RelayError) as refused:
            client.put(content)
        assert refused.value.code == "damaged"


def test_the_client_brings_no_server_and_no_torch_along() -> None:
    heavy = (
        "{'starlette', 'uvicorn', 'prometheus_client', 'torch', 'islandctl.relay.store', 'islandctl.relay.rounds'}"
    )
    source = f"import sys, islandctl.relay.client; sys.exit(','.join({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.strip() == ""


def test_a_relay_that_hangs_is_soon_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_certificate(tmp_path / "key.pem", tmp_path / "ca.pem", ["127.0.0.1"], common_name="relay")
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel takes connections, nobody answers
        url = f"https://127.0.0.1:{stopped.getsockname()[1]}"
        with RelayClient(url, "secret", tmp_path / "ca.pem") as client:
            for ask in (lambda: client.entries(0, 0.1), lambda: client.heartbeat(beat())):
                began = time.monotonic()
                with pytest.raises(UnreachableError, match="no answer: it took too long"):
                    ask()
                assert time.monotonic() - began < 10


def beat() -> Heartbeat:
    return Heartbeat(attempt=1, cell=0, state="training", step=1, steps=2, tokens=3, tokens_per_s=4.0)


def test_a_long_poll_may_take_its_time_and_little_more(connect: Callable[..., RelayClient]) -> None:
    limits = []

    def handler(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={"entries": []})

    client = connect(handler)
    client.entries(0, 2.0)
    client.entries(0, 0.0)
    assert limits == [12.0, 10.0]
