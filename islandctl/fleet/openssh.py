"""What a host alias means. OpenSSH itself is asked (``ssh -G``): Include, Match, patterns and jumps mean the same."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from islandctl.config.host_address import Address, parse_address
from islandctl.config.site import Ssh
from islandctl.errors import ConfigError, PreflightError

_MAX_HOPS = 8
_DEADLINE_S = 20.0
"""``Match exec`` may run commands; a hanging one must not hang us."""
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
KEEPALIVE_S = 15
KEEPALIVE_COUNT = 3
"""A link that has not answered so many times in a row is given up."""


@dataclass(frozen=True)
class Hop:
    """One SSH server on the way, resolved."""

    alias: str
    """As the user wrote it, for messages."""
    by_hand: str
    """What comes after ``ssh`` to go the same way by hand: options of the profile, then the host, for a shell."""
    host: str
    port: int
    user: str
    identities: tuple[str, ...]
    """Private key files, in OpenSSH's order; they need not exist."""
    identities_only: bool
    certificates: tuple[str, ...]
    """Files with certificates for the user's keys (CertificateFile)."""
    agent: str | None
    """Socket of the key agent."""
    known_hosts: tuple[str, ...]
    host_key_name: str
    """Name under which known_hosts files hold its key: ``host``, ``[host]:port`` or the HostKeyAlias."""
    revoked_keys: str | None
    """A file of host keys that are not to be believed (RevokedHostKeys)."""
    proxy_command: str | None
    connect_timeout_s: float
    family: int = socket.AF_UNSPEC
    """AddressFamily: IPv4, IPv6 or either."""
    source: str | None = None
    """Own address to connect from (BindAddress)."""

    @property
    def endpoint(self) -> str:
        """``user@host:port``, with brackets for IPv6."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.user}@{host}:{self.port}"


def resolve(host: str, ssh: Ssh) -> tuple[Hop, ...]:
    """All servers on the way to a host, the host itself last.

    The profile's user, port and identity are for the host, not for its jump hosts, as with ``ssh -i -J``.

    Raises:
        ConfigError: OpenSSH refuses the configuration, jump hosts lead in a circle, or a file is missing.
        PreflightError: there is no OpenSSH client on this machine.
    """
    address = parse_address(host)
    for what, path in (("config", ssh.config), ("identity", ssh.identity), ("known_hosts", ssh.known_hosts)):
        if path is not None and (not Path(path).expanduser().exists() or Path(path).expanduser().is_dir()):
            raise ConfigError(f"ssh.{what}: there is no file {path}", hint="correct the path in the site profile")
    own = Address(
        ssh.user if address.user is None else address.user,
        address.host,
        ssh.port if address.port is None else address.port,
    )
    return _chain(own, ssh, ssh.identity, ())


def _chain(address: Address, ssh: Ssh, identity: str | None, seen: tuple[str, ...]) -> tuple[Hop, ...]:
    hop, jumps = _ask(address, ssh, identity)
    if not jumps:
        return (hop,)
    if str(address) in seen or len(seen) >= _MAX_HOPS:
        raise ConfigError(
            f"ProxyJump leads in a circle: {' → '.join((*seen, str(address)))}",
            hint=f"look at: ssh -G {hop.by_hand} | grep -i proxyjump",
        )
    first, *others = [_jump(text) for text in jumps.split(",")]
    before = _chain(first, ssh, None, (*seen, str(address)))
    # As in `ssh -J a,b host`: the list replaces b's own ProxyJump.
    return (*before, *(_ask(jump, ssh, None)[0] for jump in others), hop)


def _jump(text: str) -> Address:
    """One entry of ProxyJump: ``[user@]host[:port]`` or an ``ssh://`` URI."""
    text = text.strip().removeprefix("ssh://").rstrip("/")
    return parse_address(re.sub(r"\[([^:\]]*)\]", r"\1", text))  # ssh -G puts brackets around IPv4 addresses, too


