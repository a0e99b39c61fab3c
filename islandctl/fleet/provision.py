"""Makes a node ready: code in a folder named by its content, an interpreter that imports what a worker needs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import re
import shlex
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import islandctl
from islandctl.config.site import SiteProfile
from islandctl.errors import PreflightError
from islandctl.fleet.host import Host

PYTHON_LEAST = (3, 11)
WORKER_REQUIREMENTS = ("blake3>=1.0", "httpx>=0.28,<1", "numpy>=1.26", "pydantic>=2.9,<3", "tenacity>=9,<10")
"""The small dependencies of a worker; torch comes from the profile's ``environment.packages``."""
SOAP_REQUIREMENT = "pytorch-optimizer>=4.1,<5"
WORKER_IMPORTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("torch", (2, 10)),
    ("numpy", (1, 26)),
    ("pydantic", (2, 9)),
    ("httpx", ()),
    ("blake3", ()),
    ("tenacity", ()),
)
"""What is imported to believe in an environment. torch before 2.10 does not have all that the worker uses."""


@dataclass(frozen=True)
class Needs:
    """What an interpreter must have: how to install it, and what to import to believe it."""

    who: str
    """For messages: ``a worker``."""
    requirements: tuple[str, ...]
    imports: tuple[tuple[str, tuple[int, ...]], ...]
    """Module and least version."""
    packages: bool = True
    """Whether the profile's ``environment.packages`` (torch and the like) are wanted too."""
    extras: str = "worker"
    """What of islandctl itself to install on this machine, if something is missing here."""


def worker_needs(optimizer: str = "adamw") -> Needs:
    """Of a node that trains.

    Args:
        optimizer: the recipe's ``training.optimizer.kind``; empty: a script has its own.
    """
    needs = Needs("a worker", WORKER_REQUIREMENTS, WORKER_IMPORTS)
    if optimizer != "soap":
        return needs
    return replace(
        needs,
        who="a worker with the optimizer soap",
        requirements=(*needs.requirements, SOAP_REQUIREMENT),
        imports=(*needs.imports, ("pytorch_optimizer", ())),
        extras="worker,soap",
    )


RELAY_NEEDS = Needs(
    "the relay",
    (
        "blake3>=1.0",
        "cryptography>=43",
        "httpx>=0.28,<1",
        "prometheus-client>=0.21",
        "pydantic>=2.9,<3",
        "starlette>=0.45",
        "tenacity>=9,<10",
        "uvicorn>=0.34",
    ),
    (("pydantic", (2, 9)), ("starlette", ()), ("uvicorn", ()), ("blake3", ()), ("prometheus_client", ())),
    packages=False,
)
"""Of a host that only carries the relay: no torch."""
CHECK_TIMEOUT_S = 300.0
"""The first import of torch from a cold shared file system takes minutes."""
BUILD_TIMEOUT_S = 3600.0
"""pip fetches gigabytes for a CUDA build of torch."""
LEAST_FREE_BYTES = 200_000_000
FULL_BYTES = 10_000_000
"""With less than this left after a failed build, the disk is what failed: venv does not always say so."""
CLOCK_WARN_S, CLOCK_LIMIT_S = 0.5, 3.0
"""How far a node's clock may be off this machine's: heartbeat ages, certificates and logs are read by it."""
_INDEX_OPTIONS = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host")
_INDEX_SWITCHES = ("--no-index", "--pre")
_SUFFIXES = (".py", ".csv", ".yaml", ".json", ".typed")


@dataclass(frozen=True)
class Bundle:
    """The package as it is sent."""

    hash: str
    """Of names and contents: a changed file is another hash."""
    data: bytes
    """tar.gz; the same bytes for the same content."""


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


def make_bundle(package: Path | None = None) -> Bundle:
    """Pack the islandctl package (or another folder in its place, for tests)."""
    root = package or Path(islandctl.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES and "__pycache__" not in path.parts)
    contents = {f"{root.name}/{path.relative_to(root).as_posix()}": path.read_bytes() for path in files}
    total, packed = hashlib.sha256(), io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in sorted(contents.items()):
            total.update(json.dumps([name, len(content)]).encode() + content)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return Bundle(total.hexdigest()[:16], packed.getvalue())


@cache
def _source() -> str:
    return (Path(__file__).parent / "node_setup.py").read_text()


def _setup(host: Host, do: str, deadline_s: float, payload: bytes = b"", **args: Any) -> Any:
    return host.python(_source(), {"do": do, **args}, timeout_s=deadline_s, payload=payload)


