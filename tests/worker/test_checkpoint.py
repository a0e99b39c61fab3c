"""Checkpoints: whole or absent, verified before anything is opened, the right one chosen."""

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from islandctl.errors import CheckpointError
from islandctl.ledger.entries import Checkpoint, Rewind
from islandctl.ledger.packet import digest
from islandctl.worker import tensors as disk
from islandctl.worker.checkpoint import (
    MANIFEST,
    Manifest,
    Saved,
    TrainingState,
    choose,
    hash_file,
    listing,
    prune,
    read_state,
    unsaved,
    verify,
    write,
)
from islandctl.worker.parallel import Ranks
from tests.disk import files_at_most, fill, mounted, needs_mount

ALONE = Ranks(0, 1, torch.device("cpu"))


def state(step: int = 10, attempt: int = 1) -> TrainingState:
    return TrainingState(
        run="r",
        config_hash="c",
        map_hash="",
        cell=0,
        num_ranks=1,
        attempt=attempt,
        step=step,
        tokens=100,
        versions=(1, 1),
        held_out_hash="h",
        bits_per_byte=((0, 8.0), (10, 3.0)),
    )


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "model/w": torch.full((4, 3), value),
        "optimizer/w/step": torch.tensor(value),
        "rank-0/rng/cpu": torch.get_rng_state(),
        "rank-0/island/flight": torch.arange(7, dtype=torch.uint8),
        "rank-0/island/nothing": torch.empty(0, dtype=torch.uint8),
    }


def saved(folder: Path, step: int = 10, attempt: int = 1, value: float = 1.0) -> Saved:
    return write(folder, state(step, attempt), tensors(value), ALONE)


def entry(one: Saved, cell: int = 0) -> Checkpoint:
    return Checkpoint(
        seq=1,
        attempt=one.attempt,
        at="",
        previous="",
        cell=cell,
        step=one.step,
        manifest=one.manifest,
        versions=(1, 1),
    )


def rewind(one: Saved, attempt: int = 2) -> Rewind:
    return Rewind(
        seq=2, attempt=attempt, at="", previous="", step=one.step, manifests=(one.manifest,), versions=(1, 1)
    )


def pick(folder: Path, *entries: Checkpoint | Rewind, attempt: int = 1) -> Saved | None:
    return choose(folder, attempt=attempt, cell=0, entries=entries, ranks=ALONE)


def flip(path: Path, position: int = -40) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def forge_manifest(folder: Path) -> None:
    """Make the manifest fit whatever lies there now, as an intruder would."""
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    files = [
        record.model_copy(
            update={"size_bytes": (folder / record.name).stat().st_size, "hash": hash_file(folder / record.name)}
        )
        for record in manifest.files
    ]
    (folder / MANIFEST).write_text(manifest.model_copy(update={"files": tuple(files)}).model_dump_json())


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    one = verify(saved(tmp_path, value=0.1), ALONE)
    target = {"model/w": torch.zeros(4, 3), "optimizer/w/step": torch.tensor(0.0)}
    own = disk.load(one.path, target, one.files, ALONE)
    assert torch.equal(target["model/w"], torch.full((4, 3), 0.1))
    assert torch.equal(target["optimizer/w/step"], torch.tensor(0.1))
    assert torch.equal(own["rng/cpu"], torch.get_rng_state())
    assert own["island/flight"].tolist() == list(range(7))
    assert own["island/nothing"].shape == (0,)
    assert read_state(one.path, run="r", config_hash="c", cell=0, num_ranks=1) == state()
    assert one.path.name == "step-00000010-attempt-1"
    assert one.manifest == digest((one.path / MANIFEST).read_bytes())


def test_every_file_is_in_the_manifest(tmp_path: Path) -> None:
    one = verify(saved(tmp_path), ALONE)
    assert set(os.listdir(one.path)) == one.files | {MANIFEST}


def test_a_repetition_leaves_the_whole_one_as_it_is(tmp_path: Path) -> None:
    one, again = saved(tmp_path), saved(tmp_path)
    assert one.manifest == again.manifest
    assert [each.step for each in listing(tmp_path)] == [10]


