"""What provisioning does on a node. Standard library only, Python 3.8 or newer: its text is sent by provision.py."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zlib
from typing import Any

from islandctl.fleet.node_store import expand, identity, locked, place

_CHECK = """
import hashlib, importlib, json, os, platform, sys
wanted, marker, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]

def note():
    # Named by all on which an import depends: this boot of this node, the interpreter, the folders of its packages.
    def when(path):
        return [path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0]
    with open("/proc/sys/kernel/random/boot_id") as file:
        depends = [wanted, platform.node(), file.read(), sys.version, sys.executable]
    depends += [when(path) for path in (os.path.realpath(sys.executable), *sys.path) if path]
    depends += sorted(pair for pair in os.environ.items() if pair[0].startswith(("PYTHON", "LD_")))
    return os.path.join(folder, hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16] + ".json")

def look():
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
    return told

try:
    with open(note()) as file:
        told = json.load(file)
except (OSError, ValueError):
    told = look()
    if told["found"] and not told["missing"]:
        try:
            os.makedirs(folder, exist_ok=True)
            with open(note(), "w") as file:
                json.dump(told, file)
        except OSError:
            pass  # what is not there, or cut, costs the next launch some time
sys.stdout.write("\\n%s %s\\n" % (marker, json.dumps(told)))
"""

NOTES = "imported"
"""Folder in the work folder: what has been imported here."""
_UNREACHABLE = re.compile(
    "Failed to establish a new connection|Name or service not known|Temporary failure in name resolution|"
    "Network is unreachable|Connection refused|ConnectTimeoutError|No route to host|NameResolutionError"
)
"""What pip says of an index that it cannot reach."""


def with_setup(setup: list[str], argv: list[str]) -> list[str]:
    """The command, after the profile's shell lines."""
    return ["/bin/sh", "-c", "\n".join(setup) + '\nexec "$@"', "sh", *argv] if setup else argv


