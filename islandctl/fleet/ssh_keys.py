"""The two keys of a login: the one that the server shows, and those of the user that are offered to it."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping

import paramiko
from paramiko.agent import AgentSSH
from paramiko.auth_strategy import AuthSource, AuthStrategy, SourceResult
from paramiko.pkey import PublicBlob

from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet import certificates
from islandctl.fleet.hostkeys import Shown
from islandctl.fleet.openssh import Hop


class TurnedAway(Exception):
    """The server closed the connection before it greeted or agreed on keys: its login limit, most often."""


def shown(key: paramiko.PKey) -> Shown:
    """What a server has shown: the key, and its certificate when the authority's signature is right."""
    blob = key.public_blob.key_blob if key.public_blob else b""
    certificate = certificates.read(blob)
    if certificate is None or certificate.key != key.asbytes() or not _signed(certificate):
        return Shown(key.get_name(), key.asbytes())
    return Shown(key.get_name(), key.asbytes(), certificate)


def _signed(certificate: certificates.Certificate) -> bool:
    signature = paramiko.Message(certificate.signature)
    kind = paramiko.Message(certificate.authority).get_text()
    if signature.get_text() == "ssh-rsa":  # with SHA-1, which OpenSSH refuses here too
        return False
    try:
        authority = paramiko.PKey.from_type_string(kind, certificate.authority)
        return bool(authority.verify_ssh_sig(certificate.signed, paramiko.Message(certificate.signature)))
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError):
        return False


