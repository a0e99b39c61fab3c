"""What checks do to a node's disk. Standard library only, Python 3.8 or newer: its text is sent there."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

LEAST_BYTES = 1 << 20
SYNC_BYTES = 64 << 20
NETWORKED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "glusterfs", "wekafs", "9p", "cifs", "smb")
"""Beginnings of the types of file systems that several nodes may share."""


def main(args: dict[str, Any], _: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    return {"disk_space": disk_space, "disk_rates": disk_rates}[args["do"]](args)


def expand(path: str) -> str:
    """``~`` is the node's own home."""
    return os.path.abspath(os.path.expanduser(path))


def disk_space(args: dict[str, Any]) -> dict[str, Any]:
    """The work folder's disk: can this user write there, without anybody's help, and how much fits?"""
    work = expand(args["work_dir"])
    try:
        os.makedirs(work, exist_ok=True)
        path = os.path.join(work, ".doctor-" + os.urandom(6).hex())
        with open(path, "xb"):
            os.unlink(path)
    except OSError as error:
        return {"work_dir": work, "unfit": error.strerror, "errno": error.errno}
    room = os.statvfs(work)
    kind, mounted = _mount(work)
    return {
        "work_dir": work,
        "total_bytes": room.f_blocks * room.f_frsize,
        "free_bytes": room.f_bavail * room.f_frsize,
        "used": 1 - room.f_bavail / room.f_blocks if room.f_blocks else 0.0,
        "inodes_free": room.f_favail if room.f_files else None,
        "inodes": room.f_files or None,
        "kind": kind,
        "mounted": mounted,
        "shared": kind.startswith(NETWORKED),
    }


def _mount(path: str) -> tuple[str, str]:
    """Type and source of the file system under ``path``."""
    best, kind, mounted = "", "", ""
    real = os.path.realpath(path)
    for line in _mounts():
        source, point, what = line.split(" ")[:3]
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind, mounted = point, what, source
    return kind, mounted


def disk_rates(args: dict[str, Any]) -> dict[str, Any]:
    """Write and flush, read back, and make small files, as checkpoints do; everything is removed again."""
    work = expand(args["work_dir"])
    os.makedirs(work, exist_ok=True)
    folder = os.path.join(work, ".doctor-" + os.urandom(6).hex())
    os.mkdir(folder, 0o700)
    try:
        room = os.statvfs(work)
        limit = min(args["limit_bytes"], room.f_bavail * room.f_frsize // 10)
        if limit < LEAST_BYTES:
            return {"error": "less than 10 MB are free"}
        written, write_s = _write(os.path.join(folder, "large"), limit, args["seconds"])
        read_s, cached = _read(os.path.join(folder, "large"))
        small = _small_files(folder, args["small_files"])
        return {"bytes": written, "write_s": write_s, "read_s": read_s, "cached": cached, "small_s": small}
    except OSError as error:
        return {"error": error.strerror}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: str, limit: int, seconds: float) -> tuple[int, float]:
    """Bytes and seconds, the flush included. The bytes are random: some file systems compress."""
    block, written, began = os.urandom(8 << 20), 0, time.monotonic()
    with open(path, "wb") as file:
        while written < limit and time.monotonic() - began < seconds:
            written += file.write(block[: limit - written])
            if written % SYNC_BYTES == 0:  # or memory would take all of it in at once
                file.flush()
                os.fdatasync(file.fileno())
        os.fsync(file.fileno())
    return written, time.monotonic() - began


def _read(path: str) -> tuple[float, bool]:
    """Seconds for the whole file, asked from the disk; True: this system cannot drop what it holds in memory."""
    with open(path, "rb", buffering=0) as file:
        can = hasattr(os, "posix_fadvise")
        if can:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        while file.read(8 << 20):
            pass
        return time.monotonic() - began, not can


def _small_files(folder: str, number: int) -> float:
    """Seconds to make, flush, look at and remove so many files of 4 KiB."""
    began, block = time.monotonic(), os.urandom(4096)
    for index in range(number):
        path = os.path.join(folder, str(index))
        with open(path, "wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.stat(path)
        os.unlink(path)
    return time.monotonic() - began


def _mounts() -> list[str]:
    try:
        with open("/proc/mounts", encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
