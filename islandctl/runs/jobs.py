"""What each process of a run is told: supervisor jobs and cell files, from the plan and the record. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath

from islandctl.config.job import CellJob
from islandctl.config.paths import CellFolder
from islandctl.fleet.job import RestartPolicy, SupervisorJob, Watchdog, from_code
from islandctl.planner.budget import budget_seconds
from islandctl.planner.plan import Plan
from islandctl.runs.record import CellRecord, NodeRecord, RunRecord

STOP_TIMEOUT_S = 120.0
"""Between TERM and KILL of workers: a checkpoint of a large model takes its time."""


def cell_job(record: RunRecord, plan: Plan, cell: CellRecord) -> CellJob:
    """``cell.json`` of one cell."""
    return CellJob(
        run=record.run,
        attempt=record.attempt,
        cell=cell.index,
        cells=tuple(one.name for one in plan.cells),
        site=cell.site,
        num_ranks=sum(node.num_ranks for node in cell.nodes),
        config_hash=record.config_hash,
        recipe=plan.recipe,
        window=plan.cells[cell.index].window,
    )


def worker_job(
    record: RunRecord, plan: Plan, node: NodeRecord, *, master: tuple[str, int] | None, address: str = ""
) -> SupervisorJob:
    """``job.json`` of one node's workers.

    Args:
        master: address and port of node 0, as the cell's nodes reach it; None for a cell of one node, where a free
            port is taken at every start, and where the nodes find it out when they run.
        address: this node's own, where there are several.
    """
    site = plan.site(node.site)
    cell = record.cells[node.cell]
    folder = CellFolder(PurePosixPath(node.cell_folder))
    script = (plan.recipe.worker.command or ())[1:]
    env = {
        **from_code(node.code),
        "PYTHONUNBUFFERED": "1",
        "ISLANDCTL_RELAY_URL": node.relay_url,
        "ISLANDCTL_NODE_FOLDER": node.folder,
        "ISLANDCTL_CELL": str(cell.index),
        "ISLANDCTL_NUM_CELLS": str(len(record.cells)),
        "ISLANDCTL_LOG_BYTES": str(plan.recipe.worker.logs),
        # Else the arenas of the exchange's threads keep what each round has freed: half as much again, measured.
        "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    }
    launcher: tuple[str, ...] = (node.python,)
    ranks_ended = None
    if sum(one.num_ranks for one in cell.nodes) > 1:
        launcher = _torchrun(node, len(cell.nodes), master, address)
        ranks_ended = env["ISLANDCTL_RANKS_ENDED"] = f"{node.folder}/ranks.json"
        # Else torchrun would cut a checkpoint off after 30 s, when both are asked to end.
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f"{STOP_TIMEOUT_S:.0f}"
    watchdog = plan.recipe.worker.watchdog
    before = sum(one.num_ranks for one in cell.nodes[: node.index])
    first, total = _share(plan, node)
    if site.gpu.type == "cpu":
        on_node = total if site.hosts_are_nodes else site.gpu.per_node
        env["OMP_NUM_THREADS"] = str(max(1, site.cpu.cores // on_node))
    elif total > node.num_ranks:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + rank) for rank in range(node.num_ranks))
    return SupervisorJob(
        run=record.run,
        mark=record.mark,
        name=f"{cell.name}/node-{node.index}",
        argv=(*launcher, "-m", "islandctl.worker", node.cell_folder, *script),
        cwd=str(folder.script) if plan.files else node.cell_folder,
        env={**env, **plan.recipe.worker.env},
        env_files=(str(folder.secrets),) if plan.recipe.worker.secrets else (),
        setup=site.environment.setup,
        outcome=str(folder.outcome),
        progress=str(folder.metrics),
        ranks=tuple(range(before, before + node.num_ranks)),
        ranks_ended=ranks_ended,
        binds=(master,) if master is not None and node.index == 0 else (),
        watchdog=Watchdog(least_s=watchdog.least, factor=watchdog.factor) if watchdog.enabled else None,
        restart=RestartPolicy(
            limit=plan.recipe.worker.restart.limit,
            backoff_s=plan.recipe.worker.restart.backoff,
            backoff_limit_s=plan.recipe.worker.restart.backoff_limit,
        ),
        stop_timeout_s=STOP_TIMEOUT_S,
        budget_s=budget_seconds(plan, record.budget or plan.recipe.budget),
    )


def _share(plan: Plan, node: NodeRecord) -> tuple[int, int]:
    """Which of its host's accelerators are this cell's: (the first, how many all cells take on the host)."""
    if not plan.site(node.site).hosts_are_nodes:  # the scheduler gives every job its own
        return 0, node.num_ranks
    on_host = [
        (cell.index, one.num_ranks)
        for cell in plan.cells
        for one in cell.nodes
        if (cell.site, one.host) == (node.site, node.host)
    ]
    return sum(num for index, num in on_host if index < node.cell), sum(num for _, num in on_host)


def _torchrun(node: NodeRecord, num_nodes: int, master: tuple[str, int] | None, own_address: str) -> tuple[str, ...]:
    """The command up to the program. Restarts are the supervisor's business, so torchrun's own are off."""
    run = (node.python, "-m", "islandctl.worker.recorded", "torch.distributed.run")
    start = (*run, f"--nproc-per-node={node.num_ranks}", "--max-restarts=0")
    place = (f"--nnodes={num_nodes}", f"--node-rank={node.index}")
    if master is not None:
        address, port = master
        own = f"--local-addr={own_address or address}"
        return (*start, *place, own, f"--master-addr={address}", f"--master-port={port}")
    if num_nodes > 1:  # addresses and port come as PET_MASTER_ADDR and the like, which torchrun reads as well
        return (*start, *place)
    # --standalone with an address: torchrun would otherwise ask the resolver for this host's full name
    return (*start, "--standalone", "--local-addr=127.0.0.1")