def read_whole(path: str) -> bytes:
    """The content of a file, without Python's layers above it: every launch reads hundreds on each node."""
    descriptor = os.open(path, os.O_RDONLY)
    pieces: list[bytes] = []
    try:
        while True:
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """``os.write`` until all is written."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def tree_hash(folder: str) -> str:
    """The hash of a code folder: sha256 over names, contents and modes in order, compiled files left out."""
    total = hashlib.sha256()
    names = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        names += [os.path.relpath(os.path.join(root, name), folder) for name in files]
    for name in sorted(names):
        path = os.path.join(folder, name)
        content, executable = read_whole(path), os.stat(path).st_mode & 0o100
        total.update(json.dumps([name, len(content)] + ([1] if executable else [])).encode() + content)
    return total.hexdigest()[:16]


def check(python: str, setup: list[str], wanted: list[Any], timeout_s: float, notes: str) -> dict[str, Any]:
    """Ask an interpreter what it is and whether it imports ``wanted``: [module, least version as numbers].

    Args:
        notes: folder in which it is noted what has been imported: nothing is imported again for the same question
            while this boot of the node, the interpreter and its packages are the same.
    """
    if not wanted and not setup and shutil.which(os.path.expanduser(python)) == sys.executable:
        return {"executable": sys.executable, "version": platform.python_version(), "found": {}, "missing": {}}
    marker = os.urandom(8).hex()
    argv = with_setup(setup, [os.path.expanduser(python), "-c", _CHECK, json.dumps(wanted), marker, notes])
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
        aside = os.path.join(work, ".writable-" + os.urandom(4).hex())
        os.close(os.open(aside, os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(aside)
        who = identity(work)
    except OSError as error:
        return {"work_dir": work, "unfit": error.strerror}
    return {
        "home": os.path.expanduser("~"),
        "work_dir": work,
        "identity": who,
        "free_bytes": shutil.disk_usage(work).free,
        "arch": platform.machine(),
        "libc": platform.libc_ver(),
        "code_there": settled(args, b""),
        "python": check(args["python"], args["setup"], args["wanted"], args["timeout_s"], os.path.join(work, NOTES)),
        "path": os.environ.get("PATH", ""),
        "clock": [began, time.time()],
    }


def settled(args: dict[str, Any], _: bytes) -> list[bool]:
    """Of each bundle whether it is here, whole and unchanged."""
    root = os.path.join(expand(args["work_dir"]), "code")
    if os.path.isdir(root):
        os.listdir(root)  # a network file system may still believe that a folder is not there
    return [_whole(os.path.join(root, name), name) for name in args["bundles"]]


def _whole(folder: str, name: str) -> bool:
    return os.path.isdir(folder) and tree_hash(folder) == name


def put_code(args: dict[str, Any], payload: bytes) -> None:
    """Unpack a bundle aside, check it, and move it into place in one step.

    It is the payload, or with ``content`` one of the store, which then goes.
    """
    name = args["bundle_hash"]
    stored = place(args["work_dir"], args["content"]) if args.get("content") else None
    root = os.path.join(expand(args["work_dir"]), "code")
    os.makedirs(root, exist_ok=True)
    folder = os.path.join(root, name)
    with locked(folder + ".lock", 120.0):
        if not _whole(folder, name):
            if os.path.isdir(folder):
                os.rename(folder, f"{folder}.damaged-{os.urandom(4).hex()}")
            aside = f"{folder}.{os.urandom(4).hex()}.tmp"
            try:
                found = _unpack(read_whole(stored) if stored else payload, aside)
                if found != name:
                    raise ValueError(f"the code arrived damaged: hash {found} instead of {name}")
                os.rename(aside, folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)


def copy_code(args: dict[str, Any], _: bytes) -> bool:
    """Copy a bundle that is here to another folder of the work folder, as a whole. False: it is not here."""
    source = os.path.join(expand(args["work_dir"]), "code", args["bundle_hash"])
    target = expand(args["folder"])
    if not _whole(source, args["bundle_hash"]):
        return False
    shutil.copytree(source, target, dirs_exist_ok=True)
    return True


def _sync(folder: str) -> None:
    """See that what was written there survives a power cut: one wait, and not one for every file."""
    import ctypes  # here, as below: most launches find all there, and loading takes time on each node

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    except (OSError, AttributeError):  # a C library without it
        os.sync()
    finally:
        os.close(descriptor)


def _unpack(packed: bytes, folder: str) -> str:
    """Write the files of a bundle; the hash of what they are, as ``tree_hash`` would find it."""
    head, _, contents = zlib.decompress(packed).partition(b"\n")
    total, at, made = hashlib.sha256(), 0, set()
    os.umask(0o022)
    for entry in json.loads(head.decode()):
        name, size, executable = entry[0], entry[1], len(entry) > 2
        parts = name.split("/")
        if ".." in parts or "" in parts:
            raise ValueError(f"the bundle holds {name!r}, which is no place below its folder")
        path = os.path.join(folder, *parts)
        if os.path.dirname(path) not in made:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            made.add(os.path.dirname(path))
        content = contents[at : at + size]
        at += size
        total.update(json.dumps(entry).encode() + content)
        # without Python's layers above it: a node writes hundreds of files
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if executable else 0o644)
        try:
            write_all(descriptor, content)
        finally:
            os.close(descriptor)
    _sync(folder)
    return total.hexdigest()[:16]


def find_env(args: dict[str, Any], _: bytes) -> str | None:
    """The interpreter of ``env/<hash>``, if that is whole."""
    folder = os.path.join(expand(args["work_dir"]), "env", args["env_hash"])
    python = os.path.join(folder, "bin", "python")
    return python if os.path.isfile(os.path.join(folder, "complete.json")) and os.path.exists(python) else None


def build_env(args: dict[str, Any], _: bytes) -> dict[str, Any]:
    """Make the virtual environment ``env/<hash>``, or find it whole. A half-built one is removed and built again.

    It is built in its place, since it could not be moved; its last file, ``complete.json``, makes it count.
    """
    root = os.path.join(expand(args["work_dir"]), "env")
    os.makedirs(root, exist_ok=True)
    folder = os.path.join(root, args["env_hash"])
    python, complete = os.path.join(folder, "bin", "python"), os.path.join(folder, "complete.json")
    with locked(os.path.join(root, args["env_hash"] + ".lock"), args["timeout_s"]):
        if find_env(args, b""):
            return {"python": python, "built": False}
        shutil.rmtree(folder, ignore_errors=True)
        try:
            told = _fill_env(folder, args)
            told["free_bytes"] = shutil.disk_usage(root).free
        finally:
            shutil.rmtree(folder + ".wheels", ignore_errors=True)
            if not os.path.isfile(complete):
                shutil.rmtree(folder, ignore_errors=True)  # what is half made is of no use, and may fill a disk
        return {"python": python, **told}


def _fill_env(folder: str, args: dict[str, Any]) -> dict[str, Any]:
    python, complete = os.path.join(folder, "bin", "python"), os.path.join(folder, "complete.json")
    failure = _run([os.path.expanduser(args["python"]), "-m", "venv", folder], args)
    if failure:
        return {"error": "venv", "lines": failure[-6:]}
    # A file, not arguments: an index address may hold a password, and arguments are seen by all users.
    requirements = os.path.join(folder, "requirements.txt")
    with open(os.open(requirements, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write("\n".join(args["requirements"]) + "\n")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *args["pip_options"]]
    if args["wheels"] is not None:
        pip += ["--no-index", "--find-links", _wheels(folder + ".wheels", args)]
    failure = _run([*pip, "-r", requirements], args)
    if failure:
        unreachable = [line for line in failure if _UNREACHABLE.search(line)] if args["wheels"] is None else []
        return {"error": "pip", "lines": failure[-6:], "unreachable": unreachable[-1] if unreachable else ""}
    notes = os.path.join(expand(args["work_dir"]), NOTES)
    told = check(python, args["setup"], args["wanted"], args["timeout_s"], notes)
    if told.get("error") or told["missing"]:
        return {"error": "check", "told": told}
    aside = complete + ".tmp"
    with open(aside, "w") as file:
        json.dump(told, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(aside, complete)
    return {"built": True}


def _wheels(folder: str, args: dict[str, Any]) -> str:
    """A folder that holds the store's contents under the names that pip wants; of a ``.tar`` what is in it."""
    import tarfile

    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for content, name in args["wheels"]:
        if not name.endswith(".tar"):
            os.symlink(place(args["work_dir"], content), os.path.join(folder, os.path.basename(name)))
            continue
        with tarfile.open(place(args["work_dir"], content)) as archive:
            for member in archive:
                with open(os.path.join(folder, os.path.basename(member.name)), "wb") as file:
                    shutil.copyfileobj(archive.extractfile(member) or io.BytesIO(), file)
    return folder


def _run(argv: list[str], args: dict[str, Any]) -> list[str]:
    """Run a step; its output if it failed."""
    try:
        done = subprocess.run(
            with_setup(args["setup"], argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=args["timeout_s"],
            env=dict(os.environ, **args["secrets"]),
        )
    except subprocess.TimeoutExpired:
        return [f"{argv[0]} was not done within {args['timeout_s']:.0f} s"]
    except OSError as error:
        return [f"cannot run {argv[0]}: {error.strerror}"]
    if done.returncode == 0:
        return []
    text = done.stdout.decode(errors="replace")
    for secret in args["secrets"].values():
        text = text.replace(secret, "***") if secret else text
    return [line.strip() for line in text.splitlines() if line.strip()] or [f"exit code {done.returncode}"]


def main(args: dict[str, Any], payload: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    functions = (probe, settled, put_code, copy_code, find_env, build_env)
    return {function.__name__: function for function in functions}[args["do"]](args, payload)
