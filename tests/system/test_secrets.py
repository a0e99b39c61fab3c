"""Secrets of a recipe and a profile: whatever is written and shown, they are only where they must be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .local import Machine, ending, kill, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CORE = "neverToBeSeen4711"
"""The part of both secrets that no way of writing changes."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    recipe = {"worker": {"secrets": ["RUN_API_KEY"]}}
    with ending(Machine(tmp_path, recipe)) as made:
        made.env |= {"RUN_API_KEY": f"p(a$s\"s\\'{CORE}-run/é", "INDEX_TOKEN": f"{CORE}-index"}
        made.site("west", environment={"secrets": ["INDEX_TOKEN"]})
        yield made


def test_every_byte_that_was_written_or_shown(machine: Machine) -> None:
    recipe, *more = machine.arguments(5000, "kept")
    sites = more[:4]
    shown = []

    def typed(*args: str, code: int = 0) -> str:
        done = machine.islandctl(*args)
        assert done.returncode == code, done.stderr + done.stdout
        shown.append((args, done.stdout + done.stderr))
        return done.stdout

    plan = machine.root / "own.plan"
    typed("plan", recipe, *sites, "--out", str(plan), "--explain")
    assert "RUN_API_KEY" in plan.read_text()
    typed("doctor", recipe, *sites)
    typed("doctor", recipe, *sites, "--json")
    typed("launch", str(plan), "--run", "kept", "--detach")
    machine.until("kept", lambda seen: min(steps_of(seen)) >= 3)
    told = [Path(f"/proc/{pid}/environ").read_bytes() for pid in machine.workers("kept", "west")]
    assert told
    assert all(f"{CORE}-run".encode() in environ for environ in told), "else nothing is tested"
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if CORE.encode() in line]
    kill(machine.workers("kept", "west"))
    machine.until("kept", lambda seen: seen["cells"][1]["restarts"] == 1 and seen["cells"][1]["state"] == "training")
    for command in ("status", "logs"):
        typed(command, "kept")
        typed(command, "kept", "--json")
    typed("checkpoints", "kept")
    typed("runs")
    typed("stop", "kept")
    typed("resume", "kept", "--detach")
    typed("stop", "kept")
    typed("plan", "--from-run", "kept")

    assert [args for args, text in shown if CORE in text] == []
    written = [path for path in machine.root.rglob("*") if path.is_file()]
    relay = machine.runs / "kept" / "relay"
    assert {"ledger.jsonl", "relay.log"} <= {path.name for path in written if path.is_relative_to(relay)}
    holding = [path for path in written if CORE.encode() in path.read_bytes()]
    assert sorted(holding) == sorted(machine.cell("kept", name) / "secrets.json" for name in ("east", "west"))
    assert {path.stat().st_mode & 0o777 for path in holding} == {0o600}
    for path in holding:
        assert json.loads(path.read_text()) == {"RUN_API_KEY": machine.env["RUN_API_KEY"]}
    typed("remove", "kept", "--checkpoints")
    assert not [path for path in machine.root.rglob("*") if path.is_file() and CORE.encode() in path.read_bytes()]


def test_what_a_script_prints_of_a_secret_is_not_shown_where_it_is_known(machine: Machine) -> None:
    """It is in the log as it was printed; commands show three stars in its place."""
    (machine.root / "train.py").write_text(
        "import os, sys\nimport islandctl\nprint('my key is', os.environ['RUN_API_KEY'], flush=True)\n"
        "raise RuntimeError('refused: ' + os.environ['RUN_API_KEY'])\n"
    )
    machine.changes = {
        "worker": {
            "command": "python train.py",
            "files": ["train.py"],
            "secrets": ["RUN_API_KEY"],
            "restart": {"limit": 1, "backoff": "200 ms"},
        }
    }
    whole = json.loads(machine.recipe(5).read_text())
    for key in ("model", "data", "evaluation"):
        whole.pop(key, None)
    whole["training"] = {key: whole["training"][key] for key in ("steps", "batch", "sequence")}
    recipe = machine.root / "script.yaml"
    recipe.write_text(json.dumps(whole))
    sites = [part for name in ("east", "west") for part in ("--site", str(machine.root / f"{name}.yaml"))]
    done = machine.islandctl("launch", str(recipe), *sites, "--run", "said")
    assert done.returncode == 1
    logs = machine.islandctl("logs", "said")
    as_json = machine.islandctl("logs", "said", "--json")
    status = machine.islandctl("status", "said")
    assert "my key is ***" in logs.stdout
    assert "my key is ***" in as_json.stdout
    assert "refused: ***" in done.stdout + done.stderr
    assert CORE not in done.stdout + done.stderr + logs.stdout + as_json.stdout + status.stdout
