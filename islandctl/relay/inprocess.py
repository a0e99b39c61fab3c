"""A relay inside this process: the same rounds and rules, packets and ledger in memory. For notebooks and tests."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from islandctl.config.exchange import Exchange, Late
from islandctl.config.given import exchange_of
from islandctl.errors import CheckpointError, ConfigError, ExchangeError, RelayError
from islandctl.ledger.configuration import exchange_hash
from islandctl.ledger.entries import Commit, Entry
from islandctl.ledger.packet import PacketHeader, digest, unpack
from islandctl.relay.messages import Heartbeat, RelayStatus
from islandctl.relay.models import outline
from islandctl.relay.refusal import Refusal
from islandctl.relay.service import Place, Service

POLL_S = 0.1
"""The longest wait for an entry, and with it the time that closing a cell may take."""


_NO_WINDOW = 1 << 62
"""Larger than any window's number."""


class MemoryArchive:
    """Packets and entries in dictionaries. Handing it to a new relay is what a restart does."""

    def __init__(self) -> None:
        self.packets: dict[Place, bytes] = {}
        self.ledger: list[Entry] = []

    def entries(self, after: int, limit: int) -> Sequence[Entry]:
        """Entries with seq > ``after``, at most ``limit``."""
        return self.ledger[max(0, after + 1) : max(0, after + 1) + limit]

    def append(self, entry: Entry) -> None:
        """Keep an entry."""
        self.ledger.append(entry)

    def packet_hash(self, place: Place) -> str | None:
        """blake3 of the packet there; None: nothing is."""
        packet = self.packets.get(place)
        return None if packet is None else digest(packet)

    def header(self, place: Place) -> PacketHeader:
        """The stored packet's header."""
        return unpack(self.packets[place])[0]

    def places(self, attempt: int) -> Sequence[Place]:
        """All packets of the attempt."""
        return [place for place in self.packets if place[0] == attempt]


