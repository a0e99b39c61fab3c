"""What a check is: a question about a node, a cell, a site's link or all sites, and the verdict that answers it.

    class Fans(NodeCheck):
        name, tier, title = "fans", "quick", "the fans turn"
        threshold, source = "at least 1000 rpm", "the vendor's manual"
        remedy = "open the case"

        def look(self, node: Node) -> Verdict:
            return judge_fans(node.tool(["ipmitool", "sensor"]).text)

What runs on a node is a tool or a small program; what its output means is a pure function beside the class, so that
recorded outputs can test it. Checks of others come in through the entry point group ``islandctl.checks``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from islandctl.config.site import SiteProfile
from islandctl.fleet.host import Host

Level = Literal["ok", "warn", "fail", "skipped", "unknown"]
"""``unknown``: no answer, so nobody knows. ``skipped``: not asked, and the text says why; never a pass."""
Tier = Literal["quick", "standard", "deep"]
"""Seconds, two minutes, as long as it takes."""
Scope = Literal["node", "cell", "site", "link", "fleet"]
Kind = Literal["host", "login", "job"]
"""Of a node: it stands in the profile; so does a login node, but trains nothing; or Slurm has chosen it for a job."""
TIERS: tuple[Tier, ...] = ("quick", "standard", "deep")
SCOPES: tuple[Scope, ...] = ("node", "cell", "site", "link", "fleet")
CPU = "cpu"
START_S = 15.0
"""Over a program's own time: for a Python to start on a busy node."""


@dataclass(frozen=True)
class Verdict:
    """What a check says of one place."""

    level: Level
    text: str
    """What was found, one line."""
    value: float | None = None
    """The figure behind it, in ``unit``."""
    unit: str = ""
    threshold: str = ""
    """What the figure was held against here; empty: the check's own words."""
    hint: str = ""
    """What to type or do next; empty: the check's remedy, where something is wrong."""
    place: str = ""
    """Where, if not the place that the check was asked about."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Keys of the site profile → what was measured, in base units (bit/s, B/s, s, B, FLOP/s)."""


Verdicts: TypeAlias = Verdict | Sequence[Verdict]


def ok(text: str, **more: Any) -> Verdict:
    """As it should be."""
    return Verdict("ok", text, **more)


def warn(text: str, **more: Any) -> Verdict:
    """It will run, but not as it should."""
    return Verdict("warn", text, **more)


def fail(text: str, **more: Any) -> Verdict:
    """A run here would fail, or train wrongly."""
    return Verdict("fail", text, **more)


def skipped(reason: str, **more: Any) -> Verdict:
    """Not asked."""
    return Verdict("skipped", reason, **more)


def unknown(reason: str, **more: Any) -> Verdict:
    """Asked without an answer."""
    return Verdict("unknown", reason, **more)


@dataclass(frozen=True)
class Wanted:
    """What the plan asks of a site; what is None is not known."""

    checkpoint_bytes: float | None = None
    """Of one checkpoint of one cell."""
    cells: int = 1
    """On this site."""
    precision: str = "float32"
    matrix_flops: float | None = None
    """Best known bf16 matrix rate of one accelerator, FLOP/s."""
    relay_address: str | None = None
    """Where the sites reach the relay directly; None: through tunnels."""
    seconds: float | None = None
    """For how long each rate is measured; None: as the tier says."""


@dataclass(frozen=True)
class Tool:
    """What a command of the node said."""

    code: int
    out: str
    err: str
    path: str
    """The PATH that it was looked for in."""
    missing: bool = False
    late: bool = False

    @property
    def text(self) -> str:
        """Everything that it wrote."""
        return self.out + self.err


