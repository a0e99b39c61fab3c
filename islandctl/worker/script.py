"""A training script of the user's own, run inside the worker's process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from islandctl.errors import ConfigError, RunError


def run_script(words: Sequence[str]) -> None:
    """Run ``script.py …`` or ``-m module …``, as ``python`` would.

    Raises:
        ConfigError: there is no such script.
        RunError: it ended with an exit code of its own.
    """
    try:
        if words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            if not os.path.isfile(words[0]):
                raise ConfigError(
                    f"worker.command: {words[0]} is not here ({os.getcwd()})",
                    hint="name it in worker.files, so that it is sent along",
                )
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RunError(f"{' '.join(words)}: ended with {end.code!r}", hint="see islandctl logs") from end