class InProcessRelay:
    """One run's relay without sockets or files.

    Args:
        run, config_hash, cells, num_fragments: which run this is; packets of another are refused.
        late: what happens when a cell's packet does not come.
        final_window: set in a butterfly; see ``Rounds``.
        seeded: window 0 is the first cell's alone.
        archive: what a relay before this one held, to go on from there.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: str,
        config_hash: str,
        cells: Sequence[str],
        num_fragments: int,
        *,
        late: Late | None = None,
        final_window: int | None = None,
        seeded: bool = False,
        archive: MemoryArchive | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.config_hash, self.num_cells = run, config_hash, len(cells)
        self.exchange: Exchange | None = None
        """How the cells exchange, where that is all they must agree on."""
        self.windows: tuple[int, ...] = ()
        """Then also: each cell's own steps a window, where they are unequal."""
        self.archive = archive or MemoryArchive()
        self.clock = clock
        self._changed = threading.Condition()
        self._beginning = threading.Lock()
        self._begun: tuple[int, ...] = ()
        self._steps: dict[int, int] = {}
        self._left: set[int] = set()
        self._patient = (late or Late()).then == "wait"
        self.service = Service(
            self.archive,
            run=run,
            config_hash=config_hash,
            cells=cells,
            num_fragments=num_fragments,
            late=late or Late(),
            final_window=final_window,
            seeded=seeded,
            clock=clock,
        )
        self.service.on_entry(self._wake)

    @classmethod
    def of(
        cls,
        exchange: Exchange | Mapping[str, Any],
        num_cells: int,
        *,
        windows: Sequence[int] = (),
        run: str = "in-process",
    ) -> InProcessRelay:
        """A relay for cells in this process that need no recipe: they agree on the exchange alone.

        Args:
            exchange: how they exchange: ``Exchange``, or its keys as in a recipe.
            windows: with ``pace: measured``, each cell's own steps a window: there is no plan that would measure.

        Raises:
            UsageError: ``exchange`` is none.
            ConfigError: ``exchange`` is faulty, or for another number of cells; ``windows`` are missing, or not one a
                cell, or fewer steps than fragments.
        """
        exchange = exchange_of(exchange)
        if exchange.mode == "none" and num_cells > 1:
            raise ConfigError(f"exchange.mode: none is one cell alone, not {num_cells}")
        if exchange.cells not in (None, num_cells):
            raise ConfigError(f"exchange.cells: {exchange.cells}, but there are {num_cells} cells here")
        wanted = num_cells if exchange.pace == "measured" else 0
        if len(windows) != wanted:
            raise ConfigError(
                f"exchange.pace: {exchange.pace} takes {wanted} windows, one a cell, not {len(windows)}"
                if wanted
                else "windows are for exchange.pace: measured",
                hint="say how many steps each cell takes in a window: windows=(20, 40)",
            )
        if short := [one for one in windows if one < exchange.fragments]:
            raise ConfigError(f"windows: {short[0]} steps are fewer than {exchange.fragments} fragments")
        cells = [f"cell-{cell}" for cell in range(num_cells)]
        named, seeded = exchange_hash(exchange, num_cells, windows), exchange.warmup > 0
        # Nobody is lost inside one process: the last rounds of a butterfly need not wait longer than others.
        final_window = _NO_WINDOW if exchange.mode == "butterfly" else None
        relay = cls(
            run, named, cells, exchange.fragments, late=exchange.late, seeded=seeded, final_window=final_window
        )
        relay.exchange, relay.windows = exchange, tuple(windows)
        return relay

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def transport(self, cell: int) -> InProcessTransport:
        """The relay as ``cell`` sees it, for ``islandctl.attach``; fulfils ``exchange.transport.Transport``."""
        return InProcessTransport(self, cell)

    def begin(self, cell: int, versions: tuple[int, ...], steps: int) -> bool:
        """A cell begins, with these versions of the fragments: 0 each, or those of the state that it has loaded; and
        for so many steps of the run.

        States can be of an earlier relay, whose ledger is gone: this one goes on from the first cell's versions.

        Returns:
            Whether the cell's state is of an earlier relay: nothing in this one's ledger is in it.

        Raises:
            ConfigError: another cell is to end after another number of steps.
            CheckpointError: the cell's state does not go together with the others', or with what is in the ledger.
        """
        with self._beginning:
            for other, known in self._steps.items() if cell not in self._steps else ():
                if known != steps:
                    raise ConfigError(
                        f"cell {cell} is to train {steps} steps, cell {other} {known}: they would never end equal",
                        hint="attach all cells with the same steps; for unequal ones: exchange.pace: measured",
                    )
            self._steps[cell] = steps
            commits = [entry for entry in self.archive.entries(0, sys.maxsize) if isinstance(entry, Commit)]
            if not self._begun:
                self._begun = (0,) * len(versions) if commits else versions
                self.service.begin_at(self._begun)
            newest = list(self._begun)
            for commit in commits:
                newest[commit.fragment] = max(newest[commit.fragment], commit.version)
        together = zip(self._begun, versions, newest, strict=True)
        if not all(first <= own <= last for first, own, last in together):
            raise CheckpointError(
                f"cell {cell} begins with version {_listed(versions)} of its fragments, the other cells with "
                f"{_listed(newest)}",
                hint="load into all cells, or into none, what they have saved at one and the same step",
            )
        return any(versions) and versions == self._begun

    def leave(self, cell: int) -> None:
        """The cell's loop has ended: no packet of it will come any more."""
        self._left.add(cell)

    def check_others(self, cell: int) -> None:
        """While a cell waits: those that it waits for can still come, or the late policy goes on without them.

        Raises:
            ExchangeError: it would wait for ever.
        """
        if self._patient and (gone := self._left & self.service.waits_for(cell)):
            raise ExchangeError(
                f"cell {cell} waits for cell {min(gone)}, whose loop has ended before its last step",
                hint="end every loop with island.finish(); cells that are to stop early leave all at one step",
            )

    def status(self) -> RelayStatus:
        """The whole view of the run."""
        return self.service.status()

    def stop(self, reason: str) -> Entry:
        """Ask all cells to checkpoint and end."""
        return self.service.stop(reason)

    def rewind(self, step: int, manifests: Sequence[str], versions: Sequence[int]) -> Entry:
        """Begin a new attempt at a joint checkpoint.

        Raises:
            RelayError: ``not-joint``, ``invalid``.
        """
        try:
            return self.service.rewind(step, tuple(manifests), tuple(versions))
        except Refusal as refusal:
            raise _error(refusal) from refusal

    def wait(self, after: int, wait_s: float, limit: int) -> Sequence[Entry]:
        """Entries with seq > ``after``; waits for the first, and lets deadlines pass meanwhile."""
        end = self.clock() + wait_s
        while True:
            next_s = self.service.tick()
            with self._changed:
                found = self.service.entries(after, limit)
                now = self.clock()
                if found or now >= end:
                    return found
                self._changed.wait(max(0.001, end - now if next_s is None else min(end - now, next_s)))


