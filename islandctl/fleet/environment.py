"""The Python environment on a node: what it is made of gives it its name; built where it is missing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from islandctl.config.paths import home
from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError, PreflightError
from islandctl.fleet import lock
from islandctl.fleet.delivery import Content
from islandctl.fleet.host import Host
from islandctl.fleet.needs import Needs
from islandctl.fleet.wire import program

BUILD_TIMEOUT_S = 3600.0
"""pip fetches gigabytes for a CUDA build of torch."""
FULL_BYTES = 10_000_000
"""With less than this left after a failed build, the disk is what failed: venv does not always say so."""
LEAST_GLIBC = {"x86_64": 5}
"""The oldest glibc 2.x for which wheels are tagged; 17 for the other processors."""
ALONE_BYTES = 8 << 20
"""A wheel of this size is sent by itself, and need not be sent again when another one changes."""
TOGETHER = "small.tar"
"""The smaller ones, in one piece."""
_INDEX_OPTIONS = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links", "--trusted-host")
_INDEX_SWITCHES = ("--no-index", "--pre")
_downloads: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


@dataclass(frozen=True)
class Environment:
    """One environment, as it is to be on a node. Two nodes that agree on it have the same hash."""

    python: str
    """The interpreter that it is made with."""
    version: str
    arch: str
    libc: tuple[str, str]
    """Name and version, as platform.libc_ver tells them."""
    requirements: tuple[str, ...]
    """Lines of the requirements file, index options included: these may hold a secret's name, never its value."""
    pip_options: tuple[str, ...]
    setup: tuple[str, ...]
    wanted: tuple[tuple[str, tuple[int, ...]], ...]
    wheels: tuple[Content, ...] | None
    """From the profile's folder; None: pip has an index, or ``offline``."""
    offline: bool
    locked: bool
    """Are the requirements those of a lock file?"""

    @property
    def hash(self) -> str:
        """Of all that decides what is in it."""
        what = {
            "python": [self.python, self.version],
            "arch": self.arch,
            "requirements": self.requirements,
            "pip_options": self.pip_options,
            "setup": self.setup,
            "wheels": None if self.wheels is None else sorted([wheel.label, wheel.name] for wheel in self.wheels),
            "offline": self.offline,
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def describe(
    site: SiteProfile, found: dict[str, Any], needs: Needs, wheels: tuple[Content, ...] | None
) -> Environment:
    """The environment of one node.

    Args:
        found: what the node's probe has told.
        wheels: those of ``environment.wheels``.

    Raises:
        ConfigError: the lock file cannot be read, or not be used.
    """
    own = site.environment
    on_file, on_line = split_options(own.pip_options)
    locked = own.lock is not None and needs.packages
    if own.lock is not None and locked:
        requirements = [*on_file, *lock.read(own.lock)]
    else:
        requirements = [*on_file, *needs.requirements, *(own.packages if needs.packages else ())]
    return Environment(
        python=found["python"]["executable"],
        version=found["python"]["version"],
        arch=found["arch"],
        libc=tuple(found.get("libc", ("", ""))),
        requirements=tuple(requirements),
        pip_options=tuple(on_line),
        setup=tuple(own.setup),
        wanted=needs.imports,
        wheels=wheels,
        offline=own.offline and wheels is None,
        locked=locked,
    )


def check_files(site: SiteProfile, key: str) -> None:
    """See that what the profile names as ``key``, ``lock`` or ``wheels``, is on this machine and can be read.

    Raises:
        ConfigError: it is not, or there is nothing in it.
    """
    own = site.environment
    if key == "lock" and own.lock is not None and own.build:
        lock.read(own.lock)
    elif key == "wheels" and own.wheels is not None and own.build:
        _listed(own.wheels)


def wheels_of(site: SiteProfile) -> tuple[Content, ...] | None:
    """The files of ``environment.wheels``; None: the profile names no folder.

    Raises:
        ConfigError: there is no such folder, or nothing in it.
    """
    folder = site.environment.wheels
    if folder is None or not site.environment.build:
        return None
    files = _listed(folder)
    try:
        return _packed(files)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"environment.wheels: {error.filename or folder}: {error.strerror}",
        hint="name a folder of wheels beside the profile, as pip download -d FOLDER fills it",
    )


def _listed(folder: str) -> list[Path]:
    try:
        files = files_of(Path(folder).expanduser())
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not files:
        raise ConfigError(f"environment.wheels: {folder} holds no wheels", hint="fill it: pip download -d FOLDER …")
    return files


def files_of(folder: Path) -> list[Path]:
    """What pip can install from in a folder."""
    return sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz", ".zip")))


def _packed(files: Sequence[Path]) -> tuple[Content, ...]:
    small = [path for path in files if path.stat().st_size < ALONE_BYTES]
    alone = [Content.of(path, path.name) for path in files if path not in small]
    return (*alone, Content.of(_together(small), TOGETHER)) if small else tuple(alone)


