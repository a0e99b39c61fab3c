"""Two sites with a real sshd each, in network namespaces where those can be made, reached as people reach clusters:
aliases in an included file, a jump host, odd ports. Launch, status, kill, stop."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sshd import Sshd, namespaces_work, servers

from .local import Machine, ending, kill, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Far:
    """A machine whose sites are SSH servers: ``east`` behind a jump host, ``west`` on an odd port."""

    def __init__(self, root: Path, machine: Machine, servers: dict[str, Sshd]) -> None:
        self.machine, self.servers = machine, servers
        included = root / "ssh" / "clusters"
        included.mkdir(parents=True)
        jump, east, west = (servers[name] for name in ("jump", "east", "west"))
        (included / "bastion.conf").write_text(jump.alias("bastion"))
        (included / "sites.conf").write_text(
            east.alias("isle-east-1", "ProxyJump bastion") + west.alias("isle-west-1")
        )
        self.config = root / "ssh" / "config"
        self.config.write_text(f"Include {included}/*.conf\n\nHost *\n  ServerAliveInterval 30\n")
        for name in ("east", "west"):
            self.profile(name)

    def profile(self, name: str, *, host: str | None = None, python: str = sys.executable, **ssh: str) -> None:
        self.machine.site(
            name,
            scheduler="ssh",
            hosts=[host or f"isle-{name}-1"],
            ssh={"config": str(self.config), "connect_timeout": "5 s", **ssh},
            environment={"python": python},
        )


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    apart = namespaces_work()
    with servers(tmp_path / "servers") as start, ending(Machine(tmp_path)) as machine:
        known = {
            "jump": start(),
            "east": start(namespace=apart),
            "west": start(namespace=apart, port=2200 if apart else None),
        }
        yield Far(tmp_path, machine, known)


def seen_by_ps() -> list[bytes]:
    """The command lines of all processes, as everybody sees them."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            lines.append(path.read_bytes())
    return lines


