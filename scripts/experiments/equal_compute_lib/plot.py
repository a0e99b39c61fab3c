"""The table as a picture: each arm's ratio to its ordinary run, and the same against what it sends."""

from __future__ import annotations

from pathlib import Path

from scripts.experiments.equal_compute_lib.report import Figure, Row


def plot(rows: dict[str, Row], ratios: dict[str, Figure], path: Path) -> None:
    """Write the PNG.

    Args:
        rows: by the arm's name.
        ratios: of the arms that are measured by another.

    Raises:
        ValueError: matplotlib is not there.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise ValueError("the plot needs matplotlib: pip install matplotlib") from error
    picture = Picture(figsize=(11, 0.34 * len(ratios) + 2), layout="constrained")
    FigureCanvasAgg(picture)
    left, right = picture.subplots(1, 2, width_ratios=(3, 2))
    names = list(reversed(ratios))
    for height, name in enumerate(names):
        one = ratios[name]
        left.errorbar(one.mean, height, xerr=one.error or 0.0, fmt="o", color="tab:blue", capsize=3)
        row = rows[name]
        sent = (row.mean("bytes_up_per_cell") + row.mean("bytes_joint_per_cell")) / row.arm.run.steps
        right.plot(sent / 1000, one.mean, "o", color="tab:blue")
        right.annotate(name, (sent / 1000, one.mean), fontsize=6, xytext=(3, 3), textcoords="offset points")
    left.set_yticks(range(len(names)), [rows[name].arm.title for name in names], fontsize=8)
    left.set_xlabel("bits per byte over ordinary training's (bars: standard error)")
    right.set_xlabel("kB that a cell sends per step, joint warm-up included")
    right.set_ylabel("ratio")
    right.set_xscale("log")
    for axes, line in ((left, left.axvline), (right, right.axhline)):
        line(1.0, color="black", linewidth=0.8)
        line(0.991, color="tab:green", linewidth=0.8, linestyle="--")
        axes.grid(alpha=0.3)
    picture.savefig(path, dpi=120, metadata={"Software": None})
