"""Curves: with letters on a terminal, as SVG, or as PNG where matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from islandctl.errors import UsageError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, told apart also by the colour-blind."""
MARKS = "abcdefg"


class Curve(NamedTuple):
    """A named line through points in order."""

    name: str
    points: list[tuple[float, float]]


class Frame(NamedTuple):
    """What the axes show. The vertical one begins at 0."""

    title: str
    across: str
    low: float
    high: float
    top: float
    logarithmic: bool

    @classmethod
    def around(cls, curves: Sequence[Curve], *, title: str, across: str, top: float | None = None) -> Frame:
        """Around all points; across by factors where they span ten times or more."""
        numbers = [x for curve in curves for x, _ in curve.points]
        low, high = min(numbers), max(numbers)
        highest = max((y for curve in curves for _, y in curve.points), default=1.0)
        return cls(title, across, low, high, top or highest or 1.0, low > 0 and high / low >= 10)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Both from 0 to 1."""
        if self.high == self.low:
            return 0.5, y / self.top
        if self.logarithmic:
            return math.log(x / self.low) / math.log(self.high / self.low), y / self.top
        return (x - self.low) / (self.high - self.low), y / self.top


def on_terminal(curves: Sequence[Curve], frame: Frame, *, width: int = 84, height: int = 13) -> str:
    """Lines of text, at most ``width + 8`` wide; where curves meet, the later one shows."""
    cells = [[" "] * width for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        for x, y in curve.points:
            across, up = frame.place(x, min(y, frame.top))
            cells[height - 1 - round(up * (height - 1))][round(across * (width - 1))] = mark
    lines = [frame.title]
    for number, row in enumerate(cells):
        level = frame.top * (height - 1 - number) / (height - 1)
        label = f"{level:7.3g}" if number % 3 == 0 or number == height - 1 else " " * 7
        lines.append(f"{label}│{''.join(row).rstrip()}")
    ends = f"{frame.low:.4g}", f"{frame.high:.4g}"
    middle = f"{frame.across}{', by factors' if frame.logarithmic else ''}"
    lines += [f"{'':7}└{'─' * width}", f"{'':8}{ends[0]}{middle.center(width - len(ends[0] + ends[1]))}{ends[1]}"]
    lines += [f"{'':8}{mark} {curve.name}" for mark, curve in zip(MARKS, curves, strict=False)]
    return "\n".join(lines)


def as_svg(curves: Sequence[Curve], frame: Frame) -> str:
    """A small SVG: axes, four levels, one line a curve, names on the right."""
    left, top, width, height = 60, 40, 560, 300

    def at(x: float, y: float) -> str:
        across, up = frame.place(x, min(y, frame.top))
        return f"{left + across * width:.1f},{top + (1 - up) * height:.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 400" font-family="sans-serif" font-size="12">',
        '<rect width="860" height="400" fill="white"/>',
        f'<text x="{left}" y="24" font-size="14">{escape(frame.title)}</text>',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
    ]
    for quarter in range(5):
        y = top + height * (4 - quarter) / 4
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{frame.top * quarter / 4:.3g}</text>')
    below = top + height + 18
    parts.append(f'<text x="{left}" y="{below}">{frame.low:.4g}</text>')
    parts.append(f'<text x="{left + width}" y="{below}" text-anchor="end">{frame.high:.4g}</text>')
    parts.append(f'<text x="{left + width / 2}" y="{below}" text-anchor="middle">{escape(frame.across)}</text>')
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(at(x, y) for x, y in curve.points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = top + 14 + 20 * number
        parts.append(f'<text x="{left + width + 14}" y="{y}" fill="{colour}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def save_png(path: Path, curves: Sequence[Curve], frame: Frame) -> None:
    """Draw with matplotlib.

    Raises:
        UsageError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise UsageError(
            f"{path}: PNG needs matplotlib", hint="pip install matplotlib, or name the file .svg"
        ) from error
    picture = Picture(figsize=(8.6, 4))
    axes = picture.add_subplot()
    for number, curve in enumerate(curves):
        across, up = zip(*curve.points, strict=True)
        axes.plot(across, up, label=curve.name, color=COLOURS[number % len(COLOURS)])
    axes.set(title=frame.title, xlabel=frame.across, ylim=(0, frame.top * 1.02))
    axes.set_xscale("log" if frame.logarithmic else "linear")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    picture.savefig(path, dpi=150, bbox_inches="tight")
