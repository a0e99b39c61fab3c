"""A visit: the doctor's job on a real Slurm on this machine, its nodes asked as hosts."""

from __future__ import annotations

import ast
import base64
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from islandctl.config.site import SiteProfile
from islandctl.errors import IslandError, PreflightError, UnreachableError
from islandctl.fleet import slurm_visit_login, slurm_visit_node, wire
from islandctl.fleet.local import LocalHost
from islandctl.fleet.slurm import SlurmJobs
from islandctl.fleet.slurm_visit import Visit, first_of
from islandctl.fleet.slurm_visit_host import NodeOfJob
from tests.disk import needs_mount
from tests.slurm import Cluster, cluster
from tests.sshd import site_profile

MARK = "doctor-{}.0123456789abcdef"
NAMED = 'import os\ndef main(args, payload):\n    return [os.environ["SLURMD_NODENAME"], args["at"], len(payload)]\n'


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "own") as made:
        yield made


@pytest.fixture(autouse=True)
def found(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)


class Seen:
    """A visit to a site of some nodes, with this machine as the login node."""

    def __init__(self, root: Path, name: str, *, nodes: int = 2, python: str = sys.executable, **asked: Any) -> None:
        profile = site_profile(
            "west", ["login"], {}, str(root / "work dir"), scheduler="slurm", slurm={"partition": "low", **asked},
            gpu={"type": "cpu", "count": nodes, "per_node": 1}, environment={"python": python},
        )  # fmt: skip
        self.site = SiteProfile.model_validate(profile)
        self.host, self.mark = LocalHost("west/login"), MARK.format(name)
        self.folder = root / "work dir" / "runs" / self.mark / "visit"
        self.scheduler = SlurmJobs(self.site)
        self.visit = Visit(self.site, self.host, self.scheduler, self.mark, str(self.folder))

    def hosts(self) -> list[NodeOfJob]:
        self.visit.begin(limit_s=600.0, wait_s=300.0)
        return self.begun()

    def begun(self) -> list[NodeOfJob]:
        end = time.monotonic() + 90.0
        while why := self.visit.pending():
            assert time.monotonic() < end, why
            time.sleep(0.1)
        return self.visit.hosts()

    def left(self) -> list[str]:
        return self.scheduler.left(self.host, self.mark, end=False)


@pytest.fixture
def see(tmp_path: Path) -> Iterator[Callable[..., Seen]]:
    """Makes visits, and ends them."""
    made: list[Seen] = []

    def make(name: str, **asked: Any) -> Seen:
        made.append(Seen(tmp_path, name, **asked))
        return made[-1]

    yield make
    for one in made:
        assert one.visit.end() == []


def fails(host: NodeOfJob) -> IslandError:
    with pytest.raises(IslandError) as caught:
        host.python(NAMED, {"at": 0}, timeout_s=60.0)
    return caught.value


