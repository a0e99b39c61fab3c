"""What happens to files on a node. Standard library only, Python 3.8 or newer: its text is sent there by node.py."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import zlib
from typing import Any


def expand(path: str) -> str:
    """``~`` is the node's own home."""
    return os.path.abspath(os.path.expanduser(path))


def write_files(args: dict[str, Any], payload: bytes) -> None:
    """Write files so that each is there whole or not at all. ``files``: [name, size, mode] in the payload's order."""
    folder = expand(args["folder"])
    at = 0
    for name, size, mode in args["files"]:
        target = os.path.join(folder, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        aside = f"{target}.{os.getpid()}.tmp"
        # The mode is there from the first byte on: a secret is never readable by others, not even for a moment.
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(payload[at : at + size])
                os.fchmod(file.fileno(), mode)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
        except BaseException:
            if os.path.exists(aside):
                os.unlink(aside)
            raise
        at += size
    for name in args.get("gone", ()):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def read_many(args: dict[str, Any], _: bytes) -> list[dict[str, Any]]:
    """Parts of files. ``parts``: [path, offset (negative: from the end), limit]; a missing file is an empty one."""
    pieces = []
    for path, offset, limit in args["parts"]:
        try:
            with open(expand(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                offset = max(0, size + offset) if offset < 0 else offset
                file.seek(offset)
                data = file.read(limit)
        except FileNotFoundError:
            size, data, offset = 0, b"", max(0, offset)
        packed = base64.b64encode(zlib.compress(data, 1)).decode()
        pieces.append({"data": packed, "offset": offset, "size": size})
    return pieces


def tail_offsets(args: dict[str, Any], _: bytes) -> list[int]:
    """Byte offset at which the last ``lines`` lines of each file begin."""
    return [_tail_offset(expand(path), args["lines"]) for path in args["paths"]]


def _tail_offset(path: str, lines: int, block: int = 1 << 16) -> int:
    try:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            if lines <= 0:
                return end
            at, missing = end, lines
            while at > 0:
                start = max(0, at - block)
                file.seek(start)
                data = file.read(at - start)
                if at == end and data.endswith(b"\n"):
                    data = data[:-1]
                while True:
                    found = data.rfind(b"\n")
                    if found < 0:
                        break
                    missing -= 1
                    if missing == 0:
                        return start + found + 1
                    data = data[:found]
                at = start
            return 0
    except FileNotFoundError:
        return 0


def sizes(args: dict[str, Any], _: bytes) -> list[dict[str, int]]:
    """Files directly in each folder and their sizes; a missing folder is an empty one."""
    answers = []
    for folder in args["folders"]:
        try:
            with os.scandir(expand(folder)) as entries:
                answers.append({entry.name: entry.stat().st_size for entry in entries if entry.is_file()})
        except FileNotFoundError:
            answers.append({})
    return answers


def remove(args: dict[str, Any], _: bytes) -> bool:
    """Remove a file or folder, only below the work folder. False: it was not there.

    ``keep``: a name; where the folder holds it, this one stays, and so does the folder.
    ``emptied``: the folder around it goes as well, when nothing else is in it.
    """
    work, path = os.path.realpath(expand(args["work_dir"])), expand(args["path"])
    # The parent's links are followed, the last part's is not: a link is removed, never what it points to.
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if os.path.commonpath([work, real]) != work or real == work:
        raise ValueError(f"{path} does not lie below {work}: refused")
    kept = os.path.join(real, args["keep"]) if args.get("keep") else ""
    if kept and not os.path.islink(real) and os.path.lexists(kept):
        for name in os.listdir(real):
            if name != args["keep"]:
                remove({"work_dir": work, "path": os.path.join(real, name)}, b"")
        return True
    if os.path.islink(real) or os.path.isfile(real):
        os.unlink(real)
    elif os.path.isdir(real):
        shutil.rmtree(real)
    else:
        return False
    if args.get("emptied") and os.path.dirname(real) != work:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(real))
    return True


def list_checkpoints(args: dict[str, Any], _: bytes) -> list[dict[str, Any]]:
    """Folders in ``checkpoints`` with their ``manifest.json`` (None: missing or damaged), oldest name first."""
    root = os.path.join(expand(args["cell_folder"]), "checkpoints")
    found = []
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    for name in names:
        if not name.startswith("step-") or not os.path.isdir(os.path.join(root, name)):
            continue
        try:
            with open(os.path.join(root, name, "manifest.json"), "rb") as file:
                text = file.read()
            manifest, raw = json.loads(text.decode()), base64.b64encode(text).decode()
        except (OSError, ValueError):
            manifest, raw = None, None
        found.append({"name": name, "manifest": manifest, "raw": raw})
    return found


def main(args: dict[str, Any], payload: bytes) -> Any:
    """Entry for ``Host.python``: ``do`` names the function."""
    functions = (write_files, read_many, tail_offsets, sizes, remove, list_checkpoints)
    return {function.__name__: function for function in functions}[args["do"]](args, payload)
