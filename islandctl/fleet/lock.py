"""``environment.lock``: a requirements file with all that is installed; refused here where no node could use it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from islandctl.errors import ConfigError, PreflightError

_HASH = re.compile(r"\s--hash[= ]")
_OF_HERE = re.compile(
    r"(?:-r|-c|--requirement|--constraint)\b|(?:-e|--editable)[\s=]+(?!\w+\+|https?:)|\S+\s*@\s*file:|file:|\.{0,2}/"
)
"""Lines that mean a file of this machine, which a node does not have."""
_OTHER = re.compile(r"(\S+) from .*?Expected \w+ ([0-9a-f]{16}).*?Got\s+([0-9a-f]{16})")
"""What pip says of a file whose hash is not the lock's."""


def read(path: str) -> list[str]:
    """Its lines, as they are.

    Raises:
        ConfigError: it cannot be read, names files of this machine, or has hashes in some lines only; at its line.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"environment.lock: {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}",
            hint="name a requirements file beside the profile, as pip freeze writes it",
        ) from error
    told = list(_requirements(lines))
    hashed = any(_HASH.search(text) for _, text in told)
    for number, text in told:
        if _OF_HERE.match(text):
            raise ConfigError(
                f"environment.lock: {path}:{number}: '{text}' is a file of this machine, which no node has",
                hint="write NAME==VERSION, as pip list --format=freeze does; its wheel may lie in environment.wheels",
            )
        if hashed and not _HASH.search(text) and not text.startswith("-"):
            raise ConfigError(
                f"environment.lock: {path}:{number}: '{text}' has no hash, and other lines have",
                hint="pip wants hashes in all lines or in none; pip-compile --generate-hashes writes them",
            )
    return lines


def _requirements(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The number of its first line, and the text, of each requirement or option, without comments."""
    begun, number = "", 0
    for at, line in enumerate(lines, 1):
        text = re.sub(r"(^|\s)#.*$", "", line).strip()
        number = number if begun else at
        begun += text.removesuffix("\\").strip() + " " if text else ""
        if begun and not text.endswith("\\"):
            yield number, begun.strip()
            begun = ""
    if begun:
        yield number, begun.strip()


def refuse_another_file(label: str, complaint: Sequence[str]) -> None:
    """Say so where pip's complaint is that a file is not the one that the lock means.

    Raises:
        PreflightError: it is.
    """
    other = _OTHER.search(" ".join(complaint))
    if other is not None:
        name, expected, got = other.groups()
        raise PreflightError(
            f"{label}: {name} is not the file of environment.lock: its hash is {got}…, not {expected}…",
            hint="fetch that file again; or write environment.lock anew, if it is the file that you mean",
        )
