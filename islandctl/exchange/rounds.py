"""The rounds of one cell: a snapshot becomes packets, a commit becomes values. Collective over the cell's ranks.

What both modes share. ``anchored.py`` holds the rounds with one anchor for all cells, ``paired.py`` those of pairs.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from islandctl.config.exchange import Exchange
from islandctl.errors import CheckpointError, ConfigError, DivergenceError, IslandError, NotFiniteError
from islandctl.exchange.codecs import Codec, codec_named
from islandctl.exchange.courier import Assignment, Courier
from islandctl.exchange.finite import first_bad
from islandctl.exchange.follower import Latch
from islandctl.exchange.fragments import Chunk, FragmentMap
from islandctl.exchange.hints import CALMER, EARLIER
from islandctl.exchange.metrics import Metrics
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.shards import Shards
from islandctl.exchange.state import Flight, FragmentState
from islandctl.exchange.verdict import names
from islandctl.ledger.entries import Commit

State = TypeVar("State", bound=FragmentState)
Result = TypeVar("Result")
"""One chunk's result of one commit, ready to be installed."""


class Rounds(ABC, Generic[State, Result]):
    """All fragments of the cell, as this rank holds them, and what happens to them.

    When it happens is not decided here: all ranks make the same calls in the same order.
    """

    def __init__(
        self,
        settings: Exchange,
        schedule: Schedule,
        fragments: FragmentMap,
        *,
        cell: int,
        num_cells: int,
        ranks: Ranks,
        shards: Shards,
        courier: Courier,
        latch: Latch,
    ) -> None:
        self._settings = settings
        self._schedule = schedule
        self._map = fragments
        self._cell = cell
        self._alone = num_cells == 1
        self._ranks = ranks
        self._shards = shards
        self._courier = courier
        self._latch = latch
        self.metrics = Metrics(settings.fragments)
        self.states = [self._first_state(p) for p in range(settings.fragments)]
        self.flights: list[Flight | None] = [None] * settings.fragments

    # What the mode decides

    @abstractmethod
    def _first_state(self, p: int) -> State:
        """Of a run that begins: the present values are those of all cells."""

    @abstractmethod
    def _vectors(self, p: int, window: int) -> dict[int, Tensor]:
        """What this rank's chunks have to send, residual included. Collective."""

    @abstractmethod
    def _snapshot(self, p: int, window: int) -> dict[str, Tensor]:
        """What must be kept of this rank's part of the parameters until the round is applied."""

    @abstractmethod
    def _base(self, p: int, window: int, chunk: int) -> tuple[int, str]:
        """(version, hash) of what the chunk's packet builds on."""

    @abstractmethod
    def work(self, commit: Commit, chunk: Chunk) -> Result:
        """One chunk's result of a commit that names somebody. Any thread; changes nothing."""

    @abstractmethod
    def _version_after(self, p: int, commit: Commit) -> int:
        """The version to which the commit must lead."""

    @abstractmethod
    def _apply(self, p: int, commit: Commit, mine: Flight | None, results: dict[int, Result]) -> bool:
        """Change state and values. ``mine``: the cell's flight of that round. Gives: can the flight count no more?"""

    @abstractmethod
    def next_last(self) -> list[tuple[int, int]]:
        """The rounds (fragment, window) that begin next, after the last step."""

    @abstractmethod
    def finish(self) -> None:
        """All last rounds are done: the end of the run."""

    @abstractmethod
    def comes_next(self, p: int, commit: Commit | None) -> Commit | None:
        """The ledger's next commit of the fragment, when it is this cell's turn to take it."""

    @abstractmethod
    def outdated(self, p: int, commit: Commit) -> bool:
        """Whether the commit came after the cell had gone past its round, and names nobody."""

    @abstractmethod
    def missed(self, commit: Commit) -> bool:
        """Whether the commit shows that others go on without this cell."""

    @abstractmethod
    def step_of(self, commit: Commit) -> int:
        """The step that the cells of the commit have reached."""

    @abstractmethod
    def order(self, commit: Commit) -> tuple[int, ...]:
        """Sorts commits as a walk takes them."""

    @abstractmethod
    def applied(self) -> Callable[[Commit], bool]:
        """Tells of which commits the present state has taken in; later changes do not count."""

    # A cell begins

    def check_values(self, step: int) -> None:
        """Before anything is trained: every parameter is finite. Collective.

        Args:
            step: where this life begins.

        Raises:
            ConfigError: of a model that begins, when a value is not.
            CheckpointError: of one that goes on.
        """
        self._ranks.agree(self._bad_parameter(step))

    def _bad_parameter(self, step: int) -> IslandError | None:
        names = (one.name for fragment in self._map.fragments for one in fragment.placements)
        name = next((one for one in names if first_bad(self._shards.local(one)) is not None), None)
        if name is None:
            return None
        if step == 0:
            return ConfigError(
                f"cell {self._cell}: parameter '{name}' holds a value that is not finite before the first step "
                f"(rank {self._ranks.rank})",
                hint="give it first values before islandctl.attach()",
            )
        return CheckpointError(
            f"cell {self._cell}: parameter '{name}' holds a value that is not finite at step {step}, where it is to "
            f"go on (rank {self._ranks.rank})",
            hint=EARLIER,
        )

    def check_state(self) -> None:
        """Of a state that was loaded: everything that this rank holds of it is finite.

        Raises:
            CheckpointError: something is not; the message names what, and of which parameter.
        """
        for fragment, state, flight in zip(self._map.fragments, self.states, self.flights, strict=True):
            for chunk in state.chunks:
                held = state.kept(chunk.index)
                if flight is not None:
                    held |= {"vector": flight.vector[chunk.index]}
                for kind, values in held.items():
                    if (bad := first_bad(values)) is not None:
                        name = fragment.parameter_at(chunk.start + bad)
                        raise _bad_state(self._cell, kind, name, self._ranks.rank)
            for name, values in flight.snapshot.items() if flight is not None else ():
                if first_bad(values) is not None:
                    raise _bad_state(self._cell, "snapshot", name, self._ranks.rank)

    # A round begins

    def begin(self, p: int, window: int, step: int) -> None:
        """Take the snapshot and give it to the courier.

        Raises:
            NotFiniteError: a value is not finite; nothing was sent.
        """
        state = self.states[p]
        vector = self._vectors(p, window)
        self._ranks.agree(self._latch.error or self._not_finite(p, window, step, vector))
        whole = self._schedule.is_whole(window)
        flight = Flight(
            window=window,
            step=step,
            apply_at=step if whole else min(step + self._schedule.overlap, self._schedule.steps),
            tokens=state.tokens,
            snapshot=self._snapshot(p, window),
            vector=vector,
            payload={},
            started=time.monotonic(),
        )
        self.flights[p] = flight
        for chunk in state.chunks:
            flight.payload[chunk.index] = self._courier.send(
                self._assignment(p, flight, chunk), vector[chunk.index], self._codec(chunk, window)
            )

    def put_again(self) -> None:
        """Put the packets of all rounds in flight again, after a checkpoint was loaded. Not collective."""
        for p, flight in enumerate(self.flights):
            if flight is not None:
                flight.started = time.monotonic()
                for chunk in self.states[p].chunks:
                    payload = flight.payload[chunk.index].result()
                    codec = self._codec(chunk, flight.window)
                    self._courier.resend(self._assignment(p, flight, chunk), payload, codec)

    def due_at(self, step: int) -> bool:
        """Whether a round is still in flight that was due then or earlier."""
        return any(flight is not None and flight.apply_at <= step for flight in self.flights)

    def _not_finite(self, p: int, window: int, step: int, vectors: dict[int, Tensor]) -> IslandError | None:
        for chunk in self.states[p].chunks:
            if (bad := first_bad(vectors[chunk.index])) is not None:
                name = self._map.fragments[p].parameter_at(chunk.start + bad)
                return NotFiniteError(
                    f"cell {self._cell}, fragment {p}, window {window}: parameter '{name}' holds a value that is not "
                    f"finite (rank {self._ranks.rank}, step {step}); nothing was sent",
                    hint=CALMER,
                )
        return None

    def _assignment(self, p: int, flight: Flight, chunk: Chunk) -> Assignment:
        version, base = self._base(p, flight.window, chunk.index)
        num_chunks = len(self._map.fragments[p].chunks)
        return Assignment(chunk, num_chunks, flight.window, version, base, flight.step, flight.tokens)

    def _codec(self, chunk: Chunk, window: int) -> Codec:
        if self._schedule.is_whole(window):
            return codec_named("fp32")
        exact = chunk.exact and self._settings.codec != "fp32"
        if exact:
            return codec_named("bf16")
        settings = self._settings
        return codec_named(settings.codec, block=settings.block, rounding=settings.rounding)

    # A round ends

    def resolve(self, p: int, commit: Commit, results: dict[int, Result], step: int) -> None:
        """Apply the fragment's next commit.

        Args:
            results: of this rank's chunks; empty when it names nobody.
            step: inner steps done.

        Raises:
            DivergenceError: the commit's version is not this cell's next.
        """
        state, flight = self.states[p], self.flights[p]
        mine = flight if flight is not None and flight.window == commit.window else None
        expected = self._version_after(p, commit)
        if commit.version != expected:
            raise DivergenceError(
                f"cell {self._cell}, fragment {p}, window {commit.window}: the commit leads to version "
                f"{commit.version}, this cell to {expected}"
            )
        over = self._apply(p, commit, mine, results)
        if commit.named:  # counted, or dropped
            state.tokens -= mine.tokens if mine is not None else state.tokens
        if mine is not None or over:
            self.flights[p] = None
        state.window, state.version = max(state.window, commit.window), max(state.version, commit.version)
        state.resolved_seq = commit.seq
        self._courier.forget(p, commit.window)
        taken = names(commit, self._cell) or self._schedule.is_seed(commit.window)
        self.metrics.resolved(named=taken, late=mine is not None and step > mine.apply_at)

    def _norm(self, p: int, square: float) -> None:
        """Tell the norm of what the fragment has learnt; ``square`` is this rank's part. Collective."""
        (total,) = self._ranks.sum([square])
        self.metrics.norm[p] = math.sqrt(total) if math.isfinite(total) else None


def _bad_state(cell: int, kind: str, name: str, rank: int) -> CheckpointError:
    return CheckpointError(
        f"cell {cell}: the loaded state holds a value that is not finite: {kind} of parameter '{name}' (rank {rank})",
        hint=EARLIER,
    )
