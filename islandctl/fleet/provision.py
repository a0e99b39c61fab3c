"""Makes nodes ready: code in a folder named by its content, an interpreter that imports what a process needs.

What many nodes need is put as rarely as it may be: once for all that share a folder, once for a site whose nodes can
give it to each other (``delivery.py``), and not at all where it lies already.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from islandctl.config.secrets import values as secret_values
from islandctl.config.site import SiteProfile
from islandctl.errors import IslandError, PreflightError, UnreachableError
from islandctl.fleet import environment as env
from islandctl.fleet.bundle import Bundle
from islandctl.fleet.delivery import Content, Member, Progress, deliver
from islandctl.fleet.environment import Environment, listed
from islandctl.fleet.host import Host
from islandctl.fleet.local import LocalHost
from islandctl.fleet.needs import PYTHON_LEAST, Needs, worker_needs
from islandctl.fleet.wire import program

CHECK_TIMEOUT_S = 300.0
"""The first import of torch from a cold shared file system takes minutes."""
PUT_TIMEOUT_S = 300.0
LEAST_FREE_BYTES = 200_000_000
CLOCK_WARN_S, CLOCK_LIMIT_S = 0.5, 3.0
"""How far a node's clock may be off this machine's: heartbeat ages, certificates and logs are read by it."""
SMALL_BYTES = 1 << 20
"""A bundle up to this size goes to each node in one call: less than a handshake's worth of time on most links."""
AT_WORK = 64

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A node that is ready. Paths are absolute paths there."""

    python: str
    """The workers' interpreter."""
    code: str
    """Goes to PYTHONPATH; holds the folder ``islandctl``."""
    supervisor: str
    """Path of supervisor.py."""
    work_dir: str
    home: str


@dataclass(eq=False)
class Place:
    """A node that is to be made ready, and what is known of it so far."""

    site: SiteProfile
    reach: Callable[[], Host]
    """Gives the connection; may raise what ``connect`` raises."""
    host: Host | None = None
    found: dict[str, Any] = field(default_factory=dict)
    """What its probe has told."""
    leader: Place | None = None
    """The node that puts things into the folder that both have."""
    python: str = ""
    error: IslandError | None = None

    @property
    def at(self) -> Host:
        """The connection, once there is one."""
        assert self.host is not None
        return self.host

    @property
    def work_dir(self) -> str:
        """Absolute."""
        return str(self.found["work_dir"])


def prepare(
    host: Host,
    site: SiteProfile,
    bundle: Bundle,
    on_message: Say = lambda line: None,
    *,
    needs: Needs | None = None,
) -> Prepared:
    """Put code and environment on one node, or find them there; see :func:`prepare_all`.

    Raises:
        ConfigError, PreflightError, UnreachableError: as there.
    """
    (made,) = prepare_all([Place(site, lambda: host)], [bundle], on_message, needs=needs)
    if isinstance(made, IslandError):
        raise made
    return made


def prepare_all(
    places: Sequence[Place],
    bundles: Sequence[Bundle],
    on_message: Say = lambda line: None,
    *,
    needs: Needs | None = None,
    progress: Progress = lambda name, done, total: None,
) -> list[Prepared | IslandError]:
    """Put code and environment on nodes, or find them there. Several launches at once do not disturb each other.

    Args:
        bundles: the package itself first, then what else is to lie in ``code/``.
        on_message: called with a line before and after what takes long.
        needs: what the interpreter must have; left out: what a worker needs.
        progress: told of large transfers.

    Returns:
        A verdict for each place, in order. The errors:
        PreflightError: the interpreter is missing or too old, a package is missing, pip failed, the disk is full or
        read-only, the clock is far off.
        UnreachableError: no connection, or it was lost; what was half made is never used.
    """
    work = _Work(bundles, on_message, needs or worker_needs(), progress)
    _each(places, work.look)
    by_site: defaultdict[str, list[Place]] = defaultdict(list)
    for place in _well(places):
        by_site[place.site.name].append(place)
    _each(list(by_site.values()), lambda group: work.fill(group[0].site, group))
    return [_verdict(place, bundles[0]) for place in places]


