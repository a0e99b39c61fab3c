"""The cell's links to the outside: the relay, its ledger, and the exchange over it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from islandctl.config.job import CellJob
from islandctl.config.paths import CellFolder
from islandctl.errors import ConfigError, IslandError, UnreachableError
from islandctl.exchange.island import Island
from islandctl.exchange.journal import FileJournal
from islandctl.ledger.entries import Entry
from islandctl.relay.client import RelayClient
from islandctl.worker.alone import Alone, Exchanger
from islandctl.worker.parallel import Ranks
from islandctl.worker.wishes import Stopped, Wishes

log = logging.getLogger(__name__)
RELAY_VARIABLE = "ISLANDCTL_RELAY_URL"
RETRY_S = 1.0
T = TypeVar("T")


def connect(folder: CellFolder, mode: str) -> RelayClient | None:
    """The way to the relay; None in a run without exchange that was given none.

    Raises:
        ConfigError: no address, or the cell's token is missing.
    """
    url = os.environ.get(RELAY_VARIABLE, "")
    if not url:
        if mode == "none":
            return None
        raise ConfigError(
            f"{RELAY_VARIABLE} is not set, and exchange.mode {mode} needs a relay",
            hint="start the cell with islandctl launch or resume",
        )
    try:
        token = Path(folder.token).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read {folder.token}: {error.strerror}", hint="run islandctl resume") from error
    return RelayClient(url, token, Path(folder.ca))


def read_ledger(relay: RelayClient | None, ranks: Ranks, wishes: Wishes) -> Sequence[Entry]:
    """The whole ledger, the same at every rank. Waits for the relay as long as it takes.

    Raises:
        Stopped: at every rank, when a signal came meanwhile.
        RelayError: at every rank; the relay refuses the cell.
    """
    if relay is None:
        return []
    outcome: list[Entry] | Exception = []
    if ranks.leads:
        try:
            outcome = _patiently(lambda: read_all(relay), wishes)
        except (IslandError, Stopped) as error:
            outcome = error
    told = ranks.tell(outcome)
    if isinstance(told, Exception):
        raise told
    return list(told)


def same_model(
    relay: RelayClient | None,
    ranks: Ranks,
    wishes: Wishes,
    attempt: int,
    parameters: Sequence[tuple[str, Sequence[int]]],
) -> None:
    """Tell the relay what the model consists of, (name, shape) pairs. Waits for the relay as long as it takes.

    Raises:
        Stopped: at every rank, when a signal came meanwhile.
        RelayError: at every rank; code ``model``: another cell holds another model.
    """
    if relay is None:
        return
    problem: Exception | None = None
    if ranks.leads:
        try:
            _patiently(lambda: relay.tell_model(attempt, parameters), wishes)
        except (IslandError, Stopped) as error:
            problem = error
    problem = ranks.tell(problem)
    if problem is not None:
        raise problem


def _patiently(ask: Callable[[], T], wishes: Wishes) -> T:
    silent = False
    while True:
        try:
            return ask()
        except UnreachableError as error:
            if not silent:
                log.warning("waiting for the relay: %s", error.message)
            silent = True
            if wishes.stopping:
                raise Stopped("stopped by a signal while waiting for the relay") from error
            time.sleep(RETRY_S)


def read_all(relay: RelayClient) -> list[Entry]:
    """The ledger as it is now.

    Raises:
        UnreachableError, RelayError: as the client does.
    """
    entries: list[Entry] = []
    while batch := relay.entries(entries[-1].seq if entries else -1, 0.0):
        entries.extend(batch)
    return entries


def join(
    folder: CellFolder,
    job: CellJob,
    parameters: Mapping[str, Tensor],
    ranks: Ranks,
    relay: RelayClient | None,
    on_silence: Callable[[], None],
    on_wait: Callable[[], None],
) -> tuple[Exchanger, str]:
    """The exchange of this cell, as the recipe wants it, and the hash of its fragment map (empty: none).

    ``on_silence`` is called when the loop stands still and the relay does not answer, ``on_wait`` at every turn of a
    wait.
    """
    settings = job.recipe.exchange
    if settings.mode == "none" or relay is None:
        return Alone(settings.fragments), ""
    island = Island(
        parameters,
        settings=settings,
        steps=job.recipe.training.steps,
        own=job.window,
        seed=job.recipe.training.seed,
        run=job.run,
        config_hash=job.config_hash,
        attempt=job.attempt,
        cell=job.cell,
        num_cells=len(job.cells),
        transport=relay,
        group=ranks.group,
        journal=FileJournal(Path(folder.journal)),
        save_every=job.recipe.checkpoint.every,
        on_silence=on_silence,
        on_wait=on_wait,
    )
    return island, island.map.map_hash
