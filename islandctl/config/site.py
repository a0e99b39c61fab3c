"""The site profile: what one cluster is, how it is reached, what it costs."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, field_validator, model_validator

from islandctl.config.host_address import parse_address
from islandctl.config.model import Name, Settings, Truth
from islandctl.config.slurm import Slurm
from islandctl.config.units import (
    BitsPerSecond,
    Bytes,
    BytesPerSecond,
    Flops,
    Seconds,
    Share,
    Usd,
    UsdPerGigabyte,
    UsdPerHour,
    UsdPerKwh,
    Watts,
    parse_bits_per_s,
    parse_seconds,
    within,
)
from islandctl.errors import ConfigError

Bandwidth = Annotated[BitsPerSecond, within(parse_bits_per_s, most="1 Pbit/s")]
"""Of one link; more than 1 Pbit/s is a slip of the hand."""
RoundTrip = Annotated[Seconds, within(parse_seconds, most="60 s")]


def checked_address(text: str) -> str:
    """``text`` unchanged, when it is a host as ``parse_address`` reads it; else a ``ValueError``."""
    try:
        parse_address(text)
    except ConfigError as error:
        raise ValueError(f"{error.message}; {error.hint}") from error
    return text


def checked_folder(text: str) -> str:
    """``text`` unchanged, when it means the same from every current folder; else a ``ValueError``."""
    if not text.startswith(("/", "~/")) and text != "~":
        raise ValueError(f"'{text}' is relative, but nodes share no current folder; begin with / or ~/")
    return text


def checked_secrets(names: tuple[str, ...]) -> tuple[str, ...]:
    """``names`` unchanged, when all can name variables that are not our own; else a ``ValueError``."""
    for name in names:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"'{name}' is not the name of an environment variable; values do not belong here")
        if name.startswith("ISLANDCTL_"):
            raise ValueError(f"'{name}': ISLANDCTL_… belongs to islandctl")
    return names


class Gpu(Settings):
    """The accelerators of a site. Type ``cpu`` means ranks on the processor (gloo), for rehearsals."""

    type: str = Field(min_length=1)
    """A name of the accelerator catalogue (H100-SXM, B300, …) or ``cpu``."""
    count: int = Field(ge=1, le=1_000_000)
    """Accelerators that the run uses on this site; one rank each."""
    per_node: int = Field(ge=1, le=1024)
    """Accelerators per node."""
    memory: Bytes | None = None
    """Overrides the catalogue."""
    bf16: Flops | None = None
    """Dense bf16 rate. Overrides the catalogue."""
    memory_rate: BytesPerSecond | None = None
    """Memory bandwidth. Overrides the catalogue."""
    link: BytesPerSecond | None = None
    """To the other accelerators of the node, one direction, all links together. Overrides the catalogue."""

    @model_validator(mode="after")
    def _whole_nodes(self) -> Gpu:
        if self.count > self.per_node and self.count % self.per_node:
            raise self.contradiction(
                f"count {self.count} is not a whole number of nodes of {self.per_node}; "
                f"nearest: {self.count // self.per_node * self.per_node} "
                f"or {(self.count // self.per_node + 1) * self.per_node}",
                "count",
            )
        return self


class Wan(Settings):
    """The site's link to the relay."""

    up: Bandwidth
    """Site to relay."""
    down: Bandwidth
    """Relay to site."""
    rtt: RoundTrip
    """Round-trip time to the relay."""
    window: Bytes = 4 * 2**20
    """Bytes that one TCP connection may have on its way; 4 MiB is Linux's usual limit (net.ipv4.tcp_wmem)."""
    to: dict[str, RoundTrip] = Field(default_factory=dict)
    """Round-trip times to other sites by name, for where the relay stands best. One of two sites tells it."""


class Network(Settings):
    """The interconnect inside the site, between nodes."""

    bandwidth: Bandwidth
    """Per accelerator, one direction."""
    oversubscription: float = Field(default=1.0, ge=1, le=1000)
    """How many times more the nodes may send than the fabric between them carries; 1: as much."""


