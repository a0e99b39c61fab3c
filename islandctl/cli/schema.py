"""``islandctl schema``: what a site profile or a recipe may hold."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer


class Kind(StrEnum):
    """The files a user writes."""

    site = "site"
    recipe = "recipe"


def schema(
    kind: Annotated[Kind, typer.Argument(metavar="site|recipe", help="Of which file.", show_default=False)],
) -> None:
    """Print the JSON Schema of a site profile or a recipe.

    Editors complete and check YAML with it: put the line
    `# yaml-language-server: $schema=site.schema.json` at the top of the profile.

    Examples:
      islandctl schema site
      islandctl schema recipe > recipe.schema.json
    """
    from islandctl.config.schema import json_schema

    typer.echo(json.dumps(json_schema(kind.value), indent=2, ensure_ascii=False))
