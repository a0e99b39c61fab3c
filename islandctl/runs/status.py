"""What is known of a run at one moment: the facts as gathered, and the view that is made of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from islandctl.config.model import Model
from islandctl.fleet.job import EndKind, SupervisorState
from islandctl.relay.messages import Heartbeat, JointCheckpoint, RelayStatus

RunState = Literal[
    "launching", "pending", "running", "degraded", "waiting", "finished", "failed", "stopped", "unknown"
]
CellState = Literal[
    "launching",
    "pending",
    "starting",
    "training",
    "waiting",
    "evaluating",
    "checkpointing",
    "ending",
    "restarting",
    "away",
    "silent",
    "finished",
    "stopped",
    "failed",
    "lost",
    "unreachable",
]
"""A cell's state: its workers' own word while they run, else what its supervisors know.

``pending``: its scheduler has yet to start it, or to start it again; the detail is the scheduler's reason.
``ending``: the workers have said their last words, and what the supervisor makes of them is not known yet.
``away``: it lives, and the relay's late policy counts it as gone. ``silent``: supervised, but no word from the
workers for a while. ``lost``: the supervisor is gone without an exit record, and so are its processes (reboot,
kill -9). ``unreachable``: nobody answers, so what it does is not known.
"""


class Outcome(Model):
    """``outcome.json``: how the workers ended, in their own words."""

    outcome: Literal["finished", "stopped", "failed"]
    retry: bool = False
    reason: str = ""
    hint: str = ""
    kind: str = ""
    step: int | None = None
    rank: int | None = None
    at: float = 0.0
    """Seconds since 1970, by the node's clock."""


class NodeFacts(Model):
    """What one node said, or why it said nothing."""

    cell: int
    node: int
    state: SupervisorState | None = None
    """None: unreachable."""
    trouble: str = ""
    """Why it could not be reached."""
    outcome: Outcome | None = None
    heartbeat: Heartbeat | None = None
    """Rebuilt from the node's metrics file, when the relay cannot tell."""
    heartbeat_age_s: float | None = None
    """Since the newest line of that file."""
    lines: tuple[str, ...] = ()
    """Last log lines of the rank that failed, or of the node."""


class Facts(Model):
    """Everything that was gathered for one look at a run."""

    relay: RelayStatus | None = None
    """None: the relay did not answer."""
    relay_trouble: str = ""
    joint: JointCheckpoint | None = None
    """The newest, from the ledger's file, when the relay could not be asked."""
    relay_state: SupervisorState | None = None
    """Of the relay's own supervisor; None: not known."""
    tunnels: dict[str, SupervisorState] = Field(default_factory=dict)
    nodes: tuple[NodeFacts, ...] = ()
    launcher_alive: bool = False
    """Does the process that launches or resumes still run? Only asked while the phase is ``launching``."""
    at_work: str = ""
    """The command that holds the run's lock, as ``islandctl stop demo (process 7)``; empty: none."""


class NodeView(Model):
    """One node in the status."""

    node: int
    """Its number in the cell."""
    label: str
    """``site/host``; under Slurm ``site/node`` with Slurm's name of the node, once it is known."""
    state: Literal["absent", "pending", "starting", "running", "backoff", "stopping", "ended", "lost", "unreachable"]
    """Of its supervisor; ``pending``: not begun yet by its scheduler; ``lost``: gone without an exit record."""
    restarts: int = 0
    """By its supervisor."""
    kind: EndKind = ""
    """How it failed or was taken away, in a word; while it runs, why its workers last ended."""
    detail: str = ""
    """Why it is in this state."""


