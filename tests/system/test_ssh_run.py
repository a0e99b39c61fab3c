"""Two sites with a real sshd each, in network namespaces where those can be made: launch, status, kill, stop."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sshd import Sshd, namespaces_work, servers

from .local import Machine, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Machine, dict[str, Sshd]]]:
    """A machine whose sites are two SSH servers."""
    apart = namespaces_work()
    with servers(tmp_path / "servers") as start:
        machine = Machine(tmp_path)
        known = {name: start(namespace=apart) for name in ("east", "west")}
        for name, server in known.items():
            ssh = f"{{config: /dev/null, identity: {server.identity}, known_hosts: {server.known_hosts}}}"
            machine.site(name, f"scheduler: ssh\nhosts: ['{server.host}']\nssh: {ssh}", python=sys.executable)
        yield machine, known
        if (tmp_path / "home" / "runs" / "far").is_dir():
            machine.islandctl("stop", "far", "--deadline", "0")


def test_a_run_over_ssh(far: tuple[Machine, dict[str, Sshd]]) -> None:
    machine, known = far
    started = machine.launch(5000, "far", "--detach")
    assert started.returncode == 0, started.stderr
    assert "through a tunnel" in started.stderr
    machine.until("far", lambda seen: min(steps_of(seen)) >= 5)

    (victim,) = machine.workers("far", "west")
    os.kill(victim, signal.SIGKILL)
    back = machine.until("far", lambda seen: seen["cells"][1]["restarts"] == 1)
    reached = max(steps_of(back))
    machine.until("far", lambda seen: min(steps_of(seen)) > reached)

    known["west"].drop()
    lost = machine.until("far", lambda seen: seen["cells"][1]["nodes"][0]["state"] == "unreachable")
    assert lost["state"] != "failed"
    assert lost["cells"][1]["state"] not in ("failed", "lost")
    blind = machine.islandctl("stop", "far", "--deadline", "0")
    assert blind.returncode == 5
    assert "west/" in blind.stdout
    known["west"].start()

    again = machine.islandctl("stop", "far", "--deadline", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert machine.processes("far") == {}
    assert machine.status("far")["state"] == "stopped"


def test_trouble_before_the_workers_leaves_nothing(far: tuple[Machine, dict[str, Sshd]]) -> None:
    machine, known = far
    known["west"].drop()
    done = machine.launch(50, "far", "--detach")
    assert done.returncode == 5
    assert "west/" in done.stderr
    assert machine.processes("far") == {}
    status = machine.status("far")
    assert status["state"] == "failed"

    known["west"].new_host_key()
    known["west"].start()
    done = machine.launch(50, "changed-key", "--detach")
    assert done.returncode == 4
    assert "host key" in done.stderr
    assert json.loads(machine.islandctl("runs", "--json").stdout)[-1]["phase"] == "failed"


def test_the_relay_on_a_host_of_its_own(far: tuple[Machine, dict[str, Sshd]]) -> None:
    machine, known = far
    recipe = machine.recipe(40)
    host = known["east"].host
    recipe.write_text(recipe.read_text().replace("relay: {", f"relay: {{host: '{host}', "))
    sites = [part for name in ("east", "west") for part in ("--site", str(machine.root / f"{name}.yaml"))]
    done = machine.islandctl("launch", str(recipe), *sites, "--run", "far")
    assert done.returncode == 0, done.stderr + done.stdout
    assert steps_of(machine.status("far")) == [40, 40]
    assert list(machine.root.glob("work dir/east/runs/far.*/relay/ledger.jsonl"))
    assert machine.processes("far") == {}
