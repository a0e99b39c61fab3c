"""What checks run on nodes, on this machine as two nodes: real tools, ports, processes and collectives."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from islandctl.fleet.checks import meeting, on_disk, on_node
from islandctl.fleet.checks.amd import Amd
from islandctl.fleet.checks.base import Cell, Node, Wanted, source
from islandctl.fleet.checks.disk import DiskRate, DiskSpace, SiteStorage
from islandctl.fleet.checks.gpus import Ecc, GpuCount, GpuFree, Mig, RowRemap
from islandctl.fleet.checks.links import NvLink, Pcie, Xid
from islandctl.fleet.checks.load import GpuHeat, MatrixRate, NodeCollective
from islandctl.fleet.checks.system import Login, system_facts
from islandctl.fleet.local import LocalHost
from tests.disk import fill, mounted, needs_mount
from tests.sshd import site_profile


def node(folder: Path, name: str = "", ranks: int = 1, gpu: str = "cpu", **more: Any) -> Node:
    """This machine as a node."""
    more.setdefault("environment", {"build": False})
    kind = {"type": gpu, "count": ranks, "per_node": ranks}
    site = site_profile("here", [], {}, str(folder / "work"), **{"gpu": kind, **more})
    host = LocalHost("here/local")
    return Node(site=site, name=name, ranks=ranks, open=lambda: host, wanted=Wanted(seconds=0.2))


def test_set_up_lines_come_first_whatever_they_print(tmp_path: Path) -> None:
    noisy = node(tmp_path, environment={"build": False, "setup": ["echo loading", f"export PATH={tmp_path}:$PATH"]})
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho $0 $*; echo complaint >&2; exit 3\n")
    tool.chmod(0o755)
    told = noisy.tool(["nvidia-smi", "-L"])
    assert (told.code, told.out, told.err) == (3, f"{tool} -L\n", "complaint\n")
    assert told.path.startswith(f"{tmp_path}:")
    tool.write_text("#!/bin/sh\nprintf 'a 1\\nb 2\\nc 3\\n'\n")
    assert noisy.tool(["nvidia-smi"], keep="b|c").out == "b 2\nc 3\n"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    assert noisy.tool(["nvidia-smi"], timeout_s=0.2).late
    assert Login().look(noisy).level == "ok"

    broken = node(tmp_path, environment={"build": False, "setup": ["echo module: not found >&2; exit 4"]})
    verdict = Login().look(broken)
    assert (verdict.level, verdict.text) == (
        "fail",
        "environment.setup ended with code 4: module: not found",
    )


def test_a_missing_tool_is_told_with_the_path(tmp_path: Path) -> None:
    bare = node(tmp_path, gpu="H100-SXM", environment={"build": False, "setup": ["PATH=/nowhere"]})
    told = bare.tool(["nvidia-smi"])
    assert (told.missing, told.path) == (True, "/nowhere")
    assert GpuCount().look(bare).level == "fail"
    assert Mig().look(bare).text == "nvidia-smi is not there (PATH /nowhere)"


def test_disks(tmp_path: Path) -> None:
    here = node(tmp_path)
    assert DiskSpace().look(here).level in ("ok", "warn")
    assert DiskRate().look(here).level in ("ok", "warn")
    storage = SiteStorage().look([here])
    assert set(storage.measured) >= {"storage.free", "storage.write"}
    assert os.listdir(tmp_path / "work") == []
    assert on_disk.disk_space({"work_dir": "/proc/islandctl"})["unfit"]


@needs_mount
def test_a_full_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 64 << 20) as disk:
        here = node(tmp_path)
        here.site = here.site.model_copy(update={"work_dir": str(disk)})
        filler = fill(disk)
        told = DiskSpace().look(here)
        assert (told.level, "less than 200 MB" in told.text) == ("fail", True)
        assert DiskRate().look(here).level == "fail"
        assert list(disk.iterdir()) == [filler]


def test_whoever_holds_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        told = on_node.can_bind({"address": "127.0.0.1", "port": held.getsockname()[1]})
    assert not told["free"]
    assert told["holder"]["pid"] == os.getpid()
    assert "python" in told["holder"]["command"]
    assert on_node.can_bind({"address": "127.0.0.1", "port": 0}) == {"free": True}


def test_processes_of_other_runs_are_found() -> None:
    mark = f"other-{os.getpid()}.0123456789abcdef"
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "ISLANDCTL_RUN": mark})
    try:
        assert on_node.leftovers({"mark": "mine"})["runs"][mark] == [child.pid]
        assert mark not in on_node.leftovers({"mark": mark})["runs"]
    finally:
        child.kill()
        child.wait()


def test_the_workers_interpreter_is_the_newest_that_was_built(tmp_path: Path) -> None:
    args = {"build": True, "python": "python3", "work_dir": str(tmp_path)}
    assert on_node.python_of(args) == {"unbuilt": str(tmp_path / "env")}
    for at, name in enumerate(("aaaa", "ffff", "cccc")):
        (tmp_path / "env" / name).mkdir(parents=True)
        if name != "ffff":  # half built
            (tmp_path / "env" / name / "complete.json").write_text("{}")
            os.utime(tmp_path / "env" / name / "complete.json", (1000 + at, 1000 + at))
    assert on_node.python_of(args) == {"python": str(tmp_path / "env" / "cccc" / "bin" / "python")}


def test_nodes_of_a_cell_meet(tmp_path: Path) -> None:
    cell = Cell("here", (node(tmp_path, "n0"), node(tmp_path, "n1")))
    cell.nodes[0].facts["addresses"] = ["127.0.0.1"]
    cell.nodes[1].facts["addresses"] = ["127.0.0.2"]
    met = meeting.Rendezvous().look(cell)
    assert (met.level, met.text[:24]) == ("ok", "1 nodes reach here/n0 at")
    ways = meeting.Interfaces().look(cell)
    assert (ways.level, "not a way between machines" in ways.text) == ("warn", True)
    assert meeting.Names().look(cell).level in ("ok", "warn")


def test_nodes_of_a_job_try_all_their_addresses(tmp_path: Path) -> None:
    cell = Cell("here", (node(tmp_path, "n0"), node(tmp_path, "n1")))
    assert len(meeting.addresses(cell.nodes[1])) <= 1  # a launch on plain hosts takes the default route's
    for one in cell.nodes:
        one.kind = "job"
        one.facts.clear()
    assert meeting.addresses(cell.nodes[0])[-1] == "127.0.0.1"
    cell.nodes[0].facts["addresses"] = ["127.0.0.1"]
    assert meeting.Rendezvous().look(cell).level == "ok"
    assert meeting.own_address(cell.nodes[0]) == "127.0.0.1"


def test_nodes_without_an_address_cannot_meet(tmp_path: Path) -> None:
    cell = Cell("here", (node(tmp_path, "n0"), node(tmp_path, "n1")))
    for one in cell.nodes:
        one.facts["addresses"] = []
    told = [kind().look(cell) for kind in (meeting.Rendezvous, meeting.Interfaces, meeting.CellCollective)]
    assert [verdict.level for verdict in told] == ["fail", "fail", "skipped"]
    assert all("no default route" in verdict.text for verdict in told)


@pytest.mark.slow
def test_a_collective_over_two_nodes(tmp_path: Path) -> None:
    cell = Cell("here", (node(tmp_path, "n0"), node(tmp_path, "n1")))
    cell.nodes[0].facts["addresses"] = ["127.0.0.1"]
    across = meeting.CellCollective().look(cell)
    assert (across.level, "between 2 ranks" in across.text) == ("ok", True), across
    assert NodeCollective().look(node(tmp_path)).text == "one rank on this node"


def test_workers_python_that_is_not_there(tmp_path: Path) -> None:
    without = node(tmp_path, environment={"build": False, "python": "/nowhere/python"})
    told = MatrixRate().look(without)
    assert (told.level, "there is no /nowhere/python" in told.text) == ("fail", True)


def test_facts_are_asked_once(tmp_path: Path) -> None:
    here = node(tmp_path)
    first = system_facts(here)
    assert system_facts(here) is first
    assert abs(first["offset_s"]) < 1.0
    assert first["python"] == ".".join(map(str, sys.version_info[:3]))


NVIDIA_SMI = """#!{python}
# NVIDIA's tool of driver 470, with the recorded outputs beside it: fields of later drivers are refused
import pathlib, sys
data = pathlib.Path("{data}")
def say(name, code=0):
    sys.stdout.write("".join(data.joinpath(name).read_text().splitlines(True)[1:]))
    sys.exit(code)
