"""The relay's rounds: which packets are welcome, when a round is committed, and what the commit names.

Nothing here does I/O or reads a clock. The state changes only by facts that are durable already: ``stored`` (a
packet lies on disk) and ``record`` (an entry stands in the ledger). Everything else asks the state and gives back
what should become a fact: ``judge`` for a packet that arrives, ``due`` for the next commit, ``checkpoint``, ``stop``,
``halt`` and ``rewind`` for what cells and controller ask for. So a relay that was killed at any moment is rebuilt
from its ledger and its packets, and decides as before.

When a round is committed, with K the late policy's ``windows``:

========================================  =====================================================
all members' packets are there            at once, naming all (``complete``)
all that is missing belongs to cells      ``then: alone``: at once, naming those that are there, of a pair nobody
that are away (K windows missed)          (``alone``); ``then: wait``: the round stays open until they are back
another member's packet is missing        at the deadline after the first packet: empty (``deadline``)
the fragment has moved on in another      at once: empty (``deadline``): its packets are on an old anchor
window
in a seeded run, window 0                 when the first cell's packets are there, naming it alone (``complete``);
                                          it has no deadline, and nobody else takes part
========================================  =====================================================

Who the members of a round are, and what their packets build on, is the mode's ``Rule``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from islandctl.config.exchange import Late
from islandctl.ledger.entries import Checkpoint, Commit, Contribution, Entry, Genesis, Halt, Rewind, Stop
from islandctl.ledger.joint import JointCheckpoint, Lineage
from islandctl.ledger.packet import PacketHeader
from islandctl.relay.opened import Base, Closed, Counts, OpenRound, Parts
from islandctl.relay.refusal import Refusal
from islandctl.relay.rules import Key, Pairs, Rule, Scope, SharedAnchor


class Welcome(Enum):
    """What to do with a packet that is not refused."""

    STORE = "store"
    SAME = "same"
    """The same bytes are stored already."""


class Rounds:
    """The state of all rounds of one run.

    Args:
        genesis: the ledger's first entry: run, configuration hash, cells, number of fragments.
        late: what happens when a cell's packet does not come.
        final_window: of a butterfly, the first window of its last rounds; None: all cells share one anchor.
        seeded: the rounds of window 0 are the first cell's alone: its values are where the others begin.
    """

    def __init__(
        self, genesis: Genesis, late: Late, *, final_window: int | None = None, seeded: bool = False
    ) -> None:
        self.genesis = genesis
        self.late = late
        self.num_cells = len(genesis.cells)
        self._rule: Rule = SharedAnchor(self.num_cells, late, seeded=seeded)
        if final_window is not None:
            self._rule = Pairs(self.num_cells, late, final_window)
        self.lineage = Lineage(self.num_cells)
        self.head: Entry = genesis
        self._begin(1, (0,) * genesis.num_fragments)

    def _begin(self, attempt: int, versions: tuple[int, ...]) -> None:
        self.attempt = attempt
        self._rule.begin(versions)
        self.closed: dict[Key, Closed] = {}
        self.counts = Counts()
        self.last_commit: Commit | None = None
        self.halted: Halt | None = None
        self.stopping: Stop | None = None
        self._open: dict[Key, OpenRound] = {}
        self._missed: dict[int, set[int]] = {cell: set() for cell in range(self.num_cells)}
        self._bases: dict[tuple[Scope, int], Base] = {}  # (scope, chunk) → base

    def begin_at(self, versions: tuple[int, ...]) -> None:
        """The present attempt, in which nothing has come yet, begins with these versions of the fragments."""
        self._rule.begin(versions)

    # What is true now

    @property
    def num_open(self) -> int:
        """Rounds that wait for packets."""
        return len(self._open)

    @property
    def joint(self) -> list[JointCheckpoint]:
        """The joint checkpoints that the run can go back to, oldest first."""
        return self.lineage.joint

    def away(self, cell: int) -> bool:
        """Has the cell missed so many windows that the late policy decides without it?

        A packet in an open round brings it back.
        """
        missed = len(self._missed[cell]) >= self.late.windows
        return missed and not any(cell in each.cells for each in self._open.values())

    def waits_for(self, cell: int) -> set[int]:
        """The cells whose packets are missing in open rounds that have this cell's."""
        return {other for each in self._open.values() if cell in each.cells for other in each.missing()}

    def next_deadline(self) -> float | None:
        """When ``due`` may have something new without any event, on the clock of ``stored``."""
        ends = [self._deadline(key) for key, each in self._open.items() if not all(map(self.away, each.missing()))]
        known = [end for end in ends if end is not None]
        return min(known) if known and self.halted is None else None

    def check_readable(self, attempt: int, fragment: int, window: int, cell: int, reader: int | None) -> None:
        """May ``reader`` (a cell; None: the controller) have the packet of ``cell`` now?

        Its own cell always, everyone once the round is decided. What an attempt that is over left undecided may be
        put again in the present one, so other cells get none of it.

        Raises:
            Refusal: ``early``, ``stale``.
        """
        if reader == cell or (reader is None and attempt < self.attempt):
            return
        self._check_attempt(attempt)
        if self._key(cell, fragment, window) not in self.closed:
            raise Refusal("early", f"fragment {fragment}, window {window} is not committed yet")

    def _key(self, cell: int, fragment: int, window: int) -> Key:
        return fragment, window, self._rule.members(cell, fragment, window)[0]

    # Packets

    def judge(self, header: PacketHeader, packet_hash: str, stored_hash: str | None) -> Welcome:
        """Is this packet welcome?

        Args:
            header: of the packet, whose payload matches it.
            packet_hash: blake3 of the whole packet.
            stored_hash: hash of what is stored at its place already.

        Raises:
            Refusal: ``foreign``, ``invalid``, ``halted``, ``stale``, ``exists``, ``closed``.
        """
        self._check_shape(header)
        where = f"fragment {header.fragment}, window {header.window}"
        if header.cell not in self._rule.members(header.cell, header.fragment, header.window):
            raise Refusal("invalid", f"{where}: the warm-up belongs to cell {self.genesis.cells[0]} alone")
        self._check_going()
        self._check_attempt(header.attempt)
        if stored_hash is not None:
            if stored_hash == packet_hash:
                return Welcome.SAME
            raise Refusal("exists", f"other bytes of chunk {header.chunk} are stored for {where} already")
        key = self._key(header.cell, header.fragment, header.window)
        if key in self.closed:
            raise Refusal("closed", f"{where}: committed as entry {self.closed[key].seq}, without this packet")
        if reason := self._rule.stale(header):
            raise Refusal("stale", f"{where}: {reason}")
        self._check_agrees(header, self._open.get(key))
        return Welcome.STORE

    def _check_shape(self, header: PacketHeader) -> None:
        if header.run != self.genesis.run or header.config_hash != self.genesis.config_hash:
            what = "run" if header.run != self.genesis.run else "configuration"
            raise Refusal("foreign", f"the packet belongs to another {what}")
        if header.cell >= self.num_cells:
            raise Refusal("invalid", f"cell {header.cell}: the run has cells 0 to {self.num_cells - 1}")
        if header.fragment >= self.genesis.num_fragments:
            raise Refusal("invalid", f"fragment {header.fragment}: the run has {self.genesis.num_fragments}")
        if header.chunk >= header.num_chunks:
            raise Refusal("invalid", f"chunk {header.chunk} of {header.num_chunks}")

    def _check_agrees(self, header: PacketHeader, opened: OpenRound | None) -> None:
        """With the cell's other chunks, and with what the other cells build on."""
        where = f"fragment {header.fragment}, window {header.window}, chunk {header.chunk}"
        name = self.genesis.cells[header.cell]
        if opened is not None:
            if header.version != opened.version:
                raise Refusal("stale", f"{where}: the round was opened at version {opened.version}")
            if header.num_chunks != opened.num_chunks:
                raise Refusal("invalid", f"{where}: cell {name} counts {header.num_chunks} chunks, the round has "
                              f"{opened.num_chunks}")  # fmt: skip
        base, what = self._base_of(header), self._rule.what
        if base is not None and base.base != header.base:
            other = f"{self.genesis.cells[base.cell]} (window {base.window})"
            reason = f"{where}: cells {name} and {other} build on different {what}s at version {header.version}"
            if header.version == 0:
                reason += ": they did not begin with equal values"
            if base.cell == header.cell:
                reason = f"{where}: cell {name} builds on another {what} than in window {base.window}, same version"
            raise Refusal("halted", reason, halt=self.halt(header.cell, reason, header.fragment, header.window))

    def _base_of(self, header: PacketHeader) -> Base | None:
        scope = self._rule.scope(header)
        return None if scope is None else self._bases.get((scope, header.chunk))

    def stored(self, header: PacketHeader, packet_hash: str, now: float) -> None:
        """A fact: a packet that ``judge`` welcomed (now, or before a restart) lies on disk."""
        if (scope := self._rule.scope(header)) is not None:
            self._bases.setdefault((scope, header.chunk), Base(header.base, header.cell, header.window))
        key = self._key(header.cell, header.fragment, header.window)
        if key in self.closed:
            return
        members = self._rule.members(header.cell, header.fragment, header.window)
        opened = self._open.setdefault(key, OpenRound(members, header.version, header.num_chunks, now))
        parts = opened.cells.setdefault(header.cell, Parts(header.tokens, header.step))
        # A cell that died while it put, and came back another way, may tell other counts in the rest of its chunks.
        parts.tokens, parts.step = max(parts.tokens, header.tokens), max(parts.step, header.step)
        parts.hashes[header.chunk] = packet_hash

    # Commits

    def due(self, now: float) -> Commit | None:
        """The next commit that should be written, if one is due. Ask again after it is recorded."""
        if self.halted is not None:
            return None
        for key in sorted(self._open, key=lambda key: (key[1], key[0], key[2])):
            commit = self._decide(key, now)
            if commit is not None:
                return commit
        return None

    def _decide(self, key: Key, now: float) -> Commit | None:
        opened = self._open[key]
        missing = opened.missing()
        if self._rule.left_behind(key[0], opened.version):
            return self._commit(key, (), missing, "deadline")
        there = tuple(cell for cell in opened.members if cell not in missing)
        if not missing:
            return self._commit(key, there, missing, "complete")
        if all(self.away(cell) for cell in missing):
            there = there if self._rule.partial else ()
            return self._commit(key, there, missing, "alone") if self.late.then == "alone" else None
        end = self._deadline(key)
        return self._commit(key, (), missing, "deadline") if end is not None and now >= end else None

    def _deadline(self, key: Key) -> float | None:
        wait_s = self._rule.deadline_s(key[1])
        return None if wait_s is None else self._open[key].first_at + wait_s

    def _commit(self, key: Key, there: tuple[int, ...], missing: tuple[int, ...], reason: str) -> Commit:
        opened, (fragment, window, _) = self._open[key], key
        named = tuple(
            Contribution(
                cell=cell,
                step=opened.cells[cell].step,
                tokens=opened.cells[cell].tokens,
                chunks=tuple(opened.cells[cell].hashes[chunk] for chunk in range(opened.num_chunks)),
            )
            for cell in there
        )
        version = self._rule.version_after(fragment, window, named=bool(named))
        return Commit.model_validate(
            self._draft()
            | {"fragment": fragment, "window": window, "version": version, "named": named, "missing": missing}
            | {"pair": self._rule.pair(opened.members), "reason": reason}
        )

    # What cells and controller ask for: the entry that should be written

    def checkpoint(self, attempt: int, cell: int, step: int, manifest: str, versions: tuple[int, ...]) -> Checkpoint:
        """A cell's checkpoint is whole on its disk. An entry that stands already is given back as it is.

        Raises:
            Refusal: ``invalid``, ``stale``, ``halted`` (the state may be diverged).
        """
        if len(versions) != self.genesis.num_fragments:
            raise Refusal("invalid", f"{len(versions)} versions for {self.genesis.num_fragments} fragments")
        self._check_going()
        self._check_attempt(attempt)
        known = self.lineage.registered(step, cell)
        if known is not None and (known.manifest, known.versions) == (manifest, versions):
            return known
        return Checkpoint(**self._draft(), cell=cell, step=step, manifest=manifest, versions=versions)

    def stop(self, reason: str) -> Stop:
        """The run should stop. A stop that stands already is given back as it is."""
        return self.stopping or Stop(**self._draft(), reason=reason)

    def halt(self, cell: int, reason: str, fragment: int | None = None, window: int | None = None) -> Halt:
        """The run must not go on. A halt that stands already is given back as it is."""
        return self.halted or Halt(**self._draft(), cell=cell, fragment=fragment, window=window, reason=reason)

    def rewind(self, step: int, manifests: tuple[str, ...], versions: tuple[int, ...]) -> Rewind:
        """All cells go back to a joint checkpoint; step 0 without manifests: to the beginning.

        The same rewind again, with nothing in between, is given back as it is.

        Raises:
            Refusal: ``invalid``, ``not-joint``.
        """
        head = self.head
        if isinstance(head, Rewind) and (head.step, head.manifests, head.versions) == (step, manifests, versions):
            return head
        if step == 0 and not manifests:
            if any(versions) or len(versions) != self.genesis.num_fragments:
                raise Refusal("invalid", "a rewind to the beginning takes version 0 of every fragment")
        elif not any((one.step, one.manifests, one.versions) == (step, manifests, versions) for one in self.joint):
            steps = ", ".join(str(one.step) for one in self.joint) or "none"
            raise Refusal("not-joint", f"step {step} is no joint checkpoint with these manifests (joint: {steps})")
        draft = self._draft() | {"attempt": self.attempt + 1}
        return Rewind.model_validate(draft | {"step": step, "manifests": manifests, "versions": versions})

    def _check_going(self) -> None:
        if self.halted is not None:
            raise Refusal("halted", f"the run is halted: {self.halted.reason}")

    def _check_attempt(self, attempt: int) -> None:
        if attempt != self.attempt:
            raise Refusal("stale", f"belongs to attempt {attempt}, the run is at attempt {self.attempt}")

    def _draft(self) -> dict[str, Any]:
        """What the border fills in: time and chain."""
        return {"seq": self.head.seq + 1, "attempt": self.attempt, "at": "", "previous": self.head.hash}

    # Entries

    def record(self, entry: Entry, heard: frozenset[int] = frozenset()) -> None:
        """A fact: the entry stands in the ledger.

        Args:
            entry: the ledger's newest.
            heard: for a commit that is read again after a restart: the cells that have a packet in its round.
        """
        self.head = entry
        self.lineage.add(entry)
        if isinstance(entry, Commit):
            self._record_commit(entry, heard)
        elif isinstance(entry, Rewind):
            self._begin(entry.attempt, entry.versions)
        elif isinstance(entry, Stop):
            self.stopping = entry
        elif isinstance(entry, Halt):
            self.halted = entry

    def _record_commit(self, entry: Commit, heard: frozenset[int]) -> None:
        key = (entry.fragment, entry.window, entry.pair[0] if entry.pair else 0)
        opened = self._open.pop(key, None)
        named = frozenset(one.cell for one in entry.named)
        self.closed[key] = Closed(entry.seq, entry.version, named)
        self.last_commit = entry
        if (ended := self._rule.recorded(entry)) is not None:
            self._bases = {at: base for at, base in self._bases.items() if at[0] != ended}
        for cell in heard | named | frozenset(opened.cells if opened else ()):
            self._missed[cell].clear()
        for cell in entry.missing:
            self._missed[cell].add(entry.window)
        self.counts.committed += bool(named)
        self.counts.empty += not named
        self.counts.partial += bool(named) and bool(entry.missing)

    def undecided(self, cell: int, fragment: int, window: int) -> bool:
        """Must a restart read the cell's packets of this round? When it is open, or they still bind later ones."""
        key = self._key(cell, fragment, window)
        if key not in self.closed:
            return True
        closed = self.closed[key]
        return self._rule.binds(closed.version, fragment, named=bool(closed.named))
