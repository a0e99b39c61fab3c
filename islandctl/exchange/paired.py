"""Rounds of pairs (butterfly): no anchor that all share, no outer optimizer; partners move half-way to each other.

Cell i and its partner j know a reference R that only they share; it begins as the value that all cells begin with.
Each sends C((x − R) + e), both read x̂ = R + C(…), and then R ← ½(x̂ᵢ + x̂ⱼ). The residual e, what the codec left out,
goes with the next packet to the same partner. Values move by ½(x̂ⱼ − x̂ᵢ), whatever was trained since the snapshot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from islandctl.errors import DivergenceError
from islandctl.exchange import mixing
from islandctl.exchange.feedback import left_out
from islandctl.exchange.fragments import Chunk
from islandctl.exchange.hints import BACK
from islandctl.exchange.rounds import Rounds
from islandctl.exchange.state import Flight, PairState, base_hash
from islandctl.exchange.verdict import names
from islandctl.ledger.entries import Commit
from islandctl.ledger.pairs import Pairing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mixed:
    """One chunk's result of one commit, ready to be installed."""

    half: Tensor
    """What is added to the value."""
    middle: Tensor
    """The pair's next reference."""
    base: str
    own: Tensor
    """What this cell sent, decoded."""


class Paired(Rounds[PairState, Mixed]):
    """The butterfly mode. A version counts the windows that are behind the fragment."""

    def __init__(self, pairing: Pairing, *args: Any, **kwargs: Any) -> None:
        self._pairing = pairing
        super().__init__(*args, **kwargs)

    def _first_state(self, p: int) -> PairState:
        fragment = self._map.fragments[p]
        first = self._shards.gather(fragment)
        zeros = {c: torch.zeros_like(value) for c, value in first.items()}
        bits = range(self._pairing.num_bits)
        return PairState(
            chunks=self._shards.owned(fragment),
            reference=[dict(first) for _ in bits],
            residual=[dict(zeros) for _ in bits],
        )

    @property
    def _last(self) -> int:
        """The window of the run's last rounds: k of them, one for each bit."""
        return self._schedule.final_window + self._pairing.num_bits - 1

    # A round begins

    def _vectors(self, p: int, window: int) -> dict[int, Tensor]:
        """v = (value − reference) + β·residual; the value itself in the last rounds."""
        state, bit = self.states[p], self._pairing.bit(p, window)
        vectors, moved = self._shards.gather(self._map.fragments[p]), 0.0
        for c, value in vectors.items():
            delta = torch.sub(value, state.reference[bit][c])
            moved += float(torch.dot(delta, delta))
            if not self._schedule.is_final(window):
                left = state.residual[bit][c].mul(self._settings.beta)
                vectors[c] = mixing.owed(value, state.reference[bit][c], left)
        self._norm(p, moved)
        return vectors

    def _snapshot(self, p: int, window: int) -> dict[str, Tensor]:
        return {}

    def _base(self, p: int, window: int, chunk: int) -> tuple[int, str]:
        return window, self.states[p].base[self._pairing.bit(p, window)][chunk]

    def next_last(self) -> list[tuple[int, int]]:
        """Only those of the earliest window: a cell whose fragments are at unequal windows must keep to the order of
        all rounds. Else it can wait for a partner that waits, over others, for an earlier round of its own."""
        windows = {}
        for p, state in enumerate(self.states):
            if not state.final:
                number = state.window + 1
                regular = number <= self._schedule.last_window(p)
                windows[p] = number if regular else max(self._schedule.final_window, number)
        first = min(windows.values(), default=0)
        return [(p, window) for p, window in windows.items() if window == first and self.flights[p] is None]

    # Its commit

    def comes_next(self, p: int, commit: Commit | None) -> Commit | None:
        """Its own round's: a commit of a later window waits until the cell has come so far."""
        flight = self.flights[p]
        return commit if commit is not None and flight is not None and flight.window == commit.window else None

    def outdated(self, p: int, commit: Commit) -> bool:
        flight = self.flights[p]
        past = commit.window <= self.states[p].window and (flight is None or flight.window != commit.window)
        if past and commit.named:  # the partner has moved, this cell cannot any more
            self._latch.fail(
                DivergenceError(
                    f"cell {self._cell}, fragment {p}, window {commit.window}: committed when the cell was past it",
                    hint=BACK,
                )
            )
        return past

    def applied(self) -> Callable[[Commit], bool]:
        behind = [state.window for state in self.states]
        flown = [None if flight is None else flight.window for flight in self.flights]
        return lambda commit: commit.window <= behind[commit.fragment] and commit.window != flown[commit.fragment]

    def missed(self, commit: Commit) -> bool:
        return commit.reason == "alone" and self._cell in commit.missing

    def step_of(self, commit: Commit) -> int:
        return self._schedule.snapshot_step(commit.fragment, commit.window)

    def order(self, commit: Commit) -> tuple[int, ...]:
        return commit.window, commit.fragment

    def work(self, commit: Commit, chunk: Chunk) -> Mixed:
        """What both partners do with both packets."""
        state, c = self.states[chunk.fragment], chunk.index
        bit = self._pairing.bit(chunk.fragment, commit.window)
        reference, base = state.reference[bit][c], state.base[bit][c]
        sent = {part.cell: self._courier.fetch(commit, part, chunk, base) for part in commit.named}
        said = sent
        if not self._schedule.is_final(commit.window):
            said = {cell: mixing.told(reference, values) for cell, values in sent.items()}
        (own,) = (values for cell, values in said.items() if cell == self._cell)
        (other,) = (values for cell, values in said.items() if cell != self._cell)
        middle = mixing.midpoint(own, other)
        return Mixed(half=mixing.half_step(own, other), middle=middle, base=base_hash(middle), own=sent[self._cell])

    # A round ends

    def _version_after(self, p: int, commit: Commit) -> int:
        return commit.window + 1

    def _apply(self, p: int, commit: Commit, mine: Flight | None, results: dict[int, Mixed]) -> bool:
        last = self._schedule.is_final(commit.window)
        if names(commit, self._cell):
            self._mix(p, commit.window, mine, results)
        elif last and self._ranks.leads:
            told = "fragment %d, window %d: a last round without cell %d: the cells do not end equal"
            log.warning(told, p, commit.window, self._pairing.partner(self._cell, p, commit.window))
        if commit.window >= self._last:
            self.states[p].final = True
        return False

    @torch.no_grad()
    def _mix(self, p: int, window: int, mine: Flight | None, results: dict[int, Mixed]) -> None:
        """The commit names this cell and its partner.

        Without a flight (a walk) the packet is from an earlier life: what it had learnt is in the middle, so the
        value begins there, and what the encoding left out is gone with that life.
        """
        state, fragment, bit = self.states[p], self._map.fragments[p], self._pairing.bit(p, window)
        last = self._schedule.is_final(window)
        for c, result in results.items():
            state.reference[bit][c], state.base[bit][c] = result.middle, result.base
            if mine is None or last:
                state.residual[bit][c] = torch.zeros_like(result.own)
            else:
                state.residual[bit][c] = left_out(mine.vector[c], result.own)
        if mine is None or last:  # nothing was trained since the packet: both partners end with the same bits
            for name, middle in self._shards.scatter(fragment, state.reference[bit]):
                self._shards.local(name).copy_(middle)
        else:
            for name, half in self._shards.scatter(fragment, {c: result.half for c, result in results.items()}):
                self._shards.local(name).add_(half)
        self._measure(p, bit, mine, results)

    def finish(self) -> None:
        """The last rounds have left the mean of all cells."""

    def _measure(self, p: int, bit: int, mine: Flight | None, results: dict[int, Mixed]) -> None:
        apart = sum(float(torch.dot(result.half, result.half)) for result in results.values())
        left = sum(float(torch.dot(one, one)) for one in self.states[p].residual[bit].values())
        owed = sum(float(torch.dot(one, one)) for one in mine.vector.values()) if mine is not None else 0.0
        apart, left, owed = self._ranks.sum([apart, left, owed])
        self.metrics.distance[p] = math.sqrt(apart)
        self.metrics.residual[p] = math.sqrt(left / owed) if owed > 0 else None
