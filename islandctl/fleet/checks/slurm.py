"""A Slurm site's scheduler, asked on its login node: would it take the job of a cell, and has it nodes for it?"""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.slurm import Slurm
from islandctl.config.units import seconds_text
from islandctl.errors import PreflightError
from islandctl.fleet.checks.base import Node, NodeCheck, Verdict, Verdicts, fail, listed, ok, warn
from islandctl.fleet.slurm import SlurmJobs
from islandctl.fleet.slurm_text import SlurmNode, longest

TOLD = 8
"""So many nodes that cannot be used are told one by one."""


class SlurmJob(NodeCheck):
    """Would Slurm take the job of a cell, and what keeps it from its nodes?"""

    name, tier, title = "slurm", "quick", "Slurm would take the job of a cell (sbatch --test-only), and has the nodes"
    asks = ("login",)
    threshold = "it would; as many nodes as the run needs are not down or drained; slurm.time within the partition's"
    source = "the profile's section slurm, and sinfo"
    remedy = "correct the section slurm of the profile; sinfo and sacctmgr there show what there is"
    deadline_s = 180.0

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        scheduler, host = SlurmJobs(node.site), node.open()
        version = scheduler.present(host)
        known = judge_nodes(scheduler.nodes(host), node.site.slurm or Slurm(), node.site.num_nodes, node.site.name)
        if any(verdict.level == "fail" for verdict in known):  # what sbatch says of these is only less clear
            return known
        cells, gpu = max(1, node.wanted.cells), node.site.gpu
        nodes = max(1, node.site.num_nodes // cells)
        try:
            told = scheduler.try_out(host, nodes, max(1, gpu.count // (cells * nodes)))
        except PreflightError as error:
            return [*known, fail(error.message.removeprefix(f"{host.label}: "), hint=error.hint)]
        return [*known, ok(f"{version}: {told}")]


def judge_nodes(nodes: Sequence[SlurmNode], asked: Slurm, wanted: int, site: str) -> list[Verdict]:
    """What Slurm says of the nodes of the partitions that a job goes to.

    Args:
        nodes: once for each partition; none: sinfo has told of none, and sbatch knows why.
        wanted: nodes that the run needs.
        site: names the places.
    """
    if not nodes:
        return []
    partitions = "/".join(dict.fromkeys(one.partition for one in nodes))
    there = {one.name: one for one in nodes}
    unfit = [one for one in there.values() if not one.fit]
    text = f"{partitions}: {len(there) - len(unfit)} of {len(there)} nodes can be used"
    verdicts = []
    if not any(one.open for one in nodes):
        verdicts.append(fail(f"partition {partitions} takes no jobs now", hint="another slurm.partition, or wait"))
    if len(there) - len(unfit) < wanted:
        hint = "another slurm.partition, a smaller gpu.count, or ask who runs the site; the rows below say why"
        verdicts.append(fail(f"{text}, and the run needs {wanted}", threshold=f"{wanted} nodes", hint=hint))
    most = longest(nodes)
    if asked.time is not None and most is not None and asked.time > most:
        said = f"slurm.time is {seconds_text(asked.time)}, and partition {partitions} allows {seconds_text(most)}"
        verdicts.append(fail(said, threshold=seconds_text(most), hint=f"slurm.time: {round(most / 60)} min at most"))
    verdicts += [
        warn(
            f"{one.state if one.answers else f'{one.state}, does not answer'}: {one.reason or 'no reason given'}",
            hint="Slurm gives it to nobody; who runs the site knows more",
            place=f"{site}/{one.name}",
        )
        for one in unfit[:TOLD]
    ]
    if len(unfit) > TOLD:
        more = [one.name for one in unfit[TOLD:]]
        verdicts.append(
            warn(f"{len(more)} more nodes cannot be used: {listed(more)}", hint=f"sinfo -R -p {partitions}")
        )
    return verdicts if unfit or verdicts else [ok(text, value=len(there), unit="nodes")]
