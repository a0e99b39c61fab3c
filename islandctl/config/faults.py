"""Pydantic's errors in words for the person who wrote the file."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from islandctl.config.model import Contradiction
from islandctl.config.text import Path

_NAME_PATTERN = "a name takes a-z, 0-9 and inner hyphens, at most 42 characters"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and where in the data."""

    path: Path
    cause: str
    at_key: bool = False
    """The key itself is wrong, not its value."""

    def __str__(self) -> str:
        dotted = dotted_path(self.path)
        return f"{dotted}: {self.cause}" if dotted else self.cause


def dotted_path(path: Path) -> str:
    """``training.optimizer.betas[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def nearest_word(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant."""
    by_lower = {known.lower(): known for known in words}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def explain(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """Every fault of ``error``, in the order found."""
    return [_fault(details, model) for details in error.errors(include_url=False)]


def _fault(details: ErrorDetails, model: type[BaseModel]) -> Fault:
    path: Path = details["loc"]
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(model_at(model, path[:-1]).model_fields)
        meant = nearest_word(str(path[-1]), known)
        advice = f"did you mean '{meant}'?" if meant else f"known here: {', '.join(known)}"
        return Fault(path, f"unknown key '{path[-1]}'; {advice}", at_key=True)
    if kind == "missing":
        return Fault(path, f"key '{path[-1]}' is missing" if isinstance(path[-1], str) else "a value is missing")
    if kind == "value_error":
        error = context["error"]
        return Fault((*path, *error.key) if isinstance(error, Contradiction) else path, str(error))
    return Fault(path, _cause(kind, value, context, details["msg"]))


def _cause(kind: str, value: Any, context: dict[str, Any], message: str) -> str:
    match kind:
        case "string_type":
            if isinstance(value, (int, float)):
                written = str(value).lower() if isinstance(value, bool) else str(value)
                return f"expected text, found {_found(value)}; write it in quotes: '{written}'"
            return f"expected text, found {_found(value)}"
        case "int_type" | "int_parsing" | "int_from_float" | "int_parsing_size":
            return f"expected a whole number, found {_found(value)}"
        case "float_type" | "float_parsing":
            return f"expected a number, found {_found(value)}"
        case "finite_number":
            return f"{value} is not a finite number"
        case "bool_type" | "bool_parsing":
            return f"expected true or false, found {_found(value)}"
        case "tuple_type" | "list_type":
            return f"expected a list, found {_found(value)}"
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"expected a section of keys and values, found {_found(value)}"
        case "greater_than_equal":
            return f"{value} is too small; at least {_short(context['ge'])}"
        case "greater_than":
            return f"{value} is too small; must be more than {_short(context['gt'])}"
        case "less_than_equal":
            return f"{value} is too large; at most {_short(context['le'])}"
        case "less_than":
            return f"{value} is too large; must be less than {_short(context['lt'])}"
        case "string_pattern_mismatch":
            return f"'{value}' is not possible; {_NAME_PATTERN}"
        case "too_short":
            return f"at least {context['min_length']} value is needed"
        case "too_long":
            return f"at most {context['max_length']} values, found {context['actual_length']}"
        case "string_too_short":
            return "must not be empty"
        case "literal_error":
            allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
            meant = nearest_word(str(value), allowed.split(", ")) if isinstance(value, str) else None
            return f"{_found(value)} is none of: {allowed}" + (f"; did you mean {meant}?" if meant else "")
        case _:
            return message[:1].lower() + message[1:]


def _found(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {value}"
        case str():
            return f"'{value}'" if len(value) <= 60 else f"'{value[:57]}…'"
        case list() | tuple():
            return "a list"
        case dict():
            return "a section of keys"
        case _:
            return type(value).__name__


def _short(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def wrong_bools(data: Any, value: Any, path: Path = ()) -> list[Fault]:
    """``true`` or ``false`` where a number belongs: pydantic would take them for 1 and 0.

    ``value`` is what ``data`` was validated to.
    """
    if isinstance(data, bool):
        return [] if isinstance(value, bool) else [Fault(path, f"expected a number, found {_found(data)}")]
    pairs: Iterable[tuple[str | int, Any, Any]] = ()
    if isinstance(data, dict):
        inner = value if isinstance(value, dict) else dict(value)
        pairs = ((key, item, inner[key]) for key, item in data.items())
    elif isinstance(data, list):
        pairs = ((index, item, value[index]) for index, item in enumerate(data))
    return [fault for key, item, typed in pairs for fault in wrong_bools(item, typed, (*path, key))]


def model_at(model: type[BaseModel], path: Path) -> type[BaseModel]:
    """The model that stands at ``path`` inside ``model``."""
    for part in path:
        if isinstance(part, str) and part in model.model_fields:
            model = inner_model(model.model_fields[part].annotation) or model
    return model


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, also inside an Optional or a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated, tuple):
        return next((model for inner in get_args(annotation) if (model := inner_model(inner))), None)
    return None
