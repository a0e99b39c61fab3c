"""The relay as cells and controller see it. The one module that knows httpx."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from islandctl.config.model import Model
from islandctl.errors import ConfigError, ExchangeError, RelayError, UnreachableError
from islandctl.ledger.entries import ENTRY, Entry
from islandctl.ledger.packet import read_header
from islandctl.relay.messages import Heartbeat, RelayStatus
from islandctl.relay.models import outline

CONNECT_S = 15.0
"""One handshake; generous, since links across an ocean take seconds."""
ANSWER_S = 10.0
"""A small question that is not answered so long after its time: the relay does not answer, or the link is gone.

Seconds of a full link are in it. Cells stand still meanwhile, so it is well below ``late.relay_away``.
"""
BLOCK_BYTES = 1 << 20
"""Packets are sent in such pieces, so that a stalled link shows."""

Result = TypeVar("Result")

_AGAIN = {408, 429, 500, 502, 503, 504, 507}
"""Answers that are no decision: the relay is in trouble, restarting, or out of disk."""

_HINTS = {
    "token": "the token is not this run's: islandctl launch writes token and ca.pem beside cell.json",
    "halted": "islandctl status shows why; islandctl resume goes back to the newest joint checkpoint",
    "foreign": "cell and relay do not belong to the same run and recipe",
    "held_out": "make data.paths hold the same files at every site",
    "model": "run the same script, with the same settings, at every site",
    "disk": "free space on the relay's disk; cells try again",
}


class _Entries(Model):
    entries: tuple[Entry, ...]


class RelayClient:
    """Fulfils ``exchange.transport.Transport``. Thread-safe; close it at the end, or use it as a context manager.

    Args:
        url: ``https://host:port``.
        token: of a cell, or the controller's.
        ca_path: the relay's certificate, the only one that is trusted.
        timeout_s: the longest silence on a connection that carries packets before it counts as lost; small
            questions wait ``ANSWER_S`` at most.
        retry_s: how long a request is repeated when there is no answer.

    Raises:
        ConfigError: the certificate cannot be read.
    """

    def __init__(
        self, url: str, token: str, ca_path: str | Path, *, timeout_s: float = 60.0, retry_s: float = 60.0
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        try:
            trust = ssl.create_default_context(cafile=str(ca_path))
            trust.check_hostname = (
                False  # made for this run alone: it proves the relay, by whatever name it is reached
            )
        except OSError as error:
            raise ConfigError(f"{ca_path}: cannot read the relay's certificate: {error}") from error
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            verify=trust,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
            trust_env=False,  # a proxy of the site is not meant for the relay, and its certificates are not trusted
        )

    def __enter__(self) -> RelayClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    # Packets and ledger: Transport

    def put(self, packet: bytes) -> None:
        """Store one packet, once; repeated on network errors for ``retry_s``. See ``Transport.put``."""
        try:
            found = read_header(memoryview(packet))
        except ExchangeError as error:
            raise RelayError(error.message, code="damaged") from error
        if found is None:
            raise RelayError("not a packet: cut short", code="damaged")
        header = found[0]
        path = f"/v1/packets/{header.attempt}/{header.fragment}/{header.window}/{header.cell}/{header.chunk}"

        def once() -> None:
            # A generator can be read once, so every attempt gets its own.
            view = memoryview(packet)
            pieces = (bytes(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))
            self._ask("PUT", path, content=pieces, headers={"Content-Length": str(len(view))})

        self._patiently(once)

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        """The packet's bytes; goes on where a lost connection has broken off. See ``Transport.fetch``."""
        path = f"/v1/packets/{attempt}/{fragment}/{window}/{cell}/{chunk}"
        content = bytearray()

        def once() -> bytes:
            headers = {"Range": f"bytes={len(content)}-"} if content else {}
            try:
                with self._http.stream("GET", path, headers=headers) as response:
                    if response.status_code not in (200, 206):
                        response.read()
                        self._check(response)
                    if response.status_code == 200:
                        content.clear()
                    for piece in response.iter_bytes():
                        content.extend(piece)
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
            return bytes(content)

        return self._patiently(once)

    def entries(self, after: int, wait_s: float, limit: int = 500) -> Sequence[Entry]:
        """Ledger entries with seq > ``after`` in order, at most ``limit``; waits up to ``wait_s`` for the first.

        Raises:
            UnreachableError: no answer ``ANSWER_S`` after that; ask again.
        """
        query = {"after": after, "wait": wait_s, "limit": limit}
        response = self._ask("GET", "/v1/ledger", params=query, timeout=self._soon(wait_s))
        return self._read(response, _Entries).entries

    # What a cell tells

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Tell a sign of life, once.

        Raises:
            RelayError: code ``held_out``: another cell evaluates on another text.
        """
        self._ask("POST", "/v1/heartbeat", content=heartbeat.model_dump_json().encode(), timeout=self._soon())

    def tell_model(self, attempt: int, parameters: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Tell what this cell's model consists of, (name, shape) pairs; once.

        Raises:
            RelayError: code ``model``: another cell holds another one; the message names a parameter.
        """
        told = outline(attempt, parameters)
        self._ask("POST", "/v1/model", content=told.model_dump_json().encode())

    def register_checkpoint(self, step: int, manifest: str, versions: Sequence[int], attempt: int) -> Entry:
        """Tell that this cell's checkpoint is whole on its disk. The same again gives the same entry.

        Raises:
            RelayError: code ``stale`` (old attempt), ``halted``, ``invalid``.
        """
        told = {"attempt": attempt, "step": step, "manifest": manifest, "versions": list(versions)}
        return self._entry("/v1/checkpoints", told)

    def halt(self, reason: str, fragment: int | None = None, window: int | None = None) -> Entry:
        """Stop the whole run, as this cell: it must not go on."""
        return self._entry("/v1/halt", {"fragment": fragment, "window": window, "reason": reason[:4096]})

    # What the controller tells

    def stop(self, reason: str) -> Entry:
        """Ask all cells to checkpoint and end."""
        return self._entry("/v1/stop", {"reason": reason[:4096]})

    def rewind(self, step: int, manifests: Sequence[str], versions: Sequence[int]) -> Entry:
        """Begin a new attempt at a joint checkpoint; step 0 without manifests: at the beginning.

        Raises:
            RelayError: code ``not-joint``, ``invalid``.
        """
        return self._entry("/v1/rewind", {"step": step, "manifests": list(manifests), "versions": list(versions)})

    # What both see

    def status(self) -> RelayStatus:
        """The whole view of the run. Asked once."""
        return self._read(self._ask("GET", "/v1/status"), RelayStatus)

    def metrics_text(self) -> str:
        """OpenMetrics text. Asked once."""
        return self._ask("GET", "/metrics").text

    # How

    def _entry(self, path: str, told: dict[str, Any]) -> Entry:
        response = self._patiently(lambda: self._ask("POST", path, json=told))
        try:
            return ENTRY.validate_json(response.content)
        except ValidationError as error:
            raise self._strange(response) from error

    def _patiently(self, once: Callable[[], Result]) -> Result:
        """Repeat a request that is safe to repeat until there is an answer, for ``retry_s`` at most."""
        retrying = Retrying(
            retry=retry_if_exception_type(UnreachableError),
            stop=stop_after_delay(self._retry_s),
            wait=_wait,
            reraise=True,
        )
        return retrying(once)

    def _soon(self, wait_s: float = 0.0) -> httpx.Timeout:
        """For a small question, whose answer the relay may hold back for ``wait_s``."""
        limit_s = min(ANSWER_S, self._timeout_s)
        return httpx.Timeout(limit_s, read=limit_s + wait_s)

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._check(response)

    def _unreachable(self, error: httpx.HTTPError) -> UnreachableError:
        timed_out = isinstance(error, httpx.TimeoutException)  # its text is httpx's, or that of a C file
        cause = "it took too long" if timed_out else str(error) or type(error).__name__
        hint = "check the address, the tunnel and the relay's log"
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            hint = "another relay answers there, or ca.pem is of another run"
        return UnreachableError(f"relay {self.url}: no answer: {cause}", hint=hint)

    def _check(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        try:
            told = response.json()
            code, message = str(told["error"]), str(told["message"])
        except (ValueError, KeyError, TypeError):
            code, message = "", f"HTTP {response.status_code}"
        if response.status_code in _AGAIN:
            raise UnreachableError(f"relay {self.url}: {message}", hint=_HINTS.get(code, "see the relay's log"))
        if not code:
            raise self._strange(response)
        raise RelayError(f"relay {self.url}: {message}", code=code, hint=_HINTS.get(code, ""))

    def _read(self, response: httpx.Response, kind: type[_AnyModel]) -> _AnyModel:
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise self._strange(response) from error

    def _strange(self, response: httpx.Response) -> UnreachableError:
        return UnreachableError(
            f"relay {self.url}: HTTP {response.status_code} with an answer that is no relay's",
            hint="check the address: something else answers there",
        )


_AnyModel = TypeVar("_AnyModel", bound=Model)

_longest: Callable[[RetryCallState], float] = wait_exponential(multiplier=0.2, max=5)
_jitter = random.Random()  # noqa: S311  # nothing secret
"""Of our own: Python's common generator is the training's, begun by every rank with one seed and saved with it."""


def _wait(state: RetryCallState) -> float:
    """Jittered, so that the ranks of a cell do not come back all at once."""
    return _jitter.uniform(0.0, _longest(state))
