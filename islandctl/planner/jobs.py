"""What a launch would submit to the schedulers of the sites."""

from __future__ import annotations

import shlex

from islandctl.config.slurm import sbatch_options
from islandctl.planner.plan import Finding, Plan


def job_findings(plan: Plan) -> list[Finding]:
    """One for every cell on a site whose scheduler chooses the nodes: the job that it becomes."""
    sites = {site.name: site for site in plan.sites}
    return [
        Finding(
            level="ok",
            place=cell.name,
            text="a job: "
            + shlex.join(["sbatch", *sbatch_options(sites[cell.site], len(cell.nodes), cell.nodes[0].num_ranks)]),
        )
        for cell in plan.cells
        if not sites[cell.site].hosts_are_nodes
    ]
