"""The application: its commands, and how an error becomes one line and an exit code.

Everything heavy is imported inside the commands, so that ``islandctl --help`` costs little more than typer itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from islandctl import __version__
from islandctl.cli import output
from islandctl.cli.checkpoints import checkpoints
from islandctl.cli.launch import launch
from islandctl.cli.logs import logs
from islandctl.cli.plan import plan
from islandctl.cli.resume import resume
from islandctl.cli.runs import runs
from islandctl.cli.schema import schema
from islandctl.cli.status import status
from islandctl.cli.stop import stop
from islandctl.errors import IslandError

# No plugin of pydantic is used, and looking for some at every start costs as much as a command may.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

app = typer.Typer(
    name="islandctl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, launch, status, logs, stop, resume, runs, checkpoints, schema):
    app.command()(command)


def _version(value: bool) -> None:
    if value:
        print(f"islandctl {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 ok, 1 the run failed, 2 usage or configuration, 3 plan infeasible, 4 preflight failed, "
    "5 unreachable (state unknown), 6 stopped by budget, 130 detached by Ctrl-C."
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Train one model over several GPU clusters that stand far apart."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the exit code of the table in ``--help``."""
    try:
        app(args=None if argv is None else list(argv), prog_name="islandctl")
    except IslandError as error:
        output.error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        output.hush()
        code = 1
    except Exception as error:  # a fault of ours: say so in one line, keep the rest in a file
        output.fault(error)
        code = 1
    else:
        code = 0
    sys.exit(code)
