"""Files to checked values: the one place where configuration touches the disk.

``load_site`` and ``load_recipe`` report all faults of a file at once, each as ``file:line:column: key: cause``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Generic, TypeVar

from blake3 import blake3
from pydantic import ValidationError

from islandctl.config.beside import read_beside, read_bytes
from islandctl.config.faults import explain, wrong_bools
from islandctl.config.idle import idle
from islandctl.config.model import Settings
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.config.text import MAX_BYTES, Path, Place, parse
from islandctl.errors import ConfigError

T = TypeVar("T", bound=Settings)


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A checked value and where it comes from."""

    value: T
    path: str
    """As the user wrote it, for messages."""
    text_hash: str
    """blake3 of the file's bytes."""
    places: dict[Path, Place] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Of a recipe: what ``worker.files`` names, by its path beside the recipe."""

    def at(self, *path: str | int) -> str:
        """``file:line:column`` of a value, or of the nearest one around it that the file holds."""
        line, column = nearest(self.places, path)
        return f"{self.path}:{line}:{column}"


def nearest(places: dict[Path, Place], path: Path) -> Place:
    """The place of ``path``, or of the longest beginning of it that has one."""
    for length in range(len(path), -1, -1):
        if path[:length] in places:
            return places[path[:length]]
    return (1, 1)


def place_of(path: str, *key: str | int) -> str:
    """``file:line:column`` of a key in a file as it is now; the file alone when it cannot be read any more."""
    try:
        text = read_bytes(path, max_bytes=MAX_BYTES, hint="").decode("utf-8")
        line, column = nearest(parse(text, path).values, key)
    except (ConfigError, UnicodeDecodeError):
        return path
    return f"{path}:{line}:{column}"


def load_recipe(path: str | os.PathLike[str]) -> Loaded[Recipe]:
    """Read a recipe, and the files that its script needs.

    Raises:
        ConfigError: unreadable or wrong; one line for every fault.
    """
    loaded = _load(path, Recipe, "recipe")
    return replace(loaded, files=read_beside(loaded.path, loaded.value.worker, loaded.at))


def load_site(path: str | os.PathLike[str]) -> Loaded[SiteProfile]:
    """Read a site profile. Its relative files are taken from beside the profile.

    Raises:
        ConfigError: unreadable or wrong; one line for every fault.
    """
    loaded = _load(path, SiteProfile, "site")
    folder = FilePath(path).absolute().parent

    def beside(section: Settings, *keys: str) -> Settings:
        files = {key: getattr(section, key) for key in keys}
        found = {key: str(folder / name) for key, name in files.items() if name and not name.startswith("~")}
        return section.model_copy(update=found)

    site = loaded.value.model_copy(
        update={
            "ssh": beside(loaded.value.ssh, "config", "identity", "known_hosts"),
            "environment": beside(loaded.value.environment, "lock", "wheels"),
        }
    )
    return Loaded(site, loaded.path, loaded.text_hash, loaded.places)


def _load(path: str | os.PathLike[str], kind: type[T], word: str) -> Loaded[T]:
    name = os.fspath(path)
    content = read_bytes(path, max_bytes=MAX_BYTES, hint=f"`islandctl schema {word}` shows what belongs in it")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text", hint="save the file as UTF-8") from error
    document = parse(text, name)
    if not isinstance(document.data, dict):
        raise ConfigError(
            f"{name}:1:1: expected keys and values", hint=f"`islandctl schema {word}` shows what belongs in it"
        )
    _refuse_the_other_kind(name, document.data, kind)
    in_vain = list(idle(document.data, kind))
    try:
        value = kind.model_validate(document.data)
        faults = wrong_bools(document.data, value)
        cause: ValidationError | None = None
    except ValidationError as error:
        faults = explain(error, kind)
        cause = error
    faults = [one for one in faults if not any(one.path[: len(each.path)] == each.path for each in in_vain)] + in_vain
    if faults:
        raise ConfigError(
            "\n".join(
                f"{name}:{line}:{column}: {text}"
                for (line, column), text in sorted(
                    (nearest(document.keys if fault.at_key else document.values, fault.path), str(fault))
                    for fault in faults
                )
            ),
            hint=f"`islandctl schema {word}` lists every key with its meaning",
        ) from cause
    return Loaded(value, name, blake3(content).hexdigest(), document.values)


def _refuse_the_other_kind(name: str, data: dict[str, object], kind: type[Settings]) -> None:
    """A profile where a recipe belongs, or the other way round, is one fault and not one for every key."""
    words: dict[type[Settings], str] = {Recipe: "a recipe", SiteProfile: "a site profile"}
    other: type[Settings] = SiteProfile if kind is Recipe else Recipe
    needed = [{key for key, item in one.model_fields.items() if item.is_required()} for one in (kind, other)]
    if needed[1] <= data.keys() and not needed[0] <= data.keys():
        raise ConfigError(
            f"{name}: is {words[other]}, where {words[kind]} belongs",
            hint="islandctl plan RECIPE --site PROFILE: the recipe stands alone, each profile after its own --site",
        )


def text_hash(path: str | os.PathLike[str]) -> str | None:
    """The ``Loaded.text_hash`` that the file would have now; None when it cannot be read."""
    try:
        return blake3(read_bytes(path, max_bytes=MAX_BYTES, hint="")).hexdigest()
    except ConfigError:
        return None
