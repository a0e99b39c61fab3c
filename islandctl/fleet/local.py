"""This machine as a host: the same programs as over SSH, started directly."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from islandctl.errors import PreflightError
from islandctl.fleet import wire
from islandctl.fleet.host import Completed

P = ParamSpec("P")
R = TypeVar("R")


class LocalHost:
    """The machine that islandctl itself runs on. ``python3`` means the controller's own interpreter."""

    def __init__(self, label: str = "this machine") -> None:
        self.label = label

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float) -> Completed:
        """Run one command; see ``Host.run``."""
        return wire.run(self, argv, stdin, timeout_s)

    def python(
        self,
        source: str,
        args: Mapping[str, Any],
        *,
        timeout_s: float,
        payload: bytes = b"",
        interpreter: str = "python3",
    ) -> Any:
        """Run a Python program; see ``Host.python``."""
        call = wire.call(source, args, payload, timeout_s)
        python = sys.executable if interpreter == "python3" else os.path.expanduser(interpreter)
        try:
            done = subprocess.run(
                [python, "-I", "-c", wire.BOOT], input=call.stdin, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise wire.late(self.label, "a command", timeout_s) from error
        except OSError as error:
            raise PreflightError(
                f"{self.label}: cannot run {python}: {error.strerror}",
                hint="set environment.python in the site profile to an interpreter that exists",
            ) from error
        code = done.returncode if done.returncode >= 0 else None
        return wire.result(self.label, call, Completed(code, done.stdout, done.stderr))

    def feed(self, source: str, args: Mapping[str, Any], pieces: Iterable[bytes], *, timeout_s: float) -> Any:
        """Run a Python program on a stream; see ``Host.feed``."""
        call = wire.call(source, args, b"", timeout_s, stream=True)
        with subprocess.Popen(
            [sys.executable, "-I", "-c", wire.BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):  # it may end without reading all: its answer tells why
                for piece in itertools.chain([call.stdin], pieces):
                    process.stdin.write(piece)
                process.stdin.close()
            said = process.stdout.read()  # it ends itself after timeout_s
        code = process.returncode if process.returncode >= 0 else None
        return wire.result(self.label, call, Completed(code, said, b""))

    def here(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function of this very process that only reads: what ``python`` does, without a process of its own.

        Raises:
            PreflightError: the function raised; names the host, as ``python`` does.
        """
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise PreflightError(f"{self.label}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Nothing is held."""
