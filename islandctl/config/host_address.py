"""How a host is written: an ssh alias, or ``[user@]host[:port]`` with IPv6 in all its forms."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from islandctl.errors import ConfigError

_HINT = "write an ssh alias, host, user@host:port, ::1 or [::1]:2222"
_WORD = re.compile(r"[^\s@/\\:\[\]'\"`$;&|<>()*?!#\x00-\x1f\x7f-][^\s@/\\:\[\]'\"`$;&|<>()*?!#\x00-\x1f\x7f]*")


@dataclass(frozen=True)
class Address:
    """A host as the user wrote it. What is None comes from the profile or from ``ssh -G``."""

    user: str | None
    host: str
    """Alias, name or address; IPv6 without brackets, with its zone (``fe80::1%eth0``)."""
    port: int | None

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.host

    @property
    def bracketed(self) -> str:
        """The host for URLs and rsync: ``[::1]`` for IPv6."""
        return f"[{self.host}]" if self.is_ipv6 else self.host

    def __str__(self) -> str:
        """The form that ``parse_address`` reads back to the same address."""
        user = "" if self.user is None else f"{self.user}@"
        return f"{user}{self.host}" if self.port is None else f"{user}{self.bracketed}:{self.port}"


def parse_address(text: str) -> Address:
    """Read a host as written in a profile.

    Accepted: ``alias``, ``host:22013``, ``user@host``, ``::1``, ``[::1]``, ``[::1]:2222``,
    ``user@[2001:db8::1]:2222``, ``fe80::1%eth0``. An IPv6 address with a port needs its brackets.

    Raises:
        ConfigError: none of these forms.
    """
    user, at, rest = text.rpartition("@")
    if at and not _WORD.fullmatch(user):
        raise ConfigError(f"host '{text}': '{user}' is no user name", hint=_HINT)
    port: str | None = None
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")) or not _is_ipv6(host):
            raise ConfigError(f"host '{text}': brackets hold one IPv6 address", hint=_HINT)
        port = tail[1:] if tail else None
    elif rest.count(":") > 1:
        host = rest
        if not _is_ipv6(host):
            raise ConfigError(f"host '{text}' is neither an IPv6 address nor host:port", hint=_HINT)
    else:
        host, colon, tail = rest.partition(":")
        port = tail if colon else None
        if not _WORD.fullmatch(host):
            raise ConfigError(f"host '{text}': '{host}' is no host name", hint=_HINT)
    return Address(user if at else None, host, None if port is None else _port(port, text))


def _port(port: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"host '{text}': port '{port}' is not a number from 1 to 65535", hint=_HINT)
    return int(port)


def _is_ipv6(host: str) -> bool:
    address, percent, zone = host.partition("%")
    if percent and not re.fullmatch(r"[A-Za-z0-9_.-]+", zone):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True
