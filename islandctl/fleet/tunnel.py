"""Tunnels: how a site behind NAT reaches the relay without an open port. OpenSSH carries, a supervisor keeps them.

OpenSSH gets a small configuration file of our own in front of the user's: first value wins, so host keys are enforced
with islandctl's own file on every hop, and aliases, jumps and keys mean what they always mean.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from islandctl.config.host_address import parse_address
from islandctl.config.site import Ssh
from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet import node, wire
from islandctl.fleet.host import Host
from islandctl.fleet.job import RestartPolicy, SupervisorJob
from islandctl.fleet.openssh import KEEPALIVE_COUNT, KEEPALIVE_S, Hop, resolve

FOREVER = RestartPolicy(limit=1_000_000, backoff_s=1.0, backoff_limit_s=15.0)
"""A tunnel is tried again for as long as the run lives: the link may be away for hours."""


@dataclass(frozen=True)
class Tunnel:
    """A tunnel to be kept by a supervisor on this machine."""

    folder: Path
    job: SupervisorJob
    ssh_config: bytes
    """Content of ``ssh_config`` in the folder."""


def reverse_tunnel(
    host: str,
    ssh: Ssh,
    *,
    run: str,
    mark: str,
    folder: Path,
    known_hosts: Path,
    host_port: int,
    local_port: int,
    command: Sequence[str] = (),
) -> Tunnel:
    """On ``host``, 127.0.0.1:``host_port`` leads to 127.0.0.1:``local_port`` on this machine.

    Args:
        command: what runs on ``host`` for as long as the tunnel stands.
    """
    forward = ["-R", f"127.0.0.1:{host_port}:127.0.0.1:{local_port}"]
    return _tunnel(host, ssh, forward, run, mark, folder, known_hosts, command)


def forward_tunnel(
    host: str, ssh: Ssh, *, run: str, mark: str, folder: Path, known_hosts: Path, host_port: int, local_port: int
) -> Tunnel:
    """On this machine, 127.0.0.1:``local_port`` leads to 127.0.0.1:``host_port`` on ``host``."""
    forward = ["-L", f"127.0.0.1:{local_port}:127.0.0.1:{host_port}"]
    return _tunnel(host, ssh, forward, run, mark, folder, known_hosts)


def open_tunnel(local: Host, supervisor_path: str, python: str, tunnel: Tunnel) -> int:
    """Write the tunnel's files and begin its supervisor; returns the supervisor's pid. See ``node.start``."""
    node.write_files(local, str(tunnel.folder), {"ssh_config": (tunnel.ssh_config, 0o600)})
    return node.start(local, supervisor_path, python, str(tunnel.folder), tunnel.job)


def await_reverse(local: Host, host: Host, folder: Path, port: int, timeout_s: float) -> None:
    """Wait until a reverse tunnel stands: its port on the host takes connections.

    Raises:
        PreflightError: the host's SSH server refuses it.
        UnreachableError: it does not come up in time.
    """
    deadline = time.monotonic() + timeout_s
    while not node.wait_port(host, port, timeout_s=1.0):
        log = node.read(local, str(folder / "logs" / f"{folder.name}.log")).data
        said = wire.last_line(b"\n".join(line for line in log.splitlines() if b"forwarding failed" in line) or log)
        if "forwarding failed" in said:
            raise PreflightError(
                f"{host.label}: its SSH server allows no tunnel to the relay (AllowTcpForwarding?): {said}",
                hint="have remote forwarding allowed there, or name a relay.address that the site reaches by itself",
            )
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"{host.label}: the tunnel to the relay does not come up within {timeout_s:g} s: {said or 'no word'}",
                hint=f"read {folder}/logs/{folder.name}.log; the tunnel is OpenSSH's own ssh",
            )


def _tunnel(
    host: str,
    ssh: Ssh,
    forward: Sequence[str],
    run: str,
    mark: str,
    folder: Path,
    known_hosts: Path,
    command: Sequence[str] = (),
) -> Tunnel:
    address = parse_address(host)
    # A relative path, since OpenSSH hands -F on to jump hosts without quoting it.
    argv = ["ssh", "-F", "ssh_config", *([] if command else ["-N"]), "-T", *forward]
    for option, value in (
        ("-l", ssh.user if address.user is None else address.user),
        ("-p", ssh.port if address.port is None else address.port),
        ("-i", ssh.identity and os.path.expanduser(ssh.identity)),
    ):
        argv += [option, str(value)] if value is not None else []
    job = SupervisorJob(
        run=run,
        mark=mark,
        name=f"tunnels/{folder.name}",
        argv=(*argv, "--", address.host, *_command(mark, folder.name, command)),
        cwd=str(folder),
        env={},
        restart=FOREVER,
        stop_timeout_s=5.0,
    )
    return Tunnel(folder, job, _config(resolve(host, ssh), ssh, known_hosts).encode())


def _command(mark: str, name: str, words: Sequence[str]) -> list[str]:
    """The command as one word of ssh, for any login shell; it carries the run's mark and the tunnel's name."""
    if not words:
        return []
    from islandctl.fleet.ssh_host import shell_word  # here: an SSH library is slow to import

    marks = f"ISLANDCTL_RUN={mark} ISLANDCTL_JOB=tunnels/{name}"
    return [f"exec env {marks} {' '.join(map(shell_word, words))}"]


def _config(way: Sequence[Hop], ssh: Ssh, known_hosts: Path) -> str:
    """What holds for the host and its jump hosts alike, then the configuration that would have been read."""
    files = [str(known_hosts), *dict.fromkeys(file for hop in way for file in hop.known_hosts)]
    if ssh.config is not None:
        included = [os.path.abspath(os.path.expanduser(ssh.config))]
    else:
        included = [f"{pwd.getpwuid(os.getuid()).pw_dir}/.ssh/config", "/etc/ssh/ssh_config"]
    lines = [
        "BatchMode yes",
        "StrictHostKeyChecking yes",
        f"UserKnownHostsFile {' '.join(_quoted(file) for file in files)}",
        "UpdateHostKeys no",
        "ExitOnForwardFailure yes",
        f"ServerAliveInterval {KEEPALIVE_S}",
        f"ServerAliveCountMax {KEEPALIVE_COUNT}",
        f"ConnectTimeout {round(way[-1].connect_timeout_s)}",
        # A shared connection of the user's would take the forwarding with it when it ends.
        "ControlMaster no",
        "ControlPath none",
        "ForwardAgent no",
        "ForwardX11 no",
        *(f"Include {_quoted(path)}" for path in included if os.path.isfile(path)),
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path else path
