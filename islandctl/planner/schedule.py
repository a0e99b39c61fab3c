"""The run's own schedule, played out: cells, links, rounds, and who waits for whom.

Every cell trains at its own pace. At a snapshot a fragment enters the cell's way up, behind what is still there; its
commit comes when the last cell's packet is at the relay; then it comes down, and at snapshot + overlap the cell
stands still until it is here. Nothing fails and nothing jitters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from islandctl.config.exchange import Exchange
from islandctl.ledger.pairs import Pairing


class Runner(NamedTuple):
    """One cell as the schedule sees it."""

    step_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    code_s: float
    """Seconds to encode, decode and step a fragment's values, a byte on the wire."""


class Played(NamedTuple):
    """What came of it, in the steady state."""

    window_s: float
    """Seconds of a window."""
    computing: list[float]
    """For each cell the share of the time in which it trains."""


WARM_UP, MEASURED = 2, 3
"""Windows that are played before, and while, time is taken."""


def play(exchange: Exchange, sizes: Sequence[int], cells: Sequence[Runner]) -> Played:
    """Play some windows of ``exchange``.

    Args:
        sizes: bytes of every fragment on the wire.
        cells: in the order of their indices (butterfly pairs go by it).
    """
    if exchange.mode == "butterfly":
        return _play(exchange, sizes, cells, partners=1)
    alike = {cell: number for number, cell in enumerate(dict.fromkeys(cells))}  # equal cells do the same
    played = _play(exchange, sizes, list(alike), partners=len(cells) - 1)
    return played._replace(computing=[played.computing[alike[cell]] for cell in cells])


def _play(exchange: Exchange, sizes: Sequence[int], cells: Sequence[Runner], *, partners: int) -> Played:
    windows = WARM_UP + MEASURED
    clock = [0.0] * len(cells)
    up_free, down_free, begin = list(clock), list(clock), list(clock)
    here: dict[int, list[float]] = {}
    now = 0
    for step, kind, number in _events(exchange, windows):
        for index, cell in enumerate(cells):
            clock[index] += (step - now) * cell.step_s
        now = step
        if kind == "apply":
            for index, ready in enumerate(here.pop(number)):
                clock[index] = max(clock[index], ready)
        elif kind == "snapshot":
            window, fragment = divmod(number, exchange.fragments)
            pairing = _pairing(exchange, window, fragment, len(cells))
            here[number] = _round(sizes[fragment], cells, clock, up_free, down_free, partners, pairing)
        elif number == WARM_UP:
            begin = list(clock)
    steps = MEASURED * exchange.window
    spent = [end - start for start, end in zip(begin, clock, strict=True)]
    return Played(
        window_s=max(spent) / MEASURED,
        computing=[
            min(1.0, steps * cell.step_s / time) if time else 1.0 for cell, time in zip(cells, spent, strict=True)
        ],
    )


def _events(exchange: Exchange, windows: int) -> list[tuple[int, str, int]]:
    """(step, what, number) in order: ``snapshot`` and ``apply`` of a round (window · fragments + fragment), and
    ``window`` at the end of one. Rounds that are applied after the last window are left out."""
    length, fragments = exchange.window, exchange.fragments
    events = [((number + 1) * length, "window", number + 1) for number in range(windows)]
    for number in range(windows * fragments):
        step = number // fragments * length + (number % fragments + 1) * length // fragments
        if step + exchange.overlap <= windows * length:
            events += [(step, "snapshot", number), (step + exchange.overlap, "apply", number)]
    # what is due comes before the next snapshot; without an overlap a round is there and back within the step
    order = ("snapshot", "apply", "window") if exchange.overlap == 0 else ("apply", "snapshot", "window")
    return sorted(events, key=lambda event: (event[0], order.index(event[1]), event[2]))


def _pairing(exchange: Exchange, window: int, fragment: int, num_cells: int) -> int:
    """The bit in which partners' indices differ; 0: all cells meet."""
    if exchange.mode != "butterfly":
        return 0
    return 1 << Pairing(num_cells).bit(fragment, window)


def alone_s(size: int, partners: int, up_bytes_per_s: float, down_bytes_per_s: float, rtt_s: float) -> float:
    """Seconds of a round of ``size`` bytes for which nobody else is late and no link is busy; see ``_round``."""
    return size / up_bytes_per_s + partners * size / down_bytes_per_s + 2.5 * rtt_s


def _round(
    size: int,
    cells: Sequence[Runner],
    clock: list[float],
    up_free: list[float],
    down_free: list[float],
    partners: int,
    pairing: int,
) -> list[float]:
    """When the round's result is ready in each cell; the links are occupied until then."""
    sent = []
    for index, cell in enumerate(cells):
        up_free[index] = max(up_free[index], clock[index] + size * cell.code_s) + size / cell.up_bytes_per_s
        sent.append(up_free[index] + cell.rtt_s)
    last = max(sent)
    ready = []
    for index, cell in enumerate(cells):
        commit = max(sent[index], sent[index ^ pairing]) if pairing else last
        begins = max(down_free[index], commit + cell.rtt_s / 2)
        down_free[index] = begins + partners * size / cell.down_bytes_per_s
        ready.append(down_free[index] + cell.rtt_s + (1 + partners) * size * cell.code_s)
    return ready
