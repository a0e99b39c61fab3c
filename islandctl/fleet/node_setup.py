"""What provisioning does on a node. Standard library only, Python 3.8 or newer: its text is sent by provision.py."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from typing import Any

_CHECK = """
import importlib, json, platform, sys
wanted, marker = json.loads(sys.argv[1]), sys.argv[2]
told = {"executable": sys.executable, "version": platform.python_version(), "found": {}, "missing": {}}
for name, least in wanted:
    try:
        module = importlib.import_module(name)
        version = str(getattr(module, "__version__", ""))
        if not version:
            from importlib import metadata
            version = metadata.version(name)
        numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()]
        if least and numbers < least:
            told["missing"][name] = "version %s is too old" % version
        else:
            told["found"][name] = version
    except Exception as error:
        told["missing"][name] = str(error).splitlines()[0] if str(error) else type(error).__name__
sys.stdout.write("\\n%s %s\\n" % (marker, json.dumps(told)))
"""


def expand(path: str) -> str:
    """``~`` is the node's own home."""
    return os.path.abspath(os.path.expanduser(path))


def with_setup(setup: list[str], argv: list[str]) -> list[str]:
    """The command, after the profile's shell lines."""
    return ["/bin/sh", "-c", "\n".join(setup) + '\nexec "$@"', "sh", *argv] if setup else argv


def tree_hash(folder: str) -> str:
    """The hash of a code folder: sha256 over names and contents in order, compiled files left out."""
    total = hashlib.sha256()
    names = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        names += [os.path.relpath(os.path.join(root, name), folder) for name in files]
    for name in sorted(names):
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        total.update(json.dumps([name, len(content)]).encode() + content)
    return total.hexdigest()[:16]


@contextlib.contextmanager
def locked(path: str, timeout_s: float) -> Iterator[None]:
    """One launch at a time; waits for another one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise OSError(
                        error.errno, "file locks do not work on this file system (Lustre: -o flock)"
                    ) from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another launch has held {path} for {timeout_s:.0f} s") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def check(python: str, setup: list[str], wanted: list[Any], timeout_s: float) -> dict[str, Any]:
    """Ask an interpreter what it is and whether it imports ``wanted``: [module, least version as numbers]."""
    marker = os.urandom(8).hex()
    argv = with_setup(setup, [os.path.expanduser(python), "-c", _CHECK, json.dumps(wanted), marker])
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, cwd="/")
    except subprocess.TimeoutExpired:
        return {"error": f"{python} did not import {[name for name, _ in wanted]} within {timeout_s:.0f} s"}
    except OSError as error:
        return {"error": f"cannot run {python}: {error.strerror}"}
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(marker):
            told: dict[str, Any] = json.loads(line[len(marker) :])
            return told
    lines = [line for line in (done.stderr + done.stdout).decode(errors="replace").splitlines() if line.strip()]
    return {"error": f"{python}: exit code {done.returncode}: {lines[-1] if lines else 'no output'}"}


def probe(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """What this node is: home, work folder, free space, architecture, the profile's interpreter, code or none."""
    began = time.time()
    work = expand(args["work_dir"])
    try:
        os.makedirs(work, exist_ok=True)
        with tempfile.TemporaryFile(dir=work):
            pass
    except OSError as error:
        return {"work_dir": work, "unfit": error.strerror}
    code = os.path.join(work, "code", args["bundle_hash"])
    return {
        "home": os.path.expanduser("~"),
        "work_dir": work,
        "free_bytes": shutil.disk_usage(work).free,
        "arch": platform.machine(),
        "code_there": os.path.isdir(code) and tree_hash(code) == args["bundle_hash"],
        "python": check(args["python"], args["setup"], args["wanted"], args["timeout_s"]),
        "path": os.environ.get("PATH", ""),
        "clock": [began, time.time()],
    }


