"""The network interface by which a node reaches its peers, for NCCL and gloo: found on every node by itself.

Left to choose, NCCL takes the first that is up, a container's bridge among them, and names differ from node to node,
so one name for all does not do (nccl#286).
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface (netdevice(7))."""
_IF_INET6 = Path("/proc/net/if_inet6")


def choose(environ: MutableMapping[str, str]) -> None:
    """In a cell of several nodes, name the interface that leads to the first one. What the recipe names stands."""
    first = environ.get("MASTER_ADDR", "")
    if int(environ.get("GROUP_WORLD_SIZE", "1")) < 2 or not first:
        return
    found = leads_to(first)
    if found is None:
        log.info("by which interface %s is reached is not known; NCCL and gloo choose themselves", first)
        return
    name, address = found
    environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this name, not all that begin with it
    environ.setdefault("GLOO_SOCKET_IFNAME", name)
    log.info("reaches %s by %s (%s): NCCL_SOCKET_IFNAME is %s", first, name, address, environ["NCCL_SOCKET_IFNAME"])


def leads_to(host: str) -> tuple[str, str] | None:
    """Interface and own address by which a host is reached; None: not known."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(target)  # sends nothing: it only asks the routing table
            address = str(sock.getsockname()[0])
        return next((name, address) for _, name in socket.if_nameindex() if address in addresses(name))
    except (OSError, StopIteration):
        return None


def addresses(interface: str) -> list[str]:
    """The addresses of an interface, as Linux tells them."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has none
            pass
    for line in _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else ():
        fields = line.split()
        if fields[-1] == interface:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return found
