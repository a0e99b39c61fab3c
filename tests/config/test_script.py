"""A recipe whose training is a script: what it must say, what means nothing in it, which files travel."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from islandctl.config.beside import unpacked
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


def test_a_script_without_sequences_leaves_them_out_and_counts_samples(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: own\ntraining: {steps: 5, batch: 2}\nworker: {command: python -m x}\n")
    assert load_recipe(tmp_path / "r.yaml").value.training.sequence == 1


def test_the_built_in_training_needs_sequences(tmp_path: Path) -> None:
    needed = "model: {kind: dense, layers: 1, width: 8, heads: 1, hidden: 8}\ndata: {paths: [python-stdlib]}\n"
    for training, message in (
        ("{steps: 5, batch: 2, optimizer: {lr: 1}}", "r.yaml:1:11: training.sequence: key 'sequence' is missing"),
        (
            "{sequence: 1, steps: 5, batch: 2, optimizer: {lr: 1}}",
            "r.yaml:1:22: training.sequence: at least 2: a token",
        ),
    ):
        (tmp_path / "r.yaml").write_text(f"training: {training}\nname: own\n{needed}")
        with pytest.raises(ConfigError) as caught:
            load_recipe(tmp_path / "r.yaml")
        assert message in caught.value.message


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


def test_little_travels(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("x" * 9_000_000)
    (tmp_path / "y.txt").write_text("y" * 9_000_000)
    files = "worker: {command: [python, x.py], files: [x.py, y.txt]}\n"
    assert "more than 16 MiB in all" in fault(tmp_path, files)


def git(folder: Path, *words: str) -> None:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", folder, *settings, *words], check=True, capture_output=True, timeout=60)


def test_of_a_git_repository_travels_what_git_does_not_ignore(tmp_path: Path) -> None:
    part, own = tmp_path / "part", tmp_path / "own"
    for folder in (part, own):
        folder.mkdir()
        git(folder, "init", "-q")
    (part / "inner.py").write_text("inner")
    git(part, "add", ".")
    git(part, "commit", "-qm", "x")
    for name, text in {
        ".gitignore": "data/\n*.log\n",
        "train.py": "old",
        "gone.py": "gone",
        "sub dir/naïve name.py": "name",
        "data/large.bin": "ignored",
        "noise.log": "ignored",
        ".hidden/kept.py": "kept",
    }.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    git(own, "submodule", "add", "-q", str(part), "vendored")
    git(own, "add", ".")
    git(own, "commit", "-qm", "x")
    (own / "train.py").write_text("not committed")
    (own / "gone.py").unlink()
    (own / "new.py").write_text("not even added")
    (own / "model.bin").write_bytes(b"\xff\x00")
    (own / "run.sh").write_text("#!/bin/sh\n")
    (own / "run.sh").chmod(0o755)
    (own / "trick.txt").write_text("data:;base64,eA==")
    loaded = load(tmp_path, "worker: {command: [python, own/train.py], files: [own]}\n")
    files = {name: unpacked(text) for name, text in loaded.files.items()}  # type: ignore[attr-defined]
    assert files.pop("own/.gitmodules")
    assert files == {
        "own/.gitignore": (b"data/\n*.log\n", False),
        "own/train.py": (b"not committed", False),
        "own/sub dir/naïve name.py": (b"name", False),
        "own/.hidden/kept.py": (b"kept", False),
        "own/vendored/inner.py": (b"inner", False),
        "own/new.py": (b"not even added", False),
        "own/model.bin": (b"\xff\x00", False),
        "own/run.sh": (b"#!/bin/sh\n", True),
        "own/trick.txt": (b"data:;base64,eA==", False),
    }


def test_secrets_are_named_and_never_written(tmp_path: Path) -> None:
    command = "worker: {command: [python, /x.py], "
    assert "WANDB_API_KEY looks like a secret" in fault(tmp_path, command + "env: {WANDB_API_KEY: abc}}\n")
    assert "'a=b' is not the name of an environment variable" in fault(tmp_path, command + "secrets: [a=b]}\n")
    both = command + "env: {HF_HOME: /x}, secrets: [HF_HOME]}\n"
    assert "HF_HOME is listed in worker.secrets as well" in fault(tmp_path, both)
    loaded = load(tmp_path, command + "env: {TOKENIZERS_PARALLELISM: '0'}, secrets: [WANDB_API_KEY]}\n")
    assert loaded.value.worker.secrets == ("WANDB_API_KEY",)  # type: ignore[attr-defined]
