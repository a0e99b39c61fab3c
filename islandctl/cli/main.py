"""The application: its commands, and how an error becomes one line and an exit code.

Everything heavy is imported inside the commands, so that ``islandctl --help`` costs little more than typer itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from islandctl import __version__
from islandctl.cli import output
from islandctl.cli.checkpoints import checkpoints
from islandctl.cli.compare import compare
from islandctl.cli.doctor import doctor
from islandctl.cli.launch import launch
from islandctl.cli.logs import logs
from islandctl.cli.options import Command, Group, help_text
from islandctl.cli.plan import plan
from islandctl.cli.remove import remove
from islandctl.cli.resume import resume
from islandctl.cli.runs import runs
from islandctl.cli.schema import schema
from islandctl.cli.status import status
from islandctl.cli.stop import stop
from islandctl.errors import IslandError, UsageError

_Misuse: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for a command line that it cannot read."""


# No plugin of pydantic is used, and looking for some at every start costs as much as a command may.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

READER_GONE = 141
"""As a shell tells of a program that SIGPIPE has ended."""

app = typer.Typer(
    cls=Group,
    name="islandctl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, compare, doctor, launch, status, logs, stop, resume, runs, checkpoints, remove, schema):
    app.command(cls=Command, help=help_text(command))(command)


def _version(value: bool) -> None:
    if value:
        print(f"islandctl {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 ok, 1 the run failed, 2 usage or configuration, 3 plan infeasible, 4 preflight failed, "
    "5 unreachable (state unknown), 6 stopped by budget, 130 detached by Ctrl-C, "
    "141 nobody reads the output any more."
)
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Show the version and end."),
    ] = False,
) -> None:
    """Train one model over several GPU clusters that stand far apart."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the exit code of the table in ``--help``."""
    output.forgiving()
    code = _run(None if argv is None else list(argv))
    try:
        sys.stdout.flush()
    except OSError:  # what an error had left unwritten; that error has been told
        output.hush()
    sys.exit(code)


def _run(argv: list[str] | None) -> int:
    try:
        code: int = app(args=argv, prog_name="islandctl", standalone_mode=False) or 0
        sys.stdout.flush()  # here, where a reader that has gone is no fault
        return code
    except IslandError as error:
        return _told(error)
    except _Misuse as error:
        return _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (BrokenPipeError, SystemExit):  # as in `islandctl logs | head`; typer and rich then want to exit with 1
        output.hush(sys.stdout, sys.stderr)
        return READER_GONE
    except Exception as error:
        told = output.border_trouble(error) if isinstance(error, OSError) else None
        if told is not None:
            return _told(told)
        output.fault(error)  # of ours: one line, and a file with the rest
        return 1


def _told(error: IslandError) -> int:
    """Tell the error, if anybody reads it, and give its exit code."""
    try:
        output.error(error)
    except BrokenPipeError:
        output.hush(sys.stdout, sys.stderr)
    return error.exit_code


def _misused(error: Any) -> int:
    """One line for what was typed wrongly, one for where to read. Without any argument the help was shown already."""
    said = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    if type(error).__name__ != "NoArgsIsHelpError":
        where = error.ctx.command_path if error.ctx else "islandctl"
        return _told(UsageError(said[:1].lower() + said[1:], hint=f"{where} --help"))
    return UsageError.exit_code
