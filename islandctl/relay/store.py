"""The relay's folder: packets as files, the ledger as JSON lines, both durable before any answer depends on them.

::

    FOLDER/
      lock            held by the one relay that serves this folder; holds its process id
      ledger.jsonl    one entry a line, appended and fsynced
      staging/        packets on their way in; emptied at start
      packets/<attempt>/<fragment>/<window>/<cell>.<chunk>

A packet's file appears by renaming, after its content is fsynced; so what has a name is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from pydantic import ValidationError

from islandctl.errors import ExchangeError, LedgerError, RelayError, UsageError
from islandctl.ledger.chain import START, check_link
from islandctl.ledger.entries import ENTRY, Entry
from islandctl.ledger.joint import JointCheckpoint
from islandctl.ledger.packet import PacketHeader, read_header
from islandctl.relay.service import Place

log = logging.getLogger(__name__)

ANSWER_BYTES = 4 << 20
"""Ledger lines in one answer. A commit of a 32B model's fragment names thousands of chunks in some 250 kB."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskError(RelayError):
    """The relay's disk is full or broken. Code ``disk``. What was acknowledged before stays."""


def _disk_error(error: OSError, what: str) -> DiskError:
    cause = "disk full" if error.errno in _FULL else (error.strerror or str(error))
    return DiskError(
        f"the relay cannot store {what}: {cause}", code="disk", hint="free space on the relay's disk; cells try again"
    )


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(file: BinaryIO, content: bytes | bytearray) -> None:
    """Write all of ``content``; an unbuffered file may take it in parts."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


class Staged:
    """A packet on its way in: its bytes are written aside and hashed as they come. One thread at a time.

    ``discard`` at the end: it removes what was not kept.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self._store = store
        self._path = path
        self._whole = blake3()
        self._payload = blake3()
        self._head = bytearray()
        self.header: PacketHeader | None = None
        self.num_bytes = 0
        self._header_bytes = 0
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise _disk_error(error, "a packet") from error

    def discard(self) -> None:
        """Remove what was not kept."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, content: bytes | bytearray) -> None:
        """Take in the next bytes.

        Raises:
            ExchangeError: these bytes cannot begin a packet.
            DiskError: no room; nothing stays behind.
        """
        try:
            write_all(self._file, content)
        except OSError as error:
            raise _disk_error(error, "a packet") from error
        self._whole.update(content)
        self.num_bytes += len(content)
        if self.header is not None:
            self._payload.update(content)
            return
        self._head += content
        found = read_header(self._head)
        if found is not None:
            self.header, self._header_bytes = found
            self._payload.update(bytes(self._head[self._header_bytes :]))
            self._head.clear()

    def finish(self) -> tuple[PacketHeader, str]:
        """All bytes are here: check them against the header and make them durable.

        Returns:
            (header, blake3 of the whole packet).

        Raises:
            ExchangeError: cut short, or damaged.
            DiskError: the disk is full or broken.
        """
        header = self.header
        if header is None:
            raise ExchangeError(f"not a packet: {self.num_bytes} bytes")
        length = self.num_bytes - self._header_bytes
        if length != header.payload_bytes or self._payload.hexdigest() != header.payload_hash:
            raise ExchangeError(
                f"damaged packet: cell {header.cell}, fragment {header.fragment}, window {header.window}, "
                f"chunk {header.chunk}: payload does not match its hash"
            )
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _disk_error(error, "a packet") from error
        return header, self._whole.hexdigest()

    def keep(self, place: Place) -> None:
        """Give the finished packet its name, durably. The service's one writer calls this."""
        self._store.name_packet(self._path, place)


