"""JSON Schemas of the files a user writes, for editors: completion, descriptions, and red lines while typing."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from islandctl.config.faults import inner_model
from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: Literal["site", "recipe"]) -> dict[str, Any]:
    """The schema (draft 2020-12) of a site profile or a recipe.

    It is a little stricter than reading: numbers written as text are accepted in a file, but an editor marks them.
    Rules that join several keys (width divisible by heads) are checked when the file is read.
    """
    model = SiteProfile if kind == "site" else Recipe
    title = "islandctl site profile" if kind == "site" else "islandctl recipe"
    schema: dict[str, Any] = _plain(model.model_json_schema(mode="validation"))
    for inner in _models(model):
        part = schema if inner is model else schema["$defs"][inner.__name__]
        written = inner.model_construct().model_dump(mode="json", warnings=False)
        for key, item in part["properties"].items():
            if "default" in item:
                item["default"] = written[key]
    return {"$schema": DIALECT, **schema, "title": title}


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """``model`` and every model inside it."""
    found = {model}
    for item in model.model_fields.values():
        inner = inner_model(item.annotation)
        if inner is not None:
            found |= _models(inner)
    return found


def _plain(value: Any) -> Any:
    """Descriptions as one paragraph of plain text, and without the titles that only repeat a key."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {}
    for key, item in value.items():
        if key == "description" and isinstance(item, str):
            plain[key] = " ".join(item.replace("``", "`").split())
        elif not (key == "title" and isinstance(item, str)):
            plain[key] = _plain(item)
    return plain
