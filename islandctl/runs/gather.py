"""Gathering facts about a run, with deadlines: a host that does not answer holds nobody up."""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Generic, TypeVar

from pydantic import ValidationError

from islandctl.config.paths import CellFolder, RunFolder, log_pieces
from islandctl.config.secrets import hide
from islandctl.errors import HostKeyError, IslandError, UnreachableError, UsageError
from islandctl.fleet import node as nodes
from islandctl.fleet import supervisor
from islandctl.fleet.host import Host
from islandctl.fleet.job import SupervisorState
from islandctl.ledger.joint import JointCheckpoint, joint_checkpoints
from islandctl.relay.glance import told_by_file
from islandctl.relay.messages import Heartbeat, RelayStatus
from islandctl.runs.cells import told_by_relay
from islandctl.runs.files import has_open, holder, only_one
from islandctl.runs.metrics import heartbeat_from, newest_time
from islandctl.runs.reach import Reach, Say, worded
from islandctl.runs.record import FAILED, FINISHED, NodeRecord, RunRecord, change, load, load_plan_of
from islandctl.runs.secrets import know
from islandctl.runs.status import Facts, NodeFacts, Outcome, RunStatus
from islandctl.runs.watch import combine
from islandctl.runs.workers import Group, groups, states_of

R = TypeVar("R")
RELAY_TIMEOUT_S = 5.0
NODE_TIMEOUT_S = 20.0
METRICS_TAIL_BYTES = 256 * 1024
LOG_TAIL_BYTES = 8 * 1024
LOG_TAIL_LINES = 12
_REPORT = "torch/distributed/elastic/multiprocessing/api.py"
_HERE = threading.BoundedSemaphore(4)
"""Questions to this very process at a time: more would only keep each other from the processor."""


class Asked(Generic[R]):
    """One question that is asked again and again, in a thread of its own that never keeps the process alive."""

    def __init__(self, ask: Callable[[], R], turn: threading.BoundedSemaphore | None = None) -> None:
        self._ask = ask
        self._turn = turn or contextlib.nullcontext()
        self._answers: queue.Queue[R | IslandError | BaseException] = queue.Queue()
        self._busy = False

    def begin(self) -> None:
        """Ask, unless the last question is still open."""
        if not self._busy:
            self._busy = True
            # not threading.Thread: that waits until each of a thousand threads has had its turn
            _thread.start_new_thread(self._run, ())

    def answer(self, deadline_s: float) -> R | IslandError | None:
        """What came back: a value or our own error; None when nothing has come within ``deadline_s`` seconds."""
        try:
            answer = self._answers.get(timeout=max(0.0, deadline_s))
        except queue.Empty:
            return None
        self._busy = False
        if isinstance(answer, BaseException) and not isinstance(answer, IslandError):
            raise answer
        return answer

    def _run(self) -> None:
        try:
            with self._turn:
                answer = self._ask()
            self._answers.put(answer)
        except BaseException as error:  # handed to the asker, who raises what is not ours
            self._answers.put(error)


