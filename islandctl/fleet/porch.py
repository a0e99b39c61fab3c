"""Passes connections on, on a login node: from a port that its cluster's nodes reach to a tunnel's end on loopback.

    python porch.py PORT TUNNEL_PORT

One file, standard library only. sshd lets a tunnel end on loopback alone, unless its administrator allows more. What
passes is the relay's, guarded by TLS and tokens. It runs as the tunnel's own command: when the tunnel ends, its
parent does, and so does it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

BLOCK_BYTES = 1 << 18
CONNECT_S = 20.0
LOOK_S = 1.0


def serve(port: int, tunnel_port: int) -> None:
    """Pass connections on until the parent is gone."""
    parent, dual = os.getppid(), socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", port), family=family, backlog=256, dualstack_ipv6=dual) as server:
        server.settimeout(LOOK_S)
        while os.getppid() == parent:
            with contextlib.suppress(socket.timeout):  # before Python 3.10 it is no TimeoutError
                caller, _ = server.accept()
                caller.settimeout(None)
                threading.Thread(target=_carry, args=(caller, tunnel_port), daemon=True).start()


def _carry(caller: socket.socket, tunnel_port: int) -> None:
    """One connection, both ways, until both have ended."""
    with (
        caller,
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", tunnel_port), timeout=CONNECT_S) as tunnel,
    ):
        tunnel.settimeout(None)
        for one in (caller, tunnel):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_pass, args=(tunnel, caller), daemon=True)
        back.start()
        _pass(caller, tunnel)
        back.join()


def _pass(source: socket.socket, target: socket.socket) -> None:
    """Whatever comes from one side, until it ends; the other side is told."""
    try:
        while data := source.recv(BLOCK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one side is gone: so is the other's use
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: porch.py PORT TUNNEL_PORT")
    serve(int(sys.argv[1]), int(sys.argv[2]))
