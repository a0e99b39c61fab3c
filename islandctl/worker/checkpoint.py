"""Checkpoints on disk: written aside, flushed, hashed, renamed; verified before anything in them is opened.

checkpoints/step-00000100-attempt-1/
    __0_0.distcp …   tensors, one file a rank (see tensors.py)
    .metadata        torch's index of them
    state.json       everything that is not a tensor (TrainingState)
    manifest.json    size and blake3 of every file above; written last
checkpoints/.tmp-…       an interrupted one; removed at the next save
checkpoints/.failed-…    the name of the last one that could not be written, and why; removed after the next good save
checkpoints/.damaged-…   one that failed its check; removed after the next good save
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from blake3 import blake3
from pydantic import Field, ValidationError
from torch import Tensor

from islandctl.config.model import Model
from islandctl.errors import CheckpointError
from islandctl.ledger.entries import Checkpoint, Entry, Rewind
from islandctl.ledger.packet import digest
from islandctl.relay.messages import UNSAVED
from islandctl.worker import tensors as disk
from islandctl.worker.parallel import Ranks

log = logging.getLogger(__name__)
STATE, MANIFEST = "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})-attempt-(\d+)")
T = TypeVar("T")


class FileRecord(Model):
    """One file of a checkpoint."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.]+$")
    size_bytes: int
    hash: str


class Manifest(Model):
    """What the checkpoint consists of. Its own hash is what the ledger names."""

    format: int = 1
    run: str
    attempt: int
    step: int
    files: tuple[FileRecord, ...]


class TrainingState(Model):
    """All of a cell's state that is not a tensor."""

    format: int = 1
    run: str
    config_hash: str
    map_hash: str
    """Of the fragment map; empty where nothing is exchanged."""
    cell: int
    num_ranks: int
    attempt: int
    step: int
    tokens: int
    versions: tuple[int, ...]
    """Of every fragment."""
    held_out_hash: str
    bits_per_byte: tuple[tuple[int, float], ...] = ()
    """(step, bits per byte) of every evaluation so far."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    path: Path
    attempt: int
    step: int
    manifest: str = ""
    """Hash of its manifest; empty before verification."""
    files: frozenset[str] = frozenset()
    """What the manifest names; empty before verification."""


def listing(folder: Path) -> list[Saved]:
    """All checkpoints with a final name, newest (attempt, step) first. Unfinished ones have none."""
    found = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append(Saved(path, attempt=int(match[2]), step=int(match[1])))
    return sorted(found, key=lambda saved: (saved.attempt, saved.step), reverse=True)


def write(folder: Path, state: TrainingState, tensors: Mapping[str, Tensor], ranks: Ranks) -> Saved:
    """Write one checkpoint. All ranks call it together, at the same step.

    A whole one of the same attempt, step and versions is left as it is: a repetition writes the same values. With
    other versions it is of the run's end, before the last rounds were done, and the new one takes its place.

    Raises:
        CheckpointError: at every rank, when any could not write (disk full, …). Nothing is left of it but a
            note (see ``unsaved``); earlier checkpoints stand.
    """
    name = f"step-{state.step:08d}-attempt-{state.attempt}"
    final, temporary = folder / name, folder / f".tmp-{name}"

    try:
        present = _on_lead(ranks, final, lambda: _prepare(final, temporary, state.versions))
        if present:
            return Saved(final, state.attempt, state.step, present)
        if not all(ranks.gather(temporary.is_dir())):
            raise CheckpointError(
                f"{temporary}: not every rank of the cell can see this folder",
                hint="a cell with several nodes needs its work_dir on storage that they share",
            )
        disk.save(temporary, tensors, ranks)
        records = ranks.gather(_try(lambda: _records(temporary, ranks.rank)))
        problem = next((item for item in records if isinstance(item, str)), None)
        if problem:
            raise CheckpointError(f"{temporary}: cannot write the tensors: {problem}")
        files = [record for part in records for record in part]
        manifest = _on_lead(ranks, final, lambda: _finish(folder, temporary, final, state, files))
    except CheckpointError as error:
        if ranks.leads:
            shutil.rmtree(temporary, ignore_errors=True)
            _note_failure(folder, name, error.message)
        raise
    return Saved(final, state.attempt, state.step, manifest)


def _note_failure(folder: Path, name: str, reason: str) -> None:
    """For the workers' next life. The name is what counts: a full disk has room for a name, and for little else."""
    note = folder / f".failed-{name}"
    with suppress(OSError):
        note.touch()
        for older in folder.glob(".failed-*"):
            if older != note:
                older.unlink()
        note.write_text(reason)


