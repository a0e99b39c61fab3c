"""What recipe and profiles name on this machine is missed before any host is asked, at its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from islandctl.cli.main import main
from islandctl.config.load import load_recipe, load_site
from islandctl.errors import ConfigError
from islandctl.planner.make import make_plan
from islandctl.planner.plan import Plan
from islandctl.runs.given import demand_all

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "recipes" / "demo.yaml").read_text()


def files(root: Path, environment: str = "", worker: str = "", hosts: str = "[192.0.2.1]") -> list[Path]:
    """A recipe and two profiles; the second one, with this environment, is of a host that never answers."""
    data = yaml.safe_load((ROOT / "site-profiles" / "local-a.yaml").read_text())
    data |= {"name": "far", "scheduler": "ssh"}
    del data["environment"]
    text = yaml.safe_dump(data) + f"hosts: {hosts}\nenvironment:\n  python: python3\n{environment}"
    (root / "far.yaml").write_text(text)
    (root / "r.yaml").write_text(RECIPE + (f"\n{worker}" if worker else ""))
    return [root / "r.yaml", ROOT / "site-profiles" / "local-b.yaml", root / "far.yaml"]


def plan(paths: list[Path]) -> Plan:
    return make_plan(load_recipe(paths[0]), [load_site(path) for path in paths[1:]])


def line(path: Path, text: str) -> int:
    return next(number for number, one in enumerate(path.read_text().splitlines(), 1) if text in one)


@pytest.mark.parametrize(
    ("environment", "key", "cause", "hint"),
    [
        ("  wheels: ./none\n", "wheels", "none: No such file or directory", "pip download -d FOLDER fills it"),
        ("  wheels: ./empty\n", "wheels", "empty holds no wheels", "fill it: pip download"),
        ("  wheels: ./far.yaml\n", "wheels", "far.yaml: Not a directory", "pip download"),
        ("  lock: ./none.txt\n", "lock", "none.txt: No such file or directory", "as pip freeze writes it"),
        ("  lock: ./empty\n", "lock", "empty: Is a directory", "as pip freeze writes it"),
        ("  lock: ~/none.txt\n", "lock", "none.txt: No such file or directory", "as pip freeze writes it"),
    ],
)
def test_a_lock_or_folder_that_is_not_there(
    tmp_path: Path, environment: str, key: str, cause: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    made = plan(files(tmp_path, environment))
    with pytest.raises(ConfigError) as told:
        demand_all(made)
    place = f"{tmp_path}/far.yaml:{line(tmp_path / 'far.yaml', key)}:"
    assert told.value.message.startswith(place)
    assert f"environment.{key}: " in told.value.message
    assert told.value.message.endswith(cause)
    assert hint in told.value.hint


def test_a_lock_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lock.txt").write_text("a==1\n")
    demand_all(plan(files(tmp_path, "  lock: ~/lock.txt\n")))


def test_what_is_not_used_is_not_missed(tmp_path: Path) -> None:
    demand_all(plan(files(tmp_path, "  build: false\n")))


def test_secrets_that_are_not_set_are_told_together_before_anybody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("IS_SET", "a value")
    monkeypatch.setenv("IS_EMPTY", "")
    for name in ("NOT_SET", "PIP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    own = "worker:\n  secrets:\n    - IS_SET\n    - NOT_SET\n    - IS_EMPTY\n"
    recipe, west, far = files(tmp_path, "  secrets: [IS_SET, PIP_TOKEN]\n", own)
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(recipe), "--site", str(west), "--site", str(far), "--yes"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{recipe}:{line(recipe, '- NOT_SET')}:7: worker.secrets: NOT_SET is not set on this machine" in said
    assert f"{recipe}:{line(recipe, '- IS_EMPTY')}:7: worker.secrets: IS_EMPTY is not set on this machine" in said
    assert f"{far}:{line(far, 'PIP_TOKEN')}:" in said
    assert "environment.secrets: PIP_TOKEN is not set on this machine" in said
    assert "export NOT_SET=… IS_EMPTY=… PIP_TOKEN=…, then type the command again" in said
    assert "IS_SET is" not in said
    assert "connecting" not in said
    assert not list((tmp_path / "home").glob("runs/*"))


def test_a_plan_whose_files_are_gone_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_TOKEN", raising=False)
    paths = files(tmp_path, "  secrets: [PIP_TOKEN]\n")
    made = plan(paths)
    paths[2].unlink()
    with pytest.raises(ConfigError, match=rf"^{paths[2]}: environment.secrets: PIP_TOKEN is not set"):
        demand_all(made)
