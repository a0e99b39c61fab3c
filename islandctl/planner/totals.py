"""The run as a whole: how long to the end, what failures take, what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.pace import Pace
from islandctl.config.recipe import Recipe
from islandctl.planner import cost, storage
from islandctl.planner.estimate import Setting
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Totals


def totals(setting: Setting, estimates: Sequence[CellEstimate]) -> Totals:
    """Add up the cells' estimates."""
    recipe, sites = setting.recipe, list(setting.sites.values())
    training, window = recipe.training, recipe.exchange.window
    tokens = float(trained_steps(recipe, setting.cells)) * training.batch * training.sequence
    failures = storage.failures_per_hour(sites)
    between = storage.mean_time_between_failures(failures) if failures is not None and failures.value else None
    window_s = _window_time(window, estimates)
    windows_per_hour = (0.0, 0.0, 0.0)
    if window_s is not None:
        windows_per_hour = (3600 / window_s.high, 3600 / window_s.value, 3600 / window_s.low)
    known = [(site, setting.accelerators[site.name]) for site in sites]
    per_hour = cost.cost_per_hour(known, estimates, setting.cells, windows_per_hour)
    plain = Totals(tokens=tokens, failures_per_hour=failures, between_failures=between, cost_per_hour=per_hour)
    if window_s is None:
        return plain
    write = 0.0  # a site without storage.write is planned without the time of its checkpoints
    if all(site.storage.write is not None for site in sites):
        write = max(estimate.checkpoint_write.value for estimate in estimates)
    read = max(
        storage.read_time(
            estimate.checkpoint_bytes.value, setting.sites[cell.site], setting.cells_on[cell.site], cell.num_ranks
        )
        for estimate, cell in zip(estimates, setting.cells, strict=True)
    )
    step_s = window_s.value / window
    lost = storage.lost_share(
        recipe.checkpoint.every * step_s, write, read, between, max(site.failures.outage for site in sites)
    )
    duration = _duration(training.steps / window, window_s, lost)
    speed = Figure(
        value=tokens / duration.value,
        low=tokens / duration.high,
        high=tokens / duration.low,
        unit="tokens/s",
        formula="all tokens / time to the end",
    )
    sent = sum(one.bytes_up_per_window.value + one.bytes_down_per_window.value for one in estimates)
    return plain.model_copy(
        update={
            "computing": min(
                (one.computing for one in estimates if one.computing is not None), key=lambda figure: figure.value
            ),
            "lost": lost,
            "best_checkpoint_every": None if between is None or not write else _best_every(write, between, step_s),
            "duration": duration,
            "tokens_per_s": speed,
            "relay_bytes_per_s": Figure(
                value=sent / window_s.value,
                low=sent / window_s.high,
                high=sent / window_s.low,
                unit="B/s",
                formula=f"all cells' {sent / 1e9:.3g} GB a window, in and out / window",
            ),
            "cost_per_billion_tokens": None if per_hour is None else cost.cost_per_billion_tokens(per_hour, speed),
            "cost_to_end": None if per_hour is None else cost.cost_to_end(per_hour, duration),
        }
    )


def trained_steps(recipe: Recipe, cells: Sequence[CellPlan]) -> int:
    """Of all cells together to the recipe's end, each its own; the warm-up's are the first one's alone."""
    steps = [Pace.of(recipe.exchange, cell.window).own_step(recipe.training.steps) for cell in cells]
    return sum(steps) - recipe.exchange.warmup * (len(cells) - 1)


def _window_time(window: int, estimates: Sequence[CellEstimate]) -> Figure | None:
    """Seconds of a window in the slowest cell, waits included."""
    spans = []
    for one in estimates:
        step = one.run_step
        if step is None or one.computing is None:
            return None
        # fast steps wait the longest, so the ends of the two ranges belong together
        spans.append(
            (
                window * step.low / one.computing.low,
                window * step.value / one.computing.value,
                window * step.high / one.computing.high,
            )
        )
    low, value, high = (max(span[index] for span in spans) for index in range(3))
    return Figure(
        value=value, low=min(low, value), high=max(high, value), unit="s", formula=f"{window} steps and their waits"
    )


def _duration(windows: float, window_s: Figure, lost: Figure) -> Figure:
    def stretched(seconds: float, share: float) -> float:
        return windows * seconds / max(1 - share, 1e-9)

    return Figure(
        value=stretched(window_s.value, lost.value),
        low=stretched(window_s.low, lost.low),
        high=stretched(window_s.high, lost.high),
        unit="s",
        formula=f"{windows:.6g} windows of {window_s.value:.3g} s, and {lost.value:.1%} for checkpoints and failures",
    )


def _best_every(write_s: float, between: Figure, step_s: float) -> Figure:
    low, value, high = (
        max(1.0, storage.best_interval(write_s, seconds) / step_s)
        for seconds in (between.low, between.value, between.high)
    )
    return Figure(
        value=value,
        low=low,
        high=high,
        unit="steps",
        formula=f"√(2 · {write_s:.3g} s to write · time between failures) / {step_s:.3g} s a step",
    )
