"""docs/troubleshooting.md has every message of the code, and says nothing of others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from islandctl.config.host_address import parse_address
from islandctl.config.load import load_site
from islandctl.config.site import Ssh
from islandctl.errors import IslandError
from islandctl.fleet.openssh import resolve
from islandctl.runs.record import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "troubleshooting"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout in PAGE, "cog -r docs/troubleshooting.md"


def test_what_status_is_said_to_say_is_in_the_code() -> None:
    files = [*(ROOT / "islandctl/runs").glob("*.py"), *(ROOT / "islandctl/fleet").glob("*.py")]
    files += (ROOT / "islandctl/worker").glob("*.py")
    code = " ".join(path.read_text() for path in files)
    table = PAGE.partition("## What status says of a run")[2].partition("\n## ")[0]
    words = [part for row in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) for part in row.split("…")]
    assert len(words) > 16
    assert [part for part in words if part.strip(" ;:") not in code] == []


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path))
    return tmp_path


def test_what_is_raised_stands_on_the_page_with_a_code(nothing: Path) -> None:
    """A few errors, as a person meets them: from the class itself, a helper, a faulty file and a constant."""
    (nothing / "site.yaml").write_text("name: a\nname: b\n")
    (nothing / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    rows = re.findall(r"^(?:- |\| )`([^`]*)` (?:\| |\()(\w+)", PAGE, re.MULTILINE)
    for meet in (
        lambda: load("no-such-run"),
        lambda: parse_address("host:ssh"),
        lambda: load_site(nothing / "site.yaml"),
        lambda: resolve("a", Ssh(config=str(nothing / "config"))),
        lambda: resolve("a", Ssh(identity="/no/such/key")),
    ):
        with pytest.raises(IslandError) as caught:
            meet()
        fits = [code for row, code in rows if re.search(_pattern(row), caught.value.message)]
        assert str(caught.value.exit_code) in fits, caught.value.message


def _pattern(row: str) -> str:
    return ".*".join(re.escape(words) for words in row.replace("\\|", "|").split("…")) + "$"
