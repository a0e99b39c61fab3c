"""What a supervisor is told, and what it tells. The supervisor itself knows only the JSON (``supervisor.py``)."""

from __future__ import annotations

from typing import Literal

from islandctl.config.model import Model


def from_code(folder: str) -> dict[str, str]:
    """The variables of a Python that runs what lies in a code folder.

    It keeps nothing compiled there: on a full disk Python puts a file that was cut into its place, and then fails at
    it for ever. To compile anew takes 0.2 s.
    """
    return {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}


class RestartPolicy(Model):
    """How often, and how patiently, a child that dies is started again."""

    limit: int = 10
    """Restarts without progress in between."""
    backoff_s: float = 2.0
    backoff_limit_s: float = 60.0


class Watchdog(Model):
    """When a child counts as hung: by the pulse of its ranks (``worker/pulse.py``)."""

    least_s: float
    """Shorter silence means nothing."""
    factor: float
    """Nor does one that is shorter than so many usual steps."""


class SupervisorJob(Model):
    """``job.json``: one child to keep alive."""

    run: str
    """The run's name."""
    mark: str
    """The run's unique id; every process carries it as ISLANDCTL_RUN."""
    name: str
    """For messages: ``cell/node-0``, ``relay``, ``tunnel-…``."""
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    env_files: tuple[str, ...] = ()
    """Files (0600) that hold one JSON object of further variables: secrets travel so, never in ``env``."""
    setup: tuple[str, ...] = ()
    """POSIX sh lines run before the command, in the same shell."""
    outcome: str | None = None
    """File in which the child tells how it ended (``outcome.json``); see docs/architecture.md."""
    progress: str | None = None
    """File of JSON lines with ``attempt`` and ``step``. A new highest step is progress: the limit starts anew."""
    ranks: tuple[int, ...] = ()
    """The ranks that the child keeps; none: it keeps none."""
    ranks_ended: str | None = None
    """File in which the child tells how its ranks ended (``worker/recorded.py``); None: it is the only one itself."""
    binds: tuple[tuple[str, int], ...] = ()
    """(address, port) on which the child will listen: tried before each start, with the holder named."""
    watchdog: Watchdog | None = None
    """None: nothing counts as hung."""
    restart: RestartPolicy = RestartPolicy()
    stop_timeout_s: float = 60.0
    """Between TERM and KILL."""
    budget_s: float | None = None
    """Seconds that the job may be kept, over all supervisors of its folder; None: no limit."""


EndKind = Literal["", "crash", "out-of-memory", "preempted", "node-lost", "hung", "peer-lost"]
"""Why a child ended though nobody had asked it to, in a word. ``peer-lost``: another node's rank was first."""


class SupervisorState(Model):
    """``state.json`` joined with ``exit.json``, and whether the supervisor really runs."""

    state: Literal["absent", "pending", "starting", "running", "backoff", "stopping", "ended", "lost"]
    """``absent``: never started. ``pending``: its scheduler has yet to start it, or to start it again. ``lost``: the
    file says it runs, but no such process does (reboot, kill -9)."""
    restarts: int = 0
    child_pid: int | None = None
    supervisor_pid: int | None = None
    since: str = ""
    beat_age_s: float | None = None
    budget_left_s: float | None = None
    """Seconds; None: the job has no budget."""
    outcome: Literal["finished", "stopped", "failed"] | None = None
    """Once ended."""
    code: int | None = None
    signal: int | None = None
    kind: EndKind = ""
    """How it failed, was taken away or was lost; empty: none of that."""
    rank: int | None = None
    """The first rank that failed, where it is known."""
    reason: str = ""
    node: str = ""
    """The scheduler's own name of its node; empty: not known, or the host is the node."""
    last: str = ""
    """Why the child last ended though nobody had asked it to; empty: it never did."""
    last_kind: EndKind = ""
    """The same in a word."""
    orphans: bool | None = None
    """Only of a lost one: do processes of its job live on without it?"""

    @property
    def runs(self) -> bool:
        """Is there a supervisor at work?"""
        return self.state in ("starting", "running", "backoff", "stopping")

    @property
    def lives(self) -> bool:
        """Does it run, or will it without anybody's doing?"""
        return self.runs or self.state == "pending"

    @property
    def last_end(self) -> str:
        """``crash: exit code 3``; empty: it never ended unasked."""
        return ": ".join(filter(None, (self.last_kind, self.last)))

    @property
    def life(self) -> str:
        """Names the child's present life, as its environment does (ISLANDCTL_LIFE)."""
        return f"{self.supervisor_pid}.{self.restarts}"