def _verdict(place: Place, package: Bundle) -> Prepared | IslandError:
    if place.error is not None:
        return place.error
    code = PurePosixPath(place.work_dir) / "code" / package.hash
    return Prepared(
        python=place.python,
        code=str(code),
        supervisor=str(code / "islandctl" / "fleet" / "supervisor.py"),
        work_dir=place.work_dir,
        home=place.found["home"],
    )


def _well(places: Sequence[Place]) -> list[Place]:
    return [place for place in places if place.error is None]


def _each(items: Sequence[Any], work: Callable[[Any], None]) -> None:
    """Side by side. An error of ours belongs to its place, and the others go on."""

    def one(item: Any) -> None:
        try:
            work(item)
        except IslandError as error:
            for place in item if isinstance(item, list) else [item]:
                place.error = place.error or error

    if len(items) == 1:
        one(items[0])
    elif items:
        with ThreadPoolExecutor(max_workers=min(len(items), AT_WORK), thread_name_prefix="prepare") as pool:
            list(pool.map(one, items))


def _setup(host: Host, do: str, deadline_s: float, payload: bytes = b"", **args: Any) -> Any:
    source = program("node_store", "node_setup")
    return host.python(source, {"do": do, **args}, timeout_s=deadline_s, payload=payload)


@dataclass(frozen=True)
class _Work:
    """One launch's preparation."""

    bundles: Sequence[Bundle]
    say: Say
    needs: Needs
    progress: Progress

    def look(self, place: Place) -> None:
        """Connect, ask the node what it is, and judge that."""
        environment = place.site.environment
        place.host = place.reach()
        own = place.site.scheduler == "local" and not environment.build and environment.python == "python3"
        sent = time.time()
        found = place.found = _setup(
            place.host,
            "probe",
            CHECK_TIMEOUT_S + 60,
            work_dir=place.site.work_dir,
            bundles=[bundle.hash for bundle in self.bundles],
            python=sys.executable if own else environment.python,
            setup=list(environment.setup),
            wanted=[] if environment.build else self.needs.wanted,
            timeout_s=CHECK_TIMEOUT_S,
        )
        received = time.time()
        if "unfit" in found:
            raise PreflightError(
                f"{place.host.label}: cannot write into the work folder {found['work_dir']}: {found['unfit']}",
                hint="set work_dir in the site profile to a folder that can be written on every node",
            )
        began, ended = found["clock"]
        _judge_clock(place.host.label, clock_offset(sent, began, ended, received), self.say)
        _judge(place.host.label, environment.build, self.needs, found, own=own)
        place.python = found["python"]["executable"]

    def fill(self, site: SiteProfile, places: list[Place]) -> None:
        """Give all nodes of a site what they lack."""
        lacking = [place for place in places if not all(place.found["code_there"])]
        made = self._environments(site, places)
        lacking += [place for place in made if place not in lacking]
        if not lacking:
            return
        self._find_leaders(site, lacking)
        heads = [place for place in lacking if place.leader is None]
        self._put(site, heads)
        self._build(site, [place for place in _well(heads) if place in made], made)
        followers = [place for place in lacking if place.leader is not None]
        if followers:
            _each(followers, self._settle)
            late = [place for place in _well(followers) if not all(place.found["code_there"])]
            self._put(site, late)
            self._build(site, [place for place in _well(followers) if place in made], made)

    def _environments(self, site: SiteProfile, places: list[Place]) -> dict[Place, Environment]:
        """By node the environment that it still lacks."""
        if not site.environment.build:
            return {}
        wheels = env.wheels_of(site)
        made: dict[Place, Environment] = {}

        def one(place: Place) -> None:
            wanted = env.describe(site, place.found, self.needs, wheels)
            python = env.find(place.at, place.work_dir, wanted)
            if python is None:
                made[place] = wanted
            else:
                place.python = python

        _each(places, one)
        return made

    def _find_leaders(self, site: SiteProfile, places: list[Place]) -> None:
        """Find out which nodes have one and the same work folder: what one writes there the others see."""
        groups: defaultdict[str, list[Place]] = defaultdict(list)
        for place in places:
            if place.found["identity"] and not isinstance(place.host, LocalHost):
                groups[place.found["identity"]].append(place)
        for first, *others in groups.values():
            if not others:
                continue

            def see(place: Place, sign: str, first: Place = first) -> None:
                # a copied disk has the same identity, and does not see the sign
                if Member(place.at, place.work_dir).sees(sign):
                    place.leader = first

            try:
                with Member(first.at, first.work_dir).sign() as sign:
                    _each(others, partial(see, sign=sign))
            except IslandError as error:
                first.error = error
                continue
            sharing = sum(place.leader is first for place in others)
            if sharing:
                self.say(f"{site.name}: {sharing + 1} nodes share the folder {first.work_dir}; it is filled once")

    def _put(self, site: SiteProfile, places: list[Place]) -> None:
        """Bring the bundles that these nodes lack."""
        for index, bundle in enumerate(self.bundles):
            lacking = [place for place in _well(places) if not place.found["code_there"][index]]
            if not lacking:
                continue
            large = len(bundle.data) > SMALL_BYTES
            if large:
                self._deliver(site, lacking, [bundle.content])

            def put(place: Place, bundle: Bundle = bundle, large: bool = large) -> None:
                put_code(place.at, place.work_dir, bundle, stored=large)
                self.say(f"{place.at.label}: {bundle.label} {bundle.hash} is there")

            _each(_well(lacking), put)

    def _deliver(self, site: SiteProfile, places: list[Place], contents: Sequence[Content]) -> None:
        members = [Member(place.at, place.work_dir) for place in places]
        deliver(site.name, members, contents, self.say, self.progress)
        for place, member in zip(places, members, strict=True):
            place.error = place.error or member.error

    def _build(self, site: SiteProfile, places: list[Place], made: dict[Place, Environment]) -> None:
        """Build the environments that these nodes lack."""
        values = secret_values(site.environment.secrets)
        by_hash: defaultdict[str, list[Place]] = defaultdict(list)
        for place in places:
            by_hash[made[place].hash].append(place)
        for group in by_hash.values():
            wanted = made[group[0]]
            wheels = wanted.wheels
            if wanted.offline:
                wheels = env.download(wanted, self.say)
            if wheels is not None:
                self._deliver(site, [place for place in group if place.leader is None] or group[:1], wheels)

            def one(place: Place, wanted: Environment = wanted, wheels: Sequence[Content] | None = wheels) -> None:
                python = env.find(place.at, place.work_dir, wanted) if place.leader else None
                if python is None:
                    python = env.build(place.at, place.work_dir, wanted, wheels, values, self.say)
                place.python = python

            _each(_well(group), one)

    def _settle(self, place: Place) -> None:
        """See whether the leader's work is seen here; a node for which it is not stands for itself."""
        assert place.leader is not None
        hashes = [bundle.hash for bundle in self.bundles]
        place.found["code_there"] = _setup(
            place.at, "settled", PUT_TIMEOUT_S, work_dir=place.work_dir, bundles=hashes
        )
        if place.leader.error is not None or not all(place.found["code_there"]):
            place.leader = None


