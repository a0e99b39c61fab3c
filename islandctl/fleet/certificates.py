"""OpenSSH certificates: a public key with names, a span of time and the signature of an authority.

The format is OpenSSH's PROTOCOL.certkeys. Whether the signature is right is for the caller to check (``signed``).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from datetime import UTC, datetime

_KEY_FIELDS = {
    "ssh-ed25519": 1,
    "ssh-rsa": 2,
    "ecdsa-sha2-nistp256": 2,
    "ecdsa-sha2-nistp384": 2,
    "ecdsa-sha2-nistp521": 2,
    "sk-ssh-ed25519": 2,
    "sk-ecdsa-sha2-nistp256": 3,
}
"""How many fields hold the key's numbers."""
_MARK = "-cert-v01@openssh.com"
_HOST = 2
_FOREVER = 2**64 - 1


@dataclass(frozen=True)
class Certificate:
    """What a certificate says."""

    kind: str
    """Of the certified key, as known_hosts writes it."""
    key: bytes
    """The certified public key."""
    is_host: bool
    names: tuple[str, ...]
    """Hosts (``*`` and ``?`` stand for others) or users that it is for; none: all."""
    valid_from: int
    valid_until: int
    """Seconds since 1970, as is ``valid_from``."""
    critical: bool
    """It demands something that this reader does not know."""
    authority: bytes
    """Public key of who signed it."""
    signed: bytes
    """What the signature is for."""
    signature: bytes


class _Fields:
    def __init__(self, blob: bytes) -> None:
        self.blob, self.at = blob, 0

    def take(self, count: int) -> bytes:
        data = self.blob[self.at : self.at + count]
        if len(data) < count:
            raise ValueError("cut short")
        self.at += count
        return data

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> bytes:
        return self.take(self.number(">I"))


def read(blob: bytes) -> Certificate | None:
    """The certificate in a public key's bytes; None: it is none, or not a whole one."""
    fields = _Fields(blob)
    try:
        return _read(fields)
    except (ValueError, UnicodeDecodeError):
        return None


def _read(fields: _Fields) -> Certificate | None:
    kind, mark, rest = fields.text().decode("ascii").partition(_MARK)
    if not mark or rest or kind not in _KEY_FIELDS:
        return None
    fields.text()  # a nonce
    begin = fields.at
    for _ in range(_KEY_FIELDS[kind]):
        fields.text()
    numbers = fields.blob[begin : fields.at]
    fields.number(">Q")  # serial
    what = fields.number(">I")
    fields.text()  # name of the certificate, for logs
    inner, names = _Fields(fields.text()), []
    while inner.at < len(inner.blob):
        names.append(inner.text().decode())
    valid_from, valid_until = fields.number(">Q"), fields.number(">Q")
    critical = fields.text()
    for _ in range(2):  # extensions, reserved
        fields.text()
    authority = fields.text()
    signed = fields.blob[: fields.at]
    whole = f"{kind}@openssh.com" if kind.startswith("sk-") else kind
    return Certificate(
        kind=whole,
        key=struct.pack(">I", len(whole)) + whole.encode() + numbers,
        is_host=what == _HOST,
        names=tuple(names),
        valid_from=valid_from,
        valid_until=valid_until,
        critical=bool(critical),
        authority=authority,
        signed=signed,
        signature=fields.text(),
    )


def out_of_time(certificate: Certificate, now: float) -> str:
    """``expired on …`` or ``not valid before …``; empty: it is valid at this time."""
    if now < certificate.valid_from:
        return f"not valid before {_day(certificate.valid_from)}"
    if now >= certificate.valid_until != _FOREVER:
        return f"expired on {_day(certificate.valid_until)}"
    return ""


def no_host_s(certificate: Certificate, host: str, now: float) -> str:
    """Why this is no certificate for ``host``; empty: it is one."""
    if not certificate.is_host:
        return "is for a user, not for a host"
    if certificate.critical:
        return "demands what is not known here"
    if certificate.names and not any(_fits(name.lower(), host) for name in certificate.names):
        return f"is for {', '.join(certificate.names)}"
    trouble = out_of_time(certificate, now)
    return f"is {trouble}" if trouble.startswith("not") else trouble


def _fits(pattern: str, host: str) -> bool:
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), host))


def _day(seconds: int) -> str:
    # The largest time that a date can name, for what is written as "for ever" in other ways.
    return datetime.fromtimestamp(min(seconds, 253402300799), UTC).strftime("%Y-%m-%d %H:%M UTC")
