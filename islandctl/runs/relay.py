"""The run's relay, on the controller or on a host of the recipe's choice: its files, its start, a client for it."""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from islandctl.config.paths import RunFolder
from islandctl.errors import IslandError, RelayError, UnreachableError
from islandctl.fleet import node as nodes
from islandctl.fleet.host import Host
from islandctl.fleet.job import RestartPolicy, SupervisorJob
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


def relay_files(record: RunRecord, plan: Plan, *, host: str, port: int) -> dict[str, tuple[bytes, int]]:
    """What lies in the relay's folder before its start: name → (content, mode).

    Args:
        host, port: where it listens.
    """

    from islandctl.relay.settings import RelaySettings
    from islandctl.relay.tokens import token_hash

    folder = RunFolder.of(record.run).secrets
    roles = {token_hash((folder / "token").read_text()): "controller"}
    roles |= {token_hash(cell_token(record.run, cell.index).decode()): str(cell.index) for cell in plan.cells}
    settings = RelaySettings(
        run=record.run,
        config_hash=record.config_hash,
        cells=tuple(cell.name for cell in plan.cells),
        num_fragments=plan.recipe.exchange.fragments,
        late=plan.recipe.exchange.late,
        emulate=plan.recipe.relay.emulate,
        host=host,
        port=port,
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
        env={"PYTHONPATH": relay.code, "PYTHONUNBUFFERED": "1"},
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
        UnreachableError: there is no relay yet.
    """
    from islandctl.relay.client import RelayClient  # here: httpx is slow to import

    folder = RunFolder.of(record.run).secrets
    if not record.relay_url:
        raise UnreachableError(f"{record.run}: the relay was never started")
    token = (folder / "token").read_text()
    return RelayClient(record.relay_url, token, folder / "ca.pem", timeout_s=timeout_s, retry_s=retry_s)


def wait_until_it_answers(record: RunRecord, host: Host, *, timeout_s: float = START_TIMEOUT_S) -> RelayStatus:
    """Ask until the relay answers.

    Raises:
        RelayError: it ended, or does not answer within ``timeout_s``; quotes its log.
    """
    end = time.monotonic() + timeout_s
    problem: IslandError | None = None
    while time.monotonic() < end:
        try:
            with client(record) as relay:
                return relay.status()
        except UnreachableError as error:
            problem = error
            time.sleep(0.1)
    last = b""
    if record.relay is not None:
        last = nodes.read_tail(host, f"{record.relay.folder}/logs/relay.log", 4096)
    lines = last.decode(errors="replace").strip().splitlines()
    raise RelayError(
        f"the relay does not answer at {record.relay_url} within {timeout_s:g} s"
        + (f"; its last line: {lines[-1]}" if lines else f": {problem.message if problem else ''}"),
        hint=f"read {record.relay.folder if record.relay else 'relay'}/logs/relay.log",
    )


def address(host: Host, folder: str, *, timeout_s: float = START_TIMEOUT_S) -> tuple[str, int]:
    """Where the relay of ``folder`` listens: waits until it has written ``address.json``.

    Raises:
        RelayError: it has not within ``timeout_s``; quotes its log.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        content = nodes.read(host, f"{folder}/address.json").data
        if content:
            told = json.loads(content)
            return told["host"], int(told["port"])
        time.sleep(0.1)
    log = nodes.read_tail(host, f"{folder}/node-0/logs/relay.log", 4096).decode(errors="replace").strip()
    raise RelayError(
        f"{host.label}: the relay did not come up within {timeout_s:g} s"
        + (f": {log.splitlines()[-1]}" if log else ""),
        hint=f"read {folder}/node-0/logs/relay.log",
    )
