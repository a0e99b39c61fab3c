"""A cell's side of the exchange: beside the training loop, and in it only for a moment at snapshot and apply.

The loop calls ``step`` after each inner optimizer step and ``finish`` at the end. Between them the threads of
``Courier`` and ``Follower`` encode, put, fetch and compute; what they find is installed only at the step where it is
due, so that weights and checkpoints never depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from islandctl.config.exchange import Exchange
from islandctl.config.pace import Pace
from islandctl.errors import CheckpointError, ConfigError, ExchangeError
from islandctl.exchange import state as store
from islandctl.exchange.anchored import Anchored
from islandctl.exchange.courier import Courier, Identity
from islandctl.exchange.due import Due
from islandctl.exchange.follower import Follower, Latch
from islandctl.exchange.fragments import fragment_map
from islandctl.exchange.journal import Journal
from islandctl.exchange.paired import Paired
from islandctl.exchange.prepare import Preparer
from islandctl.exchange.progress import Progress
from islandctl.exchange.ranks import Ranks
from islandctl.exchange.rounds import Rounds
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.shards import Shards
from islandctl.exchange.transport import Transport
from islandctl.exchange.waiting import Waiting
from islandctl.exchange.walk import Walk
from islandctl.exchange.warmup import Warmup
from islandctl.ledger.configuration import differences, exchange_parts
from islandctl.ledger.pairs import Pairing


class Hurried(Exception):
    """The process was asked to end while it waited for the relay, before there was anything to keep."""


class Island:
    """The exchange of one cell, as one of its ranks holds it.

    Args:
        parameters: dotted name → fp32 parameter, plain or a DTensor (FSDP2). All cells begin with equal values.
        settings: the recipe's exchange.
        steps: of the run.
        own: steps of its own that this cell takes in a window; left out: as many as the run. Only with
            ``pace: measured``.
        seed: of the codecs' random bits.
        run, config_hash, attempt: what packets and ledger entries must be of.
        cell, num_cells: which cell this is, of how many.
        transport: the relay.
        group: gloo group of the cell's ranks; None for a cell of one rank.
        journal: where resolutions are kept (used by rank 0).
        save_every: steps between joint checkpoints; with ``when: arrival`` no round is applied early across one.
        deadline_grace_s: how long over a round's deadline to wait for its commit when the relay does not decide.
        on_silence: called in the loop's thread, once a wait, when it stands still and the relay does not answer.
        on_wait: called in the loop's thread, at every turn of a wait.

    Raises:
        ConfigError: the settings do not fit the model or the number of cells, or there is no exchange.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        settings: Exchange,
        steps: int,
        own: int | None = None,
        seed: int,
        run: str,
        config_hash: str,
        attempt: int,
        cell: int,
        num_cells: int,
        transport: Transport,
        group: dist.ProcessGroup | None = None,
        journal: Journal,
        save_every: int | None = None,
        deadline_grace_s: float = 30.0,
        on_silence: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        if settings.mode == "none":
            raise ConfigError("exchange.mode: 'none' exchanges nothing")
        if not 0 <= cell < num_cells:
            raise ConfigError(f"cell {cell} of {num_cells} cells")
        if own is not None and settings.pace == "equal":
            raise ConfigError(f"cell {cell}: {own} steps of its own a window, but exchange.pace is equal")
        self.cell, self._num_cells, self._settings = cell, num_cells, settings
        self.pace = Pace.of(settings, own)
        self._own = 0
        """Steps of this cell's own. All else here counts the run's."""
        self.schedule = Schedule(steps, settings.window, settings.fragments, settings.overlap, settings.warmup)
        self.map = fragment_map(
            [(name, tuple(parameter.shape)) for name, parameter in parameters.items()],
            settings.fragments,
            settings.chunk,
            settings.exact,
            placement=settings.placement,
            codec=settings.codec,
        )
        self._ranks = Ranks(group)
        self._shards = Shards(parameters, self._ranks)
        self._latch = Latch()
        self._waiting = Waiting(self._ranks, self._latch, on_wait)
        self._courier = Courier(transport, Identity(run, config_hash, attempt, cell, seed), self._latch)
        pairing = Pairing(num_cells) if settings.mode == "butterfly" else None
        kind: Callable[..., Rounds[Any, Any]] = Anchored if pairing is None else partial(Paired, pairing)
        self._rounds = kind(
            settings,
            self.schedule,
            self.map,
            cell=cell,
            num_cells=num_cells,
            ranks=self._ranks,
            shards=self._shards,
            courier=self._courier,
            latch=self._latch,
        )
        self._follower = Follower(
            transport,
            run=run,
            config_hash=config_hash,
            num_fragments=settings.fragments,
            attempt=attempt,
            cell=cell,
            latch=self._latch,
            on_commit=lambda fragment: self._preparer.begin(fragment),
        )
        self._preparer: Preparer[Any] = Preparer(
            [state.chunks for state in self._rounds.states],
            self._follower,
            self._latch,
            self._courier.fetcher,
            self._rounds.work,
        )
        self._progress = Progress(cell, self.schedule, self._rounds, self._follower, self._preparer, self._waiting)
        self._walk = Walk(self._progress, journal, attempt, self._ranks)
        self._due = Due(
            settings,
            settings.late.deadline + deadline_grace_s,
            attempt,
            progress=self._progress,
            walk=self._walk,
            ranks=self._ranks,
            latch=self._latch,
            journal=journal,
            pairing=pairing,
            save_every=save_every or steps,
            on_silence=on_silence,
        )

        self._warmup = Warmup(self._progress, self._due, self._ranks, self._latch)

    # The loop's calls

    @property
    def warming_up(self) -> bool:
        """The first cell trains alone, and this one has not got its values yet: call ``await_warmup``, not ``step``.

        Never true in the first cell, and in a run without ``exchange.warmup``.
        """
        return self._warmup.waits

    def await_warmup(self) -> int:
        """Wait for the first cell; call after ``resume``, while ``warming_up``. Collective.

        Returns:
            The cell's own step counter: the warm-up's end once the first cell's values are here; before that the step
            at which the first cell has saved a checkpoint, so that this one can save at the same step and both are
            joint; or the same as before when ``hurry`` was called.
        """
        self._start()
        self._warmup.go_on()
        return self._go_on()

    def step(self, tokens: int) -> int:
        """One inner step is done. Collective over the cell's ranks.

        What the run's steps bring that the cell reaches with it is done in their order: none, one, or several of
        them, as the cell's pace is.

        Args:
            tokens: that the whole cell trained in this step.

        Returns:
            The cell's own step counter now: one more, or further where it was put forward to meet the other cells.

        Raises:
            ExchangeError: a round cannot be carried out; also what went wrong in the background since the last call.
            DivergenceError: the cells' anchors are not the same.
        """
        if self.warming_up:
            raise ExchangeError(
                f"cell {self.cell} waits for the first cell's warm-up: await_warmup comes before step"
            )
        self._start()
        self._own += 1
        for state in self._rounds.states:
            state.tokens += tokens
        return self._go_on()

    def _go_on(self) -> int:
        """Through the run's steps that the cell has reached with its own; gives its own counter, which follows where
        the run's was put forward."""
        progress, pace = self._progress, self.pace
        reached = min(pace.run_step(self._own), self.schedule.steps)
        while progress.step < reached:
            progress.step += 1
            self._due.settle()
            self._due.begin()
            # What is due now, and left undone because the process must end, a resume waits for at this step.
            if progress.step < reached and self._rounds.due_at(progress.step) and self._waiting.hurried():
                return self._own
        beyond = pace.run_step(self._own - 1), pace.run_step(self._own + 1)
        if progress.step != reached and not beyond[0] < progress.step < beyond[1]:
            self._own = pace.at(progress.step)
        return self._own

    @property
    def run_step(self) -> int:
        """The run's step that the cell has reached: what the ledger and joint checkpoints count."""
        return self._progress.step

    def finish(self) -> bool:
        """Apply what is in flight, then exchange every fragment once more: all cells end with the same bits.

        The final rounds are exact averages of what is left (fp32, η = 1, μ = 0), residuals included: nothing is owed
        afterwards. A cell whose step counter ran ahead of its rounds (it trained on without the relay) first makes up
        for them, until all cells are at the end. A final round that nobody's packets came to is begun again under the
        next window number. Collective; blocks until the other cells are there, or the relay's late policy goes on
        without them.

        Returns:
            False when it was broken off, by ``hurry`` or because the others stop before their last step: what is
            done is in the state, and ``finish`` after a resume goes on from there.
        """
        self._start()
        self._due.settle(finishing=True)
        while not all(state.final for state in self._rounds.states):
            if self._waiting.hurried() or self._due.others_stop():
                return False
            self._due.begin_last()
            self._due.settle(finishing=True)
        self._rounds.finish()
        return True

    def should_stop_at(self) -> int | None:
        """The cell's own step at which all checkpoint and end because of a stop entry; None: go on. Equal on all
        ranks."""
        return None if self._due.stop_at is None else self.pace.own_step(self._due.stop_at)

    def hurry(self) -> None:
        """Do not stand still any more: a round that is due stays in flight, and comes with the checkpoint.

        For a process that was asked to end. Any thread or signal handler of any rank may call it; a wait ends within
        a second or so.
        """
        self._waiting.hurry = True

    def versions(self) -> tuple[int, ...]:
        """Of every fragment, the commits that its anchor contains; in a butterfly the windows behind it."""
        return tuple(state.version for state in self._rounds.states)

    def metrics(self) -> dict[str, Any]:
        """Counts and the last round's figures of each fragment; see ``Metrics``. Bytes are this rank's."""
        self._rounds.metrics.bytes_up = self._courier.bytes_up
        self._rounds.metrics.bytes_down = self._courier.bytes_down
        return self._rounds.metrics.as_dict()

    def close(self) -> None:
        """End all threads. Packets that are not put yet are in the checkpoint, or come again with the replay."""
        self._latch.fail(ExchangeError("the exchange was closed"))  # wakes a loop that still waits in another thread
        self._latch.closed.set()
        self._follower.join()
        self._courier.close()

    # Checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the state: see ``state`` for the keys. Does not wait for the network."""
        meta = {
            "step": self._progress.step,
            "own": self._own,
            "begun_at": self._progress.begun_at,
            "cell": self.cell,
            "ranks": self._ranks.size,
            "map_hash": self.map.map_hash,
            "exchange": self._kept_exchange(),
            "metrics": self._rounds.metrics.counters(),
        }
        return store.save(self._rounds.states, self._rounds.flights, meta, self._ranks.rank)

    def needs(self, key: str) -> bool:
        """Whether ``load_state_dict`` on this rank wants this key of a checkpoint."""
        kind, *rest = key.split(".")
        if kind == "meta" or (kind == "flight" and rest[1] == "snapshot"):
            return key.endswith(f".rank{self._ranks.rank}")
        p, c = int(rest[0]), int(rest[-1])
        return p < len(self._rounds.states) and any(chunk.index == c for chunk in self._rounds.states[p].chunks)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave on this rank, before ``resume`` or the first ``step``.

        The parameters themselves are loaded by the caller.

        Raises:
            CheckpointError: it belongs to another model, exchange, cell or number of ranks, or something in it is
                missing or not finite.
        """
        meta = store.load_meta(tensors, self._ranks.rank)
        mine = {"cell": self.cell, "ranks": self._ranks.size}
        exchange = self._kept_exchange()
        if other := differences(meta.get("exchange", exchange), exchange):  # states of earlier versions have none
            raise CheckpointError(
                f"cell {self.cell}: the state was saved under another exchange: {'; '.join(other)}",
                hint="go on with the exchange that it was saved under, or begin anew",
            )
        if meta.get("map_hash") != self.map.map_hash:
            raise CheckpointError(
                f"rank {self._ranks.rank}: the checkpoint is of another model "
                f"(fragment map {str(meta.get('map_hash'))[:12]}, not {self.map.map_hash[:12]})",
                hint="load it with the model that it was saved with: the same parameters, by name and shape",
            )
        for name, value in mine.items():
            if meta.get(name) != value:
                raise CheckpointError(
                    f"rank {self._ranks.rank}: the checkpoint's exchange state has {name} {meta.get(name)}, "
                    f"not {value}"
                )
        parts = [{one.name: self._shards.local(one.name) for one in each.placements} for each in self.map.fragments]
        try:
            self._rounds.flights = store.load(tensors, meta, self._rounds.states, parts, self._ranks.rank)
            self._progress.step, self._progress.begun_at = meta["step"], meta["begun_at"]
            self._own = meta["own"]
            self._rounds.metrics.restore(meta["metrics"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"rank {self._ranks.rank}: the checkpoint's exchange state is damaged") from error
        self._rounds.check_state()

    def _kept_exchange(self) -> dict[str, Any]:
        """What of the exchange a state belongs to, for one that is loaded under another."""
        parts = exchange_parts(self._settings) | {"cells": self._num_cells}
        del parts["late"]  # how long others are waited for is in no state
        return parts | ({} if self._settings.pace == "equal" else {"own window": self.pace.own})

    def change_ledger(self) -> None:
        """After ``load_state_dict``: the relay has another ledger, which goes on from this state."""
        for state in self._rounds.states:
            state.resolved_seq = -1

    def resume(self) -> int:
        """Find the way back: call once at every start, after loading whatever there is to load. Collective.

        Reads the ledger to its end (waiting for the relay if need be) and puts packets in flight again. When commits
        since the checkpoint were made without this cell it walks them, otherwise the caller repeats its steps. What
        was due at the checkpoint's own step, and was left undone because the process had to end, is done now.

        Returns:
            The cell's own step to go on from: the loaded one, or after a walk the one before the first open round.

        Raises:
            ConfigError: a parameter of a model that begins holds a value that is not finite.
            CheckpointError: the same of one that goes on.
            Hurried: asked to end while the relay did not answer.
        """
        self._rounds.check_values(self._progress.step)
        self._start()
        if not self._waiting.everywhere(lambda: self._follower.caught_up):
            raise Hurried
        (head,) = self._ranks.decide([self._follower.head])
        (walk,) = self._ranks.decide([int(self._walk.needed(head))])
        if walk and not self._walk.go(head):
            raise Hurried
        self._rounds.put_again()
        if self._progress.step < self.schedule.steps:
            self._due.settle()
            self._due.begin()
        return self._go_on()

    def _start(self) -> None:
        self._follower.start(self._rounds.applied())
