"""Host keys: known_hosts files are read by OpenSSH's own tool, and what they say is enforced on every hop."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import itertools
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from islandctl.errors import HostKeyError, PreflightError
from islandctl.fleet.certificates import Certificate, no_host_s
from islandctl.fleet.openssh import Hop

Ask = Callable[[str], bool]
"""Puts a question to a person, one at a time however many threads ask, and waits for yes or no."""


_first_contacts = threading.Lock()
"""One at a time: two connections to one host ask once."""


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file that speaks of a host."""

    file: str
    line: int
    marker: str
    """Empty, ``CA`` or ``REVOKED``."""
    kind: str
    key: bytes
    without_port: bool = False
    """On file for the host without its port: the same key is believed, another one says nothing (as with OpenSSH)."""

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


@dataclass(frozen=True)
class Shown:
    """What a server shows of itself: a key, and perhaps a certificate for it whose signature is right."""

    kind: str
    key: bytes
    certificate: Certificate | None = None

    def __str__(self) -> str:
        return f"{self.kind} {fingerprint(self.key)}"


class HostKeys:
    """The policy of one site: which files are believed, and what happens with a key that nobody knows.

    Args:
        own: islandctl's known_hosts file; keys accepted on first contact are added to it.
        policy: ``ssh.host_keys`` of the profile.
        on_message: called with one line for the person.
        ask: puts a question to the person; None: there is nobody to ask.
    """

    def __init__(self, own: Path, policy: str, on_message: Callable[[str], None], ask: Ask | None = None) -> None:
        self._own = own
        self._policy = policy
        self._on_message = on_message
        self._ask = ask

    def known(self, hop: Hop) -> list[KnownKey]:
        """What is on file for this server. A line without port counts when none with the port is there."""
        files = (*((str(self._own),) if self._own.is_file() else ()), *hop.known_hosts)
        found = find(hop.host_key_name, files)
        if hop.host_key_name == f"[{hop.host.lower()}]:{hop.port}" and all(entry.marker for entry in found):
            found += [replace(entry, without_port=True) for entry in find(hop.host.lower(), files)]
        return found

    def check(self, label: str, hop: Hop, known: list[KnownKey], shown: Shown) -> None:
        """Believe the server's key, or stop.

        Raises:
            HostKeyError: revoked, changed, not what its certificate is for, or unknown and not accepted.
        """
        place = f"{label}: the host key of {hop.host_key_name}"
        for entry in known:
            if entry.marker == "REVOKED" and entry.key in (shown.key, _authority(shown)):
                raise HostKeyError(f"{place} ({shown}) is revoked by {entry.place}", hint="do not use this host")
        if hop.revoked_keys is not None and _is_revoked(shown.key, shown.kind, hop.revoked_keys):
            raise HostKeyError(
                f"{place} ({shown}) is revoked by {hop.revoked_keys} (RevokedHostKeys)", hint="do not use this host"
            )
        plain = [entry for entry in known if not entry.marker]
        if any(entry.key == shown.key for entry in plain) or self._vouched(place, hop, known, shown):
            return
        line = f"{hop.host_key_name} {shown.kind} {base64.b64encode(shown.key).decode()}"
        others = [entry for entry in plain if not entry.without_port]
        if others:
            entry = next((entry for entry in others if entry.kind == shown.kind), others[0])
            on_file = f"{entry.place} holds {entry.kind} {fingerprint(entry.key)}"
            raise HostKeyError(
                f"{place} has changed: it shows {shown}, but {on_file}",
                hint="if the machine was really replaced: "
                f"ssh-keygen -R {quote(hop.host_key_name)} -f {quote(entry.file)} && "
                f"echo {quote(line)} >> {quote(entry.file)}",
            )
        with _first_contacts:
            if self._own.is_file() and line in self._own.read_text().splitlines():
                return  # accepted meanwhile, over another connection
            if self._policy != "accept-new":
                self._first_contact(place, hop, shown, line)
            self._keep(line)
        self._on_message(f"{place} is new, accepted and kept in {self._own}: {shown}")

    def _vouched(self, place: str, hop: Hop, known: list[KnownKey], shown: Shown) -> bool:
        """Whether an authority on file (@cert-authority) has certified the key for this host."""
        signers = [entry for entry in known if entry.marker == "CA" and entry.key == _authority(shown)]
        if not signers or shown.certificate is None:
            return False
        name = re.sub(r"^\[(.*)\]:[0-9]+$", r"\1", hop.host_key_name)
        trouble = no_host_s(shown.certificate, name.lower(), time.time())
        if trouble:
            raise HostKeyError(
                f"{place} ({shown}) has a certificate of {signers[0].place} (@cert-authority) that {trouble}",
                hint="ask the site's administrator for a new host certificate",
            )
        return True

    def _first_contact(self, place: str, hop: Hop, shown: Shown, line: str) -> None:
        """Ask, where the policy says so and somebody is there."""
        unknown = f"{place} is unknown: it shows {shown}"
        if self._policy == "ask" and self._ask is not None:
            if self._ask(f"{unknown}. Is this the fingerprint that your provider names? Accept and keep the key?"):
                return
            unknown += ", which was not accepted"
        user_s = next((file for file in hop.known_hosts if os.access(file, os.W_OK)), None)
        raise HostKeyError(
            unknown,
            hint="compare the fingerprint with your provider's; then: "
            f"echo {quote(line)} >> {quote(user_s) if user_s else '~/.ssh/known_hosts'} "
            f"(or connect once by hand: ssh {hop.by_hand}; or set ssh.host_keys: accept-new in the site profile)",
        )

    def _keep(self, line: str) -> None:
        self._own.parent.mkdir(parents=True, exist_ok=True)
        with self._own.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if line not in file.read().splitlines():
                file.write(line + "\n")


def _is_revoked(key: bytes, kind: str, file: str) -> bool:
    """Whether OpenSSH's list of revoked keys holds a key; a list that cannot be read revokes all, as with OpenSSH."""
    line = f"{kind} {base64.b64encode(key).decode()}\n"
    try:
        content = Path(file).read_bytes()
    except OSError:
        return True
    if not content.startswith(b"SSHKRL"):  # a plain list of public keys
        return any(line.split()[1].encode() in text.split() for text in content.splitlines())
    argv = ["ssh-keygen", "-Q", "-f", file, "/dev/stdin"]
    return subprocess.run(argv, input=line.encode(), capture_output=True, timeout=20, check=False).returncode != 0


def _authority(shown: Shown) -> bytes | None:
    return shown.certificate.authority if shown.certificate else None
