"""What the processes are told."""

from __future__ import annotations

from islandctl.runs.jobs import cell_job, worker_job

from . import builders as make


def test_a_cell_knows_its_place_and_nothing_secret() -> None:
    record, plan = make.record(attempt=3), make.plan()
    job = cell_job(record, plan, record.cells[1])
    assert (job.cell, job.cells, job.attempt, job.num_ranks) == (1, ("east", "west"), 3, 1)
    assert job.recipe == plan.recipe


def test_one_node_needs_no_fixed_port() -> None:
    record = make.record()
    job = worker_job(record, make.plan(), record.nodes[0], master=None)
    assert job.argv[:3] == ("/env/bin/python", "-m", "torch.distributed.run")
    assert "--standalone" in job.argv
    assert job.argv[-3:] == ("-m", "islandctl.worker", "/data/runs/demo/east")
    assert job.env["PYTHONPATH"] == "/code"
    assert job.env["OMP_NUM_THREADS"] == "1"
    assert job.outcome == "/data/runs/demo/east/outcome.json"
    assert job.mark == record.mark


def test_several_nodes_meet_at_the_first() -> None:
    record = make.record()
    job = worker_job(record, make.plan(), record.nodes[0], master=("10.0.0.7", 29411))
    assert "--master-addr=10.0.0.7" in job.argv
    assert "--master-port=29411" in job.argv
    assert "--node-rank=0" in job.argv
    assert "--standalone" not in job.argv
