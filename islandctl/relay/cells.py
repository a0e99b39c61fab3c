"""N cells in one process: for notebooks, tests and experiments. Deterministic, whatever the loops draw and do.

Each cell's loop has its own thread, but only one of them runs at a time, step by step in turn: a loop hands over when
it calls into its island, and waits there until it is its turn again. So the loops' own work comes in one order always
(also what they draw from the process's random generators), and what the exchange does meanwhile depends on the ledger
alone. Only when cells begin at unequal steps, as after a warm-up, the order at the first meeting depends on time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from islandctl.config.exchange import Exchange
from islandctl.errors import ConfigError, IslandError
from islandctl.relay.inprocess import InProcessRelay, InProcessTransport

T = TypeVar("T")


class Turns:
    """Whose turn it is: of the cell that has made the fewest of the run's steps, and among equals of the first one.

    So no cell that is behind ever waits for one that is ahead and itself waits for it.
    """

    def __init__(self, num_cells: int) -> None:
        self._made: dict[int, float] = dict.fromkeys(range(num_cells), 0)
        """The run's steps made by every cell that has not ended, with fractions where it takes steps of its own;
        infinite while it only waits for the others."""
        self._changed = threading.Condition()

    def give(self, cell: int, made: float) -> None:
        """The cell goes into the exchange, with so many steps made."""
        with self._changed:
            self._made[cell] = made
            self._changed.notify_all()

    def take(self, cell: int, made: float) -> None:
        """It has come back: wait for its turn."""
        with self._changed:
            self._made[cell] = made
            self._changed.notify_all()
            self._changed.wait_for(lambda: min((steps, one) for one, steps in self._made.items())[1] == cell)

    def leave(self, cell: int) -> None:
        """The cell has ended."""
        with self._changed:
            del self._made[cell]
            self._changed.notify_all()


class Place(InProcessTransport):
    """One cell's place among the others: what its ``attach`` needs as ``transport``."""

    def __init__(self, relay: InProcessRelay, cell: int, turns: Turns) -> None:
        super().__init__(relay, cell)
        self._turns = turns

    @contextmanager
    def aside(self, made: float) -> Iterator[Callable[[float], None]]:
        """The others' turn, as long as this cell is in the exchange.

        Args:
            made: steps that it has made; infinite when it only waits for the others.

        Yields:
            What to call with its steps before it comes back, where they are others by then.
        """
        back = made

        def come_back(at: float) -> None:
            nonlocal back
            back = at

        self._turns.give(self.cell, made)
        try:
            yield come_back
        except BaseException:
            back = -1.0  # at once: nobody shall wait for a cell that ends
            raise
        finally:
            self._turns.take(self.cell, back)


def run_cells(
    loop: Callable[[Place], T], num_cells: int, exchange: Exchange | Mapping[str, Any], *, windows: Sequence[int] = ()
) -> list[T]:
    """Run ``loop(place)`` for every cell, and give what each returned. Twice the same gives the same bits.

    Args:
        loop: makes model and optimizer, attaches with ``transport=place``, trains. ``place.cell`` says which cell it
            is. Its first values must be the same in all cells.
        num_cells: cells.
        exchange: how they exchange: ``Exchange``, or its keys as in a recipe.
        windows: with ``pace: measured``, each cell's own steps a window.

    Raises:
        UsageError: ``exchange`` is none.
        ConfigError: no cell, a faulty exchange, or one that the number of cells or ``windows`` do not fit.
        Exception: the first that a loop raised; the other loops are ended.
    """
    if num_cells < 1:
        raise ConfigError(f"run_cells: {num_cells} cells")
    relay, turns = InProcessRelay.of(exchange, num_cells, windows=windows), Turns(num_cells)
    places = [Place(relay, cell, turns) for cell in range(num_cells)]
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(place: Place) -> None:
        turns.take(place.cell, 0)
        try:
            results[place.cell] = loop(place)
            relay.leave(place.cell)
        except BaseException as error:
            errors.append(error)
            relay.service.halt(place.cell, _reason(error))
        finally:
            turns.leave(place.cell)

    try:
        _together(
            [threading.Thread(target=run, args=(place,), daemon=True, name=f"cell-{place.cell}") for place in places]
        )
    except BaseException:  # the wait was interrupted, as by Ctrl-C in a notebook: the loops end at their next step
        relay.service.halt(0, "interrupted")
        raise
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
