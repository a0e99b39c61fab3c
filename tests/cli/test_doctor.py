"""`islandctl doctor` from outside: what it refuses, and how a report looks. Nobody is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from islandctl.cli.doctor_view import show
from islandctl.cli.main import main
from islandctl.runs.doctor.report import DoctorReport, Row, Written, in_order

DEMO = f"{Path(__file__).parents[2]}/recipes/demo.yaml"


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "missing argument RECIPE"),
        ([DEMO], "a recipe needs its sites"),
        ([DEMO, "--site", "x", "--tier", "fast"], "there is no tier 'fast'"),
        ([DEMO, "--site", "x", "--skip", "wann"], "there is no check called wann"),
        ([DEMO, "--site", "/no/such/file"], "/no/such/file: no such file"),
        ([DEMO, "--site", "x", "--seconds", "0"], "seconds"),
    ],
)
def test_what_is_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", *argv) == 2
    said = capsys.readouterr()
    assert (words in said.err, said.out) == (True, "")


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--list") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert run("doctor", "--list", "--json") == 0
    checks = json.loads(capsys.readouterr().out)
    assert {"login", "wan", "agreement"} <= {check["name"] for check in checks}
    assert all(check["name"] in out for check in checks)


def row(site: str, level: str, check: str = "clock", place: str = "", text: str = "fine", **more: Any) -> Row:
    base = {"check": check, "scope": "node", "tier": "quick", "seconds": 0.1, "site": site, "text": text}
    return Row.model_validate({**base, "level": level, "place": place or f"{site}/{'n' * 60}-0", **more})


def report(*rows: Row, **more: Any) -> DoctorReport:
    sites = tuple(dict.fromkeys(one.site for one in rows if one.site))
    made = {"tier": "quick", "sites": sites, "rows": in_order(rows, sites), "seconds": 1.0}
    return DoctorReport.model_validate({**made, **more})


def shown(made: DoctorReport, capsys: pytest.CaptureFixture[str], write_profile: bool = False) -> str:
    show(made, recipe="my recipe.yaml", profiles=["a.yaml", "b.yaml"], write_profile=write_profile)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:-1])) <= 100
    assert "\x1b" not in out
    return out


def test_the_worst_comes_first_and_the_last_line_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    made = report(
        row("east", "ok", "login", text="PATH " + "/opt/x/bin:" * 30),
        row("east", "skipped", "gpus", text="no accelerator here"),
        row("east", "skipped", "mig", text="no accelerator here"),
        row("east", "warn", "limits", text="at most 1024 open files", hint="ulimit -n 65536"),
        row("east", "fail", text="7.5 s ahead", hint="sudo hwclock -s"),
        row("west", "unknown", "login", text="no answer in 120 s", hint="ssh -v west"),
        *(row("west", "ok", "disk-space", f"west/n{at}", text=f"{at} TB free") for at in range(64)),
    )
    out = shown(made, capsys)
    assert made.exit_code == 4
    order = [
        out.index(words) for words in ("east  1 failed", "7.5 s ahead", "→ sudo", "at most 1024", "PATH", "2 checks")
    ]
    assert order == sorted(order)
    assert out.index("no answer in 120 s") < out.index("n0 and 63 more")
    assert out.splitlines()[-1].startswith("next: mend clock on east/nnn")
    assert out.splitlines()[-1].endswith("islandctl doctor 'my recipe.yaml' --site a.yaml --site b.yaml --only clock")


@pytest.mark.parametrize(
    ("levels", "code"), [(("ok", "warn", "skipped"), 0), (("ok", "unknown"), 5), (("unknown", "fail"), 4)]
)
def test_exit_codes(levels: tuple[str, ...], code: int) -> None:
    assert report(*(row("east", level) for level in levels)).exit_code == code


def test_what_comes_next_when_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    fine = row("east", "ok")
    assert "--tier standard measures" in shown(report(fine), capsys)
    measured = {"measured": {"east": {"wan.up": 1e9}}, "tier": "standard"}
    assert "--write-profile keeps the figures" in shown(report(fine, **measured), capsys)
    written = (Written(profile="a.yaml", key="wan.up", before=None, after="1 Gbit/s"),)
    out = shown(report(fine, **measured, written=written), capsys, write_profile=True)
    assert "a.yaml: wan.up: (not there) → 1 Gbit/s" in out
    assert out.splitlines()[-1].startswith("next: islandctl plan 'my recipe.yaml'")
