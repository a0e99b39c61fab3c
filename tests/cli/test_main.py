"""The command line from outside: exit codes, one clear line an error, nothing heavy imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from islandctl import __version__
from islandctl.cli import output
from islandctl.cli.main import app, main
from islandctl.cli.runs import fitted
from islandctl.config.paths import RunFolder
from islandctl.runs import record as records
from tests.runs import builders as make

ROOT = Path(__file__).parents[2]
DEMO = [f"{ROOT}/recipes/demo.yaml", "--site", f"{ROOT}/site-profiles/local-a.yaml"]
DEMO += ["--site", f"{ROOT}/site-profiles/local-b.yaml"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "home"


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return int(caught.value.code or 0)


def launched(name: str = "demo") -> None:
    made = records.create(make.plan(), name, launcher_pid=0)
    records.change(made, phase="stopped", cells=make.record().cells)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"islandctl {__version__}\n"


@pytest.mark.parametrize("command", [command.callback.__name__ for command in app.registered_commands])
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert f"islandctl {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["status", "--nonsense"],
        ["resume", "demo", "--from", "x"],
        ["logs", "demo", "--tail", "-1"],
        ["launch"],
        ["status", "demo"],
        ["status"],
        ["stop", "demo"],
        ["resume", "demo"],
        ["logs", "demo"],
        ["checkpoints", "demo"],
        ["remove", "demo"],
        ["remove"],
        ["launch", "/nowhere.yaml", "--site", "/nowhere.yaml"],
        ["launch", "/nowhere.plan"],
    ],
)
def test_wrong_use_ends_with_2_and_says_why_on_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err
    assert "Traceback" not in seen.err


def test_an_error_is_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    launched("demo-1")
    assert run("status", "demo-2") == 2
    assert capsys.readouterr().err == "error: there is no run called demo-2\nhint: nearest: demo-1\n"


def test_logs_names_the_sites_and_ranks_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    launched()
    assert run("logs", "demo", "--site", "north") == 2
    assert "its sites: east, west" in capsys.readouterr().err
    assert run("logs", "demo", "--rank", "7") == 2
    assert "its ranks: 0 to 0" in capsys.readouterr().err
    assert run("logs", "demo", "--since", "yesterday") == 2


def test_a_recipe_needs_sites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: r\nmodel: {kind: dense, layers: 1, width: 16, heads: 2, hidden: 32}\n"
        "data: {paths: [python-stdlib]}\ntraining: {steps: 1, batch: 1, sequence: 8, optimizer: {lr: 1e-3}}\n"
        "exchange: {fragments: 1}\n"
    )
    assert run("launch", str(recipe)) == 2
    assert "--site PROFILE" in capsys.readouterr().err


def test_nothing_to_resume_after_a_failed_launch(capsys: pytest.CaptureFixture[str]) -> None:
    made = records.create(make.plan(), "demo", launcher_pid=0)
    records.change(made, phase="failed", reason="no answer")
    assert run("resume", "demo") == 2
    assert "never got to the workers" in capsys.readouterr().err
    assert run("status", "demo", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["detail"]) == ("failed", "no answer")


def test_runs_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("runs") == 0
    assert "no run yet" in capsys.readouterr().err
    launched()
    assert run("runs") == 0
    shown = capsys.readouterr().out
    assert "demo" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert run("runs", "--json") == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["run"], only["phase"], only["sites"]) == ("demo", "stopped", ["east", "west"])
    assert only["last_known"] in shown


def test_a_long_reason_is_cut_on_a_terminal_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    name, reason = "n" * 42, "east/gpu-1: [/tmp] has no room :boom: " + "no answer; " * 30
    launched(name)
    records.change(records.load(name), phase="failed", reason=reason)
    assert run("runs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert reason.rstrip() in lines[1]
    assert lines[1].startswith(name)
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(("width", "num_columns"), [(78, 4), (88, 5), (100, 6), (120, 6)])
def test_the_table_of_runs_fits_the_terminal(width: int, num_columns: int) -> None:
    lines = [
        ["run", "started", "last known", "attempt", "cells", "note"],
        ["n" * 42, "10 min ago", "failed", "1", "east, west", "east/gpu-1: " + "no answer; " * 30],
        ["demo", "2 d ago", "stopped", "12", "east", ""],
    ]
    fits = fitted(lines, width)
    assert [line[:4] for line in fits] == [line[:4] for line in lines]
    assert {len(line) for line in fits} == {num_columns}
    longest = [max(map(len, column)) for column in zip(*fits, strict=True)]
    assert sum(longest) + 2 * (num_columns - 1) <= width
    if num_columns > 4:
        assert fits[1][-1].startswith("east/gpu")
        assert fits[1][-1].endswith("…")


def test_a_removed_run_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    made = records.create(make.plan(), "demo", launcher_pid=0)
    records.change(made, phase="failed", reason="no answer")
    assert run("remove", "demo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kept"] == []
    assert records.names() == []
    assert run("remove", "demo") == 2


def test_a_damaged_record_hides_no_other_run(capsys: pytest.CaptureFixture[str]) -> None:
    launched("demo-1")
    launched("demo-2")
    RunFolder.of("demo-1").record.write_text("{")
    assert run("runs", "--json") == 0
    seen = capsys.readouterr()
    assert [one["run"] for one in json.loads(seen.out)] == ["demo-2"]
    assert seen.err == "demo-1: its record cannot be read; islandctl status demo-1 says why\n"
    assert run("status", "demo-1") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert str(RunFolder.of("demo-1").record) in error
    assert "islandctl stop demo-1 ends the run's processes all the same" in hint


@pytest.mark.parametrize("argv", [["schema", "site"], ["runs", "--json"], ["status", "demo"], ["--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_told(argv: list[str], unbuffered: str, home: Path) -> None:
    launched()
    env = {**os.environ, "ISLANDCTL_HOME": str(home), "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "islandctl", *argv]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.stderr == "error: the output could not be written: no space left on device\n"
    assert done.returncode == 1


def test_a_fault_of_ours_is_one_line_and_a_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("no\nsecond line")

    monkeypatch.setattr(records, "load_all", broken)
    assert run("runs") == 1
    seen = capsys.readouterr().err
    assert seen.startswith("error: ZeroDivisionError: no\n")
    assert "Traceback" not in seen
    (saved,) = (home / "faults").iterdir()
    assert str(saved) in seen
    assert "second line" in saved.read_text()


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "load_all", interrupted)
    assert run("runs") == 130


def command(*argv: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ISLANDCTL_HOME": str(home)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_help_and_status_do_not_import_what_is_heavy(home: Path) -> None:
    watch = (
        "import sys\n"
        "from islandctl.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'fabric', 'paramiko', 'cryptography', 'pydantic', 'httpx'}\n"
        "    print(sorted(set(sys.modules) & heavy), file=sys.stderr)\n"
    )
    shown = command(sys.executable, "-c", watch, "--help", home=home)
    assert shown.stderr.splitlines()[-1] == "[]"
    launched()
    shown = command(sys.executable, "-c", watch, "status", "demo", home=home)
    local = shown.stderr.splitlines()[-1]
    assert "pydantic" in local
    assert [name for name in ("torch", "numpy", "fabric", "paramiko", "cryptography") if name in local] == []


@pytest.mark.parametrize("argv", [["runs", "--json"], ["schema", "site"], ["--help"], ["plan", *DEMO]])
def test_a_reader_that_goes_away_is_no_trouble(argv: list[str], home: Path) -> None:
    launched()
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "ISLANDCTL_HOME": str(home)}
    command = [sys.executable, "-m", "islandctl", *argv]
    done = subprocess.run(command, env=env, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 141)


def test_an_error_that_nobody_reads_keeps_its_exit_code(home: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "ISLANDCTL_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "islandctl", "status", "nothing"],
        env=env, stdout=write, stderr=write, timeout=60, check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 2


def test_json_is_json_also_when_a_loss_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    output.as_json({"loss": [float("nan"), float("-inf"), 1.5], "place": "München"})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"loss": [None, None, 1.5], "place": "München"}
    assert "München" in shown


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nonsense"], "error: no such command 'nonsense'\nhint: islandctl --help\n"),
        (["lauch"], "error: no such command 'lauch'. Did you mean 'launch'?\nhint: islandctl --help\n"),
        (["status", "--nonsense"], "error: no such option: --nonsense\nhint: islandctl status --help\n"),
        (["launch"], "error: missing argument 'RECIPE|PLAN'\nhint: islandctl launch --help\n"),
    ],
)
def test_misuse_is_one_line_and_a_hint(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert capsys.readouterr().err == said


def test_commands_are_named_so_that_they_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "islandctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    said = "demo: detached; islandctl status demo; the islandctl relay of /opt/islandctl status"
    assert output.typeable(said) == said.replace("islandctl status demo", "bin/islandctl status demo", 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert output.typeable("islandctl status") == f"{program} status"
    monkeypatch.setenv("PATH", str(program.parent))
    assert output.typeable(said) == said


@pytest.mark.parametrize("wrong", ["a file", "a file/below"])
def test_a_home_that_cannot_be_used_is_told_in_one_line(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / wrong))
    assert run("launch", *DEMO, "--yes") == 2
    seen = capsys.readouterr().err
    assert "hint: set ISLANDCTL_HOME to a folder that can be written" in seen
    assert "Traceback" not in seen
    for argv in (["runs"], ["status"], ["status", "demo"], ["stop", "demo"], ["remove", "demo"]):
        assert run(*argv) == 2
        assert "hint: set ISLANDCTL_HOME to a folder that can be written" in capsys.readouterr().err


def test_a_terminal_without_these_signs_gets_question_marks(home: Path) -> None:
    env = {**os.environ, "ISLANDCTL_HOME": str(home), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "islandctl", "plan", *DEMO], env=env, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"feasible" in done.stdout