@dataclass(eq=False)
class Node:
    """One node as a check sees it. ``facts`` keep what a check has learnt, for those after it.

    How it is reached is the business of ``open``: over SSH, on this machine, in a job of a scheduler.
    """

    site: SiteProfile
    name: str
    """The host as written in the profile, or the node's name in Slurm; empty: this machine."""
    ranks: int
    """Of the run, on this node."""
    open: Callable[[], Host]
    """Connects at the first call."""
    tier: Tier = "quick"
    wanted: Wanted = Wanted()
    known_hosts: Path = Path("known_hosts")
    """islandctl's own."""
    facts: dict[str, Any] = field(default_factory=dict)
    kind: Kind = "host"
    job: str = ""
    """The job in which it is asked, where its kind is ``job``."""

    @property
    def label(self) -> str:
        """``site/host``, as messages name it."""
        return f"{self.site.name}/{self.name or 'local'}"

    @property
    def through(self) -> str:
        """The host of the profile by which it is reached."""
        return self.site.hosts[0] if self.kind == "job" else self.name

    @property
    def has_gpus(self) -> bool:
        """Does the profile say that accelerators are here?"""
        return self.site.gpu.type != CPU and self.kind != "login"

    def tool(self, argv: Sequence[str], *, timeout_s: float = 20.0, keep: str = "", aliases: Any = None) -> Tool:
        """Run a command of the node after the site's set-up lines; it may be missing or not end.

        Args:
            keep: a regular expression; only lines that hold it come back.
            aliases: names of fields that another generation of the tool calls otherwise.
        """
        told = self.ask("tool", timeout_s=timeout_s, argv=list(argv), keep=keep, aliases=aliases or {})
        return Tool(**told)

    def ask(self, do: str, *, timeout_s: float, program: str = "on_node.py", **args: Any) -> Any:
        """Run a function of ``program`` on the node, in the interpreter that islandctl uses there."""
        common = {"setup": list(self.site.environment.setup), "work_dir": self.site.work_dir}
        request = {"do": do, "timeout_s": timeout_s, **common, **args}
        return self.open().python(source(program), request, timeout_s=timeout_s + START_S)

    def worker_python(self, do: str, *, timeout_s: float, **args: Any) -> Any:
        """Run a function of ``worker/examined.py`` in the workers' interpreter, with what it has installed.

        Returns the program's answer, or ``{"error": …}``; ``{"unbuilt": …}`` where no environment is there yet.
        """
        environment = self.site.environment
        own = self.site.scheduler == "local" and not environment.build and environment.python == "python3"
        return self.ask(
            "worker",
            timeout_s=timeout_s,
            python="" if own else environment.python,
            build=environment.build,
            code=worker_program(),
            args={"do": do, **args},
        )


@dataclass(frozen=True)
class Cell:
    """One cell and its nodes, the first with rank 0."""

    name: str
    nodes: tuple[Node, ...]
    bus_bytes_per_s: float | None = None
    """Of a collective over them, as the plan reckons it; None: not known."""


@dataclass(frozen=True)
class Way:
    """How one node reaches the relay."""

    node: Node
    url: str
    token: str


@dataclass(frozen=True)
class Link:
    """One site's link to the relay, over the very way that a run would use."""

    site: SiteProfile
    ways: tuple[Way, ...]
    """Of all its nodes; the first node's cell is the site's first."""
    certificate: str
    """The relay's, PEM."""
    tunnelled: bool
    streams: int
    """Connections that the workers of this site keep busy."""
    trouble: Callable[[Way], str] = lambda way: ""
    """Why a node's tunnel does not stand, as far as this side knows."""


class Check(ABC):
    """One question. Instances hold no state; ``look`` is called from several threads."""

    name: str
    """For --only and --skip, and for --json: lower case with hyphens. Never changes its meaning."""
    scope: Scope
    tier: Tier
    """The first tier that runs it; later ones do as well."""
    title: str
    """What is asked, for the list."""
    threshold: str
    """What passes."""
    source: str
    """Where the threshold comes from."""
    remedy: str
    """What to do where it does not pass."""
    deadline_s: float = 60.0
    """After this long the verdict is: no answer."""
    at_once: int = 64
    """Of so many places at the same time."""
    measures: bool = False
    """It loads the node, so nothing else runs there meanwhile."""

    def deadline(self, tier: Tier, seconds: float | None = None) -> float:
        """``deadline_s``; more for checks that take longer in a deeper tier, or measure for ``seconds``."""
        return self.deadline_s


class NodeCheck(Check):
    """Asked of every node."""

    scope: Scope = "node"
    asks: tuple[Kind, ...] = ("host", "job")
    """Nodes of these kinds. What matters on a login node says so."""

    @abstractmethod
    def look(self, node: Node) -> Verdicts:
        """Ask. Raises ``IslandError`` for what the verdict ``unknown`` (no answer) or ``fail`` says in its words."""


class CellCheck(Check):
    """Asked of every cell of several nodes."""

    scope: Scope = "cell"

    @abstractmethod
    def look(self, cell: Cell) -> Verdicts:
        """Ask; see ``NodeCheck``."""


class LinkCheck(Check):
    """Asked of every site's way to the relay, of all at the same time."""

    scope: Scope = "link"
    measures = True

    @abstractmethod
    def look(self, link: Link) -> Verdicts:
        """Ask; see ``NodeCheck``."""


class FleetCheck(Check):
    """Asked of all nodes together (scope ``fleet``) or of those of one site (``site``), after all other checks."""

    scope: Scope = "fleet"

    @abstractmethod
    def look(self, nodes: Sequence[Node]) -> Verdicts:
        """Judge what the checks before have learnt (``Node.facts``)."""


@cache
def worker_program() -> str:
    """The text of what runs in the workers' interpreter; it knows torch, so it lies with the workers."""
    return (Path(__file__).parents[2] / "worker" / "examined.py").read_text(encoding="utf-8")


@cache
def source(name: str) -> str:
    """The text of a program that runs on nodes."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The gravest of several."""
    order: tuple[Level, ...] = ("fail", "unknown", "warn", "ok", "skipped")
    return min(verdicts, key=lambda verdict: order.index(verdict.level))


def listed(names: Sequence[object], most: int = 4) -> str:
    """``0, 3, 5``: at most so many, and how many more."""
    shown = ", ".join(str(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
