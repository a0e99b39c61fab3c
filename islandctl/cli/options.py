"""Arguments and options that several commands share, and how they show in ``--help``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup


def flag(*names: str, help: str) -> Any:
    """An option without a value; its help shows no type."""
    return typer.Option(*names, metavar="", help=help)


RunName: TypeAlias = Annotated[str | None, typer.Argument(metavar="RUN", help="The run; left out: the newest one.")]
Sites: TypeAlias = Annotated[
    list[Path], typer.Option("--site", "-s", metavar="PROFILE", help="A site profile; once for each site.")
]
MaybeSites: TypeAlias = Annotated[
    list[Path] | None, typer.Option("--site", "-s", metavar="PROFILE", help="A site profile; once for each site.")
]
Json: TypeAlias = Annotated[bool, flag("--json", help="One JSON document on stdout.")]
Detach: TypeAlias = Annotated[bool, flag("--detach", help="Return as soon as the workers are started.")]


def help_text(command: Callable[..., Any]) -> str:
    """A command's docstring for ``--help``.

    A paragraph becomes one line, so that any terminal can break it anew; examples stay one a line, after a ``$``.
    """
    paragraphs = []
    for part in inspect.cleandoc(command.__doc__ or "").split("\n\n"):
        heading, *lines = part.splitlines()
        if heading == "Examples:":
            paragraphs.append("\n".join([heading, *(f"$ {line.strip()}" for line in lines)]))
        else:
            paragraphs.append(" ".join(part.split()))
    return "\n\n".join(paragraphs)


class Command(TyperCommand):
    """A command whose ``--help`` option shows no type."""

    def get_help_option(self, ctx: Any) -> Any:
        """See typer."""
        return _untyped(super().get_help_option(ctx))


class Group(TyperGroup):
    """The same for the program itself."""

    def get_help_option(self, ctx: Any) -> Any:
        """See typer."""
        return _untyped(super().get_help_option(ctx))


def _untyped(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option
