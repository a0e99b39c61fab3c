"""Measuring a link: only where it was asked for, behind the token, second by second."""

from __future__ import annotations

from pathlib import Path

from islandctl.fleet.checks import to_relay
from islandctl.relay.measure import PATH, PIECE_BYTES
from islandctl.relay.server import Server

from .live import TOKENS, LiveRelay, prepare
from .test_server import Ask, error, run


def test_a_relay_of_a_run_does_not_measure(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        assert error(await ask("0", "GET", PATH)) == (404, "unknown")

    run(tmp_path, test)


def test_what_is_sent_is_counted_and_a_token_is_needed(tmp_path: Path) -> None:
    async def test(ask: Ask, _: Server) -> None:
        for role in ("0", "controller"):
            assert (await ask(role, "GET", PATH)).content == b""
            assert (await ask(role, "POST", PATH, content=bytes(1000))).json() == {"seconds": [1000]}
        assert (await ask("0", "POST", PATH)).json() == {"seconds": []}
        sent = (await ask("0", "GET", f"{PATH}?seconds=0.02")).content
        assert sent
        assert len(sent) % PIECE_BYTES == 0
        assert error(await ask("0", "GET", f"{PATH}?seconds=x")) == (400, "malformed")
        assert error(await ask("nobody", "GET", PATH)) == (401, "token")

    run(tmp_path, test, measure=True)


def test_a_node_asks_over_an_emulated_link(tmp_path: Path) -> None:
    link = {"bandwidth": "40 Mbit/s", "rtt": "30 ms"}  # rates: tests/system/test_doctor.py
    relay = LiveRelay(prepare(tmp_path, measure=True, emulate=link))
    try:
        asked = {"url": relay.url, "token": TOKENS["0"], "certificate": (tmp_path / "ca.pem").read_text()}
        trips = to_relay.main({**asked, "do": "trips", "count": 5, "patience_s": 20.0}, b"")["trips"]
        assert len(trips) == 5
        assert min(trips) > 0.025  # two timers of 15 ms, each of which may be a little early
        wrong = to_relay.main({**asked, "token": "no", "do": "up", "streams": 1, "seconds": 1.0}, b"")
        assert "401" in wrong["error"] or "pipe" in wrong["error"] or "reset" in wrong["error"].lower()
    finally:
        relay.end()
    gone = to_relay.main({**asked, "do": "trips", "count": 1, "patience_s": 0.0}, b"")
    assert "refused" in gone["error"]
