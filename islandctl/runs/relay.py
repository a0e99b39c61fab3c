"""The run's relay, on the controller or on a host of the recipe's choice: its files, its start, a client for it."""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from islandctl.config.paths import RunFolder, log_pieces
from islandctl.errors import IslandError, PreflightError, RelayError, UnreachableError
from islandctl.fleet import node as nodes
from islandctl.fleet.host import Host
from islandctl.fleet.job import RestartPolicy, SupervisorJob, from_code
from islandctl.relay.messages import RelayStatus
from islandctl.runs.files import write_whole
from islandctl.runs.record import KeptRecord, RunRecord

if TYPE_CHECKING:
    from islandctl.planner.plan import Plan
    from islandctl.relay.client import RelayClient

START_TIMEOUT_S = 60.0
KEEP = RestartPolicy(limit=1_000_000, backoff_s=0.5, backoff_limit_s=15.0)
"""Relay and tunnels are started again for as long as the run lives: without them nothing is exchanged."""
STOP_TIMEOUT_S = 15.0


def make_secrets(record: RunRecord, plan: Plan) -> None:
    """The run's certificate and tokens, in the run's folder on the controller; made once."""
    from islandctl.relay.certificate import make_certificate  # here: cryptography is slow to import

    folder = RunFolder.of(record.run).secrets
    names = ["127.0.0.1", "localhost", *filter(None, [plan.recipe.relay.address])]
    key, certificate = make_certificate(names, common_name=f"islandctl relay of {record.run}")
    write_whole(folder / "key.pem", key)
    write_whole(folder / "ca.pem", certificate)
    write_whole(folder / "token", secrets.token_urlsafe(32).encode())
    for cell in plan.cells:
        write_whole(folder / f"cell-{cell.index}", secrets.token_urlsafe(32).encode())


def cell_token(run: str, cell: int) -> bytes:
    """One cell's key to the relay."""
    return (RunFolder.of(run).secrets / f"cell-{cell}").read_bytes()


