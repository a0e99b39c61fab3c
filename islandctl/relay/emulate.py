"""A WAN emulated inside the relay, for rehearsals on one machine: bandwidth per cell and direction, and round trips.

Bytes of packets are paced as they stream: a receiver is read no faster than the link, a sender gets pieces no faster
than the link. Real links share their bandwidth among concurrent transfers of a cell; so does a ``Pacer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from islandctl.config.recipe import Emulate

_CARRYING = ("/v1/packets/", "/v1/measure")
"""Paths whose bodies take the link's time."""
PIECE_S = 0.02
"""Bodies are cut into pieces of this duration, so that pacing is smooth and transfers share fairly."""


class Pacer:
    """A link's one direction: whoever sends waits until its bytes have passed.

    Args:
        bits_per_s: bandwidth.
        clock: seconds, monotonic.
        sleep: waits.
    """

    def __init__(
        self,
        bits_per_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bits_per_s / 8
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    @property
    def piece_bytes(self) -> int:
        """What passes in ``PIECE_S``, at least one byte, at most 1 MiB."""
        return min(1 << 20, max(1, int(self._bytes_per_s * PIECE_S)))

    async def passed(self, num_bytes: int) -> None:
        """Returns when ``num_bytes`` more have passed the link, after all that was asked for before."""
        now = self._clock()
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        await self._sleep(self._free_at - now)


class EmulatedLink:
    """ASGI wrapper: cells' requests take a round trip, their packets' bytes the link's time.

    The application outside of it must have put the role into ``scope["role"]``; the controller is not slowed.
    """

    def __init__(self, app: ASGIApp, link: Emulate) -> None:
        self._app = app
        self._link = link
        self._pacers: dict[tuple[object, str], Pacer] = {}

    def _pacer(self, cell: object, direction: str) -> Pacer:
        key = (cell, direction)
        if key not in self._pacers:
            self._pacers[key] = Pacer(self._link.bandwidth, asyncio.get_running_loop().time)
        return self._pacers[key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        cell = scope.get("role")
        if scope["type"] != "http" or not isinstance(cell, int):
            await self._app(scope, receive, send)
            return
        await asyncio.sleep(self._link.rtt)
        if not scope["path"].startswith(_CARRYING):
            await self._app(scope, receive, send)
            return
        up, down = self._pacer(cell, "up"), self._pacer(cell, "down")

        async def paced_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                await up.passed(len(message.get("body", b"")))
            return message

        async def paced_send(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            body = memoryview(message.get("body", b""))
            while len(body) > down.piece_bytes:
                piece, body = body[: down.piece_bytes], body[down.piece_bytes :]
                await down.passed(len(piece))
                await send({**message, "body": bytes(piece), "more_body": True})
            await down.passed(len(body))
            await send({**message, "body": bytes(body)})

        await self._app(scope, paced_receive, paced_send)
