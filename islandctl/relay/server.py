"""The relay over HTTP: an ASGI application on top of service and store. See docs/architecture.md."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from islandctl.config.model import Model
from islandctl.errors import LedgerError
from islandctl.ledger.entries import Checkpoint, Entry
from islandctl.relay import border, measure
from islandctl.relay.emulate import EmulatedLink
from islandctl.relay.messages import Heartbeat
from islandctl.relay.metrics import CONTENT_TYPE, openmetrics
from islandctl.relay.models import Outline
from islandctl.relay.refusal import Refusal
from islandctl.relay.rounds import Welcome
from islandctl.relay.service import Service
from islandctl.relay.settings import RelaySettings
from islandctl.relay.store import DiskError, Store
from islandctl.relay.tokens import Tokens

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
"""What one visit to a disk thread reads or writes: enough to make the visit cheap."""
TICK_S = 1.0
"""Due commits are looked for at least this often."""

Result = TypeVar("Result")


class CheckpointBody(Model):
    """``POST /v1/checkpoints``."""

    attempt: int = Field(ge=1)
    step: int = Field(ge=0, lt=2**53)
    manifest: str = Field(max_length=256)
    versions: tuple[int, ...]


class HaltBody(Model):
    """``POST /v1/halt``."""

    fragment: int | None = None
    window: int | None = None
    reason: str = Field(max_length=4096)


class StopBody(Model):
    """``POST /v1/stop``."""

    reason: str = Field(max_length=4096)


class RewindBody(Model):
    """``POST /v1/rewind``."""

    step: int = Field(ge=0)
    manifests: tuple[str, ...]
    versions: tuple[int, ...]


class Server:
    """One run's relay over HTTP.

    All writing is done by one thread, in order; packets are received, hashed and read in others.

    Args:
        service, store: of the run. The store must be the service's archive.
    """

    def __init__(self, service: Service, store: Store, tokens: Tokens, settings: RelaySettings) -> None:
        self._service = service
        self._store = store
        self._limits = settings.limits
        self._writer = ThreadPoolExecutor(1, "relay-writer")
        self._changed = asyncio.Event()
        self._nudge = asyncio.Event()
        self._closing = False
        routes = [
            Route("/v1/packets/{attempt}/{fragment}/{window}/{cell}/{chunk}", self.put_packet, methods=["PUT"]),
            Route("/v1/packets/{attempt}/{fragment}/{window}/{cell}/{chunk}", self.get_packet, methods=["GET"]),
            Route("/v1/ledger", self.ledger, methods=["GET"]),
            Route("/v1/heartbeat", self.heartbeat, methods=["POST"]),
            Route("/v1/model", self.model, methods=["POST"]),
            Route("/v1/checkpoints", self.checkpoint, methods=["POST"]),
            Route("/v1/halt", self.halt, methods=["POST"]),
            Route("/v1/stop", self.stop, methods=["POST"]),
            Route("/v1/rewind", self.rewind, methods=["POST"]),
            Route("/v1/status", self.status, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]
        if settings.measure:
            meter = measure.Meter(settings.limits)
            routes.append(Route(measure.PATH, meter.handle, methods=["GET", "POST"]))
        app: ASGIApp = Starlette(
            routes=routes,
            exception_handlers=dict.fromkeys(border.HANDLED, border.refused),
        )
        if settings.emulate is not None:
            app = EmulatedLink(app, settings.emulate)
        self.app: ASGIApp = border.Authenticated(app, tokens)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen to the ledger and let deadlines pass, as long as the context lasts."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(self._wake)

        self._service.on_entry(tell)
        timer = asyncio.create_task(self._let_time_pass())
        try:
            yield
        finally:
            timer.cancel()
            await asyncio.gather(timer, return_exceptions=True)
            self._writer.shutdown()

    def close(self) -> None:
        """Answer all long polls now: the relay is about to end."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def _let_time_pass(self) -> None:
        while True:
            self._nudge.clear()
            wait_s = TICK_S
            try:
                next_s = await self._write(self._service.tick)
                wait_s = TICK_S if next_s is None else min(TICK_S, next_s)
            except DiskError as error:
                log.error("%s", error.message)
            try:
                async with asyncio.timeout(wait_s):
                    await self._nudge.wait()
            except TimeoutError:
                pass

    async def _write(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    # Packets

    async def put_packet(self, request: Request) -> Response:
        """Take in one packet."""
        place, cell = border.place(request), border.cell(request)
        await asyncio.to_thread(self._service.expect, place, cell)
        staged = await asyncio.to_thread(self._store.stage)
        try:
            block = bytearray()
            async for piece in border.body(request, self._limits, self._limits.packet_bytes):
                block += piece
                if len(block) >= BLOCK_BYTES:
                    await asyncio.to_thread(staged.write, block)
                    block = bytearray()
            if block:
                await asyncio.to_thread(staged.write, block)
            header, packet_hash = await asyncio.to_thread(staged.finish)
            told = (header.attempt, header.fragment, header.window, header.cell, header.chunk)
            if told != place:
                raise Refusal("invalid", f"the packet's header says {told}, its path {place}")
            welcome = await self._write(
                lambda: self._service.put(header, packet_hash, staged.num_bytes, lambda: staged.keep(place))
            )
        finally:
            await asyncio.to_thread(staged.discard)
        self._nudge.set()
        return JSONResponse({"hash": packet_hash}, 201 if welcome is Welcome.STORE else 200)

    async def get_packet(self, request: Request) -> Response:
        """Give out one packet, or a range of it."""
        place, role = border.place(request), border.role(request)
        reader = role if isinstance(role, int) else None
        await asyncio.to_thread(self._service.check_readable, place, reader)
        path = self._store.path(place)
        try:
            size = (await asyncio.to_thread(path.stat)).st_size
        except FileNotFoundError as error:
            raise Refusal("unknown", f"no packet of cell {place[3]} lies here for this round and chunk") from error
        span = border.byte_range(request.headers.get("range"), size)
        first, end = span or (0, size)
        headers = {"Content-Length": str(end - first), "Accept-Ranges": "bytes"}
        if span is not None:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
        content = self._read(path, first, end, reader)
        return StreamingResponse(content, 206 if span else 200, headers, "application/octet-stream")

    async def _read(self, path: Path, first: int, end: int, reader: int | None) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread(path.open, "rb")
        try:
            file.seek(first)
            while first < end:
                block = await asyncio.to_thread(file.read, min(BLOCK_BYTES, end - first))
                if not block:
                    raise OSError(f"{path} has become shorter")
                first += len(block)
                if reader is not None:
                    self._service.bytes_down[reader] += len(block)
                yield block
        finally:
            file.close()

    # Ledger

    async def ledger(self, request: Request) -> Response:
        """Entries in order; waits for the first."""
        after = int(border.number(request, "after", -1, -1, 2**53))
        wait_s = border.number(request, "wait", 0, 0, self._limits.wait_s)
        limit = int(border.number(request, "limit", 500, 1, 1000))
        end = asyncio.get_running_loop().time() + wait_s
        while True:
            changed = self._changed
            lines = (
                [] if self._service.head_seq <= after else await asyncio.to_thread(self._store.lines, after, limit)
            )
            if lines or self._closing:
                break
            try:
                async with asyncio.timeout_at(end):
                    await changed.wait()
            except TimeoutError:
                break
        return Response(b'{"entries":[' + b",".join(lines) + b"]}", media_type="application/json")

    async def checkpoint(self, request: Request) -> Response:
        """A cell's checkpoint is whole."""
        cell, told = border.cell(request), await border.read_model(request, CheckpointBody, self._limits)
        entry = await self._write(
            lambda: self._service.checkpoint(told.attempt, cell, told.step, told.manifest, told.versions)
        )
        assert isinstance(entry, Checkpoint)
        await self._write(self._prune)
        return _entry(entry)

    def _prune(self) -> None:
        """Give back the room of packets that nobody can need any more."""
        status = self._service.status()
        if len(status.joint_checkpoints) >= 2:
            try:
                self._store.prune(status.joint_checkpoints[-2], status.attempt)
            except (OSError, LedgerError) as error:
                log.warning("could not delete old packets: %s", error)

    async def halt(self, request: Request) -> Response:
        """A cell says that the run must not go on."""
        cell, told = border.cell(request), await border.read_model(request, HaltBody, self._limits)
        return _entry(await self._write(lambda: self._service.halt(cell, told.reason, told.fragment, told.window)))

    async def stop(self, request: Request) -> Response:
        """The controller asks the run to stop."""
        border.controller(request)
        told = await border.read_model(request, StopBody, self._limits)
        return _entry(await self._write(lambda: self._service.stop(told.reason)))

    async def rewind(self, request: Request) -> Response:
        """The controller begins a new attempt."""
        border.controller(request)
        told = await border.read_model(request, RewindBody, self._limits)
        return _entry(await self._write(lambda: self._service.rewind(told.step, told.manifests, told.versions)))

    # What is seen

    async def heartbeat(self, request: Request) -> Response:
        """A cell's sign of life."""
        cell, told = border.cell(request), await border.read_model(request, Heartbeat, self._limits)
        if told.cell != cell:
            raise Refusal("forbidden", f"this token may not speak for cell {told.cell}")
        await asyncio.to_thread(self._service.heartbeat, told)
        return JSONResponse({})

    async def model(self, request: Request) -> Response:
        """What a cell's model consists of."""
        cell = border.cell(request)
        told = await border.read_model(request, Outline, self._limits, max_bytes=self._limits.model_bytes)
        await asyncio.to_thread(self._service.model, cell, told)
        return JSONResponse({})

    async def status(self, _: Request) -> Response:
        """The whole view of the run."""
        status = await asyncio.to_thread(self._service.status)
        return Response(status.model_dump_json(), media_type="application/json")

    async def metrics(self, _: Request) -> Response:
        """OpenMetrics."""
        status = await asyncio.to_thread(self._service.status)
        return Response(openmetrics(status), media_type=CONTENT_TYPE)


def _entry(entry: Entry) -> Response:
    return Response(entry.model_dump_json(), media_type="application/json")
