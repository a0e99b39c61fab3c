"""What the processes are told."""

from __future__ import annotations

from islandctl.planner.plan import CellPlan, NodePlan, Plan
from islandctl.runs.jobs import cell_job, worker_job
from islandctl.runs.record import CellRecord, RunRecord

from . import builders as make


def test_a_cell_knows_its_place_and_nothing_secret() -> None:
    record, plan = make.record(attempt=3), make.plan()
    job = cell_job(record, plan, record.cells[1])
    assert (job.cell, job.cells, job.attempt, job.num_ranks) == (1, ("east", "west"), 3, 1)
    assert job.recipe == plan.recipe


def test_an_only_rank_is_the_supervisors_own_child() -> None:
    record = make.record()
    job = worker_job(record, make.plan(), record.nodes[0], master=None)
    assert job.argv == ("/env/bin/python", "-m", "islandctl.worker", "/data/runs/demo/east")
    assert (job.ranks, job.ranks_ended) == ((0,), None)
    assert job.env["PYTHONPATH"] == "/code"
    assert job.env["PYTHONDONTWRITEBYTECODE"] == "1"  # else a full disk leaves compiled files that were cut
    assert job.env["OMP_NUM_THREADS"] == "1"
    assert int(job.env["MALLOC_MMAP_THRESHOLD_"]) < int(job.env["MALLOC_TRIM_THRESHOLD_"])
    assert job.outcome == "/data/runs/demo/east/outcome.json"
    assert job.mark == record.mark


def test_one_node_needs_no_fixed_port() -> None:
    record, plan = shared("cpu")
    job = worker_job(record, plan, record.nodes[0], master=None)
    assert job.argv[:4] == ("/env/bin/python", "-m", "islandctl.worker.recorded", "torch.distributed.run")
    assert "--standalone" in job.argv
    assert job.argv[-3:] == ("-m", "islandctl.worker", "/data/runs/demo/east")
    assert (job.ranks, job.ranks_ended) == ((0, 1), job.env["ISLANDCTL_RANKS_ENDED"])
    assert float(job.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == job.stop_timeout_s


def test_several_nodes_meet_at_the_first() -> None:
    record = make.record()
    record = record.model_copy(update={"cells": (queued(record.cells[0]), record.cells[1])})
    job = worker_job(record, make.plan(), record.nodes[0], master=("10.0.0.7", 29411), address="10.0.0.7")
    assert "--local-addr=10.0.0.7" in job.argv
    assert job.binds == (("10.0.0.7", 29411),)
    assert "--master-addr=10.0.0.7" in job.argv
    assert "--master-port=29411" in job.argv
    assert "--node-rank=0" in job.argv
    assert "--standalone" not in job.argv
    job = worker_job(record, make.plan(), record.cells[0].nodes[1], master=None)  # they find out themselves
    assert job.argv[5:9] == ("--max-restarts=0", "--nnodes=2", "--node-rank=1", "-m")


def queued(cell: CellRecord) -> CellRecord:
    """The cell with a second node."""
    second = cell.nodes[0].model_copy(update={"index": 1, "folder": "/data/runs/demo/east/node-1"})
    return cell.model_copy(update={"nodes": (cell.nodes[0], second)})


def test_a_script_runs_in_its_own_folder_and_is_told_which_cell_it_is() -> None:
    record, built_in = make.record(), make.plan()
    worker = built_in.recipe.worker.model_copy(update={"command": ("python", "own/train.py", "--lr", "1")})
    recipe = built_in.recipe.model_copy(update={"worker": worker})
    script = built_in.model_copy(update={"recipe": recipe, "files": {"own/train.py": "pass"}})
    job = worker_job(record, script, record.nodes[1], master=None)
    assert job.argv[-5:] == ("islandctl.worker", "/data/runs/demo/west", "own/train.py", "--lr", "1")
    assert job.cwd == "/data/runs/demo/west/script"
    assert (job.env["ISLANDCTL_CELL"], job.env["ISLANDCTL_NUM_CELLS"]) == ("1", "2")
    there = script.model_copy(update={"files": {}})
    assert worker_job(record, there, record.nodes[1], master=None).cwd == "/data/runs/demo/west"


def shared(gpu: str) -> tuple[RunRecord, Plan]:
    """Two cells of two ranks each on one host of four."""
    plan = make.plan()
    site = plan.sites[0]
    site = site.model_copy(update={"gpu": site.gpu.model_copy(update={"type": gpu, "count": 4, "per_node": 4})})
    site = site.model_copy(update={"cpu": site.cpu.model_copy(update={"cores": 8})})
    cells = tuple(
        CellPlan(index=index, name=f"east-{index}", site="east", nodes=(NodePlan(index=0, host="", num_ranks=2),))
        for index in range(2)
    )
    record = make.record()
    made = []
    for cell in record.cells:
        node = cell.nodes[0].model_copy(update={"site": "east", "num_ranks": 2})
        made.append(cell.model_copy(update={"site": "east", "nodes": (node,)}))
    changed = {"sites": (site, plan.sites[1]), "cells": cells}
    return record.model_copy(update={"cells": tuple(made)}), plan.model_copy(update=changed)


def test_cells_of_one_node_share_its_accelerators() -> None:
    record, plan = shared("H100-SXM")
    seen = [worker_job(record, plan, node, master=None).env["CUDA_VISIBLE_DEVICES"] for node in record.nodes]
    assert seen == ["0,1", "2,3"]
    assert (
        "CUDA_VISIBLE_DEVICES" not in worker_job(make.record(), make.plan(), make.record().nodes[0], master=None).env
    )


def test_cells_of_one_machine_share_its_cores() -> None:
    record, plan = shared("cpu")
    assert [worker_job(record, plan, node, master=None).env["OMP_NUM_THREADS"] for node in record.nodes] == ["2", "2"]


def test_a_scheduler_that_chooses_the_nodes_shares_them_out_itself() -> None:
    record, plan = shared("H100-SXM")
    slurm = plan.sites[0].model_copy(update={"scheduler": "slurm", "hosts": ("login",)})
    plan = plan.model_copy(update={"sites": (slurm, plan.sites[1])})
    jobs = [worker_job(record, plan, node, master=None) for node in record.nodes]
    assert all("CUDA_VISIBLE_DEVICES" not in job.env for job in jobs)