def test_one_from_the_middle_of_the_final_rounds_gives_way_to_the_last(tmp_path: Path) -> None:
    first = saved(tmp_path)
    again = write(tmp_path, state().model_copy(update={"versions": (9, 9)}), tensors(2.0), ALONE)
    assert again.path == first.path
    assert again.manifest != first.manifest
    assert verify(again, ALONE).manifest == again.manifest
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]


def test_an_interrupted_one_is_never_seen_and_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000020-attempt-1").mkdir(parents=True)
    (tmp_path / ".tmp-step-00000020-attempt-1" / "__0_0.distcp").write_bytes(b"half")
    assert listing(tmp_path) == []
    saved(tmp_path, 30)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000030-attempt-1"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_flipped_bit_anywhere_is_found_and_named(tmp_path: Path, name: str) -> None:
    one = saved(tmp_path)
    flip(one.path / name)
    with pytest.raises(CheckpointError, match="does not match its hash") as caught:
        verify(one, ALONE)
    assert str(one.path / name) in caught.value.message


def test_a_short_or_missing_file_is_found_and_named(tmp_path: Path) -> None:
    one = saved(tmp_path)
    os.truncate(one.path / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match="100 bytes instead of"):
        verify(one, ALONE)
    (one.path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        verify(one, ALONE)
    (one.path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="never finished"):
        verify(one, ALONE)


def test_a_forged_index_is_not_run_even_when_the_manifest_is_forged_too(tmp_path: Path) -> None:
    one = saved(tmp_path)
    mark = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> object:
            return os.system, (f"touch {mark}",)

    (one.path / ".metadata").write_bytes(pickle.dumps(Attack()))
    forge_manifest(one.path)
    with pytest.raises(CheckpointError, match="is not the one that the ledger names"):
        verify(one, ALONE, expected=one.manifest)
    files = verify(one, ALONE).files
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        disk.load(one.path, {}, files, ALONE)
    assert not mark.exists()


def test_an_index_cannot_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    one = verify(saved(tmp_path), ALONE)
    with open(one.path / ".metadata", "rb") as stream:
        index = pickle.load(stream)
    for place in index.storage_data.values():
        place.relative_path = "../elsewhere.distcp"
    (one.path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="which the manifest does not name"):
        disk.load(one.path, {"model/w": torch.zeros(4, 3)}, one.files, ALONE)


def test_pickled_objects_among_the_tensors_are_refused(tmp_path: Path) -> None:
    one = verify(saved(tmp_path), ALONE)
    buffer = io.BytesIO()
    torch.save({"x": Path("x")}, buffer)
    (one.path / "__0_0.distcp").write_bytes(buffer.getvalue() * 20)
    with pytest.raises(CheckpointError):
        disk.load(one.path, {"model/w": torch.zeros(4, 3)}, one.files, ALONE)


def test_another_shape_or_missing_key_is_refused(tmp_path: Path) -> None:
    one = verify(saved(tmp_path), ALONE)
    with pytest.raises(CheckpointError, match="cannot load"):
        disk.load(one.path, {"model/w": torch.zeros(5, 3)}, one.files, ALONE)
    with pytest.raises(CheckpointError, match="cannot load"):
        disk.load(one.path, {"model/other": torch.zeros(4, 3)}, one.files, ALONE)


@pytest.mark.parametrize("num_bytes", [0, 2000, 9000])
def test_where_the_disk_ends_the_last_good_one_stays(tmp_path: Path, num_bytes: int) -> None:
    good = saved(tmp_path)
    with files_at_most(num_bytes), pytest.raises(CheckpointError, match=r"cannot write|File too large"):
        saved(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {good.path.name, ".failed-step-00000020-attempt-1"}
    assert pick(tmp_path) == verify(good, ALONE)
    assert saved(tmp_path, 20).step == 20


def test_a_folder_that_cannot_be_made_is_an_error_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        saved(tmp_path / "file" / "checkpoints")


def test_a_restart_takes_the_newest_of_its_attempt(tmp_path: Path) -> None:
    assert pick(tmp_path) is None
    saved(tmp_path, 10)
    newest = saved(tmp_path, 20)
    assert pick(tmp_path) == verify(newest, ALONE)
    assert pick(tmp_path, rewind(newest), attempt=2) == verify(newest, ALONE)
    own = saved(tmp_path, 15, attempt=2)
    assert pick(tmp_path, rewind(newest), attempt=2) == verify(own, ALONE)


def test_a_damaged_newest_gives_way_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, newest = saved(tmp_path, 10), saved(tmp_path, 20)
    flip(newest.path / "__0_0.distcp")
    assert pick(tmp_path) == verify(before, ALONE)
    assert "taking the checkpoint before it" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".damaged-{newest.path.name}", before.path.name]
    assert saved(tmp_path, 20).step == 20
    assert not list(tmp_path.glob(".damaged-*"))


def test_a_whole_one_that_the_ledger_knows_otherwise_is_not_taken(tmp_path: Path) -> None:
    one = saved(tmp_path)
    known = entry(one).model_copy(update={"manifest": "0" * 64})
    assert pick(tmp_path, known) is None


def test_the_one_an_attempt_began_with_must_be_the_very_one(tmp_path: Path) -> None:
    one = saved(tmp_path)
    other = rewind(one).model_copy(update={"manifests": ("0" * 64,)})
    with pytest.raises(CheckpointError, match="is not the one that the ledger names"):
        pick(tmp_path, other, attempt=2)
    flip(one.path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="does not match its hash") as caught:
        pick(tmp_path, rewind(one), attempt=2)
    assert "islandctl resume --from" in caught.value.hint
    with pytest.raises(CheckpointError, match="step 30 is missing"):
        pick(tmp_path, rewind(one).model_copy(update={"step": 30}), attempt=2)
    assert pick(tmp_path, rewind(one).model_copy(update={"step": 0, "manifests": ()}), attempt=2) is None
    with pytest.raises(CheckpointError, match="no rewind entry"):
        pick(tmp_path, attempt=3)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"run": "x"}, "run is r, but this cell's is x"),
        ({"config_hash": "x"}, "configuration hash is c"),
        ({"cell": 1}, "cell is 0"),
        ({"num_ranks": 2}, "number of ranks is 1, but this cell's is 2"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, other: dict[str, object], says: str) -> None:
    mine = {"run": "r", "config_hash": "c", "cell": 0, "num_ranks": 1} | other
    with pytest.raises(CheckpointError, match=says):
        read_state(saved(tmp_path).path, **mine)  # type: ignore[arg-type]