def holds(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except FileNotFoundError:  # a temporary one
        return False


def test_a_run_over_ssh(far: Far) -> None:
    machine, west = far.machine, far.servers["west"]
    machine.changes = {"worker": {"secrets": ["FAR_API_KEY"]}}
    missing = machine.launch(5000, "far", "--detach")
    assert missing.returncode == 2
    assert "worker.secrets: FAR_API_KEY is not set on this machine" in missing.stderr
    secret = machine.env["FAR_API_KEY"] = "not-to-be-seen-anywhere"
    started = machine.launch(5000, "far", "--detach")
    assert started.returncode == 0, started.stderr
    assert "east/isle-east-1: goes to the relay through a tunnel" in started.stderr
    machine.until("far", lambda seen: min(steps_of(seen)) >= 5)
    assert all("ISLANDCTL" not in line for line in machine.processes("far").values())

    # the secret is where the workers are, and nowhere else
    assert all(secret in Path(f"/proc/{pid}/environ").read_text() for pid in machine.workers("far", "west"))
    lines = [*seen_by_ps(), started.stdout.encode(), started.stderr.encode()]
    assert not [line for line in lines if secret.encode() in line]
    holding = sorted(path for path in far.machine.root.rglob("*") if path.is_file() and holds(path, secret))
    assert holding == sorted(machine.cell("far", name) / "secrets.json" for name in ("east", "west"))
    assert {path.stat().st_mode & 0o777 for path in holding} == {0o600}

    # whatever is killed comes back, and the run goes on
    kill([*machine.workers("far", "west"), *machine.workers("far", "east")])
    machine.kill("far", "ssh -F ssh_config", "isle-east-1")
    machine.kill("far", "-m islandctl.relay")
    back = machine.until("far", lambda seen: [cell["restarts"] for cell in seen["cells"]] == [1, 1])
    reached = max(steps_of(back))
    machine.until("far", lambda seen: min(steps_of(seen)) > reached and seen["state"] in ("running", "waiting"))

    # logs -f over a lost link: no line lost, none doubled
    follower = machine.begin("logs", "far", "-f", "--site", "west", "--rank", "0")
    time.sleep(2)
    west.drop()
    lost = machine.until("far", lambda seen: seen["cells"][1]["nodes"][0]["state"] == "unreachable")
    assert lost["state"] not in ("failed", "unknown")
    assert lost["cells"][1]["state"] not in ("failed", "lost")
    shown = machine.islandctl("status", "far")
    assert shown.returncode == 0
    assert "unreachable" in shown.stdout or "not reachable" in shown.stdout
    blind = machine.islandctl("stop", "far", "--deadline", "0")
    assert blind.returncode == 5
    assert "unknown: west/isle-west-1: " in blind.stdout
    assert "nothing of far is left on this machine" in blind.stdout
    unproven = machine.islandctl("remove", "far")
    assert unproven.returncode == 5
    assert "nothing proves that far has ended everywhere: west/isle-west-1: " in unproven.stderr
    assert "islandctl remove far --forget" in unproven.stderr

    west.start()
    again = machine.islandctl("stop", "far", "--deadline", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert machine.processes("far") == {}
    assert machine.status("far")["state"] == "stopped"
    time.sleep(2)
    follower.send_signal(signal.SIGINT)
    lines, said = follower.communicate(timeout=240)
    assert follower.returncode == 130
    assert "reconnecting, no line will be lost" in said
    assert "connected again" in said
    whole = machine.islandctl("logs", "far", "--site", "west", "--rank", "0")
    assert lines == whole.stdout
    third = machine.islandctl("stop", "far")
    assert third.returncode == 0
    assert "nothing of far is left" in third.stdout

    folders = [machine.cell("far", name) for name in ("east", "west")]
    held = [sorted(folder.glob("checkpoints/step-*")) for folder in folders]
    assert any(held)
    removed = machine.islandctl("remove", "far")
    assert removed.returncode == 0, removed.stderr
    assert f"removed: west/isle-west-1: {folders[1]}\n" in removed.stdout
    assert [sorted(folder.glob("*/step-*")) for folder in folders] == held
    assert {path.name for folder in folders if folder.exists() for path in folder.iterdir()} == {"checkpoints"}
    assert machine.islandctl("status", "far").returncode == 2


def test_trouble_on_the_way_to_a_node(far: Far) -> None:
    """Everything that keeps a launch from a node: one line with place, cause and what to do; nothing left."""
    machine, west = far.machine, far.servers["west"]

    def refused(run: str, code: int, *words: str) -> None:
        done = machine.launch(50, run, "--detach")
        assert done.returncode == code, done.stderr
        error, hint = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
        assert error.startswith("error: west/"), error
        for word in words:
            assert word in error + hint, (word, error, hint)
        assert hint != "hint: "
        assert machine.processes(run) == {}
        status = machine.status(run)
        assert (status["state"], status["detail"]) == ("failed", error.removeprefix("error: "))

    west.drop()
    refused("down", 5, "refused the connection", "check the port")
    west.start()

    far.profile("west", host="isle-west-1:1")
    refused("wrong-port", 5, "port 1 refused the connection", "check the port")

    far.profile("west", host="no-such-host.invalid")
    refused("missing", 5, "no-such-host.invalid", "is not known", "check the spelling")
    far.profile("west")

    kept = west.known_hosts.read_text()
    west.known_hosts.write_text("")
    refused("unknown-key", 4, "is unknown", "SHA256:", "accept-new")
    west.known_hosts.write_text(kept)

    (west.folder / "authorized_keys").rename(west.folder / "gone")
    refused("no-login", 4, "login refused for", "ssh.identity")
    (west.folder / "gone").rename(west.folder / "authorized_keys")

    far.profile("west", python="/nowhere/python3")
    refused("no-python", 4, "/nowhere/python3", "environment.python")
    far.profile("west")

    west.new_host_key()
    west.stop()
    west.start()
    refused("changed-key", 4, "has changed", "ssh-keygen -R")
    listed = json.loads(machine.islandctl("runs", "--json").stdout)
    assert {run["phase"] for run in listed} == {"failed"}


def test_the_relay_on_a_host_of_its_own(far: Far) -> None:
    machine = far.machine
    machine.changes = {"relay": {"host": "isle-east-1"}}
    done = machine.launch(40, "far")
    assert done.returncode == 0, done.stderr + done.stdout
    assert steps_of(machine.status("far")) == [40, 40]
    assert list(machine.root.glob("work dir/east/runs/far.*/relay/ledger.jsonl"))
    assert machine.processes("far") == {}
