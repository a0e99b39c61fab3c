"""Follows the ledger beside the training loop, and keeps the first error of the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from islandctl.errors import ConfigError, DivergenceError, ExchangeError, IslandError, UnreachableError
from islandctl.exchange.transport import Transport
from islandctl.ledger.entries import Checkpoint, Commit, Entry, Genesis, Halt, Rewind, Stop

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Length of one long poll. Also how long ``close`` may take."""
PATIENCE_S = 1.0
"""Pause before asking an unreachable relay again; the transport has its own retries inside."""


class Latch:
    """The first error of the background; threads wait here for anything to change."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = threading.Event()
        self._error: IslandError | None = None

    @property
    def error(self) -> IslandError | None:
        """The first error, if any."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Keep the error if it is the first."""
        if not isinstance(error, IslandError):
            wrapped = ExchangeError(f"the exchange's background failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        with self.changed:
            if self._error is None:
                self._error = error
            self.changed.notify_all()

    def notify(self) -> None:
        """Something changed."""
        with self.changed:
            self.changed.notify_all()

    def pause(self, seconds: float) -> bool:
        """Wait that long or until closed; True when closed."""
        return self.closed.wait(seconds)


class Follower:
    """The ledger of one attempt, as this rank has read it so far.

    Args:
        transport: where entries come from.
        run, config_hash, num_fragments, attempt: what the ledger must be of.
        cell: whose rounds count.
        latch: where errors and changes are told.
        on_commit: called in the follower's thread with the fragment of every new commit.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run: str,
        config_hash: str,
        num_fragments: int,
        attempt: int,
        cell: int,
        latch: Latch,
        on_commit: Callable[[int], None],
    ) -> None:
        self._transport = transport
        self._identity = (run, config_hash, num_fragments)
        self._attempt = attempt
        self._cell = cell
        self._latch = latch
        self._on_commit = on_commit
        self._thread: threading.Thread | None = None
        self.queues: list[deque[Commit]] = [deque() for _ in range(num_fragments)]
        """Commits of the cell's rounds that are not applied yet, per fragment: in ledger order, of pairs by window.

        A pair's rounds can be committed out of order: a partner of a later window need not wait for an earlier one's.
        """
        self.head = -1
        """Seq of the newest entry read."""
        self.caught_up = False
        """The ledger was read to its end at least once."""
        self.in_touch = True
        """The last call was answered."""
        self.silent_since = 0.0
        """When it was not: since then it is asked in vain, on the process's monotonic clock."""
        self.stop_round: Commit | None = None
        """The first commit after a stop entry."""
        self.stopping = False
        """There is a stop entry."""
        self.first_saved: Checkpoint | None = None
        """The newest checkpoint of the first cell."""
        self.stop_saved: Checkpoint | None = None
        """Its first one after a stop entry."""
        self._applied: Callable[[Commit], bool] = lambda commit: False
        self._chosen: list[int | None] = [None] * num_fragments  # stays first while later ones come in

    def start(self, applied: Callable[[Commit], bool]) -> None:
        """Begin to read. ``applied`` tells of which commits the cell has taken in before this life."""
        if self._thread is None:
            self._applied = applied
            self._thread = threading.Thread(target=self._run, name="exchange-follower", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the thread, after the latch was closed."""
        if self._thread is not None:
            self._thread.join()

    def next_commit(self, fragment: int) -> Commit | None:
        """The next commit of the fragment to be applied, if it was read."""
        queue = self.queues[fragment]
        return queue[0] if queue else None

    def pop(self, fragment: int) -> Commit:
        """The same, taken out: it is applied."""
        with self._latch.changed:
            self._chosen[fragment] = None
            return self.queues[fragment].popleft()

    def bring(self, fragment: int, seq: int) -> bool:
        """Make that entry the fragment's next commit. False: it was not read yet.

        Ranks may have read the ledger to different places; what rank 0 has chosen comes first on all.
        """
        with self._latch.changed:
            queue = self.queues[fragment]
            if not any(commit.seq == seq for commit in queue):
                return False
            self._chosen[fragment] = seq
            if queue[0].seq != seq:
                self._sort(fragment)
                self._on_commit(fragment)
            return True

    def _sort(self, fragment: int) -> None:
        chosen = self._chosen[fragment]
        ordered = sorted(self.queues[fragment], key=lambda commit: (commit.seq != chosen, commit.window))
        self.queues[fragment] = deque(ordered)

    def _run(self) -> None:
        while not self._latch.closed.is_set() and self._latch.error is None:
            asked = time.monotonic()
            try:
                entries = self._transport.entries(self.head, POLL_S if self.caught_up else 0.0)
            except UnreachableError as error:
                if self.in_touch:
                    log.warning("relay unreachable, trying on: %s", error.message)
                    self.silent_since = asked
                self.in_touch = False
                self._latch.notify()
                self._latch.pause(PATIENCE_S)
                continue
            except Exception as error:
                self._latch.fail(error)
                return
            self.in_touch = True
            try:
                for entry in entries:
                    self._read(entry)
            except Exception as error:
                self._latch.fail(error)
                return
            if not entries:
                self.caught_up = True
            self._latch.notify()

    def _read(self, entry: Entry) -> None:
        if entry.seq <= self.head:
            return
        if entry.seq != self.head + 1:
            raise ExchangeError(f"the ledger has a gap: entry {entry.seq} follows {self.head}")
        if isinstance(entry, Genesis):
            if (entry.run, entry.config_hash, entry.num_fragments) != self._identity:
                raise ConfigError(f"the relay serves run '{entry.run}' or another configuration, not this one")
        elif isinstance(entry, Rewind) and entry.attempt > self._attempt:
            raise ExchangeError(
                f"the run was rewound to step {entry.step} (attempt {entry.attempt}); "
                f"this process belongs to attempt {self._attempt}"
            )
        elif entry.attempt == self._attempt:
            self._read_present(entry)
        self.head = entry.seq

    def _read_present(self, entry: Entry) -> None:
        if isinstance(entry, Halt):
            kind = ExchangeError if entry.fragment is None else DivergenceError
            raise kind(f"the run was halted by cell {entry.cell}: {entry.reason}")
        if isinstance(entry, Stop):
            self.stopping = True
        elif isinstance(entry, Checkpoint) and entry.cell == 0:
            self.first_saved = entry
            if self.stopping and self.stop_saved is None:
                self.stop_saved = entry
        elif isinstance(entry, Commit):
            if self.stopping and self.stop_round is None:
                self.stop_round = entry
            if entry.concerns(self._cell) and not self._applied(entry):
                with self._latch.changed:
                    self.queues[entry.fragment].append(entry)
                    if entry.pair is not None:
                        self._sort(entry.fragment)
                self._on_commit(entry.fragment)
