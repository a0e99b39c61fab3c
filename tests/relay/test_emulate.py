"""The emulated WAN paces real bytes while they stream, and charges each request a round trip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from islandctl.relay.emulate import PIECE_S, Pacer

from .builders import packet
from .live import LiveRelay, prepare
from .test_server import Ask, run


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


def test_bytes_take_their_time() -> None:
    clock = Time()
    pacer = Pacer(8e6, clock, clock.sleep)

    async def send() -> None:
        for _ in range(50):
            await pacer.passed(20_000)

    asyncio.run(send())
    assert clock.now == pytest.approx(101)
    assert pacer.piece_bytes == 1e6 * PIECE_S


def test_an_idle_link_saves_nothing_up() -> None:
    clock = Time()
    pacer = Pacer(8e6, clock, clock.sleep)
    clock.now += 1000
    asyncio.run(pacer.passed(1_000_000))
    assert clock.now == pytest.approx(1101)


def test_a_slow_link_still_moves_whole_bytes() -> None:
    assert Pacer(1.0, Time()).piece_bytes == 1
    assert Pacer(1e15, Time()).piece_bytes == 1 << 20


def test_every_request_of_a_cell_takes_a_round_trip(tmp_path: Path) -> None:
    took: dict[str, float] = {}

    async def test(ask: Ask, _: object) -> None:
        for role in ("0", "controller"):
            start = time.monotonic()
            await ask(role, "GET", "/v1/status")
            took[role] = time.monotonic() - start

    run(tmp_path, test, emulate={"bandwidth": "1 Gbit/s", "rtt": "1 s"})  # long, for a machine that is slow itself
    assert took["0"] >= 1.0 > took["controller"]


def timed(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


@pytest.mark.slow
def test_a_real_transfer_keeps_to_the_bandwidth_in_both_directions(tmp_path: Path) -> None:
    """2 MB at 8 Mbit/s take two seconds; 0.5 MB a quarter of that. Judged by ratio, within one run."""
    live = LiveRelay(prepare(tmp_path / "relay", emulate={"bandwidth": "8 Mbit/s", "rtt": "0 s"}))
    try:
        with live.client("0") as usa:
            small, large = (
                packet(0, 0, window, payload=b"x" * size) for window, size in ((0, 500_000), (1, 2_000_000))
            )
            up = [timed(lambda each=each: usa.put(each)) for each in (small, large)]
            down = [timed(lambda window=window: usa.fetch(1, 0, window, 0, 0)) for window in (0, 1)]
        for short, long in (up, down):
            assert long >= 1.8
            assert short >= 0.45
            assert 2 < long / short < 6
    finally:
        assert live.end() == 0
