"""Files on this machine, read whole, with everything that can go wrong said plainly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from islandctl.config.recipe import WorkerRecipe
from islandctl.errors import ConfigError

MAX_FILES_BYTES = 1 << 20
"""Of all files that travel with a plan: code, not data."""


def read_bytes(path: str | os.PathLike[str], *, max_bytes: int, hint: str) -> bytes:
    """A whole file, with everything that can go wrong said plainly.

    Raises:
        ConfigError: not there, a folder, not readable or longer than ``max_bytes``.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{name}: no such file", hint="check the path; " + hint) from error
    except IsADirectoryError as error:
        raise ConfigError(f"{name}: is a folder, not a file", hint="name a file in it") from error
    except PermissionError as error:
        raise ConfigError(f"{name}: no permission to read it", hint=f"chmod u+r {name}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}", hint="check the path") from error
    if len(content) > max_bytes:
        raise ConfigError(f"{name}: longer than {max_bytes // 1024} KiB", hint="is this the right file?")
    return content


def read_beside(recipe: str, worker: WorkerRecipe, at: Callable[..., str]) -> dict[str, str]:
    """What ``worker.files`` names, folders with all in them: path beside the recipe, with slashes → text.

    Args:
        recipe: path of the recipe.
        at: gives ``file:line:column`` of a key.

    Raises:
        ConfigError: a file is missing, no text, too long; or the command's script is not among them.
    """
    folder, files = Path(recipe).parent, {}
    left = MAX_FILES_BYTES
    for index, name in enumerate(worker.files):
        place = f"{at('worker', 'files', index)}: worker.files"
        for path in _within(folder / name):
            try:
                content = read_bytes(path, max_bytes=MAX_FILES_BYTES, hint="worker.files are beside the recipe")
            except ConfigError as error:
                raise ConfigError(f"{place}: {error.message}", hint=error.hint) from error
            left -= len(content)
            if left < 0:
                raise ConfigError(
                    f"{place}: more than {MAX_FILES_BYTES >> 10} KiB in all",
                    hint="code travels with the plan; data must lie on the sites already",
                )
            try:
                files[path.relative_to(folder).as_posix()] = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{place}: {path} is not UTF-8 text", hint="only code travels") from error
    script = worker.command[1] if worker.command else "-m"
    if script != "-m" and not script.startswith("/") and os.path.normpath(script) not in files:
        raise ConfigError(
            f"{at('worker', 'command')}: worker.command: {script} is not among worker.files",
            hint=f"worker.files: [{script}]; or name a script on the sites by its absolute path",
        )
    return files


def _within(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for found in sorted(path.rglob("*")):
        hidden = any(part == "__pycache__" or part.startswith(".") for part in found.relative_to(path).parts)
        if found.is_file() and not hidden:
            yield found
