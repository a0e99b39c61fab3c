"""Host keys: known_hosts files are read by OpenSSH's own tool, and what they say is enforced on every hop."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import itertools
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from islandctl.errors import HostKeyError, PreflightError
from islandctl.fleet.openssh import Hop


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file that speaks of a host."""

    file: str
    line: int
    marker: str
    """Empty, ``CA`` or ``REVOKED``."""
    kind: str
    key: bytes

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


def fingerprint(key: bytes) -> str:
    """``SHA256:…`` as OpenSSH prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def find(name: str, files: tuple[str, ...]) -> list[KnownKey]:
    """All lines of the files that speak of ``name``; hashed names, patterns and markers are OpenSSH's business."""
    found = []
    for file in files:
        try:
            done = subprocess.run(
                ["ssh-keygen", "-F", name, "-f", file], capture_output=True, text=True, timeout=20, check=False
            )
        except FileNotFoundError as error:
            raise PreflightError(
                "this machine has no ssh-keygen", hint="install it, for example: apt install openssh-client"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise PreflightError(f"ssh-keygen gave no answer about {file} within 20 s") from error
        lines = done.stdout.splitlines()
        for head, text in itertools.pairwise(lines):
            match = re.fullmatch(r"# Host .* found: line (\d+) ?(\w*).*", head)
            if match is None:
                continue
            fields = [field for field in text.split() if not field.startswith("@")]
            if len(fields) >= 3:
                found.append(KnownKey(file, int(match[1]), match[2], fields[1], base64.b64decode(fields[2])))
    return found


class HostKeys:
    """The policy of one site: which files are believed, and what happens with a key that nobody knows.

    Args:
        own: the run's known_hosts file; keys accepted on first contact are added to it.
        accept_new: take an unknown key once, tell its fingerprint, keep it.
        on_message: called with one line for the person.
    """

    def __init__(self, own: Path, accept_new: bool, on_message: Callable[[str], None]) -> None:
        self._own = own
        self._accept_new = accept_new
        self._on_message = on_message

    def known(self, hop: Hop) -> list[KnownKey]:
        """What is on file for this server. A line without port counts when none with the port is there."""
        files = (*((str(self._own),) if self._own.is_file() else ()), *hop.known_hosts)
        found = find(hop.host_key_name, files)
        if not found and hop.host_key_name == f"[{hop.host.lower()}]:{hop.port}":
            found = [entry for entry in find(hop.host.lower(), files) if not entry.marker]
        return found

    def check(self, label: str, hop: Hop, known: list[KnownKey], kind: str, key: bytes) -> None:
        """Believe the server's key, or stop.

        Raises:
            HostKeyError: revoked, changed, or unknown under the policy ``strict``.
        """
        shown = f"{kind} {fingerprint(key)}"
        place = f"{label}: the host key of {hop.host_key_name}"
        for entry in known:
            if entry.marker == "REVOKED" and entry.key == key:
                raise HostKeyError(f"{place} ({shown}) is revoked by {entry.place}", hint="do not use this host")
        plain = [entry for entry in known if not entry.marker]
        if any(entry.key == key for entry in plain):
            return
        changed = [entry for entry in plain if entry.kind == kind] or plain
        if changed:
            entry = changed[0]
            on_file = f"{entry.place} holds {entry.kind} {fingerprint(entry.key)}"
            raise HostKeyError(
                f"{place} has changed: it shows {shown}, but {on_file}",
                hint="if the machine was really replaced: "
                f"ssh-keygen -R {_quoted(hop.host_key_name)} -f {_quoted(entry.file)}",
            )
        if not self._accept_new and (authorities := [entry for entry in known if entry.marker == "CA"]):
            raise HostKeyError(
                f"{place} is unknown: it shows {shown}; and host certificates, for which "
                f"{authorities[0].place} (@cert-authority) vouches, cannot be checked here",
                hint="compare the fingerprint with your provider's; then add the key itself to known_hosts "
                f"(ssh-keyscan -p {hop.port} {hop.host}) or set ssh.host_keys: accept-new in the site profile",
            )
        if not self._accept_new:
            raise HostKeyError(
                f"{place} is unknown: it shows {shown}",
                hint="compare the fingerprint with your provider's; then connect once by hand "
                f"(ssh {hop.by_hand}) or set ssh.host_keys: accept-new in the site profile",
            )
        self._keep(hop.host_key_name, kind, key)
        self._on_message(f"{place} is new, accepted and kept in {self._own}: {shown}")

    def _keep(self, name: str, kind: str, key: bytes) -> None:
        self._own.parent.mkdir(parents=True, exist_ok=True)
        line = f"{name} {kind} {base64.b64encode(key).decode()}\n"
        with self._own.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if line not in file.read().splitlines(keepends=True):
                file.write(line)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
