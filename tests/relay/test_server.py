"""The relay's HTTP border: permissions, ranges, long polls, slow and wrong input. No sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from islandctl.ledger.entries import ENTRY
from islandctl.relay.server import Server
from islandctl.relay.service import Service
from islandctl.relay.settings import RelaySettings
from islandctl.relay.store import Store
from islandctl.relay.tokens import Tokens, token_hash

from .builders import CELLS, CONFIG, RUN, packet
from .live import TOKENS

Ask = Callable[..., Awaitable[httpx.Response]]
BEAT = {"attempt": 1, "cell": 0, "state": "training", "step": 7, "steps": 9, "tokens": 5, "tokens_per_s": 1.5}


def run(folder: Path, test: Callable[[Ask, Server], Awaitable[None]], **options: Any) -> None:
    """Run ``test`` with ``ask(role, method, path, …)`` against a relay on ``folder``."""

    async def inside() -> None:
        told = {"run": RUN, "config_hash": CONFIG, "cells": CELLS, "num_fragments": 2}
        relay = RelaySettings.model_validate(told | options)
        store = Store(folder)
        service = Service(
            store,
            run=RUN,
            config_hash=CONFIG,
            cells=CELLS,
            num_fragments=2,
            late=relay.late,
            clock=time.monotonic,
        )
        tokens = Tokens({token_hash(token): role for role, token in TOKENS.items()}, len(CELLS))
        server = Server(service, store, tokens, relay)
        transport = httpx.ASGITransport(server.app)
        async with server.running(), httpx.AsyncClient(transport=transport, base_url="http://relay") as client:

            async def ask(role: str, method: str, path: str, **options: Any) -> httpx.Response:
                headers = {"Authorization": f"Bearer {TOKENS.get(role, role)}"} | options.pop("headers", {})
                return await client.request(method, path, headers=headers, **options)

            await test(ask, server)
        store.close()

    asyncio.run(inside())


def error(response: httpx.Response) -> tuple[int, str]:
    told = response.json()
    assert set(told) == {"error", "message"}
    assert told["message"]
    return response.status_code, told["error"]


def path(content_of: int = 0, fragment: int = 0, window: int = 0, chunk: int = 0) -> str:
    return f"/v1/packets/1/{fragment}/{window}/{content_of}/{chunk}"


def test_a_round(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        assert (await ask("0", "PUT", path(0), content=packet(0))).status_code == 201
        assert (await ask("0", "PUT", path(0), content=packet(0))).status_code == 200
        assert error(await ask("0", "PUT", path(0), content=packet(0, payload=b"?"))) == (409, "exists")
        assert (await ask("0", "GET", path(0))).content == packet(0)
        assert error(await ask("1", "GET", path(0))) == (425, "early")
        assert error(await ask("controller", "GET", path(0))) == (425, "early")
        assert (await ask("1", "PUT", path(1), content=packet(1))).status_code == 201
        for role in ("0", "1", "controller"):
            assert (await ask(role, "GET", path(0))).content == packet(0)
        told = (await ask("0", "GET", "/v1/ledger?after=0")).json()["entries"]
        assert [ENTRY.validate_python(one).kind for one in told] == ["commit"]
        status = (await ask("controller", "GET", "/v1/status")).json()
        assert (status["rounds_committed"], status["last_commit"]["fragment"]) == (1, 0)
        assert [cell["bytes_down"] for cell in status["cells"]] == [2 * len(packet(0)), len(packet(0))]

    run(tmp_path, test)


def test_permissions(tmp_path: Path) -> None:
    checkpoint = {"attempt": 1, "step": 1, "manifest": "m", "versions": [0, 0]}
    rewind = {"step": 0, "manifests": [], "versions": [0, 0]}
    allowed: list[tuple[str, str, Any, set[str]]] = [
        ("POST", "/v1/heartbeat", BEAT, {"0"}),
        ("POST", "/v1/checkpoints", checkpoint, {"0", "1"}),
        ("POST", "/v1/stop", {"reason": "x"}, {"controller"}),
        ("POST", "/v1/halt", {"reason": "x"}, {"0", "1"}),
        ("POST", "/v1/rewind", rewind, {"controller"}),
        ("GET", "/v1/status", None, {"0", "1", "controller"}),
        ("GET", "/v1/ledger", None, {"0", "1", "controller"}),
        ("GET", "/metrics", None, {"0", "1", "controller"}),
    ]

    async def test(ask: Ask, _: Server) -> None:
        for method, where, body, roles in allowed:
            for role in ("0", "1", "controller"):
                response = await ask(role, method, where, json=body)
                if role in roles:
                    assert response.status_code == 200, response.text
                else:
                    assert error(response) == (403, "forbidden")
            for nobody in ("wrong", "", "token-of-usa\t2"):
                assert error(await ask(nobody, method, where, json=body)) == (401, "token")
        for role in ("1", "controller"):
            assert error(await ask(role, "PUT", path(0), content=packet(0))) == (403, "forbidden")
        headers = {"Authorization": "Basic " + TOKENS["0"]}
        assert error(await ask("0", "GET", "/v1/status", headers=headers)) == (401, "token")
        assert error(await ask("wrong", "GET", "/nowhere")) == (401, "token")

    run(tmp_path, test)


def test_wrong_packets(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        good = packet(0)
        assert error(await ask("0", "PUT", path(0), content=good[:-1])) == (422, "damaged")
        assert error(await ask("0", "PUT", path(0), content=b"")) == (422, "damaged")
        assert error(await ask("0", "PUT", path(0), content=b"x" * 3000)) == (422, "damaged")
        assert error(await ask("0", "PUT", path(0), content=packet(0, run="other"))) == (422, "foreign")
        assert error(await ask("0", "PUT", path(0, 1), content=good)) == (422, "invalid")
        assert error(await ask("0", "PUT", "/v1/packets/1/9/0/0/0", content=good)) == (422, "invalid")
        assert error(await ask("0", "PUT", "/v1/packets/2/0/0/0/0", content=good)) == (409, "stale")
        assert error(await ask("0", "PUT", path(0), content=b"x" * 5000)) == (413, "large")
        for each in ("-1", "1e3", "٣", "9" * 5000, "..", "01"):
            assert error(await ask("0", "GET", f"/v1/packets/1/0/0/{each}/0"))[0] == 404
        assert error(await ask("0", "GET", path(0))) == (404, "unknown")

    run(tmp_path, test, limits={"packet_bytes": 4000})
    assert [each for each in tmp_path.rglob("packets/**/*") if each.is_file()] == []


def test_a_body_that_trickles_is_given_up(tmp_path: Path) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b"ISLP"
        await asyncio.sleep(60)

    async def test(ask: Ask, _: Server) -> None:
        assert error(await ask("0", "PUT", path(0), content=trickle())) == (408, "slow")
        assert error(await ask("0", "POST", "/v1/heartbeat", content=trickle())) == (408, "slow")

    start = time.monotonic()
    run(tmp_path, test, limits={"body_grace": "100 ms"})
    assert time.monotonic() - start < 20
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_body_without_end_is_cut(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    async def test(ask: Ask, _: Server) -> None:
        for where, method in ((path(0), "PUT"), ("/v1/heartbeat", "POST")):
            response = await ask("0", method, where, content=endless())
            assert error(response)[0] in (413, 422)

    run(tmp_path, test, limits={"packet_bytes": 10_000, "json_bytes": 10_000})


@pytest.mark.parametrize(
    ("header", "status", "span"),
    [
        ("bytes=0-3", 206, (0, 4)),
        ("bytes=5-", 206, (5, None)),
        ("bytes=-7", 206, (-7, None)),
        ("bytes=0-99999", 206, (0, None)),
        ("bytes=3-1", 200, (0, None)),
        ("bytes=0-1,4-5", 200, (0, None)),
        ("lines=1-2", 200, (0, None)),
        ("bytes=٣-", 200, (0, None)),
        ("bytes=99999-", 416, None),
        ("bytes=-0", 416, None),
    ],
)
def test_ranges(tmp_path: Path, header: str, status: int, span: tuple[int, int | None] | None) -> None:
    async def test(ask: Ask, _: Server) -> None:
        whole = packet(0)
        await ask("0", "PUT", path(0), content=whole)
        response = await ask("0", "GET", path(0), headers={"Range": header.encode()})
        assert response.status_code == status
        if span is None:
            assert error(response) == (416, "range")
            return
        assert response.content == whole[slice(*span)]
        assert int(response.headers["content-length"]) == len(response.content)
        if status == 206:
            first = span[0] % len(whole)
            last = first + len(response.content) - 1
            assert response.headers["content-range"] == f"bytes {first}-{last}/{len(whole)}"

    run(tmp_path, test)


def test_a_long_poll_ends_with_the_entry(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        poll = asyncio.create_task(ask("1", "GET", "/v1/ledger?after=0&wait=50"))
        await asyncio.sleep(0.05)
        assert not poll.done()
        await ask("controller", "POST", "/v1/stop", json={"reason": "enough"})
        (entry,) = (await asyncio.wait_for(poll, 10)).json()["entries"]
        assert (entry["kind"], entry["reason"]) == ("stop", "enough")
        assert (await ask("1", "GET", "/v1/ledger?after=1&wait=0.01")).json() == {"entries": []}

    run(tmp_path, test)


def test_a_long_poll_sees_the_deadline_pass(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        await ask("0", "PUT", path(0), content=packet(0))
        (entry,) = (await ask("0", "GET", "/v1/ledger?after=0&wait=50")).json()["entries"]
        assert (entry["reason"], entry["named"], entry["missing"]) == ("deadline", [], [1])

    start = time.monotonic()
    run(tmp_path, test, late={"deadline": "100 ms"})
    assert time.monotonic() - start < 20


def test_closing_answers_long_polls(tmp_path: Path) -> None:
    async def test(ask: Ask, server: Server) -> None:
        poll = asyncio.create_task(ask("1", "GET", "/v1/ledger?after=0&wait=50"))
        await asyncio.sleep(0.05)
        server.close()
        assert (await asyncio.wait_for(poll, 10)).json() == {"entries": []}

    run(tmp_path, test)


def test_cells_with_different_models_are_refused(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        told = {"attempt": 1, "parameters": [["w", [2, 3]]]}
        assert (await ask("0", "POST", "/v1/model", json=told)).status_code == 200
        assert (await ask("1", "POST", "/v1/model", json=told)).status_code == 200
        other = await ask("1", "POST", "/v1/model", json=told | {"parameters": [["w", [2, 4]]]})
        assert error(other) == (409, "model")
        assert "parameter 'w': its shape is (2, 3) in usa, its shape is (2, 4) in asia" in other.json()["message"]
        assert error(await ask("controller", "POST", "/v1/model", json=told)) == (403, "forbidden")
        assert error(await ask("0", "POST", "/v1/model", json={"attempt": 1})) == (422, "invalid")

    run(tmp_path, test)


def test_heartbeats_and_metrics(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        more = {"held_out_hash": "a" * 64, "bits_per_byte": [[5, 2.5]], "tokens": 10**400}
        assert (await ask("0", "POST", "/v1/heartbeat", json=BEAT | more)).status_code == 200
        other = await ask("1", "POST", "/v1/heartbeat", json=BEAT | {"cell": 1, "held_out_hash": "b" * 64})
        assert error(other) == (409, "held_out")
        assert "usa and asia" in other.json()["message"]
        assert error(await ask("1", "POST", "/v1/heartbeat", json=BEAT)) == (403, "forbidden")
        (usa, asia) = (await ask("0", "GET", "/v1/status")).json()["cells"]
        assert (usa["heartbeat"]["step"], asia["heartbeat"]) == (7, None)
        assert usa["age_s"] >= 0
        scrape = await ask("controller", "GET", "/metrics")
        assert "openmetrics" in scrape.headers["content-type"]
        families = {family.name: family for family in text_string_to_metric_families(scrape.text)}
        (sample,) = families["islandctl_cell_step"].samples
        assert (sample.labels, sample.value) == ({"cell": "usa"}, 7)
        assert families["islandctl_cell_bits_per_byte"].samples[0].value == 2.5

    run(tmp_path, test)


def test_checkpoints_and_rewind(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        for step in (10, 20):
            for cell in ("0", "1"):
                body = {"attempt": 1, "step": step, "manifest": f"{step}.{cell}", "versions": [0, 0]}
                assert (await ask(cell, "POST", "/v1/checkpoints", json=body)).json()["cell"] == int(cell)
        status = (await ask("0", "GET", "/v1/status")).json()
        assert [one["step"] for one in status["joint_checkpoints"]] == [10, 20]
        wrong = {"step": 15, "manifests": ["a", "b"], "versions": [0, 0]}
        assert error(await ask("controller", "POST", "/v1/rewind", json=wrong)) == (409, "not-joint")
        right = {"step": 10, "manifests": ["10.0", "10.1"], "versions": [0, 0]}
        assert (await ask("controller", "POST", "/v1/rewind", json=right)).json()["attempt"] == 2
        assert error(await ask("0", "PUT", path(0), content=packet(0))) == (409, "stale")

    run(tmp_path, test)


ROLE = st.sampled_from(["0", "1", "controller"])
METHOD = st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD", "PATCH", "OPTIONS"])
PART = st.one_of(st.integers(0, 3).map(str), st.text(max_size=8), st.sampled_from(["..", "9" * 6000, "%00", "-1"]))
PATH = st.one_of(
    st.lists(PART, min_size=5, max_size=5).map(lambda parts: ["v1", "packets", *parts]),
    st.sampled_from(["ledger", "heartbeat", "checkpoints", "halt", "stop", "rewind", "status"]).map(
        lambda one: ["v1", one]
    ),
    st.lists(PART, max_size=6),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["attempt", "step", "reason", "manifests", "versions", "cell", "x"]), inner, max_size=5
    ),
    max_leaves=8,
)  # fmt: skip
BODY = st.one_of(
    st.binary(max_size=300),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.builds(
        lambda at, byte: packet(0)[:at] + byte + packet(0)[at + 1 :],
        st.integers(0, 350),
        st.binary(min_size=1, max_size=1),
    ),
)
QUERY = st.dictionaries(
    st.sampled_from(["after", "wait", "limit"]), st.sampled_from(["0", "-1", "nan", "1e400", "x", "9" * 5000])
)


def test_no_input_breaks_the_relay(tmp_path: Path) -> None:
    """One relay takes all of it, so that what one request leaves behind meets the next."""

    async def test(ask: Ask, _: Server) -> None:
        loop = asyncio.get_running_loop()

        @given(ROLE, METHOD, PATH, BODY, QUERY)
        @settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def check(role: str, method: str, parts: list[str], content: bytes, query: dict[str, str]) -> None:
            where = "/" + "/".join(quote(part, safe="%.") for part in parts)
            asked = ask(role, method, where, content=content, params=query)
            response = asyncio.run_coroutine_threadsafe(asked, loop).result(20)
            assert response.status_code < 500, response.text
            if response.status_code >= 400 and method != "HEAD":
                error(response)

        await asyncio.to_thread(check)
        assert (await ask("0", "GET", "/v1/status")).status_code == 200
        assert (await ask("0", "GET", "/metrics")).status_code == 200

    run(tmp_path, test, limits={"wait_s": 0.01})