class InProcessTransport:
    """One cell's access to an ``InProcessRelay``. Thread-safe; has the calls of ``RelayClient`` that cells use."""

    def __init__(self, relay: InProcessRelay, cell: int) -> None:
        self._relay = relay
        self._service = relay.service
        self.cell = cell
        self.run, self.config_hash, self.num_cells = relay.run, relay.config_hash, relay.num_cells
        self.exchange, self.windows = relay.exchange, relay.windows

    def put(self, packet: bytes) -> None:
        """Store one packet, once. See ``Transport.put``."""
        try:
            header, _ = unpack(packet)
        except ExchangeError as error:
            raise RelayError(error.message, code="damaged") from error
        place = (header.attempt, header.fragment, header.window, header.cell, header.chunk)
        content = bytes(packet)
        try:
            self._service.expect(place, self.cell)
            keep = self._relay.archive.packets.setdefault
            self._service.put(header, digest(content), len(content), lambda: _ignore(keep(place, content)))
        except Refusal as refusal:
            raise _error(refusal) from refusal

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        """The packet's bytes. See ``Transport.fetch``."""
        place = (attempt, fragment, window, cell, chunk)
        try:
            self._service.check_readable(place, self.cell)
        except Refusal as refusal:
            raise _error(refusal) from refusal
        packet = self._relay.archive.packets.get(place)
        if packet is None:
            raise RelayError(f"no packet of cell {cell} for fragment {fragment}, window {window}", code="unknown")
        self._service.bytes_down[self.cell] += len(packet)
        return packet

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        """See ``Transport.entries``. Waits briefly: asking again costs little here."""
        return self._relay.wait(after, min(wait_s, POLL_S), 1000)

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Tell a sign of life.

        Raises:
            RelayError: ``held_out``.
        """
        try:
            self._service.heartbeat(heartbeat)
        except Refusal as refusal:
            raise _error(refusal) from refusal

    def tell_model(self, attempt: int, parameters: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Tell what this cell's model consists of, (name, shape) pairs.

        Raises:
            RelayError: ``model``.
        """
        try:
            self._service.model(self.cell, outline(attempt, parameters))
        except Refusal as refusal:
            raise _error(refusal) from refusal

    def begin(self, versions: tuple[int, ...], steps: int) -> bool:
        """See ``InProcessRelay.begin``."""
        return self._relay.begin(self.cell, versions, steps)

    def check_others(self) -> None:
        """See ``InProcessRelay.check_others``."""
        self._relay.check_others(self.cell)

    def register_checkpoint(self, step: int, manifest: str, versions: Sequence[int], attempt: int) -> Entry:
        """Tell that a checkpoint is whole on disk.

        Raises:
            RelayError: ``stale``, ``halted``, ``invalid``.
        """
        try:
            return self._service.checkpoint(attempt, self.cell, step, manifest, tuple(versions))
        except Refusal as refusal:
            raise _error(refusal) from refusal

    def halt(self, reason: str, fragment: int | None = None, window: int | None = None) -> Entry:
        """Stop the whole run: it must not go on."""
        return self._service.halt(self.cell, reason, fragment, window)


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions))


def _ignore(_: object) -> None:
    """A lambda's value that nobody needs."""


def _error(refusal: Refusal) -> RelayError:
    return RelayError(refusal.message, code=refusal.code)
