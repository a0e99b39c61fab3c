"""A recipe whose training is a script: what it must say, what means nothing in it, which files travel."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.config.load import load_recipe
from islandctl.errors import ConfigError

BASE = "name: own\ntraining: {steps: 5, batch: 2, sequence: 8}\n"
FOREIGN = Path(__file__).parents[2] / "recipes" / "foreign" / "recipe.yaml"


def load(folder: Path, text: str) -> object:
    (folder / "r.yaml").write_text(BASE + text)
    return load_recipe(folder / "r.yaml")


def fault(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    return caught.value.message


def test_the_shipped_example_brings_its_script() -> None:
    loaded = load_recipe(FOREIGN)
    assert loaded.value.worker.command == ("python", "train.py", "--lr", "3e-3")
    assert loaded.files == {"train.py": (FOREIGN.parent / "train.py").read_text()}
    lines = loaded.files["train.py"].splitlines()
    assert len(lines) < 90


@pytest.mark.parametrize("written", ["python own/train.py --name 'a b'", "[python, own/train.py, --name, a b]"])
def test_a_command_is_words_or_one_text_and_folders_travel_whole(tmp_path: Path, written: str) -> None:
    (tmp_path / "own" / "lib" / "__pycache__").mkdir(parents=True)
    for name in ("train.py", "lib/data.py", "lib/__pycache__/data.pyc", ".hidden"):
        (tmp_path / "own" / name).write_text(name)
    loaded = load(tmp_path, f"worker:\n  command: {written}\n  files: [own]\n")
    assert loaded.value.worker.command == ("python", "own/train.py", "--name", "a b")  # type: ignore[attr-defined]
    assert loaded.files == {"own/train.py": "train.py", "own/lib/data.py": "lib/data.py"}  # type: ignore[attr-defined]


def test_without_a_command_model_data_and_optimizer_are_missing(tmp_path: Path) -> None:
    assert fault(tmp_path, "").startswith(f"{tmp_path}/r.yaml:1:1: model: key 'model' is missing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker: {command: [bash, x.sh]}\n", "r.yaml:3:19: worker.command: write `[python, SCRIPT, …]`"),
        ("worker: {command: python -u x.py}\n", "'-u': of python's own options only -m can be given"),
        ('worker: {command: "python \'x"}\n', "not a command: no closing quotation"),
        ("worker: {command: [python, x.py]}\n", "worker.command: x.py is not among worker.files"),
        ("worker: {command: [python, x.py], files: [x.py]}\n", "r.yaml:3:43: worker.files: "),
        ("worker: {command: [python, -m, x], files: [../x.py]}\n", "'../x.py' is not beside the recipe"),
        ("worker: {files: [x.py]}\nmodel: null\n", "r.yaml:3:17: worker.files: belongs to a command"),
        (
            "worker: {command: [python, /x.py]}\ndata: {paths: [/d]}\n",
            "r.yaml:4:7: data: means nothing with worker.command: the script decides it; leave it out",
        ),
        (
            "worker: {command: [python, /x.py]}\nevaluation: {every: 3}\n",
            "r.yaml:4:13: evaluation: means nothing with worker.command",
        ),
    ],
)
def test_what_is_wrong_is_told_at_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert message in fault(tmp_path, text)


def test_only_text_travels_and_little_of_it(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_bytes(b"\xff\xfe")
    files = "worker: {command: [python, x.py], files: [x.py, y.txt]}\n"
    assert "x.py is not UTF-8 text" in fault(tmp_path, files)
    (tmp_path / "x.py").write_text("x" * 600_000)
    (tmp_path / "y.txt").write_text("y" * 600_000)
    assert "more than 1024 KiB in all" in fault(tmp_path, files)
