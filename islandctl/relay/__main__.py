"""``python -m islandctl.relay FOLDER``: serve the run whose settings lie in FOLDER/relay.json until SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from islandctl.config.lines import keep_log
from islandctl.errors import ConfigError, IslandError, PreflightError
from islandctl.relay import glance
from islandctl.relay.refusal import Refusal
from islandctl.relay.server import Server
from islandctl.relay.service import Service
from islandctl.relay.settings import RelaySettings, read_settings
from islandctl.relay.store import Store
from islandctl.relay.tokens import Tokens

log = logging.getLogger("islandctl.relay")

GRACE_S = 5
"""At the end, transfers under way may take this long; cells repeat what was cut."""


def main() -> int:
    """Serve one folder. Gives the exit code."""
    keep_log()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if len(sys.argv) != 2:
        log.error("usage: python -m islandctl.relay FOLDER")
        return 2
    try:
        serve(Path(sys.argv[1]).absolute())
    except IslandError as error:
        log.error("%s%s", error.message, f" ({error.hint})" if error.hint else "")
        return error.exit_code
    return 0


def serve(folder: Path) -> None:
    """Recover what the folder holds and serve it until SIGTERM or SIGINT.

    Raises:
        ConfigError: settings, certificate or tokens are wrong, or of another run than the ledger.
        UsageError: another relay serves the folder.
        LedgerError: the ledger was damaged.
        PreflightError: the port is taken.
    """
    settings = read_settings(folder)
    tokens = Tokens.read(settings.tokens, len(settings.cells))
    store = Store(folder)
    try:
        listener = _listen(settings)
        service = Service(
            store,
            run=settings.run,
            config_hash=settings.config_hash,
            cells=settings.cells,
            num_fragments=settings.num_fragments,
            late=settings.late,
            final_window=settings.final_window,
            seeded=settings.seeded,
            clock=time.monotonic,
        )
        server = Server(service, store, tokens, settings)
        config = _config(server, settings)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_run(service, server, config, settings, listener, folder))
    except Refusal as refusal:
        raise ConfigError(f"{folder}: {refusal.message}", hint="use another run name") from refusal
    finally:
        store.close()


def _config(server: Server, settings: RelaySettings) -> uvicorn.Config:
    config = uvicorn.Config(
        server.app,
        http=_protocol(settings.limits.header_deadline),
        ssl_keyfile=settings.key,
        ssl_certfile=settings.certificate,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(settings.limits.header_deadline),
        timeout_graceful_shutdown=GRACE_S,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{settings.certificate}, {settings.key}: {error}") from error
    return config


async def _run(
    service: Service,
    server: Server,
    config: uvicorn.Config,
    settings: RelaySettings,
    listener: socket.socket,
    folder: Path,
) -> None:
    host, port = listener.getsockname()[:2]
    async with server.running(), _glances(service, folder):
        web = _Web(config, server)
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        while not web.started and not serving.done():
            await asyncio.sleep(0.01)
        if web.started:
            write_address(folder / "address.json", host, port)
            log.info("relay of run %s listens at %s port %d", settings.run, host, port)
        await serving
    log.info("relay ended")


@asynccontextmanager
async def _glances(service: Service, folder: Path) -> AsyncIterator[None]:
    """Keep ``status.json`` fresh; in the end it becomes the last word, under another name."""

    async def keep() -> None:
        while True:
            try:
                glance.tell(folder, await asyncio.to_thread(service.status), time.time())
            except OSError as error:  # a full disk must not end the relay
                log.warning("cannot write %s: %s", folder / glance.NAME, error)
            await asyncio.sleep(glance.WRITE_EVERY_S)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        with suppress(OSError):
            glance.tell(folder, service.status(), time.time())
            os.replace(folder / glance.NAME, folder / glance.LAST_NAME)


class _Web(uvicorn.Server):
    """uvicorn, which tells the relay when it is about to end, and does not die of the signal itself."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._server.close)


def _protocol(idle_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a deadline for a request's header, which uvicorn itself has not."""

    class Deadline(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._seen: object = self.cycle
            self._watch = self.loop.call_later(idle_s, self._look)

        def _look(self) -> None:
            """Close the connection when it has been idle since the last look."""
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self.cycle is self._seen:
                self.transport.abort()  # a polite close of TLS waits for the peer
                return
            self._seen = self.cycle if idle else self
            self._watch = self.loop.call_later(idle_s, self._look)

        def shutdown(self) -> None:
            super().shutdown()
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._watch.cancel()
            super().connection_lost(exc)

    return Deadline


def _listen(settings: RelaySettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PreflightError(
            f"the relay cannot listen at {settings.host} port {settings.port}: {error.strerror}",
            hint="end what holds the port, or set relay.port in the recipe",
        ) from error
    return listener


def write_address(path: Path, host: str, port: int) -> None:
    """Tell where the relay listens, atomically."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}) + "\n", encoding="utf-8")
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main())
