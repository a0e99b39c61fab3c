"""A run in trouble: cells in threads of one process, the relay's real rules, and mishaps at random moments.

A seed fixes what is tried. Threads take their own time, so it does not fix what comes of it; whatever comes, what
``Trouble.run`` checks must hold. ``ISLANDCTL_SEEDS=0:500 pytest tests/exchange/test_trouble.py`` tries more.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from islandctl.config.exchange import Exchange, Late, Outer
from islandctl.errors import ExchangeError, RelayError, UnreachableError
from islandctl.exchange.island import Hurried
from islandctl.exchange.state import AnchorState
from islandctl.ledger.entries import Commit, Entry, Rewind
from islandctl.ledger.packet import digest, unpack
from islandctl.relay.inprocess import InProcessRelay
from tests.exchange.toy import CONFIG, RUN, Cell, anchors, same, toy_settings

LIMIT_S = 60.0
"""A run that takes longer hangs: each takes a few seconds."""
Saved = tuple[int, dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Mishaps:
    """How often what happens: chances per step, and numbers in the whole run (rewinds, relay restarts, stops)."""

    kill: float = 0.0
    """The process dies, at any moment until its next step, and starts again from its own newest checkpoint."""
    term: float = 0.0
    """The process is asked to end, saves, and starts again from there."""
    cut: float = 0.0
    """The relay cannot be reached for up to half a second."""
    slow: float = 0.0
    """A step takes a while."""
    rewinds: int = 0
    relay_restarts: int = 0
    stops: int = 0


class Relays:
    """The relay that serves now. A restart waits for calls to end, and goes on from the archive."""

    def __init__(self, make: Callable[[InProcessRelay | None], InProcessRelay]) -> None:
        self._make = make
        self._gate = threading.Condition()
        self._calls = 0
        self._restarting = False
        self.now = make(None)

    @contextmanager
    def call(self) -> Iterator[InProcessRelay]:
        with self._gate:
            self._gate.wait_for(lambda: not self._restarting)
            self._calls += 1
            relay = self.now
        try:
            yield relay
        finally:
            with self._gate:
                self._calls -= 1
                self._gate.notify_all()

    def restart(self) -> None:
        with self._gate:
            self._restarting = True
            self._gate.wait_for(lambda: not self._calls)
            self.now = self._make(self.now)
            self._restarting = False
            self._gate.notify_all()


class Line:
    """A cell's way to the relay, cut for a while now and then."""

    def __init__(self, relays: Relays, cell: int) -> None:
        self._relays = relays
        self._cell = cell
        self.away_until = 0.0

    @contextmanager
    def _reach(self) -> Iterator[Any]:
        if time.monotonic() < self.away_until:
            raise UnreachableError("relay away")
        with self._relays.call() as relay:
            yield relay.transport(self._cell)

    def put(self, packet: bytes) -> None:
        with self._reach() as relay:
            relay.put(packet)

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        with self._reach() as relay:
            return bytes(relay.fetch(attempt, fragment, window, cell, chunk))

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        with self._reach() as relay:
            return list(relay.entries(after, min(wait_s, 0.02)))

    def register(self, step: int, manifest: str, versions: Sequence[int], attempt: int) -> None:
        with self._reach() as relay:
            relay.register_checkpoint(step, manifest, versions, attempt)


