"""A recipe and sites with single values changed: ``site.wan.up=5 Gbit/s``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from islandctl.config.faults import explain, nearest_word
from islandctl.config.load import Loaded
from islandctl.config.model import Settings
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.errors import UsageError

T = TypeVar("T", bound=Settings)

EVERY_SITE = "site"
"""The first word of a path that means all sites; a site's name means that one, anything else the recipe."""
BOTH_WAYS = "bandwidth"
"""``wan.bandwidth`` is ``wan.up`` and ``wan.down`` together."""


class Case:
    """A recipe and its sites; every change gives a new one."""

    def __init__(self, recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]]) -> None:
        self.recipe = recipe
        self.sites = tuple(sites)

    def changed(self, path: str, value: Any) -> Case:
        """With ``value`` (as in a file) at ``path``.

        Raises:
            UsageError: no such key, or a value that is not possible there.
        """
        first, _, rest = path.partition(".")
        names = [site.value.name for site in self.sites]
        if not rest or (first != EVERY_SITE and first not in names):
            if first in SiteProfile.model_fields and first not in Recipe.model_fields:
                raise UsageError(
                    f"--set {path}: '{first}' is a key of profiles",
                    hint=f"write site.{path} for all sites, or {names[0]}.{path}",
                )
            if rest and first not in Recipe.model_fields:
                raise UsageError(
                    f"--set {path}: '{first}' is neither a site here ({_some(names)}) nor a section of the recipe",
                    hint=_meant(path, [*names, EVERY_SITE, *Recipe.model_fields]),
                )
            return Case(_with(self.recipe, path, value, f"--set {path}"), self.sites)
        sites = [
            _with(site, rest, value, f"--set {path}") if first in (EVERY_SITE, site.value.name) else site
            for site in self.sites
        ]
        return Case(self.recipe, sites)

    def now(self, path: str) -> Any:
        """The value at ``path`` as it would be written; of several sites the first one's. None: left out."""
        first, _, rest = path.partition(".")
        for site in self.sites:
            if rest and first in (EVERY_SITE, site.value.name):
                return _look(site.value.model_dump(mode="json"), rest)
        return _look(self.recipe.value.model_dump(mode="json"), path)


def parse_setting(text: str) -> tuple[str, str]:
    """``path=value``.

    Raises:
        UsageError: not of this form.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip() or not value.strip():
        raise UsageError(f"--set {text}: expected PATH=VALUE", hint="for example --set exchange.overlap=8")
    return path.strip(), value.strip()


def _with(loaded: Loaded[T], path: str, value: Any, words: str) -> Loaded[T]:
    data = loaded.value.model_dump(mode="json", exclude_unset=True)
    keys = path.split(".")
    if keys[-2:] == ["wan", BOTH_WAYS]:
        data["wan"] |= {"up": value, "down": value}
    else:
        inner = data
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{words}: {key} has no keys of its own", hint="`islandctl schema` lists the keys")
        inner[keys[-1]] = value
    kind = type(loaded.value)
    try:
        return dataclasses.replace(loaded, value=kind.model_validate(data))
    except ValidationError as error:
        word = "recipe" if kind is Recipe else "site"
        raise UsageError(
            f"{words}={value}: {explain(error, kind)[0]}", hint=f"`islandctl schema {word}` lists every key"
        ) from error


def _meant(path: str, words: Sequence[str]) -> str:
    first, _, rest = path.partition(".")
    meant = nearest_word(first, words)
    return f"did you mean {meant}.{rest}?" if meant else "`islandctl schema recipe` lists the recipe's sections"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 4 else [*names[:3], "…"])


def _look(data: Any, path: str) -> Any:
    for key in path.split("."):
        if key == BOTH_WAYS and isinstance(data, dict) and "up" in data:
            key = "up"
        if not isinstance(data, dict) or key not in data:
            return None
        data = data[key]
    return data
