"""Real SSH servers for tests: each with its own host key, port, home folder, and if wanted its own network namespace.

    def test_something(sshd):                       # the fixture, see tests/fleet/conftest.py
        server = sshd()                             # on a free loopback port
        far = sshd(namespace=True)                  # in a network namespace of its own, port 22
        site = server.site("east")                  # a SiteProfile that reaches it
        connect(site, site.hosts[0], known_hosts=server.known_hosts, on_message=print)

Nothing outside the test's folder is written (root also needs /run/sshd), nothing but loopback and addresses made for
the test is listened on, and everything ends with ``close``.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from islandctl.config.site import SiteProfile

_count = itertools.count()


def sshd_path() -> str:
    """The server's program; an error, not a skip, when there is none."""
    found = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise RuntimeError("these tests need an OpenSSH server: install openssh-server (or set PATH)")
    return found


SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "fish", "tcsh", "csh") if shutil.which(shell)]
"""The login shells of this machine; scripts/setup-sshd installs the rarer ones where it may."""


def make_key(path: Path, kind: str = "ed25519", comment: str = "test", passphrase: str = "") -> Path:
    """A new key pair at ``path`` and ``path.pub``."""
    path.unlink(missing_ok=True)
    argv = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", comment, "-f", str(path)]
    subprocess.run(argv, check=True, timeout=60)
    return path


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def namespaces_work() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ictl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Namespace:
    """A network namespace with one link to this one; ``address`` is inside, ``gateway`` is this machine's end."""

    def __init__(self) -> None:
        number = next(_count)
        self.name = f"ictl-{os.getpid()}-{number}"
        inside, outside = f"iv{os.getpid() % 100000}-{number}", f"io{os.getpid() % 100000}-{number}"
        # 198.18.0.0/15 is set aside for tests of network devices (RFC 2544).
        subnet = f"198.18.{os.getpid() % 250}.{(number * 4) % 248}"
        base, _, last = subnet.rpartition(".")
        self.gateway, self.address = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"
        self._ip("netns", "add", self.name)
        try:
            self._ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", self.name)
            self._ip("addr", "add", f"{self.gateway}/30", "dev", outside)
            self._ip("link", "set", outside, "up")
            for words in (
                ["addr", "add", f"{self.address}/30", "dev", inside],
                ["link", "set", inside, "up"],
                ["link", "set", "lo", "up"],
            ):
                self._ip("-n", self.name, *words)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=20)

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command, run inside."""
        return ["ip", "netns", "exec", self.name, *argv]

    def close(self) -> None:
        """Remove it, with its link."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, timeout=20)


