"""The workers' logs of all nodes as one stream, read by byte offsets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType

from islandctl.config.paths import log_pieces
from islandctl.errors import UsageError
from islandctl.fleet import node as nodes
from islandctl.fleet.host import Host
from islandctl.planner.plan import Plan
from islandctl.runs.merge import Line, Tail, last, merge
from islandctl.runs.reach import Reach, Say, each, told, worded
from islandctl.runs.record import NodeRecord, RunRecord

BLOCK_BYTES = 4 << 20
"""Read of one file in one round trip."""
STAMP_BYTES = 64 << 10
"""Before the first line that is shown, in which its time is looked for if it has none itself."""
_LOG = re.compile(r"rank-(\d+)|node-\d+")


class LogReader:
    """Reads the logs of a run, once or following.

    Args:
        sites, ranks: only these; empty: all. With ranks, what is printed outside of them is left out.

    Raises:
        UsageError: the run has no such site or rank.
    """

    def __init__(
        self,
        record: RunRecord,
        plan: Plan,
        say: Say,
        *,
        sites: Sequence[str] = (),
        ranks: Sequence[int] = (),
        reach: Reach | None = None,
    ) -> None:
        known = [site.name for site in plan.sites]
        for site in sites:
            if site not in known:
                raise UsageError(f"{record.run} has no site {site}", hint=f"its sites: {', '.join(known)}")
        most = max((sum(node.num_ranks for node in cell.nodes) for cell in record.cells), default=0)
        for rank in ranks:
            if rank >= most:
                raise UsageError(f"{record.run} has no rank {rank}", hint=f"its ranks: 0 to {most - 1}")
        self._record = record
        self._say = say
        self._ranks = set(ranks)
        self._nodes = [node for node in record.nodes if not sites or node.site in sites]
        self._reach = reach or Reach(plan, record.run, say)
        self._tails: dict[tuple[int, int, str], Tail] = {}
        self._lost: dict[str, str] = {}

    def __enter__(self) -> LogReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reach.close()

    @property
    def unreachable(self) -> list[str]:
        """Nodes whose logs could not be read at the last try, each with the reason."""
        return list(self._lost.values())

    def first(self, *, tail: int | None = None, since: float | None = None, final: bool = False) -> list[Line]:
        """What is in the logs now, merged in order of time.

        Args:
            tail: only the last so many lines of the whole.
            since: only lines from this time on, seconds since the epoch.
            final: nothing is read after this, so a last line without its newline counts as well.
        """
        lines = self._read(tail)
        if final:
            lines = merge([lines, *(one.rest() for one in self._tails.values())])
        if since is not None:
            lines = [line for line in lines if line.at >= since]
        return lines if tail is None else last(lines, tail)

    def more(self) -> list[Line]:
        """Lines that have become whole since the last read."""
        return self._read(None)

    def _read(self, tail: int | None) -> list[Line]:
        batches: list[list[Line]] = []
        for verdict in each(self._nodes, lambda node: self._read_node(node, tail)):
            label = verdict.item.label
            if verdict.error is not None:
                if label not in self._lost:
                    self._say(f"{told(label, verdict.error)}; reconnecting, no line will be lost")
                self._lost[label] = worded(verdict.error)
                continue
            if self._lost.pop(label, None):
                self._say(f"{label}: connected again")
            batches += verdict.value or []
        return merge(batches)

    def _read_node(self, node: NodeRecord, tail: int | None) -> list[list[Line]]:
        """Everything new in one node's files; a first read begins ``tail`` lines before each file's end."""
        host = self._reach.host(node.site, node.host)
        folder = f"{node.folder}/logs"
        (sizes,) = nodes.sizes(host, [folder])
        logs = {log: pieces for log, pieces in sorted(log_pieces(sizes).items()) if self._wanted(log)}
        names = [name for pieces in logs.values() for name in pieces]
        fresh = [name for name in names if (node.cell, node.index, name) not in self._tails]
        if fresh:
            paths = [f"{folder}/{name}" for name in fresh]
            starts = [0] * len(fresh) if tail is None else nodes.tail_offsets(host, paths, tail)
            offsets = dict(zip(fresh, starts, strict=True))
            for log, pieces in logs.items():
                self._tell_of_gap(node, log, pieces)
                before = None
                for name in pieces:
                    key = (node.cell, node.index, name)
                    if name in offsets:
                        self._tails[key] = self._tail(node, log, offsets[name], before)
                    before = self._tails[key]
            self._take_times(host, folder, [(self._tails[node.cell, node.index, name], name) for name in fresh])
        found: dict[str, list[Line]] = {name: [] for name in names}
        open_ones = names
        while open_ones:
            tails = [self._tails[node.cell, node.index, name] for name in open_ones]
            parts = [
                (f"{folder}/{name}", one.offset, BLOCK_BYTES) for name, one in zip(open_ones, tails, strict=True)
            ]
            unread = []
            for name, one, piece in zip(open_ones, tails, nodes.read_many(host, parts), strict=True):
                if piece.size < one.offset:
                    one.restart()
                    unread.append(name)
                    continue
                found[name] += one.feed(piece.offset, piece.data)
                if piece.data and one.offset < piece.size:
                    unread.append(name)
            open_ones = unread
        return [self._joined(node, pieces, found) for pieces in logs.values()]

    @staticmethod
    def _take_times(host: Host, folder: str, begun: list[tuple[Tail, str]]) -> None:
        """The times of first lines that have none, from what stands before them and is not shown."""
        late = [(tail, name, min(tail.offset, STAMP_BYTES)) for tail, name in begun if tail.offset]
        parts = [(f"{folder}/{name}", tail.offset - left, left) for tail, name, left in late]
        for (tail, _, _), piece in reversed(list(zip(late, nodes.read_many(host, parts), strict=True))):
            tail.before(piece.data)  # of the pieces of one log, the first one's counts

    def _joined(self, node: NodeRecord, pieces: list[str], found: dict[str, list[Line]]) -> list[Line]:
        """New lines of all pieces of one log as one batch, so that their order stays."""
        tails = [self._tails[node.cell, node.index, name] for name in pieces]
        for one, name in zip(tails[:-1], pieces[:-1], strict=True):
            found[name] += one.rest()  # nobody goes on with a line in a piece that was left
        return [line for name in pieces for line in found[name]]

    def _tell_of_gap(self, node: NodeRecord, log: str, pieces: list[str]) -> None:
        """A follower that was away for longer than pieces are kept cannot have read them all."""
        known = [name for cell, index, name in self._tails if (cell, index) == (node.cell, node.index)]
        mine = log_pieces(known).get(log, [])
        if mine and pieces[0] not in mine:
            self._say(f"{node.label}: {log}: what came before {pieces[0]} was removed before it could be read")

    def _wanted(self, log: str) -> bool:
        match = _LOG.fullmatch(log)
        if match is None:
            return False
        return not self._ranks or (match[1] is not None and int(match[1]) in self._ranks)

    def _tail(self, node: NodeRecord, log: str, offset: int, before: Tail | None) -> Tail:
        match = _LOG.fullmatch(log)
        rank = int(match[1]) if match and match[1] else None
        cell = self._record.cells[node.cell].name
        place = f"rank-{rank}" if rank is not None else f"node-{node.index}"
        return Tail(f"{cell}/{place}", node.site, rank, offset, before)