def unsaved(folder: Path, attempt: int) -> str:
    """The last checkpoint of the attempt that could not be written, as a line for people; empty when none is owed."""
    for note in folder.glob(".failed-step-*"):
        match = _NAME.fullmatch(note.name.removeprefix(".failed-"))
        if match and int(match[2]) == attempt:
            with suppress(OSError):
                return f"{UNSAVED} {int(match[1])}: {note.read_text(errors='replace')}".rstrip(": ")
    return ""


def _prepare(final: Path, temporary: Path, versions: tuple[int, ...]) -> str:
    if (final / MANIFEST).is_file() and _versions(final) == versions:
        return digest((final / MANIFEST).read_bytes())
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for left in temporary.parent.glob(".tmp-*"):
        shutil.rmtree(left)
    temporary.mkdir()
    return ""


def _versions(path: Path) -> tuple[int, ...] | None:
    try:
        return TrainingState.model_validate_json((path / STATE).read_bytes()).versions
    except (OSError, ValidationError):
        return None


def _records(temporary: Path, rank: int) -> list[FileRecord]:
    """Flush and hash the files that this rank wrote."""
    own = sorted(temporary.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        own.append(temporary / disk.INDEX)
    return [_flushed(path) for path in own]


def _flushed(path: Path) -> FileRecord:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return FileRecord(name=path.name, size_bytes=path.stat().st_size, hash=hash_file(path))


def _finish(folder: Path, temporary: Path, final: Path, state: TrainingState, files: list[FileRecord]) -> str:
    (temporary / STATE).write_bytes(state.model_dump_json(indent=1).encode())
    files = [*files, _flushed(temporary / STATE)]
    manifest = Manifest(run=state.run, attempt=state.attempt, step=state.step, files=tuple(files))
    content = manifest.model_dump_json(indent=1).encode()
    with open(temporary / MANIFEST, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    _flush_folder(temporary)
    if final.exists():
        _set_aside(final)
    temporary.rename(final)
    _flush_folder(folder)
    for damaged in folder.glob(".damaged-*"):
        shutil.rmtree(damaged, ignore_errors=True)
    for note in folder.glob(".failed-*"):
        note.unlink(missing_ok=True)
    return digest(content)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """The blake3 hash of a file's content."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def verify(saved: Saved, ranks: Ranks, *, expected: str = "") -> Saved:
    """Check a checkpoint against its manifest, the ranks sharing the work. Opens nothing but JSON.

    Args:
        expected: the manifest's hash as the ledger has it; empty when the ledger does not know it.

    Raises:
        CheckpointError: at every rank; names the file and what is wrong with it.
    """
    path = saved.path
    content = _on_lead(ranks, path, lambda: _read_manifest(path, expected))
    manifest = Manifest.model_validate_json(content)
    mine = manifest.files[ranks.rank :: ranks.size]
    problems = ranks.gather(_try(lambda: [text for record in mine if (text := _fault(path, record))]))
    for problem in problems:
        if problem:
            raise CheckpointError(problem if isinstance(problem, str) else problem[0])
    return replace(saved, manifest=digest(content), files=frozenset(record.name for record in manifest.files))


def _read_manifest(path: Path, expected: str) -> bytes:
    place = path / MANIFEST
    try:
        content = place.read_bytes()
        if expected and digest(content) != expected:
            raise CheckpointError(f"{place}: is not the one that the ledger names (hash differs)")
        Manifest.model_validate_json(content)
    except FileNotFoundError as error:
        raise CheckpointError(f"{place}: missing; the checkpoint was never finished") from error
    except ValidationError as error:
        raise CheckpointError(f"{place}: damaged: not a manifest") from error
    return content


def _fault(path: Path, record: FileRecord) -> str:
    place = path / record.name
    if not place.is_file():
        return f"{place}: missing"
    size = place.stat().st_size
    if size != record.size_bytes:
        return f"{place}: damaged: {size} bytes instead of {record.size_bytes}"
    return "" if hash_file(place) == record.hash else f"{place}: damaged: content does not match its hash"


def read_state(path: Path, *, run: str, config_hash: str, cell: int, num_ranks: int) -> TrainingState:
    """The state of a verified checkpoint, if it is one of this cell under this configuration.

    Raises:
        CheckpointError: of another run, cell, configuration or number of ranks.
    """
    try:
        state = TrainingState.model_validate_json((path / STATE).read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path / STATE}: damaged: not a checkpoint's state") from error
    for what, has, wants in (
        ("run", state.run, run),
        ("cell", state.cell, cell),
        ("configuration hash", state.config_hash, config_hash),
        ("number of ranks", state.num_ranks, num_ranks),
    ):
        if has != wants:
            raise CheckpointError(
                f"{path / STATE}: {what} is {has}, but this cell's is {wants}",
                hint="resume with the plan that the checkpoint was made under, or launch a new run",
            )
    return state


def choose(folder: Path, *, attempt: int, cell: int, entries: Sequence[Entry], ranks: Ranks) -> Saved | None:
    """Where a cell starts: None is the beginning. All ranks call it together, with equal entries.

    The newest whole checkpoint of this attempt; a damaged one is set aside, with a warning. Without one: the
    checkpoint that the attempt began with, which must be the very one that the ledger's rewind names.

    Raises:
        CheckpointError: the one the attempt began with is missing, damaged or another.
    """
    known = {(e.attempt, e.step): e.manifest for e in entries if isinstance(e, Checkpoint) and e.cell == cell}
    present: list[Saved] = ranks.tell(listing(folder) if ranks.leads else None)
    for saved in present:
        if saved.attempt != attempt:
            continue
        try:
            return verify(saved, ranks, expected=known.get((saved.attempt, saved.step), ""))
        except CheckpointError as error:
            log.warning("%s; taking the checkpoint before it", error.message)
            _on_lead(ranks, saved.path, lambda path=saved.path: _set_aside(path))  # type: ignore[misc]
    if attempt == 1:
        return None
    rewind = next((e for e in reversed(entries) if isinstance(e, Rewind) and e.attempt == attempt), None)
    if rewind is None:
        raise CheckpointError(f"attempt {attempt} has no rewind entry in the ledger", hint="run islandctl resume")
    if not rewind.manifests:
        return None
    hint = "run islandctl resume --from an earlier step (islandctl checkpoints lists them)"
    candidates = [saved for saved in present if saved.step == rewind.step and saved.attempt < attempt]
    if not candidates:
        raise CheckpointError(f"{folder}: the joint checkpoint of step {rewind.step} is missing", hint=hint)
    problems = []
    for saved in candidates:
        try:
            return verify(saved, ranks, expected=rewind.manifests[cell])
        except CheckpointError as error:
            problems.append(error.message)
    raise CheckpointError("; ".join(problems), hint=hint)


def _set_aside(path: Path) -> None:
    target = path.with_name(f".damaged-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def prune(
    folder: Path, *, joint: Sequence[tuple[int, int]], keep: int, alone: Sequence[tuple[int, int]] = ()
) -> list[Path]:
    """Delete the checkpoints older than the newest ``keep`` (at least two) joint ones, and of ``alone`` the same.

    Until there are that many, nothing is deleted; of abandoned attempts only what is older than all of those.

    Args:
        joint: (attempt, step) of the joint checkpoints in the run's present history, as the ledger tells them.
        alone: of those that this cell has made while another one was away, and that no others will join.

    Returns:
        The folders deleted.
    """
    keep = max(2, keep)
    oldest = sorted(joint)[-keep] if len(joint) >= keep else (0, 0)
    present = listing(folder)
    passed = [saved for saved in present if (saved.attempt, saved.step) in set(alone)][keep:]
    old = [saved.path for saved in present if (saved.attempt, saved.step) < oldest or saved in passed]
    for path in old:
        delete(path)
    return old


def delete(path: Path) -> None:
    """Delete one checkpoint."""
    _set_aside(path)  # a half-deleted folder must not look like a checkpoint
    shutil.rmtree(path.with_name(f".damaged-{path.name}"), ignore_errors=True)


def _try(action: Callable[[], T]) -> T | str:
    """The result, or what went wrong as text, so that ranks can compare notes."""
    try:
        return action()
    except OSError as error:
        return f"{error.filename or ''} {error.strerror or error}".strip()


def _on_lead(ranks: Ranks, place: Path, action: Callable[[], T]) -> T:
    """Do it at rank 0; every rank gets the result, or the same CheckpointError."""
    outcome: tuple[T | None, str] = (None, "")
    if ranks.leads:
        try:
            outcome = (action(), "")
        except CheckpointError as error:
            outcome = (None, error.message)
        except OSError as error:
            outcome = (None, f"{error.filename or place}: {error.strerror or error}")
    result, problem = ranks.tell(outcome)
    if problem:
        raise CheckpointError(problem)
    return result  # type: ignore[no-any-return]
