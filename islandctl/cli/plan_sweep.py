"""A sweep: as a table and curves on the terminal, as CSV, SVG or PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from islandctl.cli import plot
from islandctl.cli.plan_view import rate_text, share_text
from islandctl.cli.tables import plain_table, print_table, wide_console
from islandctl.config.units import count_text, memory_text, seconds_text
from islandctl.errors import UsageError
from islandctl.planner.make import OWN
from islandctl.planner.sweep import Point, Swept

ROWS = 25
"""Shown on the terminal; the CSV has all."""


def show(swept: Swept) -> None:
    """Print the table, and curves where one setting is varied."""
    console = wide_console()
    print_table(console, _table(swept))
    left_out = len(swept.points) - len(_some(swept.points))
    if left_out:
        console.print(Text(f"{left_out} points between these are left out here; --csv FILE has all", style="dim"))
    curves = _curves(swept)
    if curves:
        console.print(Text(plot.on_terminal(curves, _frame(swept, curves))), soft_wrap=True)
    for point in swept.points:
        if point.memory_bytes is None:
            console.print(Text(f"! {', '.join(point.values)}: {point.binds}"))
            break


def _table(swept: Swept) -> Table:
    names = [axis.path.rpartition(".")[2] for axis in swept.axes]
    titles = [*names, "", "computes", "step", "tokens/s", "memory", "link", "USD/10⁹", "weakest link"]
    table = plain_table(*titles)
    for column in table.columns[len(names) + 1 : -1]:
        column.justify = "right"
    for point in _some(swept.points):
        table.add_row(*map(_short, point.values, point.numbers, [axis.unit for axis in swept.axes]), *_cells(point))
    return table


def _short(value: str, number: float, unit: str) -> str:
    """A value without needless digits."""
    if unit in ("Gbit/s", "Mbit/s", "Tbit/s"):
        return rate_text(number * {"Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12}[unit])
    return f"{number:.4g} {unit}" if unit else value


def _cells(point: Point) -> list[str]:
    if point.memory_bytes is None:
        return ["✗", *["–"] * 6, "cannot be planned"]
    return [
        "✓" if point.feasible else "✗",
        "?" if point.computing is None else f"{point.computing:.1%}",
        "?" if point.step_s is None else seconds_text(point.step_s),
        "?" if point.tokens_per_s is None else count_text(point.tokens_per_s),
        memory_text(point.memory_bytes),
        "?" if point.link_share is None else share_text(point.link_share),
        "?" if point.usd_per_billion_tokens is None else f"{point.usd_per_billion_tokens:,.2f}",
        point.binds,
    ]


def _some(points: Sequence[Point]) -> list[Point]:
    """At most ``ROWS``, evenly, the first and the last among them."""
    if len(points) <= ROWS:
        return list(points)
    return [points[round(number * (len(points) - 1) / (ROWS - 1))] for number in range(ROWS)]


def _curves(swept: Swept) -> list[plot.Curve]:
    """Share of the time that trains, for this recipe and the published methods; of two settings, a curve for each
    value of the second."""
    if len(swept.axes) == 2:
        curves: dict[str, list[tuple[float, float]]] = {}
        for point in swept.points:
            if point.computing is not None:
                name = f"{swept.axes[1].path} {point.values[1]}"
                curves.setdefault(name, []).append((point.numbers[0], point.computing))
        return [plot.Curve(name, line) for name, line in list(curves.items())[: len(plot.MARKS)]]
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in swept.points:
        for name, share in point.methods.items():
            lines.setdefault(name, []).append((point.numbers[0], share))
    for point in swept.points:
        if point.computing is not None:
            lines.setdefault(OWN, []).append((point.numbers[0], point.computing))
    return [plot.Curve(name, line) for name, line in lines.items()]


def _frame(swept: Swept, curves: Sequence[plot.Curve]) -> plot.Frame:
    axis = swept.axes[0]
    across = f"{axis.path} ({axis.unit})" if axis.unit else axis.path
    return plot.Frame.around(curves, title="share of the time that trains", across=across, top=1.0)


def csv_text(swept: Swept) -> str:
    """One line a point: the settings without their unit, then what ``Point`` holds; methods one column each."""
    methods = list(dict.fromkeys(name for point in swept.points for name in point.methods))
    fields = [name for name in Point.model_fields if name not in ("values", "numbers", "methods")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    paths = [f"{axis.path} ({axis.unit})" if axis.unit else axis.path for axis in swept.axes]
    writer.writerow([*paths, *fields, *methods])
    for point in swept.points:
        first = [
            value if not axis.unit else f"{number:.10g}"
            for axis, value, number in zip(swept.axes, point.values, point.numbers, strict=True)
        ]
        rest = [getattr(point, name) for name in fields]
        writer.writerow([*first, *rest, *(point.methods.get(name, "") for name in methods)])
    return out.getvalue()


def write(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}", hint="choose another path") from error


def draw(path: Path, swept: Swept) -> None:
    """Draw the curves to ``.svg`` or ``.png``.

    Raises:
        UsageError: another ending, nothing to draw, or it cannot be written.
    """
    curves = _curves(swept)
    if not curves:
        raise UsageError(
            f"{path}: nothing to draw: the step time is unknown",
            hint="give gpu.bf16 or measured.step in the profile, or --set site.measured.step='200 ms'",
        )
    frame = _frame(swept, curves)
    match path.suffix.lower():
        case ".svg":
            write(path, plot.as_svg(curves, frame))
        case ".png":
            try:
                plot.save_png(path, curves, frame)
            except OSError as error:
                raise UsageError(
                    f"{path}: cannot be written: {error.strerror}", hint="choose another path"
                ) from error
        case _:
            raise UsageError(f"{path}: drawn are .svg and .png", hint="change the file's ending")