class Life:
    """One cell from the first step to the last, through its deaths."""

    def __init__(self, trouble: Trouble, number: int) -> None:
        self.trouble, self.number = trouble, number
        self.random = random.Random(trouble.seed * 100 + number)
        self.line = Line(trouble.relays, number)
        self.attempt = 1
        self.saved: Saved | None = None  # the newest of this attempt, or what the attempt began with
        self.parked_in = 0  # the attempt in which it has stopped and waits for the next one
        self.killed: list[Cell] = []
        self.cell = self._new_cell()

    def _new_cell(self) -> Cell:
        trouble = self.trouble
        return Cell(
            None,
            self.number,
            trouble.settings,
            steps=trouble.steps,
            own=trouble.owns[self.number] if trouble.owns else None,
            attempt=self.attempt,
            transport=self.line,
            num_cells=trouble.num_cells,
            save_every=trouble.every,
            journal=self.cell.journal if hasattr(self, "cell") else None,
        )

    def run(self) -> Cell:
        """To the end, whatever comes."""
        while True:
            try:
                if self._live():
                    return self.cell
                self._park()
            except (ExchangeError, RelayError):
                self.trouble.settled.wait()  # a rewind that is being written is told after this
                if self.cell not in self.killed and self.trouble.attempt == self.attempt:
                    raise
            except (RuntimeError, CancelledError):
                if self.cell not in self.killed:
                    raise
            except Hurried:
                pass
            self._reborn()

    def _reborn(self) -> None:
        self.cell.island.close()
        rewind = self.trouble.rewind
        if rewind is not None and rewind.attempt > self.attempt:
            self.attempt = rewind.attempt
            self.saved = self.trouble.checkpoints[rewind.manifests[self.number]] if rewind.manifests else None
        self.cell = self._new_cell()
        if self.saved is not None:
            self.cell.restore(self.saved)

    def _live(self) -> bool:
        """Train on. True: to the end; False: stopped together with the others."""
        cell, mishaps, roll = self.cell, self.trouble.mishaps, self.random.random
        cell.now = cell.island.resume()
        while cell.now < cell.steps:
            stop_at = cell.island.should_stop_at()
            if stop_at is not None and cell.now >= stop_at:
                self._save()
                return False
            if roll() < mishaps.kill:
                self._kill_soon()
            if roll() < mishaps.cut:
                self.line.away_until = time.monotonic() + roll() / 2
            if roll() < mishaps.slow:
                time.sleep(roll() / 20)
            hurry = roll() < mishaps.term
            if hurry:
                cell.island.hurry()
            cell.advance(cell.now + 1)
            self._check()
            if hurry:
                self._save()
                raise Hurried
            if cell.saves:
                self._save()
        for mishap, happens in ((mishaps.kill, self._kill_soon), (mishaps.term, cell.island.hurry)):
            if roll() < mishap * 5:
                happens()
        finished = cell.island.finish()
        self._check()
        if not finished:
            self._save()
            stop_at = cell.island.should_stop_at()
            if stop_at is not None and stop_at < cell.steps:
                return False
            raise Hurried
        return True

    def _kill_soon(self) -> None:
        cell = self.cell

        def kill() -> None:
            self.killed.append(cell)
            cell.island.close()

        threading.Timer(self.random.random() / 50, kill).start()

    def _save(self) -> None:
        self.saved = self.cell.save()
        step, (_, _, tensors) = self.cell.island.run_step, self.saved
        names = "".join(f"{key}{digest(tensors[key].numpy().tobytes())}" for key in sorted(tensors))
        manifest = digest(f"{self.number} {self.attempt} {step} {names}".encode())
        self.trouble.checkpoints[manifest] = self.saved
        with suppress(UnreachableError, RelayError):  # away, or the attempt is over: then it is no joint one
            self.line.register(step, manifest, self.cell.island.versions(), self.attempt)

    def _park(self) -> None:
        """Stopped: wait for the next attempt."""
        self.parked_in = self.attempt
        while self.trouble.attempt == self.attempt:
            time.sleep(0.002)

    def _check(self) -> None:
        """Whoever holds a version of a fragment holds the same bits; of a reference, both partners."""
        rounds = self.cell.island._rounds
        for p, state in enumerate(rounds.states):
            if isinstance(state, AnchorState):
                self._compare((self.attempt, p, state.version), state.base)
                continue
            flight = rounds.flights[p]
            if flight is None or flight.window > state.window:  # else: taken over late, an older one may still come
                for bit, base in enumerate(state.base):
                    pair = min(self.number, self.number ^ (1 << bit))
                    self._compare((self.attempt, p, state.version, bit, pair), base)

    def _compare(self, key: tuple[int, ...], base: dict[int, str]) -> None:
        assert self.trouble.bases.setdefault(key, dict(base)) == base, f"cell {self.number}: {key}"


