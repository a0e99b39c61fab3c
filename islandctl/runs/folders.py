"""Before workers start: do all nodes of a cell have one and the same folder? Its checkpoints lie there as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from islandctl.errors import PreflightError
from islandctl.fleet.delivery import Member
from islandctl.fleet.provision import Prepared
from islandctl.planner.plan import Plan
from islandctl.runs.reach import Reach, demand, each


def check_folders(plan: Plan, prepared: Mapping[tuple[str, str], Prepared], reach: Reach) -> None:
    """Have the first node of every cell of several leave a sign for the others. Of Slurm's nodes nobody is asked yet.

    Args:
        prepared: by (site, host).

    Raises:
        PreflightError: a node does not see what the first one writes.
        UnreachableError: a node does not answer.
    """
    for cell in plan.cells:
        if plan.site(cell.site).hosts_are_nodes:
            places = [(cell.site, node.host) for node in cell.nodes]
            demand_one_folder(cell.name, [Member(reach.host(*one), prepared[one].work_dir) for one in places])


def demand_one_folder(cell: str, members: Sequence[Member]) -> None:
    """See that all nodes of a cell have one work folder; see ``check_folders``."""
    first, *others = members
    if not others:
        return
    with first.sign() as sign:
        seen = demand(each(others, lambda one: one.sees(sign)), "looking for a sign")
    apart = [member for member, sees in zip(others, seen, strict=True) if not sees]
    if apart:
        label, more = apart[0].host.label, f", nor by {len(apart) - 1} more" if len(apart) > 1 else ""
        raise PreflightError(
            f"{label}: what {first.host.label} writes into {first.work_dir} is not seen here{more}: "
            f"cell {cell} could keep no checkpoint",
            hint="set work_dir in the site profile to a folder that all nodes of a cell share, or describe each node "
            "as a site of its own",
        )