def test_nodes_of_a_job_are_hosts(see: Callable[..., Seen], slurm: Cluster) -> None:
    seen = see("two")
    hosts = seen.hosts()
    assert [(host.label, host.job) for host in hosts] == [(f"west/{name}", seen.visit.job) for name in ("n1", "n2")]
    told: dict[tuple[int, int], Any] = {}

    def ask(at: int, number: int) -> None:
        told[at, number] = hosts[at].python(NAMED, {"at": number}, timeout_s=60.0, payload=bytes(number << 16))

    threads = [threading.Thread(target=ask, args=(at, number)) for at in (0, 1) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {(at, number): [f"n{at + 1}", number, number << 16] for at in (0, 1) for number in range(6)}

    first = hosts[0]
    done = first.run(["sh", "-c", "cat; echo $ISLANDCTL_RUN >&2; exit 3"], stdin=b"in and out", timeout_s=30.0)
    assert (done.code, done.stdout, done.stderr.decode().strip()) == (3, b"in and out", seen.mark)
    assert first.python("def main(a, p):\n    return a\n", {"x": 1}, timeout_s=30.0, interpreter=sys.executable) == {
        "x": 1
    }
    counted = "def main(args, stream):\n    return len(stream.read())\n"
    assert first.feed(counted, {}, [b"abc", b"de"], timeout_s=30.0) == 5
    with pytest.raises(PreflightError, match=r"west/n1: ValueError: no such thing \(line 2\)"):
        first.python("def main(args, payload):\n    raise ValueError('no such thing')\n", {}, timeout_s=30.0)

    assert f"Slurm's job {seen.visit.job} (RUNNING)" in seen.left()[0]
    slurm.run("scancel", seen.visit.job)  # somebody else's word
    error = fails(first)
    assert isinstance(error, UnreachableError)  # it is not the node's fault
    assert seen.visit.end() == []
    assert seen.left() == []
    with pytest.raises(PreflightError, match="ended: CANCELLED"):
        seen.visit.pending()
    with pytest.raises(UnreachableError, match="the examination is over"):
        seen.visit.begin(limit_s=600.0, wait_s=300.0)


def test_one_that_waits_is_told_why_and_taken_out_of_the_queue(see: Callable[..., Seen], slurm: Cluster) -> None:
    blocker = slurm.occupy(600)
    seen = see("waits")
    seen.visit.begin(limit_s=60.0, wait_s=5.0)
    end = time.monotonic() + 60.0
    while "Resources: waits for nodes to become free" not in (why := seen.visit.pending()):
        assert time.monotonic() < end, why
        time.sleep(0.1)
    assert f"job {seen.visit.job}: " in why
    deadline = slurm.run("scontrol", "show", "job", "-o", seen.visit.job).partition(" Deadline=")[2].split()[0]
    assert deadline != "N/A"  # Slurm itself takes it out, where nobody is left to
    assert seen.visit.end() == []
    assert seen.left() == []

    refused = see("refused", extra=["--partition=nowhere"])
    with pytest.raises(PreflightError, match=r"west/login: sbatch .*--no-requeue: .*invalid partition"):
        refused.visit.begin(limit_s=60.0, wait_s=5.0)
    never = see("never", nodes=1, extra=["--constraint=gold", "--hold"])
    with pytest.raises(PreflightError, match=r"sbatch .*[Ii]nvalid feature|node configuration"):
        never.visit.begin(limit_s=60.0, wait_s=5.0)
    slurm.run("scancel", blocker)


@needs_mount
def test_a_node_on_which_nothing_can_begin_names_itself(
    see: Callable[..., Seen], slurm: Cluster, tmp_path: Path
) -> None:
    """Its work folder is read-only; it has no such Python; and the first node's work folder is read-only."""
    work, bare = tmp_path / "work dir", tmp_path / "own python"
    work.mkdir()
    bare.mkdir()
    (bare / "python3").symlink_to(sys.executable)
    locked = f"mount --bind '{work}' '{work}' && mount -o remount,ro,bind '{work}' && "
    try:
        slurm.restart("n2", "unshare", "--mount", "sh", "-c", f'{locked}exec "$@"', "sh")
        locked_out = see("locked")
        first, second = locked_out.hosts()
        assert first.python(NAMED, {"at": 1}, timeout_s=60.0) == ["n1", 1, 0]
        error = fails(second)
        assert isinstance(error, PreflightError)
        assert error.message.startswith("west/n2: cannot write into ")
        assert error.message.endswith("/visit: Read-only file system")
        assert "work_dir must lie on a file system" in error.hint
        assert locked_out.visit.end() == []

        slurm.restart("n2", "unshare", "--mount", "sh", "-c", f"mount -t tmpfs none '{bare}' && exec \"$@\"", "sh")
        without = see("bare", python=str(bare / "python3"))
        first, second = without.hosts()
        assert first.python(NAMED, {"at": 1}, timeout_s=60.0) == ["n1", 1, 0]
        error = fails(second)
        assert isinstance(error, PreflightError)
        assert "west/n2: execve(): " in error.message
        assert error.hint.startswith("environment.python")
        assert without.visit.end() == []

        slurm.restart("n2")
        slurm.restart("n1", "unshare", "--mount", "sh", "-c", f'{locked}exec "$@"', "sh")
        with pytest.raises(
            PreflightError, match=r"west/n1: cannot write into .*; it is the first node of Slurm's job"
        ):
            see("head").hosts()
    finally:
        slurm.restart("n1")
        slurm.restart("n2")


def test_a_job_that_does_not_see_the_folder_says_so(see: Callable[..., Seen], slurm: Cluster) -> None:
    seen = see("apart", nodes=1, extra=["--hold"])
    seen.visit.begin(limit_s=60.0, wait_s=60.0)
    (seen.folder / "submission").unlink()
    slurm.run("scontrol", "release", seen.visit.job)
    with pytest.raises(PreflightError, match="did not find its folder on n1: work_dir must lie on a file system"):
        seen.begun()


@pytest.mark.parametrize("module", [slurm_visit_login, slurm_visit_node])
def test_what_runs_there_is_written_for_python_3_8(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text(), feature_version=(3, 8))
    known = [name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names]
    known += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert set(known) <= {*sys.stdlib_module_names}


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[1-2]", "n1"), ("gpu[007,9-12],m1", "gpu007"), ("a-b,c", "a-b"), ("", "")]
)
def test_the_first_of_a_list(nodes: str, first: str) -> None:
    assert first_of(nodes) == first