class Trouble:
    """One run and its mishaps."""

    def __init__(
        self,
        seed: int,
        mishaps: Mishaps,
        *,
        settings: Exchange,
        num_cells: int = 2,
        steps: int = 40,
        every: int = 5,
        owns: Sequence[int] = (),
    ) -> None:
        self.seed, self.mishaps, self.settings = seed, mishaps, settings
        self.num_cells, self.steps, self.every, self.owns = num_cells, steps, every, owns
        self.random = random.Random(seed)
        self.checkpoints: dict[str, Saved] = {}
        self.bases: dict[tuple[int, ...], dict[int, str]] = {}
        self.rewind: Rewind | None = None
        self.settled = threading.Event()
        self.settled.set()
        self.relays = Relays(self._relay)
        self.lives = [Life(self, number) for number in range(num_cells)]

    @property
    def attempt(self) -> int:
        return 1 if self.rewind is None else self.rewind.attempt

    def _relay(self, before: InProcessRelay | None) -> InProcessRelay:
        return InProcessRelay(
            RUN,
            CONFIG,
            [f"cell-{number}" for number in range(self.num_cells)],
            self.settings.fragments,
            late=self.settings.late,
            final_window=-(-self.steps // self.settings.window) if self.settings.mode == "butterfly" else None,
            seeded=self.settings.warmup > 0,
            archive=before.archive if before else None,
        )

    def _go_back(self) -> None:
        """What ``islandctl resume`` does."""
        self.settled.clear()
        with self.relays.call() as relay:
            joint = relay.status().joint_checkpoints
            target = self.random.choice([None, *joint[-2:]]) if len(joint) < 2 else joint[-1]
            entry = (
                relay.rewind(target.step, target.manifests, target.versions)
                if target
                else relay.rewind(0, (), [0] * self.settings.fragments)
            )
        assert isinstance(entry, Rewind)
        self.rewind = entry
        self.settled.set()

    def run(self, *, equal: bool = True) -> list[Cell]:
        """Run to the end and check what must hold: no hang, no halt, equal anchors always, equal weights at last.

        Args:
            equal: whether the weights must be; not where a butterfly went on without somebody to the last.

        Returns:
            The cells as they ended.
        """
        errors: list[BaseException] = []

        def lead(life: Life) -> None:
            try:
                life.run()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=lead, args=(life,), daemon=True) for life in self.lives]
        for thread in threads:
            thread.start()
        try:
            self._disturb(threads, errors)
        finally:
            for life in self.lives:
                life.cell.island.close()
        with self.relays.call() as relay:
            assert relay.status().halted == ""
        cells = [life.cell for life in self.lives]
        for other in cells[1:] if equal else ():
            assert same(cells[0].values(), other.values()), f"seed {self.seed}: the cells end unequal"
            assert same(anchors(cells[0]), anchors(other)), f"seed {self.seed}: the cells' anchors end unequal"
        return cells

    def _disturb(self, threads: list[threading.Thread], errors: list[BaseException]) -> None:
        plan = ["rewind"] * self.mishaps.rewinds + ["restart"] * self.mishaps.relay_restarts
        plan += ["stop"] * self.mishaps.stops
        self.random.shuffle(plan)
        end, next_at = time.monotonic() + LIMIT_S, time.monotonic() + self.random.random() / 3
        while any(thread.is_alive() for thread in threads):
            if errors:
                raise errors[0]
            if time.monotonic() > end:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                raise AssertionError(f"seed {self.seed}: hangs at steps {[life.cell.now for life in self.lives]}")
            running = [life for life, thread in zip(self.lives, threads, strict=True) if thread.is_alive()]
            if running and all(life.parked_in == self.attempt for life in running) and len(running) == self.num_cells:
                self._check_stopped()
                self._go_back()
            if plan and time.monotonic() > next_at and len(running) == self.num_cells:
                next_at = time.monotonic() + self.random.random() / 3
                {"rewind": self._go_back, "restart": self.relays.restart, "stop": self._stop}[plan.pop()]()
            time.sleep(0.002)
        if errors:
            raise errors[0]

    def _stop(self) -> None:
        with self.relays.call() as relay:
            relay.stop("by the test")

    def _check_stopped(self) -> None:
        """Without cuts a stop ends in a joint checkpoint."""
        if self.mishaps.cut == 0:
            with self.relays.call() as relay:
                joint = relay.status().joint_checkpoints
            steps = {life.cell.island.run_step for life in self.lives}
            assert steps == {one.step for one in joint[-1:]}, f"seed {self.seed}: no joint checkpoint, but {steps}"

    def payloads(self) -> dict[tuple[int, int, int, int], bytes]:
        """What the commits of the last history name: (fragment, window, cell, chunk) → payload."""
        archive, found = self.relays.now.archive, {}
        for entry in archive.ledger:
            for part in entry.named if isinstance(entry, Commit) else ():
                for chunk in range(len(part.chunks)):
                    place = (entry.fragment, entry.window, part.cell, chunk)
                    found[place] = bytes(unpack(archive.packets[(entry.attempt, *place)])[1])
        return found


def settings_of(rolled: random.Random, **changes: object) -> Exchange:
    """Random settings of an exchange."""
    window = rolled.choice([4, 6, 8])
    rolls = {
        "window": window,
        "fragments": rolled.choice([1, 2, 3]),
        "overlap": rolled.choice([0, 1, 2, window - 1]),
        "codec": rolled.choice(["int8", "int4", "2bit", "bf16", "fp32"]),
        "when": rolled.choice(["fixed", "arrival"]),
        "apply": rolled.choice(["carry", "blend"]),
        "late": Late.model_validate(
            {"deadline": "150 ms", "windows": rolled.choice([1, 2]), "then": rolled.choice(["alone", "wait"])}
        ),
        "warmup": rolled.choice([0, 0, 3, 10, 13]),
        "outer": rolled.choice([Outer(), Outer(), Outer(kind="average"), Outer(kind="delayed", delay=2)]),
    }
    return toy_settings(**(rolls | changes))