class Watcher:
    """Looks at one run, once or again and again.

    Args:
        deadline_s: for one look; who has not answered by then counts as unreachable in it.
    """

    def __init__(self, record: RunRecord, say: Say, *, deadline_s: float = 15.0) -> None:
        self._record = record
        self._say = say
        self._deadline_s = deadline_s
        self._reach = Reach(None, record.run, say)
        self._silent: set[str] = set()
        self._groups: dict[Group, Asked[list[NodeFacts]]] = {}
        self._beside: dict[str, Asked[SupervisorState]] = {}
        self._relay: Asked[RelayStatus] = Asked(self._ask_relay)
        self._relay_itself: Asked[RelayStatus] = Asked(self._ask_relay_itself)
        self._joint: Asked[JointCheckpoint | None] = Asked(self._read_joint)
        self._metrics: dict[int, Asked[bytes]] = {}

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reach.close()

    @property
    def run(self) -> str:
        """The run's name."""
        return self._record.run

    def look(self) -> RunStatus:
        """One look. Never fails because somebody does not answer."""
        self._renew()
        end = time.monotonic() + self._deadline_s
        asked: list[Asked[RelayStatus] | Asked[list[NodeFacts]] | Asked[SupervisorState]]
        asked = [self._relay, *self._groups.values(), *self._beside.values()]
        for one in asked:
            one.begin()
        relay = self._relay.answer(min(RELAY_TIMEOUT_S + 1.0, end - time.monotonic()))
        beats, joint = self._from_files(relay if isinstance(relay, RelayStatus) else None, end)
        seen = []
        for group, slot in self._groups.items():
            for node in self._facts(group, slot.answer(end - time.monotonic())):
                beat, age = beats.get(node.cell, (None, None)) if node.node == 0 else (None, None)
                seen.append(node.model_copy(update={"heartbeat": beat, "heartbeat_age_s": age}))
        if isinstance(relay, RelayStatus) and before_the_end(relay, seen, self._record.attempt):
            self._relay_itself.begin()
            last = self._relay_itself.answer(min(RELAY_TIMEOUT_S + 1.0, end - time.monotonic()))
            relay = last if isinstance(last, RelayStatus) else relay
        kept = {name: slot.answer(end - time.monotonic()) for name, slot in self._beside.items()}
        states = {name: state for name, state in kept.items() if isinstance(state, SupervisorState)}
        launcher_alive, at_work = self._launcher_lives(), holder(self._lock)
        busy = {"launching": launcher_alive, "stopping": bool(at_work)}
        if not busy.get(self._record.phase, True) and load(self.run).phase != self._record.phase:
            return self.look()  # it has come to its end in good order since this look began
        facts = Facts(
            joint=joint,
            relay=relay if isinstance(relay, RelayStatus) else None,
            relay_trouble="" if isinstance(relay, RelayStatus) else _trouble(relay, "the relay", RELAY_TIMEOUT_S),
            relay_state=states.pop("relay", None),
            tunnels=states,
            nodes=tuple(seen),
            launcher_alive=launcher_alive,
            at_work=at_work,
        )
        status = combine(self._record, facts)
        self._keep_end(status)
        return status

    def _keep_end(self, status: RunStatus) -> None:
        """Into the record: how the run came out, once the supervisors of all its nodes have said so."""
        record = self._record
        told = all(node.state in ("ended", "lost") for cell in status.cells for node in cell.nodes)
        if not (status.ended and told and record.phase == "launched" and not record.reason):
            return
        stopped = status.detail or "stopped"
        seen = {"finished": FINISHED, "failed": f"{FAILED}{status.detail}"}.get(status.state, stopped)
        with contextlib.suppress(IslandError, OSError), only_one(self._lock, f"islandctl status {self.run}"):
            record = load(self.run)
            if (record.phase, record.attempt) == ("launched", self._record.attempt):
                self._record = change(record, reason=seen)

    def _renew(self) -> None:
        """Read the record again: during a launch its nodes, relay and tunnels become known one after another."""
        self._record = load(self._record.run)
        known = {node for group in self._groups for node in group}
        for group in groups(self._record, [node for node in self._record.nodes if node not in known], self._reach):
            self._groups[group] = self._ask_group(group)
        for node in self._record.nodes:
            if node.index == 0 and node.cell not in self._metrics:
                self._metrics[node.cell] = self._ask_metrics(node)
        for name, place in self._kept().items():
            if name not in self._beside:
                self._beside[name] = self._ask_about(*place)

    def _kept(self) -> dict[str, tuple[str, str]]:
        """Relay and tunnels by name: (host, the supervisor's folder)."""
        relay = self._record.relay
        kept = {"relay": (relay.host, relay.folder)} if relay else {}
        tunnels = RunFolder.of(self._record.run).tunnels
        return kept | {f"tunnel {one.name}": ("", str(tunnels / one.name)) for one in self._record.tunnels}

    def _facts(self, group: Group, answer: list[NodeFacts] | IslandError | None) -> list[NodeFacts]:
        label = group[0].label
        if isinstance(answer, list):
            if label in self._silent:
                self._silent.discard(label)
                self._say(f"{label}: answers again")
            return answer
        if label not in self._silent:
            self._silent.add(label)
            refused = worded(answer) if isinstance(answer, HostKeyError) else ""
            self._say(refused or f"{label}: no answer; reconnecting")
        trouble = _trouble(answer, label, self._deadline_s)
        return [NodeFacts(cell=node.cell, node=node.index, trouble=trouble) for node in group]

    def _from_files(
        self, relay: RelayStatus | None, end: float
    ) -> tuple[dict[int, tuple[Heartbeat, float | None]], JointCheckpoint | None]:
        """What the relay has not told: figures of cells and their age, by cell, and the newest joint checkpoint.

        The age is by this machine's clock, which a launch holds against the sites'. A cell that has come back, or
        comes back to a new attempt, has told the relay nothing yet.
        """
        record = self._record
        slots = {cell: slot for cell, slot in self._metrics.items() if not told_by_relay(relay, cell, record.attempt)}
        for slot in slots.values():
            slot.begin()
        if relay is None:
            self._joint.begin()
        answers = {cell: slot.answer(end - time.monotonic()) for cell, slot in slots.items()}
        told = relay.joint_checkpoints[-1] if relay is not None and relay.joint_checkpoints else None
        joint = self._joint.answer(end - time.monotonic()) if relay is None else told
        newest = joint if isinstance(joint, JointCheckpoint) else None
        begins_at = newest.step if newest is not None and record.attempt > 1 else 0
        now, beats = time.time(), {}
        for cell, content in answers.items():
            if not isinstance(content, bytes):
                continue
            own_step = record.cells[cell].own_step
            beat = heartbeat_from(
                content,
                cell=cell,
                attempt=record.attempt,
                steps=own_step(record.steps),
                begins_at=own_step(begins_at),
            )
            at = newest_time(content)
            if beat is not None:
                beats[cell] = (beat, None if at is None else max(0.0, now - at))
        return beats, newest

    def _ask_metrics(self, node: NodeRecord) -> Asked[bytes]:
        path = str(CellFolder(PurePosixPath(node.cell_folder)).metrics)
        return Asked(lambda: nodes.read_tail(self._reach.host(node.site, node.host), path, METRICS_TAIL_BYTES))

    @property
    def _lock(self) -> Path:
        return RunFolder.of(self._record.run).root / "lock"

    def _launcher_lives(self) -> bool:
        """Does the process that launches or resumes live? Soon after its first record it holds the run's lock."""
        pid = self._record.launcher_pid
        lives = pid > 0 and supervisor.birth(pid) is not None  # one that only waits to be reaped does not
        return lives and (has_open(pid, self._lock) or not self._lock.exists())

    def _read_joint(self) -> JointCheckpoint | None:
        from islandctl.runs.checkpoints import ledger_from_file

        entries = ledger_from_file(self._record, self._reach)
        joint = joint_checkpoints(entries, len(self._record.cells))
        return joint[-1] if joint else None

    def _ask_relay(self) -> RelayStatus:
        relay = self._record.relay
        if relay is not None and not relay.host:  # here: its files say more quickly what it would answer
            state = nodes.state(self._reach.beside(""), relay.folder).state
            if state in ("absent", "ended"):
                raise UnreachableError("the relay has ended")
            told = told_by_file(Path(relay.folder).parent, time.time()) if state == "running" else None
            if told is not None:
                return told
        return self._ask_relay_itself()

    def _ask_relay_itself(self) -> RelayStatus:
        from islandctl.runs.relay import client  # it loads an HTTP library

        with client(self._record, timeout_s=RELAY_TIMEOUT_S) as asked:
            return asked.status()

    def _ask_about(self, host: str, folder: str) -> Asked[SupervisorState]:
        return Asked(lambda: nodes.state(self._reach.beside(host), folder))

    def _ask_group(self, group: Group) -> Asked[list[NodeFacts]]:
        def look() -> list[NodeFacts]:
            states = states_of(group, self._reach)
            return [self._look_at(node, state) for node, state in zip(group, states, strict=True)]

        return Asked(look, None if group[0].host else _HERE)

    def _look_at(self, node: NodeRecord, state: SupervisorState) -> NodeFacts:
        host = self._reach.host(node.site, node.host)
        folder = CellFolder(PurePosixPath(node.cell_folder))
        outcome = read_outcome(host, str(folder.outcome)) if state.state in ("ended", "lost") else None
        lines = self._last_lines(host, node, state, outcome) if state.outcome == "failed" else ()
        return NodeFacts(cell=node.cell, node=node.index, state=state, outcome=outcome, lines=lines)

    def _last_lines(
        self, host: Host, node: NodeRecord, state: SupervisorState, outcome: Outcome | None
    ) -> tuple[str, ...]:
        """The end of the log of the rank that failed, or of what was printed outside of them."""
        first = sum(one.num_ranks for one in self._record.cells[node.cell].nodes[: node.index])
        ranks = range(first, first + node.num_ranks)
        (sizes,) = nodes.sizes(host, [f"{node.folder}/logs"])
        newest = {log: pieces[-1] for log, pieces in log_pieces(sizes).items()}
        # a rank that was killed has said nothing, and its last lines tell what it was at
        named = [state.rank, outcome.rank if outcome else None]
        logs = [f"rank-{rank}" for rank in named if rank is not None and rank in ranks]
        logs.append(f"node-{node.index}")
        if outcome is None and state.code and state.signal is None:  # it ended before it came to a log of its own
            logs.reverse()
        for log in logs:
            if log not in newest:
                continue
            content = nodes.read_tail(host, f"{node.folder}/logs/{newest[log]}", LOG_TAIL_BYTES)
            lines = [line for line in content.decode(errors="replace").splitlines() if line.strip()]
            lines = lines[: _report_at(lines)]
            if lines:
                with contextlib.suppress(UsageError):  # else nobody knows which secrets there are
                    know(load_plan_of(self._record))
                return tuple(map(hide, lines[-LOG_TAIL_LINES:]))
        return ()


def before_the_end(relay: RelayStatus, nodes: list[NodeFacts], attempt: int) -> bool:
    """Has a cell ended in good order since the relay's file was written? It has told the relay so before."""
    ended = {node.cell for node in nodes if node.state and node.state.outcome in ("finished", "stopped")}
    beats = [relay.cells[cell].heartbeat for cell in ended if cell < len(relay.cells)]
    return any(beat and beat.attempt == attempt and beat.state not in ("finished", "stopped") for beat in beats)


def _report_at(lines: list[str]) -> int:
    """Where torchrun's last report begins, which names no cause."""
    return next((at for at in reversed(range(len(lines))) if _REPORT in lines[at]), len(lines))


def read_outcome(host: Host, path: str) -> Outcome | None:
    """A cell's ``outcome.json``; None when there is none or it is cut."""
    content = nodes.read_tail(host, path, 64 * 1024)
    try:
        return Outcome.model_validate_json(content)
    except ValidationError:
        return None


def _trouble(answer: object, who: str, deadline_s: float) -> str:
    return worded(answer) if isinstance(answer, IslandError) else f"{who}: no answer within {deadline_s:g} s"
