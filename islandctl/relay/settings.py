"""What a relay is told: the file ``relay.json`` in its folder."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from islandctl.config.exchange import Late
from islandctl.config.model import Model
from islandctl.config.recipe import Emulate
from islandctl.config.units import Seconds
from islandctl.errors import ConfigError


class Limits(Model):
    """What the relay bears from one request."""

    packet_bytes: int = Field(default=256 << 20, ge=1)
    """Of one packet. The default chunk is 16 MiB in fp32; sixteen times that leaves room for larger ones."""
    json_bytes: int = Field(default=1 << 20, ge=1)
    """Of a JSON body. A checkpoint's versions and a heartbeat's series take a few kB."""
    model_bytes: int = Field(default=64 << 20, ge=1)
    """Of the list of a model's parameters: some hundred bytes each."""
    header_deadline: Seconds = 30.0
    """From a connection's start, or a request's first byte, to the end of the request's header."""
    body_grace: Seconds = 60.0
    """For a body, however slow ..."""
    body_bytes_per_s: float = Field(default=4096, gt=0)
    """... and then this mean rate: what stays below is no packet on a link but an idle connection."""
    wait_s: float = Field(default=60, gt=0)
    """The longest wait of a long poll."""


class RelaySettings(Model):
    """One run's relay. Paths may be relative to the folder."""

    run: str
    config_hash: str
    cells: tuple[str, ...] = Field(min_length=1)
    """Names of all cells, in order."""
    num_fragments: int = Field(ge=1)
    late: Late = Late()
    final_window: int | None = Field(default=None, ge=0)
    """Set in a butterfly, whose cells exchange in pairs: the first window of its last rounds."""
    seeded: bool = False
    """Window 0 is the first cell's alone, since the run begins with a warm-up."""
    emulate: Emulate | None = None
    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = Field(default=0, ge=0, le=65535)
    """0: any free one; ``address.json`` tells which."""
    key: Path = Path("key.pem")
    certificate: Path = Path("ca.pem")
    tokens: Path = Path("tokens.json")
    """JSON: SHA-256 of a token (hexadecimal) → ``controller``, or the index of a cell as text."""
    measure: bool = False
    """Serve the measurements of `islandctl doctor` as well."""
    limits: Limits = Limits()


def read_settings(folder: Path) -> RelaySettings:
    """Read ``FOLDER/relay.json``; relative paths become absolute.

    Raises:
        ConfigError: it is missing or wrong.
    """
    path = folder / "relay.json"
    try:
        settings = RelaySettings.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="islandctl launch writes it") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place}: {first['msg']}") from error
    paths = {name: folder / getattr(settings, name) for name in ("key", "certificate", "tokens")}
    return settings.model_copy(update=paths)
