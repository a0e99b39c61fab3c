"""The relay's HTTP border: who asks, what the body holds, how a refusal is told."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import TypeVar

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from islandctl.config.model import Model
from islandctl.errors import ExchangeError
from islandctl.relay.refusal import Refusal
from islandctl.relay.service import Place
from islandctl.relay.settings import Limits
from islandctl.relay.store import DiskError
from islandctl.relay.tokens import Role, Tokens

log = logging.getLogger(__name__)

STATUS = {
    "closed": 409,
    "exists": 409,
    "halted": 409,
    "held_out": 409,
    "model": 409,
    "not-joint": 409,
    "stale": 409,
    "damaged": 422,
    "foreign": 422,
    "invalid": 422,
    "malformed": 400,
    "token": 401,
    "forbidden": 403,
    "unknown": 404,
    "method": 405,
    "slow": 408,
    "large": 413,
    "range": 416,
    "early": 425,
    "disk": 507,
}
"""Code of a refusal → HTTP status."""

AnyModel = TypeVar("AnyModel", bound=Model)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


def answer(code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """A refusal as JSON."""
    return JSONResponse({"error": code, "message": message}, STATUS.get(code, 400), headers)


async def refused(_: Request, error: Exception) -> Response:
    """What a handler raised, as an answer."""
    if isinstance(error, Refusal):
        return answer(error.code, error.message)
    if isinstance(error, DiskError):
        log.error("%s", error.message)
        return answer(error.code, error.message)
    if isinstance(error, ExchangeError):
        return answer("damaged", error.message)
    if isinstance(error, HTTPException):
        code = {404: "unknown", 405: "method"}.get(error.status_code, "malformed")
        return answer(code, error.detail, dict(error.headers or {}))
    if isinstance(error, ClientDisconnect):
        return answer("malformed", "the client went away")
    raise error


HANDLED = (Refusal, DiskError, ExchangeError, HTTPException, ClientDisconnect)


class Authenticated:
    """ASGI wrapper: puts the asker's role into ``scope["role"]``, or answers 401."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            role = self._tokens.role(given)
            if role is None:
                what = "no valid token: send Authorization: Bearer TOKEN"
                await answer("token", what, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope["role"] = role
        await self._app(scope, receive, send)


def role(request: Request) -> Role:
    """Who asks."""
    found: Role = request.scope["role"]
    return found


def cell(request: Request) -> int:
    """Which cell asks.

    Raises:
        Refusal: ``forbidden``: it is the controller.
    """
    found = role(request)
    if not isinstance(found, int):
        raise Refusal("forbidden", "this is for cells; the token is the controller's")
    return found


def controller(request: Request) -> None:
    """Let only the controller pass.

    Raises:
        Refusal: ``forbidden``.
    """
    if role(request) != "controller":
        raise Refusal("forbidden", "this is for the controller; the token is a cell's")


def place(request: Request) -> Place:
    """The packet's place from the path.

    Raises:
        Refusal: ``unknown``: the path's parts are no numbers.
    """
    names = ("attempt", "fragment", "window", "cell", "chunk")
    values = [request.path_params[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if not _NUMBER.fullmatch(value):
            raise Refusal("unknown", f"no such packet: {name} is not a number of at most nine digits")
    attempt, fragment, window, cell, chunk = (int(value) for value in values)
    return attempt, fragment, window, cell, chunk


def number(request: Request, name: str, default: float, low: float, high: float) -> float:
    """A number from the query, brought between ``low`` and ``high``.

    Raises:
        Refusal: ``malformed``.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text) if len(text) < 32 else float("nan")
    except ValueError:
        value = float("nan")
    if value != value:
        raise Refusal("malformed", f"{name} is not a number")
    return max(low, min(high, value))


async def body(request: Request, limits: Limits, limit_bytes: int) -> AsyncIterator[bytes]:
    """The request's body as it comes, no larger than allowed, no slower than bearable.

    Raises:
        Refusal: ``large``, ``slow``.
    """
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and (len(told) > 15 or int(told) > limit_bytes):
        raise Refusal("large", f"the body is larger than {limit_bytes} bytes")
    loop = asyncio.get_running_loop()
    start, received = loop.time(), 0
    stream = request.stream()
    while True:
        deadline = start + limits.body_grace + received / limits.body_bytes_per_s
        try:
            async with asyncio.timeout_at(deadline):
                piece = await anext(stream, None)
        except TimeoutError as error:
            raise Refusal("slow", f"{received} bytes came in {loop.time() - start:.0f} s; given up") from error
        if piece is None:
            return
        received += len(piece)
        if received > limit_bytes:
            raise Refusal("large", f"the body is larger than {limit_bytes} bytes")
        yield piece


async def read_model(
    request: Request, kind: type[AnyModel], limits: Limits, *, max_bytes: int | None = None
) -> AnyModel:
    """The request's JSON body, of at most ``max_bytes`` (left out: ``limits.json_bytes``).

    Raises:
        Refusal: ``invalid``, ``large``, ``slow``.
    """
    content = bytearray()
    async for piece in body(request, limits, max_bytes or limits.json_bytes):
        content += piece
    try:
        return kind.model_validate_json(bytes(content))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "body"
        raise Refusal("invalid", f"{where}: {first['msg']}") from error


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The one range of a ``Range`` header: (first, end), end excluded. None: the whole is meant.

    Several ranges and other units are answered with the whole, as HTTP allows.

    Raises:
        Refusal: ``range``: it lies outside.
    """
    match = re.fullmatch(r"bytes=(\d{0,15})-(\d{0,15})", header or "", re.ASCII)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        first, end = max(0, size - int(match[2])), size
    else:
        first, end = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
        if match[2] and int(match[2]) < first:
            return None
    if first >= end:
        raise Refusal("range", f"the packet has {size} bytes")
    return first, end