def put_code(host: Host, work_dir: str, bundle: Bundle, *, stored: bool = False) -> None:
    """Unpack a bundle on a node, unless it is there; tried again when the link is lost.

    Args:
        stored: it lies in the node's store already.

    Raises:
        PreflightError, UnreachableError: it could not be put.
    """
    for attempt in Retrying(
        retry=retry_if_exception_type(UnreachableError),
        stop=stop_after_attempt(3),
        wait=wait_random_exponential(multiplier=0.2, max=3),
        reraise=True,
    ):
        with attempt:
            _setup(
                host,
                "put_code",
                PUT_TIMEOUT_S,
                b"" if stored else bundle.data,
                work_dir=work_dir,
                bundle_hash=bundle.hash,
                content=bundle.content.name if stored else None,
            )


def copy_code(host: Host, work_dir: str, bundle: Bundle, folder: str) -> None:
    """Copy a bundle on a node from ``code/`` to a folder of the work folder; it is put there first if it is away.

    Raises:
        PreflightError, UnreachableError: that failed.
    """
    args: dict[str, Any] = {"work_dir": work_dir, "bundle_hash": bundle.hash, "folder": folder}
    if not _setup(host, "copy_code", PUT_TIMEOUT_S, **args):
        put_code(host, work_dir, bundle)
        _setup(host, "copy_code", PUT_TIMEOUT_S, **args)