asked = sys.argv[1]
for field in asked.partition("=")[2].split(","):
    if field.startswith("clocks_event_reasons."):
        print('Field "%s" is not a valid field to query.\\n' % field)
        sys.exit(2)
names = {{"-L": "list-mig.txt", "--query-gpu=index,uuid": "gpus-lost.csv", "--query-gpu=index,ecc": "ecc-old.csv",
          "--query-gpu=index,temperature": "heat-470.csv", "--query-remapped-rows": "rows-pending.csv",
          "--query-gpu=index,memory": "used-killed.csv", "--query-compute-apps": "apps-none.csv",
          "--query-gpu=index,pcie": "pcie.csv", "--query-gpu=driver": "driver-gone.txt"}}
if asked == "nvlink":
    say("nvlink-down.txt" if sys.argv[2] == "-s" else "nvlink-errors.txt")
say(next(name for words, name in names.items() if asked.startswith(words)))
"""


def test_accelerators_through_the_tool_of_an_old_driver(tmp_path: Path) -> None:
    """Every check of NVIDIA's accelerators, over the wire, with a tool that answers as the recorded ones did."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI.format(python=sys.executable, data=Path(__file__).parent / "data"))
    tool.chmod(0o755)
    setup = [f"PATH={tmp_path}:$PATH"]
    sick = node(tmp_path, ranks=4, gpu="A100-SXM-80", environment={"build": False, "setup": setup})
    told = {kind.name: kind().look(sick) for kind in (GpuCount, Mig, Ecc, RowRemap, GpuFree, GpuHeat, Pcie, NvLink)}
    assert {name: verdict.level for name, verdict in told.items()} == {
        "gpus": "fail",
        "mig": "fail",
        "gpu-ecc": "skipped",
        "gpu-rows": "fail",
        "gpu-free": "fail",
        "gpu-heat": "fail",
        "pcie": "fail",
        "nvlink": "fail",
    }
    assert "slowed at rest: GPU 1 hw_slowdown" in told["gpu-heat"].text
    assert len(sick.facts["uuids"]) == 4
    for kind in (GpuCount, Ecc, Xid, Amd):
        assert kind().look(node(tmp_path)).text == "no accelerator here (gpu.type: cpu)"


@pytest.mark.parametrize("name", ["on_node.py", "on_disk.py", "to_relay.py"])
def test_what_runs_on_nodes_is_python_3_8_and_nothing_else(name: str) -> None:
    tree = ast.parse(source(name), feature_version=(3, 8))
    imported = {alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names}
    imported |= {str(one.module) for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in imported} <= sys.stdlib_module_names
