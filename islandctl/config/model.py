"""The base of every configuration model: frozen, and an unknown key is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$")]
"""A name that is safe in file names, host names and messages: a-z, 0-9 and inner hyphens, at most 42."""


class Model(BaseModel):
    """Frozen; unknown keys are refused."""

    # defer_build: a command pays only for the models that it uses.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Settings(Model):
    """What a user writes in a file: as ``Model``, numbers are finite, docstrings under fields describe them."""

    model_config = ConfigDict(allow_inf_nan=False, use_attribute_docstrings=True)
