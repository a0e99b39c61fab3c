"""N cells in one process: for notebooks, tests and experiments. Deterministic, whatever the loops draw and do.

Each cell's loop has its own thread, but only one of them runs at a time, in rotation: a loop hands over when it calls
into its island, and waits there until it is its turn again. So the loops' own work comes in one order always (also
what they draw from the process's random generators), and what the exchange does meanwhile depends on the ledger
alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from islandctl.config.recipe import Exchange
from islandctl.errors import ConfigError, IslandError
from islandctl.relay.inprocess import InProcessRelay, InProcessTransport

T = TypeVar("T")


class Turns:
    """Whose turn it is. The first cell begins."""

    def __init__(self, num_cells: int) -> None:
        self._waiting = list(range(num_cells))
        """Cells that have not ended; the first one's turn it is."""
        self._changed = threading.Condition()

    def take(self, cell: int) -> None:
        """Wait for the cell's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == cell)

    def give(self, cell: int) -> None:
        """To the next."""
        with self._changed:
            self._waiting.remove(cell)
            self._waiting.append(cell)
            self._changed.notify_all()

    def leave(self, cell: int) -> None:
        """The cell has ended."""
        with self._changed:
            self._waiting.remove(cell)
            self._changed.notify_all()


class Place(InProcessTransport):
    """One cell's place among the others: what its ``attach`` needs as ``transport``."""

    def __init__(self, relay: InProcessRelay, cell: int, turns: Turns) -> None:
        super().__init__(relay, cell)
        self._turns = turns

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The others' turn, as long as this cell is in the exchange."""
        self._turns.give(self.cell)
        try:
            yield
        finally:
            self._turns.take(self.cell)


def run_cells(loop: Callable[[Place], T], num_cells: int, exchange: Exchange) -> list[T]:
    """Run ``loop(place)`` for every cell, and give what each returned. Twice the same gives the same bits.

    Args:
        loop: makes model and optimizer, attaches with ``transport=place``, trains. ``place.cell`` says which cell it
            is. Its first values must be the same in all cells.
        num_cells: cells.
        exchange: how they exchange.

    Raises:
        ConfigError: no cell.
        Exception: the first that a loop raised; the other loops are ended.
    """
    if num_cells < 1:
        raise ConfigError(f"run_cells: {num_cells} cells")
    relay, turns = InProcessRelay.of(exchange, num_cells), Turns(num_cells)
    places = [Place(relay, cell, turns) for cell in range(num_cells)]
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(place: Place) -> None:
        turns.take(place.cell)
        try:
            results[place.cell] = loop(place)
        except BaseException as error:
            errors.append(error)
            relay.service.halt(place.cell, _reason(error))
        finally:
            turns.leave(place.cell)

    _together(
        [threading.Thread(target=run, args=(place,), daemon=True, name=f"cell-{place.cell}") for place in places]
    )
    if errors:
        raise errors[0]
    return [results[cell] for cell in range(num_cells)]


def _together(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _reason(error: BaseException) -> str:
    return error.message if isinstance(error, IslandError) else f"{type(error).__name__}: {error}"
