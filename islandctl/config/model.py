"""The base of every configuration model: frozen, and an unknown key is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]
"""A name that is safe in file names, host names and messages: a-z, 0-9 and inner hyphens, at most 42."""

Truth = Annotated[bool, Field(strict=True)]
"""``true`` or ``false``, and nothing that only resembles them."""


class Contradiction(ValueError):
    """Values that do not go together.

    Args:
        key: where to look first, as keys from the section that finds it.
    """

    def __init__(self, message: str, key: tuple[str, ...]) -> None:
        super().__init__(message)
        self.key = key


class Model(BaseModel):
    """Frozen; unknown keys are refused."""

    # defer_build: a command pays only for the models that it uses.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Settings(Model):
    """What a user writes in a file: as ``Model``, numbers are finite, docstrings under fields describe them."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)

    def contradiction(self, message: str, *keys: str) -> Contradiction:
        """The error to raise when values of this section do not go together.

        Args:
            keys: whom it is about (``gpu.per_node`` reaches into a section); told at the first that is written.
        """
        paths = [tuple(key.split(".")) for key in keys]
        return Contradiction(message, next((path for path in paths if self._is_written(path)), paths[0]))

    def _is_written(self, path: tuple[str, ...]) -> bool:
        section: BaseModel = self
        for key in path[:-1]:
            section = getattr(section, key)
        return path[-1] in section.model_fields_set
