"""Measuring a link: a sink that counts what arrives and a source that sends, second by second, behind the token.

Only a relay that `islandctl doctor` has started for the purpose has this route (``RelaySettings.measure``).
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from islandctl.relay import border
from islandctl.relay.settings import Limits

PATH = "/v1/measure"
LONGEST_S = 300.0
PIECE_BYTES = 64 << 10
MOST_BYTES = 1 << 50


class Meter:
    """The route's two methods.

    Args:
        limits: for slow bodies.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._block = os.urandom(PIECE_BYTES)  # nothing on the way can compress it

    async def handle(self, request: Request) -> Response:
        """``POST``: take in the body and tell the bytes of each second. ``GET``: send for ``seconds``; 0: an empty
        answer, for a round trip."""
        border.role(request)
        if request.method == "POST":
            return await self._take(request)
        seconds = border.number(request, "seconds", 0, 0, LONGEST_S)
        if not seconds:
            return Response(b"")
        return StreamingResponse(self._give(seconds), media_type="application/octet-stream")

    async def _take(self, request: Request) -> Response:
        counted: list[int] = []
        began: float | None = None
        async for piece in border.body(request, self._limits, MOST_BYTES):
            if not piece:
                continue
            now = time.monotonic()
            began = now if began is None else began
            at = int(now - began)
            counted += [0] * (at + 1 - len(counted))
            counted[at] += len(piece)
        return JSONResponse({"seconds": counted})

    async def _give(self, seconds: float) -> AsyncIterator[bytes]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield self._block
