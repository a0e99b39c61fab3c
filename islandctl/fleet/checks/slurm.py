"""A Slurm site's scheduler, asked on its login node."""

from __future__ import annotations

from islandctl.fleet.checks.base import Node, NodeCheck, Verdicts, ok, skipped
from islandctl.fleet.slurm import SlurmJobs


class SlurmJob(NodeCheck):
    """Would Slurm take the job of a cell?"""

    name, tier, title = "slurm", "quick", "Slurm is there, and would take the job of a cell (sbatch --test-only)"
    threshold, source = "it would", "the profile's section slurm; nothing is submitted"
    remedy = "correct the section slurm of the profile; sinfo and sacctmgr there show what there is"
    deadline_s = 180.0

    def look(self, node: Node) -> Verdicts:
        """See ``NodeCheck``."""
        if not node.is_login:
            return skipped("no Slurm site")
        scheduler, host = SlurmJobs(node.site), node.open()
        version = scheduler.present(host)
        cells, gpu = max(1, node.wanted.cells), node.site.gpu
        nodes = max(1, node.site.num_nodes // cells)
        told = scheduler.try_out(host, nodes, max(1, gpu.count // (cells * nodes)))
        return ok(f"{version}: {told}")