class Sshd:
    """One SSH server.

    Attributes:
        address, port: where it listens.
        home: the home folder of its sessions.
        identity: a private key file that it accepts.
        known_hosts: a file that holds its host key.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        namespace: bool = False,
        login_shell: str | None = None,
        path: str | None = None,
        home: str = "home",
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.home = folder / home
        self.home.mkdir(parents=True)
        self.namespace = Namespace() if namespace else None
        self.address = self.namespace.address if self.namespace else address
        self.port = port or (22 if self.namespace else free_port())
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self.identity = make_key(folder / "client_key")
        self.known_hosts = folder / "known_hosts"
        self._process: subprocess.Popen[bytes] | None = None
        shutil.copy(folder / "client_key.pub", folder / "authorized_keys")
        self.new_host_key()
        self.remember()
        environment = [f"HOME={self.home}", "LANG=C.UTF-8"] + ([f"PATH={path}"] if path is not None else [])
        environment += [f"{name}={value}" for name, value in (variables or {}).items()]
        lines = [
            *options,  # the first value counts
            f"ListenAddress {f'[{self.address}]' if ':' in self.address else self.address}:{self.port}",
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            f"PidFile {folder}/sshd.pid",
            "UsePAM no",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "PrintMotd no",
            "SetEnv " + " ".join(f'"{variable}"' for variable in environment),
            *([f"ForceCommand {self._shell_wrapper(login_shell)}"] if login_shell else []),
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self.start()

    def _shell_wrapper(self, shell: str) -> Path:
        """Runs the client's command line in another login shell than the user's own."""
        wrapper = self.folder / "login_shell"
        wrapper.write_text(f'#!/bin/sh\nexec {shell} "$SSH_ORIGINAL_COMMAND"\n')
        wrapper.chmod(0o755)
        return wrapper

    def new_host_key(self) -> None:
        """As if the machine had been installed anew. Takes effect at the next start."""
        make_key(self.folder / "host_key")

    def remember(self) -> None:
        """Write the present host key to ``known_hosts``."""
        self.known_hosts.write_text(self.known_hosts_line())

    def known_hosts_line(self) -> str:
        """What OpenSSH would note down for this server."""
        name = self.address if self.port == 22 else f"[{self.address}]:{self.port}"
        return f"{name} {' '.join((self.folder / 'host_key.pub').read_text().split()[:2])}\n"

    def start(self) -> None:
        """Listen."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        argv = [sshd_path(), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.namespace.command(argv) if self.namespace else argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                socket.create_connection((self.address, self.port), timeout=1).close()
            except OSError:
                time.sleep(0.005)
            else:
                return
        raise RuntimeError(f"sshd did not start: {(self.folder / 'sshd.log').read_text()[-2000:]}")

    def signal_sessions(self, number: int) -> None:
        """Send a signal to the server's side of all connections, not to the commands that they carry."""
        assert self._process is not None
        for pid in _children(self._process.pid):
            with suppress(OSError):
                if "sshd" in Path(f"/proc/{pid}/comm").read_text():
                    os.kill(pid, number)

    def drop(self) -> None:
        """Stop listening and end all connections, as when the machine goes down."""
        connections = _children(self._process.pid) if self._process is not None else []
        self.stop()
        for pid in connections:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop listening. Connections that stand go on, as with a restart of sshd."""
        if self._process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(self._process.pid, number)
                except ProcessLookupError:
                    break
                deadline = time.monotonic() + 3
                while time.monotonic() < deadline and self._process.poll() is None:
                    time.sleep(0.01)
            self._process.wait(timeout=10)
            self._process = None

    def close(self) -> None:
        """Stop, and remove the namespace."""
        self.drop()
        if self.namespace:
            self.namespace.close()

    @property
    def host(self) -> str:
        """``user@host:port`` as a profile takes it."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.user}@{host}:{self.port}"

    def alias(self, name: str, *lines: str) -> str:
        """A ``Host`` block for an ssh configuration file."""
        return "\n".join(
            [
                f"Host {name}",
                f"  HostName {self.address}",
                f"  Port {self.port}",
                f"  User {self.user}",
                f"  IdentityFile {self.identity}",
                "  IdentitiesOnly yes",
                f"  UserKnownHostsFile {self.known_hosts}",
                *(f"  {line}" for line in lines),
                "",
            ]
        )

    def site(self, name: str = "east", hosts: Sequence[str] | None = None, **ssh: Any) -> SiteProfile:
        """A profile that reaches this server; ``ssh`` adds to or overrides its ssh section."""
        settings = {
            "identity": str(self.identity),
            "known_hosts": str(self.known_hosts),
            "config": "/dev/null",
            **ssh,
        }
        return site_profile(name, [self.host] if hosts is None else hosts, settings, f"{self.home}/island work")


def site_profile(name: str, hosts: Sequence[str], ssh: dict[str, Any], work_dir: str, **more: Any) -> SiteProfile:
    """A small profile; no hosts: this machine."""
    return SiteProfile.model_validate(
        {
            "name": name,
            "scheduler": "ssh" if hosts else "local",
            "hosts": tuple(hosts),
            "gpu": {"type": "cpu", "count": max(1, len(hosts)), "per_node": 1},
            "wan": {"up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "1 ms"},
            "cpu": {"cores": 2, "memory": "4 GB"},
            "ssh": ssh,
            "work_dir": work_dir,
            **more,
        }
    )


def _children(pid: int) -> list[int]:
    """All descendants of a process."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return []
    return [one for child in children for one in (child, *_children(child))]


@contextmanager
def servers(folder: Path) -> Iterator[Any]:
    """A function that starts servers below ``folder``; all of them end with the block."""
    started: list[Sshd] = []

    def start(**settings: Any) -> Sshd:
        place = folder / f"sshd-{len(started)}"
        place.mkdir(parents=True)
        started.append(Sshd(place, **settings))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.close()


def shell(server: Sshd, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command there with OpenSSH's own client."""
    options = [f"-oUserKnownHostsFile={server.known_hosts}", "-oBatchMode=yes", "-F/dev/null", f"-i{server.identity}"]
    argv = ["ssh", *options, f"-p{server.port}", f"{server.user}@{server.address}", command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def quoted(words: Sequence[str]) -> str:
    """A command line for ``shell``."""
    return shlex.join(words)
