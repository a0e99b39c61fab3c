"""Code and environments on a node: named by content, whole or not there, reused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError, PreflightError
from islandctl.fleet import environment, lock, needs, node_store, provision
from islandctl.fleet.bundle import Bundle, make_bundle
from islandctl.fleet.connect import connect, this_machine
from islandctl.fleet.needs import SOAP_REQUIREMENT, worker_needs
from islandctl.fleet.provision import prepare
from tests.sshd import Sshd, site_profile

LOCAL = this_machine()


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter is fit with json alone, so that no test waits for torch."""
    monkeypatch.setattr(needs, "WORKER_IMPORTS", (("json", ()),))
    monkeypatch.setattr(needs, "WORKER_REQUIREMENTS", ())


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "islandctl"
    (folder / "fleet" / "__pycache__").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "fleet" / "supervisor.py").write_text("print('hi')")
    (folder / "fleet" / "__pycache__" / "supervisor.cpython-311.py").write_text("never sent")
    (folder / "notes.md").write_text("never sent")
    return folder


def site(tmp_path: Path, **environment: Any) -> SiteProfile:
    settings = {"build": False, **environment}
    return site_profile("here", [], {}, f"{tmp_path}/a work", environment=settings)


def listed(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# Code


def test_the_same_content_is_the_same_bundle(package: Path) -> None:
    first = make_bundle(package)
    for path in package.rglob("*.py"):
        path.touch()
    assert make_bundle(package) == first
    (package / "__init__.py").write_text("x = 1")
    assert make_bundle(package).hash != first.hash


def test_the_package_itself_holds_the_supervisor_and_what_a_worker_reads() -> None:
    bundle = make_bundle()
    assert len(bundle.hash) == 16
    assert len(bundle.data) < 2_000_000


@pytest.mark.usefixtures("light")
def test_code_goes_to_a_folder_named_by_its_content(package: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    bundle = make_bundle(package)
    ready = prepare(LOCAL, site(tmp_path), bundle, messages.append)
    assert ready.code == f"{tmp_path}/a work/code/{bundle.hash}"
    assert listed(Path(ready.code)) == ["islandctl/__init__.py", "islandctl/fleet/supervisor.py"]
    assert Path(ready.supervisor).read_text() == "print('hi')"
    assert ready.python == sys.executable
    assert ready.home == str(Path.home())
    assert len(messages) == 1
    before = Path(ready.supervisor).stat().st_mtime_ns
    assert prepare(LOCAL, site(tmp_path), bundle, messages.append) == ready
    assert Path(ready.supervisor).stat().st_mtime_ns == before
    assert len(messages) == 1


@pytest.mark.usefixtures("light")
def test_a_changed_file_is_a_new_folder_and_the_old_one_stays(package: Path, tmp_path: Path) -> None:
    old = prepare(LOCAL, site(tmp_path), make_bundle(package))
    (package / "fleet" / "supervisor.py").write_text("print('new')")
    new = prepare(LOCAL, site(tmp_path), make_bundle(package))
    assert (Path(old.supervisor).read_text(), Path(new.supervisor).read_text()) == ("print('hi')", "print('new')")


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_a_damaged_folder_is_put_aside_and_made_anew(package: Path, tmp_path: Path) -> None:
    bundle = make_bundle(package)
    ready = prepare(LOCAL, site(tmp_path), bundle)
    Path(ready.supervisor).write_text("print('edited in place')")
    assert prepare(LOCAL, site(tmp_path), bundle) == ready
    assert Path(ready.supervisor).read_text() == "print('hi')"
    assert len(list((tmp_path / "a work" / "code").glob("*.damaged-*"))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_compiled_files_do_not_damage_it(package: Path, tmp_path: Path) -> None:
    bundle = make_bundle(package)
    ready = prepare(LOCAL, site(tmp_path), bundle)
    (Path(ready.code) / "islandctl" / "__pycache__").mkdir()
    (Path(ready.code) / "islandctl" / "__pycache__" / "x.pyc").write_bytes(b"x")
    messages: list[str] = []
    prepare(LOCAL, site(tmp_path), bundle, messages.append)
    assert messages == []


@pytest.mark.usefixtures("light")
def test_a_bundle_damaged_on_the_way_is_refused_and_leaves_nothing(package: Path, tmp_path: Path) -> None:
    bundle = make_bundle(package)
    (package / "__init__.py").write_text("other")
    wrong = Bundle(bundle.hash, make_bundle(package).data)
    with pytest.raises(PreflightError, match="the code arrived damaged"):
        prepare(LOCAL, site(tmp_path), wrong)
    assert [path for path in (tmp_path / "a work" / "code").iterdir() if path.is_dir()] == []


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_launches_at_once_do_not_disturb_each_other(package: Path, tmp_path: Path) -> None:
    bundle = make_bundle(package)
    with ThreadPoolExecutor(4) as pool:
        ready = list(pool.map(lambda _: prepare(LOCAL, site(tmp_path), bundle), range(4)))
    assert len(set(ready)) == 1
    assert [path.name for path in (tmp_path / "a work" / "code").iterdir() if path.is_dir()] == [bundle.hash]


@pytest.mark.usefixtures("light")
def test_over_ssh_with_the_node_s_own_home(package: Path, server: Sshd, tmp_path: Path) -> None:
    own = {"work_dir": "~/My Drive/island", "environment": site(tmp_path).environment}
    profile = server.site().model_copy(update=own)
    host = connect(profile, server.host, known_hosts=tmp_path / "kh", on_message=print)
    try:
        ready = prepare(host, profile, make_bundle(package))
        assert ready.work_dir == f"{server.home}/My Drive/island"
        assert ready.home == str(server.home)
        assert host.run([ready.python, ready.supervisor], timeout_s=20).stdout == b"hi\n"
    finally:
        host.close()


# The profile's interpreter


@pytest.mark.usefixtures("light")
def test_a_missing_interpreter_shows_the_path_there(package: Path, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"here/local|this machine") as caught:
        prepare(LOCAL, site(tmp_path, python="/no/python"), make_bundle(package))
    assert "cannot run /no/python: No such file" in caught.value.message
    assert "PATH there: /" in caught.value.message


def test_an_interpreter_without_torch_says_what_is_missing(package: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    python = f"{tmp_path}/bare/bin/python"
    with pytest.raises(PreflightError) as caught:
        prepare(LOCAL, site(tmp_path, python=python), make_bundle(package))
    assert f"{python} lacks what a worker needs: torch (No module named 'torch'), numpy (" in caught.value.message
    assert f"{python} -m pip install 'torch>=2.10' 'numpy>=1.26' 'pydantic>=2.9,<3'" in caught.value.hint


def test_without_torch_on_this_machine_it_says_which_extra_to_install(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "WORKER_IMPORTS", (("no_such_module", ()),))
    profile = {
        "name": "here",
        "scheduler": "local",
        "gpu": {"type": "cpu", "count": 1, "per_node": 1},
        "wan": {"up": "1 Gbit/s", "down": "1 Gbit/s", "rtt": "1 ms"},
        "cpu": {"cores": 1, "memory": "1 GiB"},
        "environment": {"build": False},
        "work_dir": str(tmp_path / "work"),
    }
    with pytest.raises(PreflightError, match="lacks what a worker needs") as caught:
        prepare(LOCAL, SiteProfile.model_validate(profile), make_bundle(package))
    assert caught.value.hint.startswith("pip install 'islandctl[worker]'")
    assert "environment.build: true" in caught.value.hint


@pytest.mark.usefixtures("light")
def test_soap_needs_its_package_at_the_sites(package: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    profile = site(tmp_path, python=f"{tmp_path}/bare/bin/python")
    with pytest.raises(PreflightError, match=r"lacks what a worker with the optimizer soap needs: pytorch_optimizer"):
        prepare(LOCAL, profile, make_bundle(package), needs=worker_needs("soap"))
    prepare(LOCAL, profile, make_bundle(package), needs=worker_needs("shampoo"))
    assert SOAP_REQUIREMENT in worker_needs("soap").requirements


def fake(folder: Path, version: str, torch: str) -> Path:
    """An interpreter that says it is another version, with a torch module of our making."""
    folder.mkdir()
    (folder / "torch.py").write_text(f"__version__ = {torch!r}\n")
    (folder / "sitecustomize.py").write_text(f"import platform\nplatform.python_version = lambda: {version!r}\n")
    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


@pytest.mark.slow
def test_a_torch_that_is_too_old(package: Path, tmp_path: Path) -> None:
    python = fake(tmp_path / "old", "3.12.1", "2.9.1+cu128")
    with pytest.raises(PreflightError, match=r"torch \(version 2\.9\.1\+cu128 is too old\)"):
        prepare(LOCAL, site(tmp_path, python=str(python)), make_bundle(package))


def test_packages_are_imported_once_until_something_changes(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "WORKER_IMPORTS", (("torch", (2, 10)),))
    folder, imports = tmp_path / "packages", tmp_path / "imports"
    python = fake(folder, "3.12.1", "2.13.0")
    with open(folder / "torch.py", "a") as module:
        module.write(f"with open({str(imports)!r}, 'a') as file:\n    file.write('x')\n")
    with open(folder / "sitecustomize.py", "a") as module:
        module.write("import os\nplatform.node = lambda: os.environ.get('NODE', 'first')\n")

    def count(*setup: str) -> int:
        profile = site(tmp_path, python=str(python), setup=setup)
        assert prepare(LOCAL, profile, make_bundle(package)).python == sys.executable
        return len(imports.read_text())

    assert [count(), count()] == [1, 1]
    assert [count("export NODE=second"), count("export NODE=second")] == [2, 2]
    assert count("export LD_LIBRARY_PATH=/elsewhere") == 3
    (folder / "other.py").touch()
    assert [count(), count()] == [4, 4]
    (folder / "other.py").write_text("raise ImportError('libtorch.so: not found')\n")
    (folder / "other.py").rename(folder / "torch.py")
    for _ in range(2):
        with pytest.raises(PreflightError, match=r"lacks what a worker needs: torch \(libtorch.so: not found\)"):
            count()


@pytest.mark.usefixtures("light")
def test_a_python_that_is_too_old(package: Path, tmp_path: Path) -> None:
    python = fake(tmp_path / "old", "3.8.18", "2.13.0")
    with pytest.raises(PreflightError, match=r"is Python 3\.8\.18; a worker needs 3\.11 or newer"):
        prepare(LOCAL, site(tmp_path, python=str(python)), make_bundle(package))


@pytest.mark.usefixtures("light")
def test_setup_lines_find_the_interpreter_and_their_noise_is_ignored(package: Path, tmp_path: Path) -> None:
    setup = ("echo loading module", f"PATH={Path(sys.executable).parent}:$PATH", "export PATH")
    ready = prepare(LOCAL, site(tmp_path, python=Path(sys.executable).name, setup=setup), make_bundle(package))
    assert ready.python == sys.executable


@pytest.mark.usefixtures("light")
def test_a_full_disk_is_told_before_anything_is_written(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "LEAST_FREE_BYTES", 10**18)
    with pytest.raises(PreflightError, match=r"a work has \d+ MB free"):
        prepare(LOCAL, site(tmp_path), make_bundle(package))
    assert not (tmp_path / "a work" / "code").exists()


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """``folder`` with little space: a file system of its own where that may be made, else a limit on files."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "islandctl-test", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, timeout=20).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("light")
def test_a_disk_that_fills_while_code_is_put_leaves_nothing_half_there(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "LEAST_FREE_BYTES", 0)
    (package / "large.py").write_bytes(os.urandom(200_000))
    bundle = make_bundle(package)
    with small_disk(tmp_path / "a work", 100_000):
        with pytest.raises(PreflightError, match=r"this machine: (No space left on device|File too large)") as caught:
            prepare(LOCAL, site(tmp_path), bundle)
        assert "free some space there, or set work_dir" in caught.value.hint
        assert [path for path in (tmp_path / "a work" / "code").iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_a_disk_that_fills_while_an_environment_is_built_leaves_nothing_half_there(
    package: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "LEAST_FREE_BYTES", 0)
    with zipfile.ZipFile(next(wheels.iterdir()), "a") as wheel:
        wheel.writestr("islandctl_test_wheel_data.py", os.urandom(6_000_000))
    with small_disk(tmp_path / "a work", 5_000_000):
        with pytest.raises(PreflightError, match=r"this machine: the disk is full: ") as caught:
            prepare(LOCAL, built(tmp_path, wheels, "islandctl-test-wheel"), make_bundle(package))
        assert "free some space there, or set work_dir" in caught.value.hint
        assert [path for path in (tmp_path / "a work" / "env").iterdir() if path.is_dir()] == []


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """``folder`` may not be written to; root is held off by a mount, others by the folder's mode."""
    folder.mkdir()
    if os.geteuid() == 0:
        mount = ["mount", "-t", "tmpfs", "-o", "ro,size=4096", "islandctl-test", str(folder)]
        subprocess.run(mount, check=True, timeout=20)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
        return
    folder.chmod(0o500)
    yield
    folder.chmod(0o700)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("work", ["a work", pytest.param(".", marks=pytest.mark.slow)])
def test_a_home_that_is_read_only(package: Path, sshd: Callable[..., Sshd], tmp_path: Path, work: str) -> None:
    server = sshd()
    (server.home).rmdir()
    with read_only(server.home):
        own = {"work_dir": f"~/{work}", "environment": site(tmp_path).environment}
        profile = server.site().model_copy(update=own)
        host = connect(profile, server.host, known_hosts=tmp_path / "kh", on_message=print)
        try:
            told = r"east/\S+: cannot write into the work folder \S.*: (Read-only file system|Permission denied)"
            with pytest.raises(PreflightError, match=told) as caught:
                prepare(host, profile, make_bundle(package))
            assert "set work_dir in the site profile to a folder that can be written" in caught.value.hint
        finally:
            host.close()


# Clocks


@pytest.mark.parametrize(
    ("began", "ended", "offset"),
    [
        (10.1, 20.1, 0.0),  # no more than the way may explain
        (11.1, 21.1, 0.9),  # 1 s ahead, of which 0.1 s may have been the way
        (6.1, 16.1, -3.9),
        (10.0, 20.2, 0.0),
    ],
)
def test_a_clock_s_offset_is_what_the_way_cannot_explain(began: float, ended: float, offset: float) -> None:
    assert provision.clock_offset(10.0, began, ended, 20.2) == pytest.approx(offset, abs=1e-6)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("ahead", "told"), [(0.3, None), (2.0, "behind"), pytest.param(-2.0, "ahead of", marks=pytest.mark.slow)]
)
def test_a_clock_that_is_a_little_off_is_told(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, told: str | None
) -> None:
    shift_clock(monkeypatch, ahead)
    messages: list[str] = []
    prepare(LOCAL, site(tmp_path), make_bundle(package), messages.append)
    clocks = [line for line in messages if "clock" in line]
    assert len(clocks) == (told is not None)
    assert all(
        re.search(rf"^this machine: its clock is (1\.[5-9]|2\.0) s {told} this machine's", line) for line in clocks
    )


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("ahead", "told"), [(60.0, "behind"), pytest.param(-60.0, "ahead of", marks=pytest.mark.slow)]
)
def test_a_clock_that_is_far_off_stops_before_anything_is_put_there(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, told: str
) -> None:
    shift_clock(monkeypatch, ahead)
    with pytest.raises(
        PreflightError, match=rf"its clock is (59\.\d|60\.0) s {told} this machine's; 3 s are the most"
    ):
        prepare(LOCAL, site(tmp_path), make_bundle(package))
    assert not (tmp_path / "a work" / "code").exists()


def shift_clock(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """This machine's clock, as the controller reads it, is ahead of the node's."""
    monkeypatch.setattr(provision, "time", SimpleNamespace(time=lambda: time.time() + ahead_s))


# Environments that are built


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one tiny wheel; what a worker needs is said to be that."""
    monkeypatch.setattr(needs, "WORKER_REQUIREMENTS", ())
    monkeypatch.setattr(needs, "WORKER_IMPORTS", (("islandctl_test_wheel", (1, 0)),))
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "islandctl_test_wheel-1.0.dist-info"
    with zipfile.ZipFile(folder / "islandctl_test_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("islandctl_test_wheel.py", "__version__ = '1.0'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: islandctl-test-wheel\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def built(tmp_path: Path, wheels: Path, *packages: str, **more: Any) -> SiteProfile:
    settings = {
        "build": True,
        "packages": packages,
        "pip_options": ("--no-index", "--find-links", str(wheels), "--no-cache-dir"),
        "python": sys.executable,
        **more,
    }
    return site(tmp_path, **settings)


@pytest.mark.slow
def test_an_environment_is_built_once_and_a_half_built_one_never_used(
    package: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ALONE_BYTES", 1)
    own = {"build": True, "packages": ("islandctl-test-wheel",), "python": sys.executable}
    profile, bundle, messages = site(tmp_path, wheels=str(wheels), **own), make_bundle(package), list[str]()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: prepare(LOCAL, profile, bundle, messages.append), range(2))
    assert first == second
    env = Path(first.python).parents[1]
    assert env.parent == tmp_path / "a work" / "env"
    assert (
        sorted(line.rpartition(" ")[2] for line in messages if line.endswith(("built", "there"))).count("built") == 1
    )
    assert json.loads((env / "complete.json").read_text())["found"] == {"islandctl_test_wheel": "1.0"}
    assert subprocess.run([first.python, "-c", "import islandctl_test_wheel"], timeout=30).returncode == 0
    assert (env / "requirements.txt").stat().st_mode & 0o777 == 0o600
    (env / "complete.json").unlink()
    (env / "half").touch()
    assert prepare(LOCAL, profile, bundle, messages.append) == first
    assert not (env / "half").exists()
    assert messages[-1].endswith("built")


def a_lock(tmp_path: Path, wheels: Path, *, sha256: str | None = None) -> str:
    """As ``pip-compile --generate-hashes`` writes it."""
    (wheel,) = wheels.iterdir()
    told = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
    path = tmp_path / "lock.txt"
    path.write_text(f"# made by hand\nislandctl-test-wheel==1.0 \\\n    --hash=sha256:{told}\n    # via nobody\n")
    return str(path)


@pytest.mark.slow
def test_a_lock_is_installed_on_a_node_and_nothing_else(
    server: Sshd, package: Path, wheels: Path, tmp_path: Path
) -> None:
    """Over SSH into a real environment, from wheels of this machine, each with the hash that the lock tells."""
    own = {"build": True, "packages": ("never-asked-for",), "python": sys.executable}
    settings = {**own, "wheels": str(wheels), "lock": a_lock(tmp_path, wheels)}
    ssh = server.site().ssh.model_dump(exclude_unset=True)
    profile = site_profile("east", [server.host], ssh, f"{tmp_path}/far work", environment=settings)
    host = connect(profile, server.host, known_hosts=tmp_path / "kh", on_message=print)
    messages = list[str]()
    try:
        ready = prepare(host, profile, make_bundle(package), messages.append)
        assert ready.python.startswith(f"{tmp_path}/far work/env/")
        done = subprocess.run(
            [ready.python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True, timeout=60
        )
        there = {one["name"]: one["version"] for one in json.loads(done.stdout)}
        assert there.keys() - {"pip", "setuptools"} == {"islandctl-test-wheel"}
        assert there["islandctl-test-wheel"] == "1.0"
        messages.clear()
        assert prepare(host, profile, make_bundle(package), messages.append) == ready
        assert messages == []
        a_lock(tmp_path, wheels, sha256="5" * 64)
        with pytest.raises(PreflightError) as caught:
            prepare(host, profile, make_bundle(package))
    finally:
        host.close()
    told, hint = caught.value.message, caught.value.hint
    assert told.startswith(
        f"{host.label}: islandctl-test-wheel==1.0 is not the file of environment.lock: its hash is "
    )
    assert told.endswith(f"…, not {'5' * 16}…")
    assert "\n" not in told + hint
    assert "write environment.lock anew" in hint
    assert len(list((tmp_path / "far work" / "env").glob("*/complete.json"))) == 1
    assert list((tmp_path / "far work" / "env").glob("*.wheels")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("# nothing", "not fit: islandctl_test_wheel (No module named", "add what is missing to environment.lock"),
        ("no-such-thing==1.0", "No matching distribution found for no-such-thing==1.0", "environment.wheels"),
    ],
)
def test_a_lock_that_is_wrong_is_told_as_such(
    package: Path, wheels: Path, tmp_path: Path, text: str, told: str, hint: str
) -> None:
    (tmp_path / "lock.txt").write_text(text)
    own = {"build": True, "python": sys.executable, "wheels": str(wheels), "lock": str(tmp_path / "lock.txt")}
    with pytest.raises(PreflightError) as caught:
        prepare(LOCAL, site(tmp_path, **own), make_bundle(package))
    assert told in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "line", "told", "hint"),
    [
        (f"a==1 \\\n  --hash=sha256:{'0' * 64}\n# b\nb==2  # two", 4, "'b==2' has no hash", "all lines or in none"),
        ("a==1\nb @ file:///croot/b_169/work", 2, "is a file of this machine", "pip list --format=freeze"),
        ("-r more.txt", 1, "is a file of this machine", "NAME==VERSION"),
        ("-e .", 1, "is a file of this machine", "NAME==VERSION"),
        ("./b-1-py3-none-any.whl", 1, "is a file of this machine", "environment.wheels"),
    ],
)
def test_a_lock_that_no_node_could_use_is_refused_at_its_line(
    tmp_path: Path, text: str, line: int, told: str, hint: str
) -> None:
    (tmp_path / "lock.txt").write_text(text)
    profile = site(tmp_path, build=True, lock=str(tmp_path / "lock.txt"))
    with pytest.raises(ConfigError) as caught:
        environment.check_files(profile, "lock")
    assert caught.value.message.startswith(f"environment.lock: {tmp_path}/lock.txt:{line}: ")
    assert told in caught.value.message
    assert hint in caught.value.hint


def test_a_lock_as_tools_write_it_is_taken_as_it_is(tmp_path: Path) -> None:
    text = (
        "--index-url https://index.example/simple\n# via pip-compile\n"
        f"a==1 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'1' * 64}\n    # via b\n"
        f"b @ https://index.example/b.whl#sha256={'2' * 64} --hash=sha256:{'2' * 64}\n"
        f"c==3 ; sys_platform == 'linux' --hash=sha256:{'3' * 64}\n"
    )
    for written in (text, "-e git+https://code.example/d@v1#egg=d\na==1\n"):
        (tmp_path / "lock.txt").write_text(written)
        assert lock.read(str(tmp_path / "lock.txt")) == written.splitlines()


@pytest.mark.slow
def test_pip_s_failure_is_shown_with_its_last_lines(package: Path, wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PreflightError, match=r"pip install failed: .*No matching distribution found for no-such"
    ) as caught:
        prepare(LOCAL, built(tmp_path, wheels, "no-such-thing"), make_bundle(package))
    assert "environment.packages" in caught.value.hint
    assert list((tmp_path / "a work" / "env").glob("*/complete.json")) == []


@pytest.mark.slow
def test_an_environment_that_does_not_import_what_a_worker_needs(package: Path, wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"not fit: islandctl_test_wheel \(No module named"):
        prepare(LOCAL, built(tmp_path, wheels), make_bundle(package))


@pytest.mark.slow
def test_a_site_without_an_index_gets_wheels_from_here(
    package: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``offline``: pip here fetches them for the node, once; they lie there as content, and pip there is content."""
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "controller"))
    monkeypatch.setenv("PLACE_OF_WHEELS", str(wheels))
    messages, bundle = list[str](), make_bundle(package)
    options = ("--no-index", "--find-links ${PLACE_OF_WHEELS}")
    python = {"build": True, "packages": ("islandctl-test-wheel",), "python": sys.executable}
    profile = site(tmp_path, offline=True, pip_options=options, **python)
    ready = prepare(LOCAL, profile, bundle, messages.append)
    assert subprocess.run([ready.python, "-c", "import islandctl_test_wheel"], timeout=30).returncode == 0
    wheel = next(wheels.iterdir())
    stored = [path for path in (tmp_path / "a work" / "store").iterdir() if path.suffix == ""]
    assert wheel.read_bytes() in stored[0].read_bytes()
    assert [path.name for path in (tmp_path / "controller" / "wheels").glob("*/*")] == [wheel.name]
    assert len([line for line in messages if "fetching packages for Python" in line]) == 1
    (folder,) = (tmp_path / "controller" / "wheels").iterdir()
    (given,) = environment.wheels_of(site(tmp_path, wheels=str(folder), **python)) or ()
    assert given.name == stored[0].name
    wheel.unlink()
    messages.clear()
    assert prepare(LOCAL, profile, bundle, messages.append) == ready
    assert messages == []


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_names_what_helps(
    package: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDEX_PASSWORD", "never-to-be-seen")
    options = ("--index-url http://me:${INDEX_PASSWORD}@127.0.0.1:1/simple", "--retries 0", "-vv")
    profile = built(tmp_path, wheels, "islandctl-test-wheel", pip_options=options, secrets=("INDEX_PASSWORD",))
    with pytest.raises(PreflightError, match="pip cannot reach its package index from there: ") as caught:
        prepare(LOCAL, profile, make_bundle(package))
    assert "environment.offline: true" in caught.value.hint
    assert "environment.wheels" in caught.value.hint
    assert "never-to-be-seen" not in caught.value.message


def test_a_password_in_an_index_s_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"write \$\{NAME\} in its place"):
        site(tmp_path, pip_options=("--index-url", "https://me:secret@index.example/simple"))


def test_platforms_are_those_that_the_node_s_c_library_runs(tmp_path: Path, wheels: Path) -> None:
    def names(arch: str, *libc: str) -> list[str]:
        found = {"python": {"executable": "/p", "version": "3.11.2"}, "arch": arch, "libc": libc}
        return environment.platforms(environment.describe(site(tmp_path), found, worker_needs(), None))

    new = names("x86_64", "glibc", "2.36")
    assert (new[0], new[-1]) == ("manylinux_2_36_x86_64", "linux_x86_64")
    assert {"manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"} < {*new}
    assert names("aarch64", "glibc", "2.18") == [
        "manylinux_2_18_aarch64",
        "manylinux_2_17_aarch64",
        "manylinux2014_aarch64",
        "linux_aarch64",
    ]
    assert names("x86_64", "", "")[0] == "musllinux_1_2_x86_64"


def test_the_environment_s_name_follows_what_is_in_it(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "lock").write_text("a==1\n")
    hashes = []
    for packages, version, more in (
        (("a",), "3.11.2", {}),
        (("a", "b"), "3.11.2", {}),
        (("a",), "3.11.2", {"setup": ("module load x",)}),
        (("a",), "3.12.1", {}),
        (("a",), "3.11.2", {"lock": str(tmp_path / "lock")}),
        (("a",), "3.11.2", {"offline": True}),
        (("a",), "3.11.2", {"wheels": str(wheels)}),
    ):
        found = {"python": {"executable": "/usr/bin/python3", "version": version}, "arch": "x86_64"}
        own = {"build": True, "packages": packages, **more}
        profile = site(tmp_path, **own)
        made = environment.describe(profile, found, worker_needs(), environment.wheels_of(profile))
        hashes.append(made.hash)
    assert len(set(hashes)) == 7


def test_index_options_do_not_reach_the_command_line() -> None:
    on_file, on_line = environment.split_options(
        ("--index-url https://user:secret@index.example/simple", "--no-cache-dir", "--pre", "--find-links=/w")
    )
    assert on_file == ["--index-url https://user:secret@index.example/simple", "--pre", "--find-links /w"]
    assert on_line == ["--no-cache-dir"]


def test_a_lock_waits_for_the_other_launch(tmp_path: Path) -> None:
    path, order = str(tmp_path / "lock"), list[str]()
    entered = threading.Event()

    def second() -> None:
        entered.wait(5)
        with node_store.locked(path, 5.0):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with node_store.locked(path, 5.0):
        entered.set()
        with pytest.raises(TimeoutError, match="another launch has held"), node_store.locked(path, 0.2):
            order.append("never")
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
