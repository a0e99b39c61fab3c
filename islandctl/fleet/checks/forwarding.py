"""Does the SSH server forward? Tried with the very tunnel that a run would keep, before anything is put there."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from islandctl.fleet.checks.base import Node, NodeCheck, Verdict, Verdicts, fail, ok, skipped
from islandctl.fleet.tunnel import reverse_tunnel

TRY_S = 20.0


class Forwarding(NodeCheck):
    """A reverse tunnel, and a word through it."""

    name, tier, title = "forwarding", "quick", "SSH forwards: a real tunnel carries a word from the node to here"
    asks = ("host", "login")
    threshold, source = "it arrives", "dstack#2642: marked ready, then unreachable at once"
    at_once = 8  # each logs in through the same bastion, which takes ten at a time (MaxStartups)
    remedy = "AllowTcpForwarding yes (or remote) in sshd_config there; or relay.address in the recipe"

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        if not node.name:
            return skipped("this machine: no tunnel is needed")
        if node.wanted.relay_address is not None:
            return skipped("the recipe gives relay.address: no tunnel is needed")
        arrived, said = _word_through(node)
        if not arrived and said:  # the port was taken meanwhile, or the server had too many logins at once
            arrived, said = _word_through(node)
        node.facts["forwards"] = arrived
        return judge_forwarding(arrived, said)


def _word_through(node: Node) -> tuple[bool, str]:
    """Whether a word came through a tunnel, and what ssh wrote to stderr."""
    port = node.ask("free_port", timeout_s=10.0)["port"]
    word = secrets.token_hex(8)
    with (
        tempfile.TemporaryDirectory(prefix="islandctl-doctor-") as folder,
        socket.create_server(("127.0.0.1", 0)) as door,
    ):
        threading.Thread(target=_greet, args=(door, word), daemon=True).start()
        tunnel = reverse_tunnel(
            node.name,
            node.site.ssh,
            run="doctor",
            mark="doctor",
            folder=Path(folder),
            known_hosts=node.known_hosts,
            host_port=port,
            local_port=door.getsockname()[1],
        )
        (Path(folder) / "ssh_config").write_bytes(tunnel.ssh_config)
        child = subprocess.Popen(
            tunnel.job.argv,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        try:
            heard = _listen(node, child, port)
        finally:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
            said = child.communicate()[1]
    return heard == word, said


def judge_forwarding(arrived: bool, said: str) -> Verdict:
    """Args: said: what ssh wrote to stderr."""
    if arrived:
        return ok("a word came through a tunnel")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    refused = [line for line in lines if "forwarding failed" in line or "prohibited" in line]
    if refused:
        return fail(f"the server does not forward: {refused[-1]}")
    return fail(f"nothing came through the tunnel: {lines[-1] if lines else 'ssh stood, the port did not answer'}")


def _greet(door: socket.socket, word: str) -> None:
    with suppress(OSError):
        while True:
            guest, _ = door.accept()
            with guest:
                guest.sendall(word.encode())


def _listen(node: Node, child: subprocess.Popen[str], port: int) -> str:
    """What the node hears at the tunnel's end; empty: nothing, though the tunnel had its time."""
    end = time.monotonic() + TRY_S
    while time.monotonic() < end and child.poll() is None:
        answer = node.ask("dial", timeout_s=10.0, targets=[["127.0.0.1", port]], each_s=5.0, listen=True)["answers"][
            0
        ]
        if answer.get("said"):
            return str(answer["said"])
        time.sleep(0.2)
    return ""