def test_only_what_is_older_than_the_kept_joint_ones_is_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        saved(tmp_path, step)
    assert prune(tmp_path, joint=[(1, 10)], keep=1) == []
    assert prune(tmp_path, joint=[(1, 10), (1, 20), (1, 30)], keep=1) == [tmp_path / "step-00000010-attempt-1"]
    assert [each.step for each in listing(tmp_path)] == [40, 30, 20]
    saved(tmp_path, 25, attempt=2)
    saved(tmp_path, 35, attempt=2)
    prune(tmp_path, joint=[(1, 20), (2, 25), (2, 35)], keep=2)
    assert [(each.attempt, each.step) for each in listing(tmp_path)] == [(2, 35), (2, 25)]


def test_of_what_a_cell_made_alone_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        saved(tmp_path, step)
    alone = [(1, 30), (1, 40), (1, 50)]
    assert prune(tmp_path, joint=[(1, 10), (1, 20)], keep=2, alone=alone[:2]) == []
    assert prune(tmp_path, joint=[(1, 10), (1, 20)], keep=2, alone=alone) == [tmp_path / "step-00000030-attempt-1"]
    assert [each.step for each in listing(tmp_path)] == [60, 50, 40, 20, 10]


@needs_mount
def test_that_the_last_one_could_not_be_written_is_known_to_the_next_life(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        folder = disk / "checkpoints"
        saved(folder, 10)
        assert unsaved(folder, 1) == ""
        filler = fill(disk)
        for step in (20, 30):
            with pytest.raises(CheckpointError):
                saved(folder, step)
            assert unsaved(folder, 1) == f"no checkpoint at step {step}"  # there is no room for the reason
        assert unsaved(folder, 2) == ""
        filler.unlink()
        saved(folder, 40)
        assert unsaved(folder, 1) == ""
        with files_at_most(1000), pytest.raises(CheckpointError) as caught:
            saved(folder, 50)
        assert unsaved(folder, 1) == f"no checkpoint at step 50: {caught.value.message}"
        assert [one.step for one in listing(folder)] == [40, 10]