class Store:
    """The folder, locked for this process. One writer; readers beside it are welcome.

    Raises:
        UsageError: another relay serves this folder; names its process.
        LedgerError: the ledger was damaged; names the line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packets = folder / "packets"
        self._staging = folder / "staging"
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(folder / "lock")
        try:
            shutil.rmtree(self._staging, ignore_errors=True)
            for each in (self._staging, self.packets):
                each.mkdir(exist_ok=True)
            self._staged = 0
            self._path = folder / "ledger.jsonl"
            self._offsets, self._end = _check_ledger(self._path)
            self._ledger: io.FileIO | None = io.FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            self._ledger.seek(self._end)
            sync_folder(folder)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Give the folder back."""
        if self._ledger is not None:
            self._ledger.close()
        self._lock.close()

    # Ledger

    def append(self, entry: Entry) -> None:
        """Write one entry and wait until it is durable.

        Raises:
            DiskError: nothing was appended.
        """
        line = entry.model_dump_json().encode() + b"\n"
        if self._ledger is None:
            raise DiskError("the ledger could not be repaired after a disk error", code="disk")
        try:
            write_all(self._ledger, line)
            os.fsync(self._ledger.fileno())
        except OSError as error:
            self._take_back()
            raise _disk_error(error, f"ledger entry {entry.seq}") from error
        self._offsets.append((self._end, len(line)))
        self._end += len(line)

    def _take_back(self) -> None:
        """Cut off a half-written entry. If even that fails nothing is appended any more in this process's life."""
        assert self._ledger is not None
        try:
            self._ledger.truncate(self._end)
            self._ledger.seek(self._end)
            os.fsync(self._ledger.fileno())
        except OSError:
            log.critical("cannot cut a half-written entry off %s; restart the relay", self._path)
            self._ledger.close()
            self._ledger = None

    def lines(self, after: int, limit: int) -> list[bytes]:
        """The ledger's lines with seq > ``after`` as they stand in the file.

        At most ``limit``, and no more than fit into ``ANSWER_BYTES`` (but one at least).
        """
        spans = self._offsets[max(0, after + 1) : max(0, after + 1) + limit]
        while len(spans) > 1 and spans[-1][0] + spans[-1][1] - spans[0][0] > ANSWER_BYTES:
            spans = spans[: len(spans) // 2]
        if not spans:
            return []
        first, (last, length) = spans[0][0], spans[-1]
        with self._path.open("rb") as file:
            file.seek(first)
            block = file.read(last + length - first)
        return block.splitlines()

    def entries(self, after: int, limit: int) -> Sequence[Entry]:
        """Entries with seq > ``after``, at most ``limit``."""
        return [ENTRY.validate_json(line) for line in self.lines(after, limit)]

    # Packets

    def stage(self) -> Staged:
        """Begin to take in a packet.

        Raises:
            DiskError: no room.
        """
        self._staged += 1
        return Staged(self, self._staging / str(self._staged))

    def path(self, place: Place) -> Path:
        """Where the packet lies, if it does."""
        attempt, fragment, window, cell, chunk = place
        return self.packets / str(attempt) / str(fragment) / str(window) / f"{cell}.{chunk}"

    def name_packet(self, staged: Path, place: Place) -> None:
        """Move a finished packet to its place, durably.

        Raises:
            DiskError: it is not there, or not durably; it was not acknowledged.
        """
        target = self.path(place)
        try:
            missing = [each for each in (target.parent, *target.parents) if not each.exists()]
            for each in reversed(missing):
                each.mkdir(exist_ok=True)
                sync_folder(each.parent)
            os.replace(staged, target)
            sync_folder(target.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
            raise _disk_error(error, "a packet") from error

    def packet_hash(self, place: Place) -> str | None:
        """blake3 of the packet's whole file; None: there is none."""
        try:
            with self.path(place).open("rb") as file:
                whole = blake3()
                while block := file.read(1 << 20):
                    whole.update(block)
                return whole.hexdigest()
        except FileNotFoundError:
            return None

    def header(self, place: Place) -> PacketHeader:
        """The stored packet's header.

        Raises:
            LedgerError: the file was damaged on disk.
        """
        path = self.path(place)
        try:
            with path.open("rb") as file:
                found = read_header(file.read(80 * 1024))
        except ExchangeError as error:
            raise LedgerError(f"{path}: {error.message}") from error
        if found is None:
            raise LedgerError(f"{path}: cut short")
        return found[0]

    def places(self, attempt: int) -> Sequence[Place]:
        """All packets of the attempt."""
        root = self.packets / str(attempt)
        found = []
        for path in root.glob("*/*/*.*"):
            cell, chunk = path.name.split(".")
            found.append((attempt, int(path.parent.parent.name), int(path.parent.name), int(cell), int(chunk)))
        return found

    def prune(self, keep: JointCheckpoint, attempt: int) -> int:
        """Delete the packets that no cell can need again.

        A cell goes back at most to ``keep``, the last joint checkpoint but one, of the present ``attempt``. It has
        then taken in every commit up to the checkpoint's versions; what was put for those rounds is not read again.
        Packets of earlier attempts cannot count any more. An empty round's packets go once a later commit of the
        fragment, itself within the checkpoint, has moved the anchor.

        Returns:
            Number of files deleted.
        """
        if keep.attempt != attempt:
            return 0
        done = 0
        for folder in self.packets.iterdir():
            if int(folder.name) < attempt:
                done += sum(1 for path in folder.rglob("*") if path.is_file())
                shutil.rmtree(folder)
        for fragment, version in enumerate(keep.versions):
            for window in sorted(
                (self.packets / str(attempt) / str(fragment)).glob("*"), key=lambda each: int(each.name)
            ):
                files = list(window.iterdir())
                # A packet of version v is for the commit that makes v + 1: within the checkpoint when v < version.
                if any(read_version(path) >= version for path in files):
                    break
                for path in files:
                    path.unlink()
                    done += 1
                window.rmdir()
        return done


def read_version(path: Path) -> int:
    """The anchor version on which a stored packet builds."""
    with path.open("rb") as file:
        found = read_header(file.read(80 * 1024))
    if found is None:
        raise LedgerError(f"{path}: cut short")
    return found[0].version


def _lock(path: Path) -> io.TextIOWrapper:
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise UsageError(
            f"{path.parent}: another relay serves this folder (process {holder})",
            hint=f"end it first: kill {holder}",
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _check_ledger(path: Path) -> tuple[list[tuple[int, int]], int]:
    """Check the whole chain, line by line; cut off a last line that a crash has torn.

    Returns:
        ((offset, length) of every line, end of the last one).
    """
    offsets: list[tuple[int, int]] = []
    end, head = 0, START
    if not path.exists():
        return offsets, end
    with path.open("r+b") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                log.warning(
                    "%s:%d: cut off an entry that was not written to its end (%d bytes)", path, number, len(line)
                )
                file.truncate(end)
                os.fsync(file.fileno())
                break
            try:
                entry = ENTRY.validate_json(line)
                check_link(entry, number - 1, head)
            except ValidationError as error:
                raise LedgerError(f"{path}:{number}: not a ledger entry") from error
            except LedgerError as error:
                raise LedgerError(f"{path}:{number}: {error.message}") from error
            offsets.append((end, len(line)))
            end += len(line)
            head = entry.hash
    return offsets, end
