"""The text: found, split, dealt out; the cursor is exact."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.config.recipe import DataRecipe
from islandctl.errors import ConfigError
from islandctl.worker.data import Sequences, held_out_sequences, permute
from islandctl.worker.text import read_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(60):
        path = tmp_path / "text" / str(number % 7) / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {number}\n" + f"value_{number} = {number}\n" * 40)
    (tmp_path / "text" / "image.png").write_bytes(b"\x89PNG")
    return tmp_path / "text"


def recipe(*paths: object, **more: object) -> DataRecipe:
    return DataRecipe(paths=tuple(map(str, paths)), **{"held_out": 0.2, **more})  # type: ignore[arg-type]


def sequences(cell: int = 0, num_cells: int = 2, *, size: int = 1000) -> Sequences:
    text = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    return Sequences(text, sequence=10, seed=3, cell=cell, num_cells=num_cells)


def test_the_split_depends_on_content_and_not_on_names_or_places(folder: Path, tmp_path: Path) -> None:
    first = read_text(recipe(folder), sequence=32)
    other = tmp_path / "elsewhere"
    other.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.py"), reverse=True)):
        (other / f"x{number}.py").write_bytes(path.read_bytes())
    second = read_text(recipe(other), sequence=32)
    assert first.held_out_hash == second.held_out_hash
    assert np.array_equal(first.training, second.training)
    assert first.num_files == 60
    assert 0 < len(first.held_out) < len(first.training)


def test_no_held_out_file_is_trained_on(folder: Path) -> None:
    text = read_text(recipe(folder), sequence=32)
    training = set(text.training.tobytes().split(b"\0"))
    held_out = set(text.held_out.tobytes().split(b"\0"))
    assert training & held_out == {b""}
    assert len(training | held_out) == 61


def test_globs_files_and_folders_that_meet_give_each_file_once(folder: Path) -> None:
    (folder / "copy.py").write_bytes((folder / "3" / "3.py").read_bytes())
    text = read_text(recipe(folder, folder / "**" / "*.py", folder / "3" / "3.py"), sequence=32)
    assert text.num_files == 60


def test_few_large_files_are_held_out_by_their_ends(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("abcdefghij" * 1000)
    text = read_text(recipe(tmp_path / "book.txt", held_out=0.1), sequence=32)
    assert (len(text.training), len(text.held_out)) == (9001, 1001)


def test_a_limit_takes_less_and_still_holds_some_out(folder: Path) -> None:
    text = read_text(recipe(folder, limit_bytes=9000), sequence=32)
    assert 8000 < len(text.training) + len(text.held_out) - text.num_files <= 9000
    assert len(text.held_out) > 33


def test_the_library_of_this_python_is_real_text() -> None:
    text = read_text(DataRecipe(paths=("python-stdlib",)), sequence=256)
    assert len(text.training) > 5_000_000
    assert len(text.held_out) > 100_000
    assert b"def dataclass(" in text.training.tobytes() + text.held_out.tobytes()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: root / "missing", "gives no file"),
        (lambda root: root / "*.rst", "gives no file"),
        (lambda root: root / "tiny.py", "one sequence needs"),
    ],
)
def test_unusable_paths_are_named(tmp_path: Path, make: object, says: str) -> None:
    (tmp_path / "tiny.py").write_text("x = 1\n")
    path = make(tmp_path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=says) as caught:
        read_text(recipe(path), sequence=64)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "5.py":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"5\.py: Permission denied"):
        read_text(recipe(folder), sequence=32)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**56))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_permute_mixes_and_stays_the_same_for_ever() -> None:
    assert permute(np.arange(8), 1000, 1).tolist() == [557, 911, 183, 164, 338, 29, 631, 869]
    order = permute(np.arange(5000), 5000, 7)
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.05


def test_cells_share_an_epoch_without_overlap_and_epochs_differ() -> None:
    cells = [sequences(cell, 3) for cell in range(3)]
    epochs = [[set(cell.numbers(e * cell.per_epoch, (e + 1) * cell.per_epoch)) for cell in cells] for e in range(2)]
    for epoch in epochs:
        assert sum(map(len, epoch)) == len(set.union(*epoch)) == 3 * cells[0].per_epoch
    assert epochs[0][0] != epochs[1][0]


@given(batches=st.lists(st.integers(1, 9), min_size=1, max_size=30), cut=st.integers(0, 29))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_a_restored_cursor_goes_on_exactly(batches: list[int], cut: int) -> None:
    straight, interrupted = sequences(), sequences()
    expected = [straight.take(batch) for batch in batches]
    for batch in batches[:cut]:
        interrupted.take(batch)
    resumed = sequences()
    resumed.load_state_dict(interrupted.state_dict())
    for batch, want in zip(batches[cut:], expected[cut:], strict=True):
        assert torch.equal(resumed.take(batch), want)


def test_ranks_together_take_what_one_rank_would() -> None:
    alone = sequences().take(7)
    parts = [sequences().take(7, rank=rank, num_ranks=3) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 3]
    assert torch.equal(torch.cat(parts), alone)


def test_every_cell_needs_a_sequence() -> None:
    with pytest.raises(ConfigError, match="fewer than the 2 cells"):
        sequences(size=15)


def test_held_out_sequences_are_spread_and_predict_every_byte_once() -> None:
    text = np.arange(0, 250, dtype=np.uint8)
    rows = held_out_sequences(text, sequence=10, count=4)
    assert rows[:, 0].tolist() == [0, 60, 120, 180]
    assert torch.equal(rows[0], torch.arange(11))
    assert held_out_sequences(text, sequence=10, count=999).shape == (math.floor(249 / 10), 11)


def test_what_a_launch_asks_is_what_the_workers_would_meet(folder: Path) -> None:
    def ask(num_cells: int = 2, **more: object) -> dict[str, object]:
        data = recipe(folder, **more).model_dump(mode="json")
        given = json.dumps({"data": data, "sequence": 32, "num_cells": num_cells})
        command = [sys.executable, "-X", "importtime", "-m", "islandctl.worker.preflight"]
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
        assert not [line for line in done.stderr.splitlines() if line.endswith(" torch")]  # it takes seconds
        return dict(json.loads(done.stdout.splitlines()[-1]))

    text = read_text(recipe(folder), sequence=32)
    size = len(text.training) + len(text.held_out)
    assert ask() == {"files": 60, "bytes": size, "held_out": text.held_out_hash}
    told = ask(limit_bytes="100 B")
    assert "bytes of held-out text; one sequence needs 33" in str(told["error"])
    assert "raise data.limit_bytes (it is 100)" in str(told["hint"])
    assert "fewer than the 5000 cells" in str(ask(num_cells=5000)["error"])