class Storage(Settings):
    """The file system that holds checkpoints."""

    read: BytesPerSecond | None = None
    """Rate at which a checkpoint comes back."""
    write: BytesPerSecond | None = None
    """Rate at which a checkpoint is written."""
    free: Bytes | None = None
    """Space for checkpoints."""


class Cpu(Settings):
    """Processor and memory of one node."""

    cores: int = Field(ge=1)
    """Of one node; a site of type ``cpu`` shares them out between its ranks."""
    memory: Bytes
    """Of one node."""


class Price(Settings):
    """What the site costs. Left out: planned without cost, and the plan says so."""

    gpu: UsdPerHour | None = None
    """Per accelerator."""
    egress: UsdPerGigabyte | None = None
    """Per 10⁹ bytes that leave the site."""


class Purchase(Settings):
    """What it takes to own these accelerators instead of renting them; for `islandctl compare`."""

    gpu: Usd
    """To buy, for each accelerator, with its part of host, network, storage and installation."""
    owned: int = Field(default=0, ge=0)
    """Accelerators that are there already: only the others are bought."""
    years: float = Field(default=4.0, gt=0, le=30)
    """Until they are written off; four is what large buyers count with, less is careful."""
    resale: Share = 0.0
    """Share of the price that they still fetch then. Left out: nothing, which is careful."""
    interest: Annotated[Share, Field(lt=1)] = 0.0
    """A year, on the money: what it costs to borrow, or would earn elsewhere. Left out: not counted."""
    power: Watts | None = None
    """Of each accelerator under load, with its part of the host. Left out: the catalogue's, and 30 % for the host."""
    power_price: UsdPerKwh
    """What a kilowatt-hour costs."""
    pue: float = Field(default=1.3, ge=1, le=5)
    """Power of the whole room over that of its machines; 1.3 is usual with air, 1.1 with water."""
    admin_hours: float = Field(default=40.0, ge=0, le=10_000)
    """Of people, a month."""
    admin_rate: UsdPerHour = 90.0
    """What such an hour costs, all in."""


class Failures(Settings):
    """How often something breaks. Left out: as in Llama 3's training, on rented machines three to five times that."""

    per_gpu: Annotated[Seconds, within(parse_seconds, least="1 h", most="1e6 d")] | None = None
    """Mean time between failures for each accelerator, with all that belongs to it: 50000 h."""
    rented: bool = True
    """Machines that nobody has burnt in fail more often. False: your own, or proven ones."""
    outage: Annotated[Seconds, within(parse_seconds, least="1 s", most="30 d")] = 300.0
    """From a failure to the first new step, without reading the checkpoint: found out, decided, started. The middle;
    one in ten takes three times as long."""
    site: Annotated[Seconds, within(parse_seconds, least="1 h", most="1e6 d")] = 60 * 86_400.0
    """Mean time between outages of the whole site, for `--simulate`: power, cooling, network, the provider. 60 days
    and an hour make 99.9 %, the better of what providers promise."""
    site_outage: Annotated[Seconds, within(parse_seconds, least="1 s", most="30 d")] = 3600.0
    """What such an outage takes, as ``outage``."""


class Measured(Settings):
    """What a run of this recipe has shown here. It takes the place of what the planner would assume."""

    step: Annotated[Seconds, within(parse_seconds, least="1 us", most="30 d")] | None = None
    """Seconds of one step that waits for nothing."""
    memory: Bytes | None = None
    """Peak memory of one rank."""
    sent: Bytes | None = None
    """Bytes that a cell here sends in a window."""
    fetched: Bytes | None = None
    """Bytes that a cell here fetches in a window."""
    exchange: Annotated[Seconds, within(parse_seconds, least="1 us", most="30 d")] | None = None
    """Seconds from the largest fragment's snapshot until its result is here."""
    source: str = "the profile"
    """Where these figures come from, for people."""