def clock_offset(sent: float, began: float, ended: float, received: float) -> float:
    """How far the node's clock surely is ahead of this machine's, in seconds; negative: behind.

    Args:
        sent, received: this machine's time before and after the call.
        began, ended: the node's own time in between. What is not between them was spent on the way, one way or the
            other, and is given to the node (RFC 5905, section 8).
    """
    offset = ((began - sent) + (ended - received)) / 2
    way = max(0.0, (received - sent) - (ended - began))
    return math.copysign(max(0.0, abs(offset) - way / 2), offset)


def _judge_clock(label: str, offset: float, on_message: Callable[[str], None]) -> None:
    if abs(offset) <= CLOCK_WARN_S:
        return
    told = f"{label}: its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's"
    if abs(offset) > CLOCK_LIMIT_S:
        raise PreflightError(
            f"{told}; {CLOCK_LIMIT_S:g} s are the most",
            hint="set the one that is wrong: timedatectl tells; on WSL and after a VM's sleep: sudo hwclock -s",
        )
    on_message(f"{told}; times in its logs are off by that")


def _judge(label: str, build: bool, needs: Needs, found: dict[str, Any], *, own: bool = False) -> None:
    """Stop for what the probe has shown. ``own``: the interpreter is islandctl's own."""
    told = found["python"]
    if "error" in told:
        raise PreflightError(
            f"{label}: {told['error']} (PATH there: {found['path']})",
            hint="set environment.python in the profile to an absolute path, or environment.setup to what finds it",
        )
    version = tuple(int(part) for part in told["version"].split(".")[:2])
    if version < PYTHON_LEAST:
        raise PreflightError(
            f"{label}: {told['executable']} is Python {told['version']}; {needs.who} needs 3.11 or newer",
            hint="set environment.python in the site profile to a newer one",
        )
    if found["free_bytes"] < LEAST_FREE_BYTES:
        raise PreflightError(
            f"{label}: {found['work_dir']} has {found['free_bytes'] / 1e6:.0f} MB free; 200 MB are the least",
            hint="free some space, or set work_dir in the site profile to another disk",
        )
    if told["missing"] and not build:
        raise PreflightError(
            f"{label}: {told['executable']} lacks what {needs.who} needs: {listed(told['missing'])}",
            hint=f"pip install 'islandctl[{needs.extras}]'; or set environment.build: true in the site profile"
            if own
            else "set environment.build: true, or type there: "
            + _pip_line(told["executable"], told["missing"], needs),
        )


def _pip_line(python: str, missing: dict[str, str], needs: Needs) -> str:
    wanted = {requirement.partition(">")[0]: requirement for requirement in ("torch>=2.10", *needs.requirements)}
    return shlex.join([python, "-m", "pip", "install", *(wanted.get(name, name) for name in missing)])