def put_code(args: dict[str, Any], payload: bytes) -> None:
    """Unpack the bundle aside, check it, and move it into place in one step."""
    root = os.path.join(expand(args["work_dir"]), "code")
    os.makedirs(root, exist_ok=True)
    place = os.path.join(root, args["bundle_hash"])
    with locked(os.path.join(root, args["bundle_hash"] + ".lock"), 120.0):
        if os.path.isdir(place):
            if tree_hash(place) == args["bundle_hash"]:
                return
            os.rename(place, f"{place}.damaged-{os.urandom(4).hex()}")
        aside = f"{place}.{os.urandom(4).hex()}.tmp"
        try:
            _unpack(payload, aside)
            found = tree_hash(aside)
            if found != args["bundle_hash"]:
                raise ValueError(f"the code arrived damaged: hash {found} instead of {args['bundle_hash']}")
            os.rename(aside, place)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _unpack(payload: bytes, folder: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(payload), mode="r:gz") as archive:
        for member in archive.getmembers():
            parts = member.name.split("/")
            if not member.isfile() or ".." in parts or member.name.startswith("/"):
                raise ValueError(f"the bundle holds {member.name!r}, which is not a plain file")
            path = os.path.join(folder, *parts)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            source = archive.extractfile(member)
            with open(path, "wb") as file:
                file.write(source.read() if source else b"")
                file.flush()
                os.fsync(file.fileno())


def build_env(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """Make the virtual environment ``env/<hash>``, or find it whole. A half-built one is removed and built again."""
    root = os.path.join(expand(args["work_dir"]), "env")
    os.makedirs(root, exist_ok=True)
    folder = os.path.join(root, args["env_hash"])
    python, complete = os.path.join(folder, "bin", "python"), os.path.join(folder, "complete.json")
    with locked(os.path.join(root, args["env_hash"] + ".lock"), args["timeout_s"]):
        if os.path.isfile(complete) and os.path.exists(python):
            return {"python": python, "built": False}
        shutil.rmtree(folder, ignore_errors=True)
        try:
            told = _fill_env(folder, args)
            told["free_bytes"] = shutil.disk_usage(root).free
        finally:
            if not os.path.isfile(complete):
                shutil.rmtree(folder, ignore_errors=True)  # what is half made is of no use, and may fill a disk
        return {"python": python, **told}


def _fill_env(folder: str, args: dict[str, Any]) -> dict[str, Any]:
    python, complete = os.path.join(folder, "bin", "python"), os.path.join(folder, "complete.json")
    failure = _run([os.path.expanduser(args["python"]), "-m", "venv", folder], args)
    if failure:
        return {"error": "venv", "lines": failure}
    # A file, not arguments: an index address may hold a password, and arguments are seen by all users.
    requirements = os.path.join(folder, "requirements.txt")
    with open(os.open(requirements, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write("\n".join(args["requirements"]) + "\n")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    failure = _run([*pip, *args["pip_options"], "-r", requirements], args)
    if failure:
        return {"error": "pip", "lines": failure}
    told = check(python, args["setup"], args["wanted"], args["timeout_s"])
    if told.get("error") or told["missing"]:
        return {"error": "check", "told": told}
    aside = complete + ".tmp"
    with open(aside, "w") as file:
        json.dump(told, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, complete)
    return {"built": True}


def _run(argv: list[str], args: dict[str, Any]) -> list[str]:
    """Run a step; the last lines of its output if it failed."""
    try:
        done = subprocess.run(
            with_setup(args["setup"], argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=args["timeout_s"],
        )
    except subprocess.TimeoutExpired:
        return [f"{argv[0]} was not done within {args['timeout_s']:.0f} s"]
    except OSError as error:
        return [f"cannot run {argv[0]}: {error.strerror}"]
    if done.returncode == 0:
        return []
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
    return lines[-6:] or [f"exit code {done.returncode}"]


def main(args: dict[str, Any], payload: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    return {function.__name__: function for function in (probe, put_code, build_env)}[args["do"]](args, payload)
