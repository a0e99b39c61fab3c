"""Keys that decide nothing beside what else the file chooses: written there, they are told, never passed over.

The rule looks at what is written, not at values: ``alpha: 0.5`` without ``apply: blend`` is idle although 0.5 is its
default, and a plan that is read back, with every default in it, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from islandctl.config.exchange import Exchange
from islandctl.config.faults import Fault
from islandctl.config.model import Settings
from islandctl.config.recipe import Optimizer, Recipe
from islandctl.config.site import SiteProfile

Look = Callable[[str], Any]
"""What is written at ``exchange.mode``; None: nothing."""


@dataclass(frozen=True)
class _Rule:
    """``keys`` mean nothing where ``holds``; ``beside`` says why."""

    holds: Callable[[Look], bool]
    beside: str
    keys: tuple[str, ...]


def _is(path: str, *values: Any, left_out: bool = False) -> Callable[[Look], bool]:
    """One of ``values`` is written at ``path``, or nothing where that means the same."""

    def holds(look: Look) -> bool:
        value = look(path)
        return left_out if value is None else value in values

    return holds


def _is_written(path: str) -> Callable[[Look], bool]:
    return lambda look: look(path) is not None


_OF_EXCHANGE = tuple(f"exchange.{key}" for key in Exchange.model_fields if key not in ("mode", "cells"))
_OF_A_LOOP = ("optimizer", "schedule", "precision", "recompute")
_KINDS = get_args(Optimizer.model_fields["kind"].annotation)
_ONLY_FOR = {
    "refresh": ("shampoo", "soap"),
    "factor_beta": ("shampoo", "soap"),
    "block": ("shampoo",),
    "damping": ("shampoo",),
    "graft": ("shampoo",),
    "momentum": ("muon",),
}

_RECIPE = (
    _Rule(
        _is_written("worker.command"),
        "worker.command: the script decides it",
        ("model", "data", "evaluation", *(f"training.{key}" for key in _OF_A_LOOP)),
    ),
    _Rule(_is("exchange.mode", "none"), "mode: none: one cell trains alone", _OF_EXCHANGE),
    _Rule(_is("exchange.mode", "butterfly"), "mode: butterfly: it has no anchor to move", ("exchange.outer",)),
    _Rule(_is("exchange.apply", "carry", left_out=True), "apply: carry", ("exchange.alpha",)),
    _Rule(_is("exchange.codec", "fp32"), "codec: fp32: nothing is left out", ("exchange.feedback",)),
    _Rule(_is("exchange.codec", "fp32"), "codec: fp32: all goes whole", ("exchange.exact",)),
    _Rule(_is("exchange.codec", "bf16"), "codec: bf16: all goes as bf16", ("exchange.exact",)),
    _Rule(_is("model.kind", "dense"), "kind: dense: it has no experts to balance", ("model.balance",)),
    _Rule(_is("training.schedule.decay", "none"), "decay: none", ("training.schedule.final",)),
    _Rule(
        _is("worker.restart.limit", 0),
        "limit: 0: nothing is started again",
        ("worker.restart.backoff", "worker.restart.backoff_limit"),
    ),
    *(
        _Rule(
            _is("training.optimizer.kind", kind, left_out=kind == Optimizer.model_fields["kind"].default),
            f"kind: {kind}, only with {' or '.join(users)}",
            (f"training.optimizer.{key}",),
        )
        for key, users in _ONLY_FOR.items()
        for kind in _KINDS
        if kind not in users
    ),
)
_SITE = (
    _Rule(_is("scheduler", "local"), "scheduler: local: nothing goes over SSH", ("ssh",)),
    _Rule(
        _is("environment.build", False),
        "build: false: python is used as it is",
        ("environment.packages", "environment.pip_options"),
    ),
)
_RULES: dict[type[Settings], tuple[_Rule, ...]] = {Recipe: _RECIPE, SiteProfile: _SITE}


def idle(data: Mapping[str, Any], kind: type[Settings]) -> Iterator[Fault]:
    """The keys of ``data`` that decide nothing.

    Args:
        data: as written in a file; it need not be valid.
        kind: what the file is.
    """

    def look(path: str) -> Any:
        value: Any = data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    for rule in _RULES.get(kind, ()):
        for key in rule.keys if rule.holds(look) else ():
            if look(key) not in (None, {}):
                yield Fault(tuple(key.split(".")), f"means nothing with {rule.beside}; leave it out")