def _together(files: Sequence[Path]) -> bytes:
    """Small files as one: many pieces would be many round trips to every node."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in files:
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)
    return packed.getvalue()


def download(made: Environment, say: Callable[[str], None]) -> tuple[Content, ...]:
    """The wheels of an offline site's environment, fetched here once and kept.

    Raises:
        PreflightError: pip could not fetch them for that node's Python and platform.
    """
    what = [made.requirements, made.pip_options, made.version, platforms(made)]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    folder = home() / "wheels" / key
    with _downloads[key]:
        if not folder.is_dir():
            say(f"this machine: fetching packages for Python {made.version} on {made.arch} (takes minutes)")
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{key}.") as aside:
                _download(made, Path(aside) / "files", Path(aside) / "requirements.txt")
                try:
                    os.rename(Path(aside) / "files", folder)
                except OSError:
                    if not folder.is_dir():  # else another launch was faster
                        raise
    return _packed(files_of(folder))


def _download(made: Environment, folder: Path, requirements: Path) -> None:
    folder.mkdir()
    requirements.write_text("\n".join(made.requirements) + "\n")
    version = ".".join(made.version.split(".")[:2])
    argv = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet"]
    argv += ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    argv += [f"--platform={name}" for name in platforms(made)]
    argv += [*made.pip_options, "-d", str(folder), "-r", str(requirements)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode == 0:
        return
    whole = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    lock.refuse_another_file("this machine", whole)
    lines = whole[-4:]
    raise PreflightError(
        f"this machine: pip download for Python {version} on {made.arch} failed: {' / '.join(lines)}",
        hint="fetch the wheels in another way, and name their folder as environment.wheels in the site profile",
    )


def platforms(made: Environment) -> list[str]:
    """pip's names for what the node can run, newest first."""
    name, _, minor = made.libc[0], *made.libc[1].partition(".")[1:]
    if name != "glibc" or not minor.split(".")[0].isdigit():
        return [f"{kind}_{made.arch}" for kind in ("musllinux_1_2", "musllinux_1_1", "linux")]
    least = LEAST_GLIBC.get(made.arch, 17)
    old = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    names = []
    for number in range(int(minor.split(".")[0]), least - 1, -1):
        names.append(f"manylinux_2_{number}_{made.arch}")
        names += [f"{old[number]}_{made.arch}"] if number in old else []
    return [*names, f"linux_{made.arch}"]


def find(host: Host, work_dir: str, made: Environment) -> str | None:
    """The environment's interpreter on the node, if it is there as a whole."""
    args = {"do": "find_env", "work_dir": work_dir, "env_hash": made.hash}
    found = host.python(program("node_store", "node_setup"), args, timeout_s=60.0)
    return str(found) if found else None


def build(
    host: Host,
    work_dir: str,
    made: Environment,
    wheels: Sequence[Content] | None,
    secrets: dict[str, str],
    say: Callable[[str], None],
) -> str:
    """Build the environment on a node, unless another launch has meanwhile; its interpreter.

    Args:
        wheels: contents of the node's store to install from; None: from pip's index.
        secrets: variables for pip (``environment.secrets``).

    Raises:
        PreflightError: names what failed, and what to change.
    """
    say(f"{host.label}: environment {made.hash} is built (takes minutes)")
    answer = host.python(
        program("node_store", "node_setup"),
        {
            "do": "build_env",
            "work_dir": work_dir,
            "env_hash": made.hash,
            "python": made.python,
            "requirements": list(made.requirements),
            "pip_options": list(made.pip_options),
            "setup": list(made.setup),
            "wanted": [[name, list(least)] for name, least in made.wanted],
            "wheels": None if wheels is None else [[wheel.name, wheel.label] for wheel in wheels],
            "secrets": secrets,
            "timeout_s": BUILD_TIMEOUT_S,
        },
        timeout_s=3 * BUILD_TIMEOUT_S + 60,
    )
    _judge(host.label, answer, made)
    say(f"{host.label}: environment {made.hash} {'built' if answer['built'] else 'was there'}")
    return str(answer["python"])


def _judge(label: str, answer: dict[str, Any], made: Environment) -> None:
    lines = " / ".join(answer.get("lines", ()))
    if lines and (answer["free_bytes"] < FULL_BYTES or re.search("No space left|File too large|quota", lines)):
        raise PreflightError(
            f"{label}: the disk is full: {lines}",
            hint="free some space there, or set work_dir in the site profile to another disk",
        )
    if answer.get("error") == "venv":
        raise PreflightError(
            f"{label}: no virtual environment could be made: {lines}",
            hint="on Debian and Ubuntu: apt install python3-venv; or use environment.build: false",
        )
    if answer.get("error") == "pip" and answer.get("unreachable"):
        raise PreflightError(
            f"{label}: pip cannot reach its package index from there: {answer['unreachable']}",
            hint="set environment.offline: true in the site profile (packages are fetched on this machine and sent), "
            "or environment.wheels: FOLDER; or name an index that it reaches in environment.pip_options",
        )
    if answer.get("error") == "pip":
        lock.refuse_another_file(label, answer["lines"])
        raise PreflightError(
            f"{label}: pip install failed: {lines}",
            hint="add what is missing to the folder of environment.wheels"
            if made.wheels is not None
            else "correct environment.packages or environment.pip_options in the site profile; or "
            "environment.offline, where the site reaches no package index",
        )
    if answer.get("error") == "check":
        told = answer["told"]
        raise PreflightError(
            f"{label}: the built environment is not fit: {told.get('error') or listed(told['missing'])}",
            hint="add what is missing to environment.lock"
            if made.locked
            else "add what is missing to environment.packages in the site profile",
        )


def listed(missing: dict[str, str]) -> str:
    """Modules that are missing, with the reason of each."""
    return ", ".join(f"{name} ({reason})" for name, reason in missing.items())


def split_options(options: tuple[str, ...]) -> tuple[list[str], list[str]]:
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
