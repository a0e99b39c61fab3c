"""All checks: the built-in ones, and those of other packages (entry points ``islandctl.checks``)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib.metadata import entry_points

from islandctl.errors import UsageError
from islandctl.fleet.checks.amd import Amd
from islandctl.fleet.checks.base import SCOPES, TIERS, Check, Tier
from islandctl.fleet.checks.disk import DiskRate, DiskSpace, ImportTime, OneFolder, SiteStorage
from islandctl.fleet.checks.forwarding import Forwarding
from islandctl.fleet.checks.gpus import Ecc, GpuCount, GpuFree, Mig, RowRemap
from islandctl.fleet.checks.links import FabricManager, InfiniBand, NvLink, Pcie, Xid
from islandctl.fleet.checks.load import Dcgm, GpuHeat, MatrixRate, NodeCollective
from islandctl.fleet.checks.meeting import CellCollective, Interfaces, Names, Rendezvous
from islandctl.fleet.checks.slurm import SlurmJob
from islandctl.fleet.checks.software import Agreement, SiteRate, Software
from islandctl.fleet.checks.system import Clock, Leftovers, Limits, Login, Memory
from islandctl.fleet.checks.wan import RelayReach, WanRate

GROUP = "islandctl.checks"
BUILT_IN: tuple[type[Check], ...] = (
    Login,
    Forwarding,
    SlurmJob,
    Clock,
    Memory,
    Limits,
    Leftovers,
    DiskSpace,
    Software,
    GpuCount,
    Mig,
    Ecc,
    RowRemap,
    Xid,
    NvLink,
    FabricManager,
    Pcie,
    InfiniBand,
    GpuFree,
    Amd,
    DiskRate,
    ImportTime,
    MatrixRate,
    GpuHeat,
    Dcgm,
    NodeCollective,
    OneFolder,
    Rendezvous,
    Interfaces,
    Names,
    CellCollective,
    RelayReach,
    WanRate,
    SiteStorage,
    SiteRate,
    Agreement,
)
"""In the order in which they are asked where one waits for another."""


def all_checks() -> list[Check]:
    """One of each.

    Raises:
        UsageError: a package's check cannot be loaded, is no check, or takes a name that is taken.
    """
    checks: list[Check] = [kind() for kind in BUILT_IN]
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        where = f"the check {point.name} of {point.dist.name if point.dist else 'another package'}"
        try:
            check = point.load()()
        except Exception as error:
            raise UsageError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}", hint="update or remove that package"
            ) from error
        if not isinstance(check, Check) or check.scope not in SCOPES or check.tier not in TIERS:
            raise UsageError(f"{where} is no check", hint="see islandctl/fleet/checks/base.py")
        if check.name in {known.name for known in checks}:
            raise UsageError(f"{where}: the name {check.name} is taken", hint="update or remove that package")
        checks.append(check)
    return checks


def pick(checks: Sequence[Check], tier: Tier, only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Those of a tier and the ones before it; ``only`` names some, of whatever tier.

    Raises:
        UsageError: there is no check of that name.
    """
    names = [check.name for check in checks]
    for name in (*only, *skip):
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
            hint = f"nearest: {', '.join(near)}" if near else ""
            raise UsageError(f"there is no check called {name}", hint=hint or "islandctl doctor --list shows them")
    upto = TIERS[: TIERS.index(tier) + 1]
    chosen = [check for check in checks if (check.name in only if only else check.tier in upto)]
    return [check for check in chosen if check.name not in skip]
