"""Ways to a test server, and to its refusal."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from islandctl.errors import IslandError
from islandctl.fleet.connect import connect
from islandctl.fleet.host import Host
from islandctl.fleet.hostkeys import Ask
from tests.sshd import Sshd

Start = Callable[..., Sshd]


def reach(
    server: Sshd, messages: list[str] | None = None, name: str | None = None, ask: Ask | None = None, **ssh: Any
) -> Host:
    """Connect; islandctl's own known_hosts lies beside the server's files."""
    host = server.host if name is None else name
    said = [] if messages is None else messages
    site = server.site(hosts=[host], **ssh)
    run_s = server.folder / "run" / "known_hosts"
    return connect(site, host, known_hosts=run_s, on_message=said.append, ask=ask)


def hello(host: Host) -> bytes:
    """What an echo there says; the connection is given back."""
    try:
        return host.run(["echo", "hello"], timeout_s=20).stdout
    finally:
        host.close()


def refused(kind: type[IslandError], server: Sshd, **settings: Any) -> IslandError:
    """The error of a connection that cannot be made: it names its place and says what to do."""
    with pytest.raises(kind) as caught:
        hello(reach(server, **settings))
    assert type(caught.value) is kind
    assert caught.value.message.startswith("east/")
    assert caught.value.hint
    return caught.value


def jump_config(tmp_path: Path, text: str) -> dict[str, Any]:
    """A profile's ssh section that takes everything from a configuration file with this text."""
    (tmp_path / "config").write_text(text)
    return {"config": str(tmp_path / "config"), "identity": None, "known_hosts": None}


def certify(authority: Path, key: Path, *options: str) -> Path:
    """Let OpenSSH sign ``key.pub``; gives the certificate's file."""
    argv = ["ssh-keygen", "-q", "-s", authority, "-I", "test", *options, key.with_suffix(".pub")]
    subprocess.run(argv, check=True, capture_output=True)
    return key.parent / f"{key.name}-cert.pub"