def prepare(
    host: Host,
    site: SiteProfile,
    bundle: Bundle,
    on_message: Callable[[str], None] = lambda line: None,
    *,
    needs: Needs | None = None,
) -> Prepared:
    """Put code and environment on a node, or find them there. Several launches at once do not disturb each other.

    Args:
        on_message: called with a line before and after what takes long.
        needs: what the interpreter must have; left out: what a worker needs.

    Raises:
        PreflightError: the interpreter is missing or too old, a package is missing, pip failed, the disk is full or
            read-only, the clock is far off.
        UnreachableError: the link was lost; what was half made is never used.
    """
    environment = site.environment
    needs = needs or worker_needs()
    own = site.scheduler == "local" and not environment.build and environment.python == "python3"
    python, setup = sys.executable if own else environment.python, list(environment.setup)
    sent = time.time()
    found = _setup(
        host,
        "probe",
        CHECK_TIMEOUT_S + 60,
        work_dir=site.work_dir,
        bundle_hash=bundle.hash,
        python=python,
        setup=setup,
        wanted=[] if environment.build else [[name, list(least)] for name, least in needs.imports],
        timeout_s=CHECK_TIMEOUT_S,
    )
    received = time.time()
    if "unfit" in found:
        raise PreflightError(
            f"{host.label}: cannot write into the work folder {found['work_dir']}: {found['unfit']}",
            hint="set work_dir in the site profile to a folder that can be written on every node",
        )
    began, ended = found["clock"]
    _judge_clock(host.label, clock_offset(sent, began, ended, received), on_message)
    _judge(host.label, environment.build, needs, found, own=own)
    work = PurePosixPath(found["work_dir"])
    code = work / "code" / bundle.hash
    if not found["code_there"]:
        _setup(host, "put_code", 300.0, bundle.data, work_dir=str(work), bundle_hash=bundle.hash)
        on_message(f"{host.label}: code {bundle.hash} is there")
    interpreter = _build(host, site, found, on_message, needs) if environment.build else found["python"]["executable"]
    return Prepared(
        python=interpreter,
        code=str(code),
        supervisor=str(code / "islandctl" / "fleet" / "supervisor.py"),
        work_dir=str(work),
        home=found["home"],
    )


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
            f"{label}: {told['executable']} lacks what {needs.who} needs: {_listed(told['missing'])}",
            hint=f"pip install 'islandctl[{needs.extras}]'; or set environment.build: true in the site profile"
            if own
            else "set environment.build: true, or type there: "
            + _pip_line(told["executable"], told["missing"], needs),
        )


def _listed(missing: dict[str, str]) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in missing.items())


def _pip_line(python: str, missing: dict[str, str], needs: Needs) -> str:
    wanted = {requirement.partition(">")[0]: requirement for requirement in ("torch>=2.10", *needs.requirements)}
    return shlex.join([python, "-m", "pip", "install", *(wanted.get(name, name) for name in missing)])


def _build(
    host: Host,
    site: SiteProfile,
    found: dict[str, Any],
    on_message: Callable[[str], None],
    needs: Needs | None = None,
) -> str:
    environment, needs = site.environment, needs or worker_needs()
    on_file, on_line = _split_options(environment.pip_options)
    requirements = [*on_file, *needs.requirements, *(environment.packages if needs.packages else ())]
    what = {
        "python": [found["python"]["executable"], found["python"]["version"]],
        "arch": found["arch"],
        "requirements": requirements,
        "pip_options": on_line,
        "setup": list(environment.setup),
    }
    env_hash = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    on_message(f"{host.label}: environment {env_hash}: looked for, and built where it is missing (takes minutes)")
    answer = _setup(
        host,
        "build_env",
        3 * BUILD_TIMEOUT_S + 60,
        work_dir=found["work_dir"],
        env_hash=env_hash,
        python=found["python"]["executable"],
        requirements=requirements,
        pip_options=on_line,
        setup=list(environment.setup),
        wanted=[[name, list(least)] for name, least in needs.imports],
        timeout_s=BUILD_TIMEOUT_S,
    )
    lines = " / ".join(answer.get("lines", ()))
    if lines and (answer["free_bytes"] < FULL_BYTES or re.search("No space left|File too large|quota", lines)):
        raise PreflightError(
            f"{host.label}: the disk is full: {lines}",
            hint="free some space there, or set work_dir in the site profile to another disk",
        )
    if answer.get("error") == "venv":
        raise PreflightError(
            f"{host.label}: no virtual environment could be made: {lines}",
            hint="on Debian and Ubuntu: apt install python3-venv; or use environment.build: false",
        )
    if answer.get("error") == "pip":
        raise PreflightError(
            f"{host.label}: pip install failed: {lines}",
            hint="correct environment.packages or environment.pip_options in the site profile",
        )
    if answer.get("error") == "check":
        told = answer["told"]
        raise PreflightError(
            f"{host.label}: the built environment is not fit: {told.get('error') or _listed(told['missing'])}",
            hint="add what is missing to environment.packages in the site profile",
        )
    on_message(f"{host.label}: environment {env_hash} {'built' if answer['built'] else 'was there'}")
    return str(answer["python"])


def _split_options(options: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Options that go into the requirements file (they may hold a password), and those that pip takes on its line."""
    on_file, on_line = [], []
    words = [word for option in options for word in shlex.split(option)]
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in _INDEX_OPTIONS + _INDEX_SWITCHES:
            on_line.append(word)
        elif equals or name in _INDEX_SWITCHES:
            on_file.append(f"{name} {value}".strip())
        else:
            on_file.append(f"{name} {words.pop(0) if words else ''}".strip())
    return on_file, on_line
