"""What the doctor has found, on the terminal: a table a site, the worst first, at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from rich.text import Text

from islandctl.cli import output
from islandctl.cli.look import table
from islandctl.fleet.checks.base import listed
from islandctl.runs.doctor.report import ORDER, DoctorReport, Row

_STYLES = {"fail": "bold red", "unknown": "magenta", "warn": "yellow", "ok": "green", "skipped": "dim"}
_WORDS = {"fail": "failed", "unknown": "without answer", "warn": "warned", "ok": "ok", "skipped": "skipped"}
_EVERYWHERE = "all sites"


def show(report: DoctorReport, *, recipe: str, profiles: Sequence[str], write_profile: bool) -> None:
    """Print it all, and in the end what to type next."""
    console = output.console()
    for name in (*report.sites, ""):
        rows = [row for row in report.rows if row.site == name]
        if not rows:
            continue
        console.print(_headline(name or _EVERYWHERE, rows))
        made = table("", "check", "where", "found")
        made.columns[2].no_wrap = made.columns[3].no_wrap = False
        made.columns[3].overflow = "fold"
        made.columns[2].max_width, made.columns[1].max_width = 22, 15
        for level, check, place, found in _lines(rows, name):
            made.add_row(Text(level, style=_STYLES[level]), check, place, found)
        console.print(made)
        console.print()
    for one in report.written:
        before = one.before or "(not there)"
        console.print(Text(f"{one.profile}: {one.key}: {before} → {one.after}"), soft_wrap=True)
    output.data(_next(report, recipe, profiles, write_profile))


def _headline(name: str, rows: Sequence[Row]) -> Text:
    text = Text.assemble((name, "bold"), " ")
    for level in ORDER:
        number = sum(row.level == level for row in rows)
        if number:
            text.append(f" {number} {_WORDS[level]}", style=_STYLES[level])
    return text


def _lines(rows: Sequence[Row], site: str) -> Iterator[tuple[str, str, str, Text]]:
    """What is wrong, once for all places of which the same is said; of what is right one line a check; of what was
    skipped one line a reason."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        said = {"ok": (row.check,), "skipped": (row.text,)}.get(row.level, (row.check, row.text, row.hint))
        alike.setdefault((row.level, *said), []).append(row)
    for (level, *_), group in alike.items():
        first, names = group[0], list(dict.fromkeys(row.check for row in group))
        texts = list(dict.fromkeys(row.text for row in group))
        places = list(dict.fromkeys(_short(row.place, site) for row in group))
        found = Text(first.text, style="dim" if level == "skipped" else "")
        if level == "skipped" and len(names) > 1:
            found.append(f": {', '.join(names)}")
        elif len(places) == 1 and len(texts) > 1:
            found.append("".join(f"\n{text}" for text in texts[1:]))
        elif len(texts) > 1:
            found.append("; …")
        if level not in ("ok", "skipped") and first.hint:
            found.append(f"\n→ {output.typeable(first.hint)}", style="dim")
        check = names[0] if len(names) == 1 else f"{len(names)} checks"
        yield level, check, listed(places, 1 if len(places) > 2 else 2), found


def _short(place: str, site: str) -> str:
    """A place without its site, which stands above the table."""
    return place.removeprefix(f"{site}/") if site else place


def _next(report: DoctorReport, recipe: str, profiles: Sequence[str], write_profile: bool) -> str:
    sites = " ".join(f"--site {quote(path)}" for path in profiles)
    command = f"{quote(recipe)} {sites}"
    wrong = next((row for row in report.rows for level in ("fail", "unknown") if row.level == level), None)
    if wrong is not None:
        deeper = "" if report.tier == "quick" else f" --tier {report.tier}"
        again = f"islandctl doctor {command} --only {wrong.check}{deeper}"
        return f"next: mend {wrong.check} on {wrong.place}, then {again}"
    unasked = next((row for row in report.rows if (row.check, row.level) == ("slurm", "skipped")), None)
    if unasked is not None:
        return f"next: islandctl doctor {command} --tier {report.tier} --wait 2h, for the nodes of {unasked.site}"
    if report.tier == "quick":
        return f"next: islandctl doctor {command} --tier standard measures links and disks; or islandctl launch …"
    if report.measured and not write_profile:
        return f"next: islandctl doctor {command} --tier {report.tier} --write-profile keeps the figures for plan"
    return f"next: islandctl plan {command}; then islandctl launch {command}"
