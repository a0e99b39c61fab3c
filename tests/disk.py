"""Disks that fill up."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which only root may do")


@contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """``folder``, made as a file system of its own."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "islandctl-test", str(folder)]
    subprocess.run(mount, check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def fill(folder: Path) -> Path:
    """Take all the space there is, and all that its other files have in their last blocks."""
    for path in folder.rglob("*.log"):
        with suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(bytes(-path.stat().st_size % 4096))
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filler


@contextmanager
def files_at_most(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this; what a write would add is cut there, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
