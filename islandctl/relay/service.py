"""The relay's one order of events: rounds decide, the archive makes it durable, then the state takes it in.

Everything here is serialised by one lock. The heavy part of a put (receiving, hashing, writing aside) happens before,
outside of it; see ``Archive``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from islandctl.config.budget import BY_BUDGET
from islandctl.config.exchange import Late
from islandctl.ledger.chain import START, seal
from islandctl.ledger.entries import Entry, Genesis
from islandctl.ledger.packet import PacketHeader
from islandctl.relay.messages import CellStatus, Heartbeat, RelayStatus
from islandctl.relay.models import Outline, difference
from islandctl.relay.refusal import Refusal
from islandctl.relay.rounds import Rounds, Welcome

Place = tuple[int, int, int, int, int]
"""Where a packet belongs: attempt, fragment, window, cell, chunk."""


class Archive(Protocol):
    """What keeps packets and entries. One real form (``store.py``), one in memory (``inprocess.py``).

    ``Staged`` content is what a packet is before it is accepted: a file aside, or bytes.
    """

    def entries(self, after: int, limit: int) -> Sequence[Entry]:
        """Entries with seq > ``after``, in order."""

    def append(self, entry: Entry) -> None:
        """Make the entry durable."""

    def packet_hash(self, place: Place) -> str | None:
        """blake3 of the whole packet stored there; None: nothing is."""

    def header(self, place: Place) -> PacketHeader:
        """The stored packet's header."""

    def places(self, attempt: int) -> Sequence[Place]:
        """All packets stored for the attempt."""