class CellView(Model):
    """One cell in the status."""

    cell: int
    """Its number."""
    name: str
    """Its name, which begins with its site."""
    site: str
    """Where it runs."""
    state: CellState
    """Its workers' own word while they run, else what the supervisors know."""
    detail: str = ""
    """One line: what it waits for, why it failed, why it cannot be reached."""
    step: int | None = None
    """Last step done, by its own number."""
    steps: int | None = None
    """Of its own in the whole run, where cells take unequal numbers of them (exchange.pace: measured); else null."""
    window: int | None = None
    """Then also: whole windows that are behind it, in which all cells are alike."""
    windows: int | None = None
    """And of the whole run."""
    bits_per_byte: tuple[tuple[int, float], ...] = ()
    """(step, held-out bits per byte), newest last."""
    loss: float | None = None
    """Training loss of the last step, nats per token."""
    tokens: int | None = None
    """Trained so far."""
    tokens_per_s: float | None = None
    """Recent mean."""
    heartbeat_age_s: float | None = None
    """Since its last sign of life."""
    rounds_sent: int | None = None
    """Rounds of which the commit names this cell."""
    rounds_late: int | None = None
    """Rounds applied after their planned step."""
    rounds_skipped: int | None = None
    """Rounds of which the commit does not name this cell."""
    restarts: int = 0
    """By the supervisors."""
    last_end: str = ""
    """Why its workers last ended though nobody had asked them to, a word (crash, out-of-memory, preempted, node-lost,
    hung, peer-lost) before the cause; empty: they never did."""
    bytes_up: int | None = None
    """Of packets to the relay, since the relay was last started."""
    bytes_down: int | None = None
    """Of packets from the relay, since the relay was last started."""
    source: Literal["relay", "files", "none"] = "none"
    """Where the figures come from."""
    nodes: tuple[NodeView, ...] = ()
    """Its nodes, in order."""


class Culprit(Model):
    """The first thing that failed; what else ended was stopped because of it."""

    site: str
    """Its site."""
    cell: str
    """Its cell."""
    node: str
    """Its node, as ``site/host``."""
    rank: int | None = None
    """Its rank, when it is known."""
    kind: EndKind = ""
    """The same in a word."""
    reason: str
    """In its own words, or its exit code or signal."""
    hint: str = ""
    """What to do."""
    lines: tuple[str, ...] = ()
    """The last lines of its log."""


class RelayView(Model):
    """The relay in the status."""

    state: Literal["answering", "unreachable", "ended", "lost", "absent"]
    """``ended``: by its supervisor's record. ``lost``: killed with its supervisor. ``absent``: never started."""
    detail: str = ""
    """Why it cannot be asked, or how it ended; empty when it was ended with the run."""
    rounds_committed: int | None = None
    """Rounds of the present attempt that moved the anchor."""
    rounds_empty: int | None = None
    """Rounds of the present attempt that nobody was counted in."""
    rounds_open: int | None = None
    """Rounds that wait for packets now."""
    ledger_seq: int | None = None
    """Number of the last ledger entry."""


class RunStatus(Model):
    """One look at a run."""

    run: str
    """Its name."""
    state: RunState
    """``unknown``: nobody answers, which is not a failure."""
    detail: str = ""
    """One line that explains the state."""
    hint: str = ""
    """The next command, when there is something to do."""
    attempt: int
    """Counts the resumes, from 1."""
    created: str
    """UTC, ISO 8601."""
    config_hash: str
    """Of what decides the result: recipe and cells."""
    step: int | None = None
    """Of the recipe's steps, where the slowest cell is."""
    steps: int
    """The recipe's, of the whole run."""
    eta_s: float | None = None
    """Until the slowest cell is through, at its present speed; null while a cell is not known to move. A budget may
    end the run before: see ``budget_step``."""
    budget_left_s: float | None = None
    """Until the budget is used up, while the workers are kept; null: there is none, or no supervisor answers."""
    budget_step: int | None = None
    """Where the budget will end the run at its present speed; null: not before its last step, or not known."""
    cells: tuple[CellView, ...]
    """In the order of their numbers."""
    relay: RelayView
    """What orders the rounds."""
    joint_checkpoint: JointCheckpoint | None = None
    """The newest."""
    culprit: Culprit | None = None
    """What failed first, when something did."""

    @property
    def ended(self) -> bool:
        """Nothing more will happen by itself."""
        return self.state in ("finished", "failed", "stopped")
