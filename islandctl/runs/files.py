"""Files of a run on the controller: written whole or not at all, and readable by their owner only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from islandctl.errors import UsageError


def make_folder(folder: Path) -> Path:
    """Make ``folder`` and its parents (0700 for the last one) unless it is there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` atomically and durably; mode 0600 from the first byte.

    A reader sees the old content or the new one, also after a power cut.
    """
    make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = str(path)  # a write does not name its file by itself
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def only_one(lock: Path, what: str) -> Iterator[None]:
    """Hold the file lock ``lock`` while the body runs; it falls with the process, however that ends.

    Args:
        what: the holder, for the message that the next one gets, for example ``islandctl stop demo``.

    Raises:
        UsageError: another process holds it, or its folder is not there.
    """
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:  # its folder is not made here: a run that was removed stays removed
        raise UsageError(f"there is no run called {lock.parent.name}", hint="islandctl runs lists them") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another command"
            raise UsageError(
                f"{lock.parent.name}: {holder} is at work on this run",
                hint=f"wait for it to end; islandctl status {lock.parent.name} shows how it goes",
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{what} (process {os.getpid()})\n".encode())
        yield
    finally:
        os.close(handle)


def holder(lock: Path) -> str:
    """Who holds the lock of :func:`only_one`, as written into it; empty: nobody. The lock itself is not touched."""
    try:
        told = lock.read_text(errors="replace").strip()
    except OSError:
        return ""
    process = re.search(r"\(process (\d+)\)$", told)
    return told if process and has_open(int(process[1]), lock) else ""


def has_open(pid: int, path: Path) -> bool:
    """Does the process live with this file open? One that is dead but not yet reaped has none."""
    wanted = os.path.realpath(path)
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed between the two looks
                if os.readlink(f"/proc/{pid}/fd/{number}") == wanted:
                    return True
    return False