class Ssh(Settings):
    """How the hosts are reached. What is left out comes from the user's own ssh configuration (``ssh -G``).

    File names: ``~`` is the user's home, and a relative one lies beside the profile.
    """

    config: str | None = None
    """An ssh configuration file to use instead of the user's."""
    user: str | None = None
    """Login name."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the ssh server."""
    identity: str | None = None
    """Private key file."""
    known_hosts: str | None = None
    """An extra known_hosts file. Your own and islandctl's (``$ISLANDCTL_HOME/known_hosts``) are always read."""
    host_keys: Literal["ask", "accept-new", "strict"] = "ask"
    """What happens with an unknown host key; its fingerprint is always shown. ``ask``: you are asked, and without a
    terminal it stops and says what to type. ``accept-new``: it is accepted once and kept. ``strict``: it stops. A
    changed key stops under each of them."""
    connect_timeout: Annotated[Seconds, within(parse_seconds, least="1 s", most="10 min")] = 20.0
    """One handshake; generous, since bastions across an ocean take seconds."""


_PASSWORD = re.compile(r"://[^/\s@]*:(?!\$\{)[^/\s@]+@")


class Environment(Settings):
    """The Python environment of the workers.

    File names: ``~`` is the user's home, and a relative one lies beside the profile.
    """

    python: str = "python3"
    """Interpreter on the site: a name or an absolute path."""
    build: Truth = True
    """Build a virtual environment on the site from ``packages``. False: use ``python`` as it is."""
    packages: tuple[str, ...] = ("torch>=2.10", "numpy>=1.26")
    """Added to what a worker needs itself (its small dependencies are always installed)."""
    lock: str | None = None
    """A requirements file with everything that is installed, as ``pip freeze`` writes it (hashes are checked); then
    ``packages`` is not used."""
    pip_options: tuple[str, ...] = ()
    """Options for pip install, for example an index. ``${NAME}`` stands for a secret."""
    secrets: tuple[str, ...] = ()
    """Names of this machine's environment variables that pip needs there. Their values are sent apart."""
    offline: Truth = False
    """The site reaches no package index: packages are fetched on this machine, for the site's Python, and sent."""
    wheels: str | None = None
    """A folder of wheels on this machine; they are sent, and nothing else is installed."""
    setup: tuple[str, ...] = ()
    """Shell lines (POSIX sh) run before every command of the run, for example ``module load cuda``."""

    _names = field_validator("secrets")(checked_secrets)

    @field_validator("pip_options")
    @classmethod
    def _no_password(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        if any(_PASSWORD.search(option) for option in options):
            raise ValueError(
                "holds a password, and would be kept with plan and record; write ${NAME} in its place and list NAME "
                "in environment.secrets"
            )
        return options

    @model_validator(mode="after")
    def _one_source(self) -> Environment:
        if self.offline and self.wheels is not None:
            raise self.contradiction("packages come from here or from there; leave one out", "offline", "wheels")
        return self


@cache
def _reader(section: type[Settings], name: str) -> TypeAdapter[object]:
    """Reads a value of the section's key ``name`` from text."""
    return TypeAdapter(section.model_fields[name].rebuild_annotation())


class SiteProfile(Settings):
    """One cluster (an island)."""

    name: Name
    """Names folders, cells and log lines."""
    provider: str = "unknown"
    """For people; nothing depends on it."""
    region: str = "unknown"
    """For people; nothing depends on it."""
    scheduler: Literal["local", "ssh", "slurm"]
    """``local``: this machine. ``ssh``: plain hosts. ``slurm``: a Slurm cluster, driven over its login node."""
    hosts: tuple[str, ...] = ()
    """ssh aliases or [user@]host[:port] forms, one per node (``local`` has none; of ``slurm`` the login node)."""
    gpu: Gpu
    wan: Wan
    network: Network | None = None
    """Needed for the planner to judge cells of several nodes."""
    storage: Storage = Storage()
    """Left out: the planner says that it cannot judge checkpoints."""
    cpu: Cpu
    price: Price = Price()
    purchase: Purchase | None = None
    """Left out: the site can only be rented."""
    failures: Failures = Failures()
    measured: Measured = Measured()
    examined: dict[str, str] = Field(default_factory=dict)
    """Which values `islandctl doctor --write-profile` has measured, by key (`wan.up`), as it wrote them. What uses
    one is marked in `plan --explain`, until the value is changed."""
    ssh: Ssh = Ssh()
    environment: Environment = Environment()
    slurm: Slurm | None = None
    """Only with ``scheduler: slurm``."""
    work_dir: str = "~/islandctl"
    """Folder on every node for code, environment, logs and checkpoints. ``~`` is the node's own home. With ``slurm``
    it must lie on a file system that the login node and all nodes share."""

    @property
    def num_nodes(self) -> int:
        """Nodes that the run uses."""
        return max(1, self.gpu.count // self.gpu.per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks (accelerators) used on each node."""
        return min(self.gpu.count, self.gpu.per_node)

    @property
    def hosts_are_nodes(self) -> bool:
        """Are the hosts the nodes? Else a scheduler chooses the nodes, and shares out what is on them."""
        return self.scheduler != "slurm"

    _folder = field_validator("work_dir")(checked_folder)

    def holds(self, key: str, text: str) -> bool:
        """Is this the profile's value of ``section.key``?

        Raises:
            ValueError: there is no such key, or it takes no such value.
        """
        section, _, name = key.partition(".")
        part = getattr(self, section, None)
        if not isinstance(part, Settings) or name not in type(part).model_fields:
            raise ValueError(f"there is no {key}")
        return bool(getattr(part, name) == _reader(type(part), name).validate_python(text))

    @property
    def found_by_doctor(self) -> dict[str, str]:
        """Of ``examined`` what is the profile's value still."""
        return {key: text for key, text in self.examined.items() if self.holds(key, text)}

    @model_validator(mode="after")
    def _examined_values_are_values(self) -> SiteProfile:
        for key, text in self.examined.items():
            try:
                self.holds(key, text)
            except ValueError as error:
                told = str(error) if str(error).startswith("there is no") else f"'{text}' is no value of {key}"
                raise self.contradiction(
                    f"{told}; this section is written by islandctl doctor", "examined"
                ) from error
        return self

    @model_validator(mode="after")
    def _owns_no_more_than_it_has(self) -> SiteProfile:
        if self.purchase is not None and self.purchase.owned > self.gpu.count:
            raise self.contradiction(
                f"{self.purchase.owned} are owned of gpu.count {self.gpu.count}", "purchase.owned"
            )
        return self

    @field_validator("hosts")
    @classmethod
    def _hosts_are_addresses(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            checked_address(host)
            if hosts.count(host) > 1:
                raise ValueError(f"host '{host}' is listed twice; one entry a node")
        return hosts

    @model_validator(mode="after")
    def _hosts_match_scheduler(self) -> SiteProfile:
        if self.scheduler == "local" and self.hosts:
            raise self.contradiction("a local site has no hosts; use scheduler: ssh for other machines", "hosts")
        if self.scheduler == "local" and self.num_nodes != 1:
            raise self.contradiction("a local site has one node; set gpu.per_node to gpu.count", "gpu.per_node")
        if self.scheduler == "ssh" and len(self.hosts) != self.num_nodes:
            raise self.contradiction(
                f"hosts lists {len(self.hosts)}, but gpu.count / gpu.per_node makes {self.num_nodes} nodes",
                "hosts",
                "scheduler",
            )
        if self.scheduler != "slurm" and self.slurm is not None:
            raise self.contradiction(f"this section belongs to scheduler: slurm, not {self.scheduler}", "slurm")
        if self.scheduler == "slurm" and len(self.hosts) != 1:
            raise self.contradiction("a slurm site lists exactly one host: its login node", "hosts", "scheduler")
        return self
