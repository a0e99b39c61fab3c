"""The schemas are valid, complete, and agree with the shipped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator

from islandctl.config.schema import json_schema
from islandctl.config.text import parse

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "site-profiles").glob("*.yaml"), *(ROOT / "recipes").glob("*.yaml")]


def kind_of(path: Path) -> Literal["site", "recipe"]:
    return "site" if path.parent.name == "site-profiles" else "recipe"


@pytest.mark.parametrize("kind", ["site", "recipe"])
def test_schemas_are_valid(kind: Literal["site", "recipe"]) -> None:
    schema = json_schema(kind)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_files_fit_their_schema(path: Path) -> None:
    data = parse(path.read_text(), path.name).data
    assert list(Draft202012Validator(json_schema(kind_of(path))).iter_errors(data)) == []


@pytest.mark.parametrize(
    "change",
    [{"name": 8}, {"nmae": "a"}, {"wan": {"up": "1 GBPS", "down": "1 Gbit/s", "rtt": "1 ms"}}, {"scheduler": "pbs"}],
)
def test_the_schema_refuses_what_reading_refuses(change: dict[str, Any]) -> None:
    data = parse((ROOT / "site-profiles" / "local-a.yaml").read_text(), "local-a.yaml").data | change
    assert not Draft202012Validator(json_schema("site")).is_valid(data)


def test_defaults_fit_their_own_type() -> None:
    for kind in ("site", "recipe"):
        schema = json_schema(kind)  # type: ignore[arg-type]
        for name, model in [("", schema), *schema["$defs"].items()]:
            for key, field in model["properties"].items():
                if "default" in field:
                    validator = Draft202012Validator({**field, "$defs": schema["$defs"]})
                    assert validator.is_valid(field["default"]), (name, key, field["default"])


def test_fields_carry_their_descriptions() -> None:
    properties = json_schema("recipe")["$defs"]["Exchange"]["properties"]
    told = "Steps between taking a snapshot and applying the round's result. With `pace: measured` in proportion."
    assert properties["overlap"]["description"] == told
