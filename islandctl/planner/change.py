"""A recipe and sites with single values changed: ``site.wan.up=5 Gbit/s``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from islandctl.config.faults import dotted_path, explain, model_at, nearest_word
from islandctl.config.idle import idle
from islandctl.config.load import Loaded
from islandctl.config.model import Settings
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.config.text import parse
from islandctl.errors import ConfigError, UsageError
from islandctl.planner.from_run import Shown

T = TypeVar("T", bound=Settings)

EVERY_SITE = "site"
"""The first word of a path that means all sites; a site's name means that one, anything else the recipe."""
BOTH_WAYS = "bandwidth"
"""``wan.bandwidth`` is ``wan.up`` and ``wan.down`` together."""


class Case:
    """A recipe and its sites; every change gives a new one."""

    def __init__(
        self, recipe: Loaded[Recipe], sites: Sequence[Loaded[SiteProfile]], shown: Shown | None = None
    ) -> None:
        self.recipe = recipe
        self.sites = tuple(sites)
        self.shown = shown
        """A run whose figures take the place of assumed ones, wherever it did the same; see ``from_run.adopted``."""

    def changed(self, path: str, value: Any) -> Case:
        """With ``value`` (as in a file) at ``path``; see ``changed_together``."""
        return self.changed_together([(path, value)])

    def changed_together(self, settings: Sequence[tuple[str, Any]]) -> Case:
        """With all of ``settings``, (path, value as in a file). Only the outcome must hold together, no step on the
        way: ``exchange.window=1`` with ``exchange.overlap=0`` is possible where either alone is not.

        Raises:
            UsageError: no such key, or a value that is not possible there.
        """
        of_recipe: list[_Setting] = []
        of_site: list[list[_Setting]] = [[] for _ in self.sites]
        for path, value in settings:
            first, _, rest = path.partition(".")
            if rest and self._of_sites(path):
                for site, own in zip(self.sites, of_site, strict=True):
                    if first in (EVERY_SITE, site.value.name):
                        own.append(_Setting(path, rest, value))
            else:
                self._refuse_unknown(path)
                of_recipe.append(_Setting(path, path, value))
        sites = [_with(site, own) for site, own in zip(self.sites, of_site, strict=True)]
        return Case(_with(self.recipe, of_recipe), sites, self.shown)

    def _of_sites(self, path: str) -> bool:
        """Whether a path is one of the sites'. A site that is called as a section of the recipe (``relay``) keeps the
        keys that the section does not have."""
        first, _, rest = path.partition(".")
        if first == EVERY_SITE:
            return True
        known = any(site.value.name == first for site in self.sites)
        key = rest.split(".")[0]
        return known and (first not in Recipe.model_fields or key in SiteProfile.model_fields)

    def _refuse_unknown(self, path: str) -> None:
        """A path that is meant for the recipe, but begins with nothing of it."""
        first, _, rest = path.partition(".")
        names = [site.value.name for site in self.sites]
        if first in Recipe.model_fields:
            return
        if first in SiteProfile.model_fields:
            raise UsageError(
                f"--set {path}: '{first}' is a key of profiles",
                hint=f"write site.{path} for all sites, or {names[0]}.{path}",
            )
        if rest:
            raise UsageError(
                f"--set {path}: '{first}' is neither a site here ({_some(names)}) nor a section of the recipe",
                hint=_meant(path, [*names, EVERY_SITE, *Recipe.model_fields]),
            )

    def now(self, path: str) -> Any:
        """The value at ``path`` as it would be written; of several sites the first one's. None: left out."""
        first, _, rest = path.partition(".")
        for site in self.sites:
            if rest and self._of_sites(path) and first in (EVERY_SITE, site.value.name):
                return _look(site.value.model_dump(mode="json"), rest)
        return _look(self.recipe.value.model_dump(mode="json"), path)


class _Setting(NamedTuple):
    """One change, as it was typed and inside its file."""

    typed: str
    path: str
    value: Any
    """None: the key is left out."""


def parse_setting(text: str) -> tuple[str, Any]:
    """``path=value``; a list as in YAML, ``betas=[0.9, 0.95]``; ``null`` leaves the key out.

    Raises:
        UsageError: not of this form.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip() or not value.strip():
        raise UsageError(f"--set {text}: expected PATH=VALUE", hint="for example --set exchange.overlap=8")
    if value.strip().startswith("["):
        try:
            return path.strip(), parse(value.strip(), f"--set {path.strip()}").data
        except ConfigError as error:
            raise UsageError(error.message, hint='a list is written as in YAML: [0.9, 0.95], ["*.router"]') from error
    return path.strip(), None if value.strip() in ("null", "~") else value.strip()


def _with(loaded: Loaded[T], settings: Sequence[_Setting]) -> Loaded[T]:
    if not settings:
        return loaded
    data = loaded.value.model_dump(mode="json", exclude_unset=True)
    for typed, path, value in settings:
        *sections, last = path.split(".")
        inner = data
        for key in sections:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UsageError(
                    f"--set {typed}: {key} has no keys of its own", hint="`islandctl schema` lists the keys"
                )
        both = sections[-1:] == ["wan"] and last == BOTH_WAYS
        if value is None and not both and last not in model_at(type(loaded.value), tuple(sections)).model_fields:
            raise UsageError(
                f"--set {typed}=null: there is no key '{last}'", hint="`islandctl schema` lists the keys"
            )
        for name in ("up", "down") if both else (last,):
            inner[name] = value
            if value is None:
                del inner[name]
    kind = type(loaded.value)
    for fault in idle(data, kind):  # what lay idle before, or does beside what is set now, is no fault of a what-if
        for typed, path, value in settings:
            if f"{path}.".startswith(f"{dotted_path(fault.path)}."):
                raise UsageError(
                    f"--set {typed}={value}: {fault.cause}", hint="set the key that it belongs to as well"
                )
    try:
        return dataclasses.replace(loaded, value=kind.model_validate(data))
    except ValidationError as error:
        said = ", ".join(f"{one.typed}={'null' if one.value is None else one.value}" for one in settings)
        word = "recipe" if kind is Recipe else "site"
        raise UsageError(
            f"--set {said}: {explain(error, kind)[0]}", hint=f"`islandctl schema {word}` lists every key"
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