def now_utc() -> str:
    """ISO 8601, for people."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Service:
    """One run's relay, whatever carries its requests. Thread-safe.

    Args:
        archive: keeps packets and entries; what it holds already is taken over.
        run, config_hash, cells, num_fragments: which run this is. Must match the archive's.
        late: the late policy.
        final_window: set in a butterfly; see ``Rounds``.
        seeded: window 0 is the first cell's alone.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        archive: Archive,
        *,
        run: str,
        config_hash: str,
        cells: Sequence[str],
        num_fragments: int,
        late: Late,
        final_window: int | None = None,
        seeded: bool = False,
        clock: Callable[[], float],
    ) -> None:
        self._archive = archive
        self._clock = clock
        self._lock = threading.RLock()
        self._listeners: list[Callable[[], None]] = []
        self._heartbeats: dict[int, tuple[Heartbeat, float]] = {}
        self._still_since: dict[int, float] = {}
        self._models: dict[int, Outline] = {}
        # Traffic is counted anew with every start: of what was fetched before nothing is kept.
        self._packets: dict[int, int] = defaultdict(int)
        self.bytes_up: dict[int, int] = defaultdict(int)
        self.bytes_down: dict[int, int] = defaultdict(int)
        genesis = Genesis(
            seq=0,
            attempt=1,
            at=now_utc(),
            previous=START,
            run=run,
            config_hash=config_hash,
            cells=tuple(cells),
            num_fragments=num_fragments,
        )
        self._rounds = self._recover(Rounds(self._first(genesis), late, final_window=final_window, seeded=seeded))
        self.tick()

    def _first(self, expected: Genesis) -> Genesis:
        """The ledger's first entry, written if there is none."""
        first = self._archive.entries(-1, 1)
        if not first:
            genesis = seal(expected, START)
            self._archive.append(genesis)
            first = [genesis]
        found = first[0]
        assert isinstance(found, Genesis)
        ignored = {"at", "hash"}
        if found.model_dump(exclude=ignored) != expected.model_dump(exclude=ignored):
            raise Refusal("foreign", f"the ledger here belongs to run {found.run}, or to another configuration of it")
        return found

    def _recover(self, rounds: Rounds) -> Rounds:
        """Rebuild the state from the archive."""
        attempt = 0
        heard: dict[tuple[int, int], set[int]] = {}
        while batch := self._archive.entries(rounds.head.seq, 1000):
            for entry in batch:
                if entry.attempt != attempt:
                    attempt = entry.attempt
                    heard = self._heard(attempt)
                rounds.record(entry, _heard_in(entry, heard))
        now = self._clock()
        for place in sorted(self._archive.places(rounds.attempt)):
            _, fragment, window, cell, _ = place
            if rounds.undecided(cell, fragment, window):
                packet_hash = self._archive.packet_hash(place)
                assert packet_hash is not None
                rounds.stored(self._archive.header(place), packet_hash, now)
        return rounds

    def _heard(self, attempt: int) -> dict[tuple[int, int], set[int]]:
        heard: dict[tuple[int, int], set[int]] = defaultdict(set)
        for _, fragment, window, cell, _ in self._archive.places(attempt):
            heard[fragment, window].add(cell)
        return heard

    # Facts

    def on_entry(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after entries were written (from whichever thread wrote them)."""
        self._listeners.append(listener)

    def _write(self, draft: Entry) -> Entry:
        """Make an entry a fact. One that stands already is given back."""
        if draft.hash:
            return draft
        entry = seal(draft.model_copy(update={"at": now_utc()}), self._rounds.head.hash)
        self._archive.append(entry)
        self._rounds.record(entry)
        return entry

    def tick(self) -> float | None:
        """Write all commits that are due.

        Returns:
            Seconds until the next one may be due without any event; None: never.
        """
        with self._lock:
            wrote = False
            while commit := self._rounds.due(self._clock()):
                self._write(commit)
                wrote = True
            if wrote:
                self._tell()
            deadline = self._rounds.next_deadline()
            return None if deadline is None else max(0.0, deadline - self._clock())

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _settle(self, draft: Entry) -> Entry:
        entry = self._write(draft)
        self._tell()
        self.tick()
        return entry

    def waits_for(self, cell: int) -> set[int]:
        """See ``Rounds.waits_for``."""
        with self._lock:
            return self._rounds.waits_for(cell)

    def begin_at(self, versions: tuple[int, ...]) -> None:
        """See ``Rounds.begin_at``. Not kept by the archive."""
        with self._lock:
            self._rounds.begin_at(versions)

    # Requests

    def expect(self, place: Place, role: int | None) -> None:
        """Refuse early, before a packet's bytes are taken in, what cannot be welcome.

        Raises:
            Refusal: ``forbidden``, ``invalid``, ``halted``, ``stale``.
        """
        with self._lock:
            rounds = self._rounds
            if role != place[3]:
                raise Refusal("forbidden", f"this token may not put packets of cell {place[3]}")
            if place[3] >= rounds.num_cells or place[1] >= rounds.genesis.num_fragments:
                raise Refusal("invalid", f"the run has no cell {place[3]} or no fragment {place[1]}")
            if rounds.halted is not None:
                raise Refusal("halted", f"the run is halted: {rounds.halted.reason}")
            if place[0] != rounds.attempt:
                raise Refusal("stale", f"belongs to attempt {place[0]}, the run is at attempt {rounds.attempt}")

    def put(self, header: PacketHeader, packet_hash: str, num_bytes: int, keep: Callable[[], None]) -> Welcome:
        """Take in one packet. ``keep`` makes it durable at its place; called only when it is welcome.

        Raises:
            Refusal: see ``Rounds.judge``.
        """
        place = (header.attempt, header.fragment, header.window, header.cell, header.chunk)
        with self._lock:
            try:
                welcome = self._rounds.judge(header, packet_hash, self._archive.packet_hash(place))
            except Refusal as refusal:
                if refusal.halt is not None:
                    self._settle(refusal.halt)
                raise
            if welcome is Welcome.STORE:
                keep()
                self._packets[header.cell] += 1
                self.bytes_up[header.cell] += num_bytes
                self._rounds.stored(header, packet_hash, self._clock())
                self.tick()
            return welcome

    def check_readable(self, place: Place, role: int | None) -> None:
        """See ``Rounds.check_readable``."""
        with self._lock:
            self._rounds.check_readable(*place[:4], reader=role)

    def entries(self, after: int, limit: int) -> Sequence[Entry]:
        """Entries with seq > ``after`` in order, at most ``limit``; none when there are none yet."""
        return self._archive.entries(after, limit)

    @property
    def head_seq(self) -> int:
        """The newest entry's number."""
        return self._rounds.head.seq

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Keep a cell's sign of life; one whose budget is used up stops the run.

        Raises:
            Refusal: ``held_out``: two cells evaluate on different texts; the message names both.
        """
        with self._lock:
            cells = self._rounds.genesis.cells
            if heartbeat.cell >= len(cells):
                raise Refusal("invalid", f"the run has no cell {heartbeat.cell}")
            for cell, (other, _) in self._heartbeats.items():
                known = heartbeat.held_out_hash and other.held_out_hash and other.attempt == heartbeat.attempt
                if cell != heartbeat.cell and known and other.held_out_hash != heartbeat.held_out_hash:
                    raise Refusal(
                        "held_out",
                        f"cells {cells[cell]} and {cells[heartbeat.cell]} hold out different texts "
                        f"({other.held_out_hash[:12]}, {heartbeat.held_out_hash[:12]})",
                    )
            now, (last, _) = self._clock(), self._heartbeats.get(heartbeat.cell, (None, 0.0))
            if last is None or (last.attempt, last.step) != (heartbeat.attempt, heartbeat.step):
                self._still_since[heartbeat.cell] = now
            self._heartbeats[heartbeat.cell] = (heartbeat, now)
            rounds = self._rounds
            if heartbeat.spent and heartbeat.attempt == rounds.attempt and not (rounds.stopping or rounds.halted):
                self._settle(rounds.stop(BY_BUDGET))

    def model(self, cell: int, outline: Outline) -> None:
        """Keep what a cell's model consists of. Kept in memory only: every life of a cell tells it again.

        Raises:
            Refusal: ``model``: another cell of this attempt holds another one; the message names a parameter.
        """
        with self._lock:
            cells = self._rounds.genesis.cells
            for other, known in self._models.items():
                if other == cell or known.attempt != outline.attempt:
                    continue
                text = difference(known, outline, (cells[other], cells[cell]))
                if text:
                    raise Refusal("model", f"cells {cells[other]} and {cells[cell]} hold different models: {text}")
            self._models[cell] = outline

    def checkpoint(self, attempt: int, cell: int, step: int, manifest: str, versions: tuple[int, ...]) -> Entry:
        """See ``Rounds.checkpoint``."""
        with self._lock:
            return self._settle(self._rounds.checkpoint(attempt, cell, step, manifest, versions))

    def stop(self, reason: str) -> Entry:
        """See ``Rounds.stop``."""
        with self._lock:
            return self._settle(self._rounds.stop(reason))

    def halt(self, cell: int, reason: str, fragment: int | None = None, window: int | None = None) -> Entry:
        """See ``Rounds.halt``."""
        with self._lock:
            return self._settle(self._rounds.halt(cell, reason, fragment, window))

    def rewind(self, step: int, manifests: tuple[str, ...], versions: tuple[int, ...]) -> Entry:
        """See ``Rounds.rewind``."""
        with self._lock:
            return self._settle(self._rounds.rewind(step, manifests, versions))

    def status(self) -> RelayStatus:
        """The whole view of the run."""
        with self._lock:
            rounds = self._rounds
            last = rounds.last_commit
            return RelayStatus(
                run=rounds.genesis.run,
                config_hash=rounds.genesis.config_hash,
                attempt=rounds.attempt,
                ledger_seq=rounds.head.seq,
                ledger_hash=rounds.head.hash,
                cells=tuple(self._cell_status(cell) for cell in range(rounds.num_cells)),
                rounds_committed=rounds.counts.committed,
                rounds_empty=rounds.counts.empty,
                rounds_partial=rounds.counts.partial,
                rounds_open=rounds.num_open,
                last_commit=None
                if last is None
                else {"fragment": last.fragment, "window": last.window, "seq": last.seq},
                joint_checkpoints=tuple(rounds.joint),
                halted=rounds.halted.reason if rounds.halted else "",
                stopping=rounds.stopping is not None,
            )

    def _cell_status(self, cell: int) -> CellStatus:
        heartbeat, seen = self._heartbeats.get(cell, (None, 0.0))
        now = self._clock()
        return CellStatus(
            cell=cell,
            name=self._rounds.genesis.cells[cell],
            heartbeat=heartbeat,
            age_s=None if heartbeat is None else max(0.0, now - seen),
            still_s=None if heartbeat is None else max(0.0, now - self._still_since[cell]),
            away=self._rounds.away(cell),
            packets=self._packets[cell],
            bytes_up=self.bytes_up[cell],
            bytes_down=self.bytes_down[cell],
        )


def _heard_in(entry: Entry, heard: dict[tuple[int, int], set[int]]) -> frozenset[int]:
    if entry.kind != "commit":
        return frozenset()
    cells = frozenset(heard.get((entry.fragment, entry.window), ()))
    return cells & frozenset(entry.pair) if entry.pair else cells