def _ask(address: Address, ssh: Ssh, identity: str | None) -> tuple[Hop, str]:
    """One ``ssh -G``: the hop, and its ProxyJump list (empty for none)."""
    options: list[str] = []
    for option, value in (
        ("-F", ssh.config and os.path.expanduser(ssh.config)),
        ("-l", address.user),
        ("-p", address.port),
        ("-i", identity and os.path.expanduser(identity)),
    ):
        options += [option, str(value)] if value is not None else []
    try:
        done = subprocess.run(
            ["ssh", "-G", *options, "--", address.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DEADLINE_S,
            check=False,
            text=True,
        )
    except FileNotFoundError as error:
        raise PreflightError(
            "this machine has no OpenSSH client (ssh)", hint="install it, for example: apt install openssh-client"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"ssh -G {address.host} gave no answer within {_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "terminal" not in line]
        raise ConfigError(
            f"ssh -G {address.host}: {' '.join(lines) or 'failed'}", hint="correct the ssh configuration"
        )
    values: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value)
    return _hop(address, values, ssh, shlex.join([*options, address.host])), _unless_none(values, "proxyjump") or ""


def _unless_none(values: dict[str, list[str]], key: str) -> str | None:
    text = values.get(key, ["none"])[0]
    return None if text.lower() == "none" else text


def _hop(address: Address, values: dict[str, list[str]], ssh: Ssh, by_hand: str) -> Hop:
    host, port, user = values["hostname"][0], int(values["port"][0]), values["user"][0]
    tokens = {
        "%": "%",
        "d": _home(),
        "h": host,
        "i": str(os.getuid()),
        "L": socket.gethostname().partition(".")[0],
        "l": socket.gethostname(),
        "n": address.host,
        "p": str(port),
        "r": user,
        "u": pwd.getpwuid(os.getuid()).pw_name,
    }

    def expand(text: str) -> str:
        return re.sub(r"%(.)", lambda found: tokens.get(found[1], found[0]), text)

    def path(text: str) -> str:
        text = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], found[0]), text)
        return expand(_home() + text[1:] if text.startswith("~/") else text)

    files = [
        path(name)
        for key in ("userknownhostsfile", "globalknownhostsfile")
        for line in values.get(key, [])
        for name in _file_names(line)
    ]
    if ssh.known_hosts is not None:
        files.insert(0, os.path.expanduser(ssh.known_hosts))
    identities = [path(name) for name in values.get("identityfile", []) if name.lower() != "none"]
    configured = values.get("connecttimeout", ["none"])[0]
    command = _unless_none(values, "proxycommand")
    alias = _unless_none(values, "hostkeyalias")
    revoked = _unless_none(values, "revokedhostkeys")
    return Hop(
        alias=str(address),
        by_hand=by_hand,
        host=host,
        port=port,
        user=user,
        identities=tuple(identities),
        certificates=tuple(path(name) for name in values.get("certificatefile", []) if name.lower() != "none"),
        identities_only=values.get("identitiesonly", ["no"])[0] == "yes",
        agent=_agent(values, path),
        known_hosts=tuple(name for name in files if os.path.isfile(name)),
        host_key_name=alias or (host.lower() if port == 22 else f"[{host.lower()}]:{port}"),
        revoked_keys=None if revoked is None else path(revoked),
        proxy_command=None if command is None else expand(command),
        connect_timeout_s=max(ssh.connect_timeout, float(configured) if configured.isdigit() else 0.0),
        family=_FAMILIES.get(values.get("addressfamily", ["any"])[0], socket.AF_UNSPEC),
        source=_unless_none(values, "bindaddress"),
    )


def _agent(values: dict[str, list[str]], path: Callable[[str], str]) -> str | None:
    text = values.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    if text.lower() == "none":
        return None
    if text == "SSH_AUTH_SOCK" or text.startswith("$"):
        return os.environ.get(text.removeprefix("$")) or None
    return path(text)


def _file_names(line: str) -> list[str]:
    """``ssh -G`` separates files by spaces and does not quote them: what is a file together is one name."""
    names, words = [], line.split(" ")
    while words:
        lengths = (num for num in range(len(words), 1, -1) if os.path.isfile(" ".join(words[:num])))
        taken = next(lengths, 1)
        names.append(" ".join(words[:taken]))
        words = words[taken:]
    return [name for name in names if name and name.lower() != "none"]


def _home() -> str:
    """The home folder as OpenSSH finds it: by the user's entry, whatever $HOME says."""
    return pwd.getpwuid(os.getuid()).pw_dir
