"""Files on this machine, read whole, with everything that can go wrong said plainly."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from islandctl.config.recipe import WorkerRecipe
from islandctl.errors import ConfigError

MAX_FILES_BYTES = 16 << 20
"""Of all files that travel with a plan: code, not data."""
_BASE64, _EXECUTABLE = "data:;base64,", "data:;x;base64,"
"""How a file begins in a plan that is not plain text, and one that may be executed."""
_GIT_TIMEOUT_S = 60.0


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
        for path in _within(folder / name, place):
            try:
                content = read_bytes(path, max_bytes=MAX_FILES_BYTES, hint="worker.files are beside the recipe")
            except ConfigError as error:
                raise ConfigError(f"{place}: {error.message}", hint=error.hint) from error
            left -= len(content)
            if left < 0:
                raise ConfigError(
                    f"{place}: more than {MAX_FILES_BYTES >> 20} MiB in all",
                    hint="code travels with the plan; data must lie on the sites already, and what git ignores stays",
                )
            files[path.relative_to(folder).as_posix()] = packed(content, os.access(path, os.X_OK))
    script = worker.command[1] if worker.command else "-m"
    if script != "-m" and not script.startswith("/") and os.path.normpath(script) not in files:
        raise ConfigError(
            f"{at('worker', 'command')}: worker.command: {script} is not among worker.files",
            hint=f"worker.files: [{script}]; or name a script on the sites by its absolute path",
        )
    return files


def packed(content: bytes, executable: bool) -> str:
    """A file as it stands in a plan: plain text as it is."""
    if not executable:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            pass
        else:
            if not text.startswith("data:;"):
                return text
    return (_EXECUTABLE if executable else _BASE64) + base64.b64encode(content).decode()


def unpacked(text: str) -> tuple[bytes, bool]:
    """The content of a file in a plan, and whether it may be executed."""
    for start in (_BASE64, _EXECUTABLE):
        if text.startswith(start):
            return base64.b64decode(text[len(start) :]), start == _EXECUTABLE
    return text.encode(), False


def _within(path: Path, place: str) -> Iterator[Path]:
    """The files that a path stands for: itself, or what a folder holds."""
    if not path.is_dir():
        yield path
        return
    names = _of_git(path, place)
    if names is None:
        for found in sorted(path.rglob("*")):
            hidden = any(part == "__pycache__" or part.startswith(".") for part in found.relative_to(path).parts)
            if found.is_file() and not hidden:
                yield found
        return
    for name in names:
        found = path / name
        if found.is_dir():  # a submodule, or a link to a folder
            yield from _within(found, place)
        elif found.exists():  # else it was deleted, and that is not committed
            yield found


def _of_git(folder: Path, place: str) -> list[str] | None:
    """What git does not ignore in a folder, committed or not; None: no folder of a repository.

    Raises:
        ConfigError: git refuses.
    """
    if not any((above / ".git").exists() for above in (folder.absolute(), *folder.absolute().parents)):
        return None
    argv = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"{place}: {folder} is in a git repository, and there is no git", hint="install git"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{place}: git ls-files in {folder} was not done within {_GIT_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
        raise ConfigError(f"{place}: git in {folder}: {said[0]}", hint=f"try: git -C {folder} status")
    return sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})