def relay_files(
    record: RunRecord, plan: Plan, *, host: str, port: int, measure: bool = False
) -> dict[str, tuple[bytes, int]]:
    """What lies in the relay's folder before its start: name → (content, mode).

    Args:
        host, port: where it listens.
        measure: it also serves the doctor's measurements.
    """

    from islandctl.relay.settings import RelaySettings
    from islandctl.relay.tokens import token_hash

    folder = RunFolder.of(record.run).secrets
    roles = {token_hash((folder / "token").read_text()): "controller"}
    roles |= {token_hash(cell_token(record.run, cell.index).decode()): str(cell.index) for cell in plan.cells}
    exchange, steps = plan.recipe.exchange, plan.recipe.training.steps
    settings = RelaySettings(
        run=record.run,
        config_hash=record.config_hash,
        cells=tuple(cell.name for cell in plan.cells),
        num_fragments=exchange.fragments,
        late=exchange.late,
        final_window=-(-steps // exchange.window) if exchange.mode == "butterfly" else None,
        seeded=exchange.warmup > 0,
        emulate=plan.recipe.relay.emulate,
        host=host,
        port=port,
        measure=measure,
    )
    return {
        "relay.json": (settings.model_dump_json(indent=2).encode(), 0o600),
        "tokens.json": (json.dumps(roles, indent=1).encode(), 0o600),
        "key.pem": ((folder / "key.pem").read_bytes(), 0o600),
        "ca.pem": ((folder / "ca.pem").read_bytes(), 0o600),
    }


def relay_job(record: RunRecord, relay: KeptRecord) -> SupervisorJob:
    """``job.json`` of the relay."""
    data = str(PurePosixPath(relay.folder).parent)
    return SupervisorJob(
        run=record.run,
        mark=record.mark,
        name="relay",
        argv=(relay.python, "-m", "islandctl.relay", data),
        cwd=data,
        env={**from_code(relay.code), "PYTHONUNBUFFERED": "1"},
        restart=KEEP,
        stop_timeout_s=STOP_TIMEOUT_S,
    )


def own_code() -> str:
    """The folder from which this very islandctl is imported, for a relay on the controller."""
    import islandctl

    return str(Path(islandctl.__file__).resolve().parent.parent)


def own_python() -> str:
    """The interpreter that islandctl itself runs on."""
    return sys.executable


def client(record: RunRecord, *, timeout_s: float = 5.0, retry_s: float = 0.0) -> RelayClient:
    """A client of the run's relay in the controller's role.

    Raises:
        UnreachableError: there is no relay yet, or its key is missing here.
    """
    from islandctl.relay.client import RelayClient  # here: httpx is slow to import

    folder = RunFolder.of(record.run).secrets
    if not record.relay_url:
        raise UnreachableError(f"{record.run}: the relay was never started")
    try:
        token = (folder / "token").read_text()
    except OSError as error:
        raise UnreachableError(f"the key to the relay, {folder / 'token'}: {error.strerror}") from error
    return RelayClient(record.relay_url, token, folder / "ca.pem", timeout_s=timeout_s, retry_s=retry_s)


def wait_until_it_answers(record: RunRecord, host: Host, *, timeout_s: float = START_TIMEOUT_S) -> RelayStatus:
    """Ask until the relay answers.

    Raises:
        PreflightError: it does not come up; quotes its log.
        RelayError: it does not answer within ``timeout_s``.
    """
    end, start = time.monotonic() + timeout_s, None
    problem: IslandError | None = None
    while time.monotonic() < end:
        try:
            with client(record) as relay:
                return relay.status()
        except UnreachableError as error:
            problem = error
            if record.relay is not None:
                start = start or _Start(host, record.relay.folder)
                start.check()
            time.sleep(0.1)
    raise RelayError(
        f"the relay does not answer at {record.relay_url} within {timeout_s:g} s: "
        f"{problem.message if problem else 'no answer'}",
        hint=f"read {record.relay.folder if record.relay else 'relay'}/logs/relay.log",
    )


def address(host: Host, folder: str, *, timeout_s: float = START_TIMEOUT_S) -> tuple[str, int]:
    """Where the relay of ``folder`` listens: waits until it has written ``address.json``.

    Raises:
        PreflightError: it does not come up; quotes its log.
        RelayError: it has not written it within ``timeout_s``.
    """
    end, start = time.monotonic() + timeout_s, _Start(host, f"{folder}/node-0")
    while time.monotonic() < end:
        content = nodes.read(host, f"{folder}/address.json").data
        if content:
            told = json.loads(content)
            return told["host"], int(told["port"])
        start.check()
        time.sleep(0.1)
    raise RelayError(f"{host.label}: the relay did not come up within {timeout_s:g} s", hint=f"read {start.log}")


class _Start:
    """Watches a relay's supervisor while it is waited for: one that dies again and again will not come up.

    Args:
        folder: the supervisor's.
    """

    def __init__(self, host: Host, folder: str) -> None:
        self._host, self._folder = host, folder
        self.log = f"{folder}/logs/relay.log"
        self._before = nodes.state(host, folder).restarts
        self._looked = time.monotonic()

    def check(self) -> None:
        """Look, at most once a second.

        Raises:
            PreflightError: it has died twice since this watch began; in its own words.
        """
        if time.monotonic() < self._looked + 1.0:
            return
        self._looked = time.monotonic()
        state = nodes.state(self._host, self._folder)
        if state.state != "ended" and state.restarts < self._before + 2:
            return
        (sizes,) = nodes.sizes(self._host, [f"{self._folder}/logs"])
        self.log = f"{self._folder}/logs/{log_pieces(sizes).get('relay', ['relay.log'])[-1]}"
        text = nodes.read_tail(self._host, self.log, 8192).decode(errors="replace")
        said = [line.partition(" ERROR ")[2] for line in text.splitlines() if " ERROR " in line]
        # the relay writes "message (hint)"
        what, _, hint = said[-1].removesuffix(")").partition(" (") if said else (state.reason or "no word", "", "")
        raise PreflightError(f"{self._host.label}: {what}", hint=hint or f"read {self.log}")