class Keys(AuthStrategy):
    """Logs in with the user's keys, in OpenSSH's order, and says of each why it did not do."""

    def __init__(self, label: str, hop: Hop) -> None:
        self._label = label
        self._hop = hop
        self._tried: list[str] = []

    def get_sources(self) -> Iterator[AuthSource]:
        """Not used: keys come from an agent that has to stay open while they sign."""
        return iter(())

    def authenticate(self, transport: paramiko.Transport) -> list[SourceResult]:
        """Try key after key.

        Raises:
            PreflightError: none was accepted, or one was and the server wants more than keys.
            UnreachableError: the server stopped answering.
            TurnedAway: the server closed the connection before a key was offered.
        """
        hop, tried = self._hop, self._tried
        if not transport.is_active():  # its patience was over while somebody was asked about its key
            raise TurnedAway("no login in time")
        with self._agent() as in_agent:
            for name, key in self._offers(in_agent):
                try:
                    more = transport.auth_publickey(hop.user, key)
                except paramiko.BadAuthenticationType as error:
                    tried.append(f"the server takes no keys, only {', '.join(error.allowed_types)}")
                    break
                except (paramiko.SSHException, EOFError, OSError) as error:
                    if "timeout" in str(error):
                        raise UnreachableError(
                            f"{self._label}: {hop.endpoint} did not answer a login in {hop.connect_timeout_s:g} s",
                            hint=f"check the load of the machine, or look at: ssh -v {hop.by_hand}",
                        ) from error
                    if transport.is_active():
                        tried.append(f"{name} refused")
                        continue
                    many = "; more keys than it takes? IdentitiesOnly yes in the ssh configuration offers fewer"
                    tried.append(f"{name}: {error}{many if tried else ''}")
                    break
                if transport.is_authenticated():
                    return []
                if "publickey" not in more:
                    raise PreflightError(
                        f"{self._label}: {hop.endpoint} took {name}, but also wants a second factor "
                        f"({', '.join(more)}), which cannot be given here",
                        hint="ask for logins by key alone; a jump host can be opened by hand instead: ControlMaster "
                        f"and ControlPersist for it, ProxyCommand ssh -W %h:%p {hop.by_hand} for the hosts behind it",
                    )
                tried.append(f"{name} accepted, but the server wants another key too")
        if not tried:
            tried.append("there is no key to offer")
            tried += [f"there is no {file}" for file in hop.identities if not os.path.exists(file)]
        raise PreflightError(
            f"{self._label}: login refused for {hop.endpoint}: {'; '.join(tried)}",
            hint=f"check user and key (ssh.user, ssh.identity in the profile), or look at: ssh -v {hop.by_hand}",
        )

    def _offers(self, in_agent: Mapping[bytes, paramiko.PKey]) -> Iterator[tuple[str, paramiko.PKey]]:
        """Each key with its certificates, then the key alone: an outdated certificate must not hide it."""
        beside = [f"{file}-cert.pub" for file in self._hop.identities]
        found: list[tuple[str, PublicBlob, certificates.Certificate]] = []
        for file in dict.fromkeys([*self._hop.certificates, *filter(os.path.isfile, beside)]):
            try:
                blob = PublicBlob.from_file(file)
            except (OSError, ValueError) as error:
                self._tried.append(f"certificate {file} cannot be read: {error}")
                continue
            certificate = certificates.read(blob.key_blob)
            if certificate is None:
                self._tried.append(f"{file} is no certificate")
            else:
                found.append((file, blob, certificate))
        for name, key in self._keys(in_agent):
            for file, blob, certificate in found:
                if certificate.key == key.asbytes():
                    key.public_blob = blob
                    trouble = certificates.out_of_time(certificate, time.time())
                    yield f"{name} with {file}{f' ({trouble})' if trouble else ''}", key
            key.public_blob = None
            yield name, key

    def _keys(self, in_agent: Mapping[bytes, paramiko.PKey]) -> Iterator[tuple[str, paramiko.PKey]]:
        """Of the named files those that the agent holds, others of the agent, then the files."""
        offered: set[bytes] = set()
        for file in self._hop.identities:
            public = _public_part(file)
            if public is not None and public in in_agent:
                offered.add(public)
                yield f"{file} (agent)", in_agent[public]
        if not self._hop.identities_only:
            for public, key in in_agent.items():
                if public not in offered:
                    yield f"agent key {key.get_name()}", key
        for file in self._hop.identities:
            if not os.path.isfile(file) or file.endswith(".pub") or _public_part(file) in offered:
                continue
            if _others_may_read(file):
                self._tried.append(f"{file} may be read by others, so OpenSSH refuses it (type: chmod 600 {file})")
                continue
            try:
                yield file, paramiko.PKey.from_path(file)
            except (paramiko.PasswordRequiredException, TypeError):
                self._tried.append(f"{file} needs its passphrase (type: ssh-add {file})")
            except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, OSError, ValueError) as error:
                self._tried.append(f"{file} cannot be read: {error}")

    @contextlib.contextmanager
    def _agent(self) -> Iterator[Mapping[bytes, paramiko.PKey]]:
        """The keys in the agent, by their public part; it has to stay open while they sign."""
        agent = AgentSSH()
        keys: dict[bytes, paramiko.PKey] = {}
        with socket.socket(socket.AF_UNIX) as sock:
            if self._hop.agent is not None:
                try:
                    sock.settimeout(5)
                    sock.connect(self._hop.agent)
                    agent._connect(sock)  # type: ignore[attr-defined]  # paramiko's own way in, for any socket
                    for key in agent.get_keys():
                        if "-cert-v01@" in key.get_name():
                            key.inner_key = None  # type: ignore[attr-defined]  # or paramiko shows the bare key under the certificate's name
                        keys[key.asbytes()] = key
                except (paramiko.SSHException, OSError) as error:
                    self._tried.append(f"key agent {self._hop.agent}: {error}")
            yield keys


def _others_may_read(file: str) -> bool:
    """As OpenSSH judges, which carries the tunnels: a key of the user's own that others may open is not used."""
    found = os.stat(file)
    return found.st_uid == os.getuid() and bool(stat.S_IMODE(found.st_mode) & 0o077)


def _public_part(file: str) -> bytes | None:
    """The public key of an IdentityFile, which may be only the public file of a key that an agent holds."""
    for name in (f"{file}.pub", file):
        try:
            return PublicBlob.from_file(name).key_blob
        except (OSError, ValueError, IndexError, paramiko.SSHException):
            continue
    return _public_part_of_private(file)


def _public_part_of_private(file: str) -> bytes | None:
    """OpenSSH's private key files hold the public key in clear, whatever passphrase locks the rest."""
    try:
        with open(file, encoding="ascii") as lines:
            text = lines.read(1 << 16)
        body = base64.b64decode("".join(text.split("-----")[2].split()))
        _, magic, rest = body.partition(b"openssh-key-v1\0")
        message = paramiko.Message(rest)
        for _ in range(3):  # cipher, key derivation and its options
            message.get_string()
        return message.get_string() if magic and message.get_int() == 1 else None
    except (OSError, ValueError, IndexError):
        return None