def test_files_carry_bytes_once_however_often_they_are_sent(tmp_path: Path) -> None:
    for name in ("0.in", "0.out", "beat", "nodes", "visit.log"):
        (tmp_path / name).touch()
    asked = {"do": "carry", "folder": str(tmp_path), "at": {"0": 0}, "log": 0, "wait_s": 0.0}
    for beat, (offset, data) in enumerate([(0, b"abc"), (0, b"abc"), (3, b"de"), (3, b"de")]):
        send = {"0": [offset, base64.b64encode(data).decode()]}
        told = slurm_visit_login.main({**asked, "beat": beat, "send": send}, b"")
        assert told == {"came": {}, "log": "", "nodes": []}
    assert (tmp_path / "0.in").read_bytes() == b"abcde"
    slurm_visit_node.add(str(tmp_path / "0.out"), b"12")
    slurm_visit_node.add(str(tmp_path / "0.out"), b"3")
    (tmp_path / "nodes").write_text("n1\nn2\nn")
    told = slurm_visit_login.main({**asked, "beat": 9, "send": {}, "at": {"0": 1}}, b"")
    assert (base64.b64decode(told["came"]["0"]), told["nodes"]) == (b"23", ["n1", "n2"])


@pytest.mark.parametrize("how", ["quiet", "gone"])
def test_a_node_leaves_when_nobody_asks(how: str, tmp_path: Path) -> None:
    """Whoever asked was killed; or has cleared up. What it had begun for a question ends too."""
    folder, hanging = tmp_path / "visit", tmp_path / "hanging"
    folder.mkdir()
    for name in ("7.in", "7.out", "beat"):
        (folder / name).touch()
    begin = (
        f"from islandctl.fleet import slurm_visit_node as node; node.QUIET_S = {1.0 if how == 'quiet' else 600.0}; "
        f"node.BEAT_LOOK_S = 0.1; node.attend({str(folder)!r}, '7', {wire.BOOT!r})"
    )
    program = f"import os, time\nopen({str(hanging)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n".encode()
    (folder / "7.in").write_bytes(b"%d\n%b" % (len(program), program))
    node = subprocess.Popen([sys.executable, "-c", begin], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60.0
    while not (hanging.exists() and hanging.read_text()):
        if how == "quiet":
            (folder / "beat").write_text(str(time.monotonic()))
        assert time.monotonic() < end
        time.sleep(0.05)
    if how == "gone":
        folder.rename(tmp_path / "away")
    said = node.communicate(timeout=60.0)[1]
    assert ("nobody has asked" if how == "quiet" else "its folder is gone") in said
    while alive(int(hanging.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
