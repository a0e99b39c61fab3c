"""JSON Schemas of the files a user writes, for editors: completion, descriptions, and red lines while typing."""

from __future__ import annotations

from typing import Any, Literal

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
    return {"$schema": DIALECT, **schema, "title": title}


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
