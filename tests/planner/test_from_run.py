"""What a run's files show, held against its plan. The files are written by the classes that write them in a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from islandctl.exchange.metrics import Metrics as ExchangeMetrics
from islandctl.ledger.entries import Commit, Contribution
from islandctl.planner.change import Case
from islandctl.planner.fragments import fragment_sizes
from islandctl.planner.from_run import Shown
from islandctl.planner.make import make_plan, sweep_plans
from islandctl.planner.measured import Counted, cell_shown, parse_lines, round_times, with_bytes, with_rounds
from islandctl.planner.plan import Plan
from islandctl.planner.sweep import parse_axis
from islandctl.worker.metrics import Metrics

STEP_S, WINDOWS = 0.2, 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock of the lines, set by hand."""
    now = [1000.0]
    monkeypatch.setattr("islandctl.worker.metrics.time.time", lambda: now[0])
    return now


@pytest.fixture
def demo(shipped: Callable[..., Any]) -> tuple[Any, Any, Plan]:
    recipe, sites = shipped("demo", "local-a", "local-b")
    return recipe, sites, make_plan(recipe, sites)


def written(path: Path, clock: list[float], plan: Plan, *, waits: float = 0.0, failures: int = 0) -> bytes:
    """A cell's lines of two windows: steps of 0.2 s, a round every 12 or 13 steps, an evaluation in between."""
    metrics, told = Metrics(path, 1), ExchangeMetrics(plan.recipe.exchange.fragments)
    due = {window * 50 + (p + 1) * 50 // 4 + 5: (window, p) for window, p in itertools.product(range(2), range(4))}
    for _ in range(failures + 1):
        metrics.write("start", 0, checkpoint="", num_ranks=1, life="1.0")
    for step in range(1, WINDOWS * 50 + 6):
        clock[0] += STEP_S + (1.5 if step in due else 0.0)
        metrics.write("train", step, loss=3.0, tokens=step * 1024, tokens_per_s=5000.0, peak_bytes=500 << 20)
        if step in due:
            window, p = due[step]
            told.resolved(named=True, late=False)
            told.round_s[p] = 0.9 + 0.1 * p + 0.001 * window + waits
            versions = [sum(done <= step and q == each for done, (_, q) in due.items()) for each in range(4)]
            metrics.write("exchange", step, **told.as_dict(), versions=versions)
        if step == 50:
            clock[0] += 3.0
            metrics.write("eval", step, bits_per_byte=4.0)
    metrics.close()
    return path.read_bytes()


def commits(plan: Plan, cells: int = 2) -> list[Commit]:
    fragments = fragment_sizes(plan.recipe.decoder, plan.recipe.exchange)
    last = -(-plan.recipe.training.steps // plan.recipe.exchange.window)
    return [
        Commit(
            seq=0, attempt=1, at="", previous="", fragment=p, window=window, version=1, reason="complete",
            named=tuple(
                Contribution(cell=cell, step=1, tokens=1, chunks=("h",) * fragments[p].num_chunks)
                for cell in range(cells)
            ),
        )
        for window, p in itertools.product([*range(WINDOWS), last], range(4))
    ]  # fmt: skip


def shown(tmp_path: Path, clock: list[float], plan: Plan, *, failures: int = 0, windows: int = WINDOWS) -> Shown:
    """The run's two cells; the relay has counted the last ``windows`` regular windows, and the final rounds."""
    begun, lines = clock[0], []
    (tmp_path := tmp_path / str(failures)).mkdir()
    for cell, waits in (("local-a", 1.0), ("local-b", 0.0)):
        clock[0] = begun
        lines.append(parse_lines(written(tmp_path / cell, clock, plan, waits=waits, failures=failures)))
    seen = [cell_shown(cell.name, own) for cell, own in zip(plan.cells, lines, strict=True)]
    seen = with_rounds(seen, [round_times(own) for own in lines])
    fragments = fragment_sizes(plan.recipe.decoder, plan.recipe.exchange)
    sent = windows * sum(one.with_headers(one.encoded_bytes) for one in fragments)
    sent += sum(one.with_headers(one.whole_bytes) for one in fragments)
    packets = (windows + 1) * sum(one.num_chunks for one in fragments)
    counted = Counted(packets=packets, bytes_up=sent, bytes_down=sent)
    return Shown(
        run="r1", plan=plan, cells=tuple(with_bytes(seen, [counted] * 2, commits(plan), fragments, windows=range(16)))
    )


def test_a_recorded_run_against_its_plan(tmp_path: Path, clock: list[float], demo: Any) -> None:
    run = shown(tmp_path, clock, demo[2])
    rows = {(one.cell, one.name): one for one in run.comparisons()}
    for cell in ("local-a", "local-b"):
        assert rows[cell, "memory"].measured == 500 << 20
        assert rows[cell, "memory"].within is True
        assert rows[cell, "step"].measured == pytest.approx(STEP_S, abs=0.002)
        assert rows[cell, "step"].planned is None
        assert rows[cell, "step"].within is None
        for way in ("sent", "fetched"):
            assert rows[cell, way].measured == pytest.approx(rows[cell, way].planned, rel=0.01)
            assert rows[cell, way].within is True
        # the slowest fragment, in the cell that waits for nobody
        assert rows[cell, "exchange"].measured == pytest.approx(1.2, abs=0.01)
        assert rows[cell, "exchange"].within is True


@pytest.mark.parametrize("windows", [0, 1])
def test_a_relay_that_was_started_anew_has_counted_the_last_rounds(
    tmp_path: Path, clock: list[float], demo: Any, windows: int
) -> None:
    """With none but the final ones, which go whole, nothing is known of a window."""
    told = [one for one in shown(tmp_path, clock, demo[2], windows=windows).comparisons() if one.name == "sent"]
    assert len(told) == 2
    for one in told:
        assert one.measured == (pytest.approx(one.planned, rel=0.01) if windows else None)


def test_a_damaged_or_empty_file_shows_nothing() -> None:
    assert parse_lines(b'{"kind": "tr\n[1]\n\n{"kind": "train"}') == []
    assert cell_shown("a", []).step_s is None
    assert with_rounds([cell_shown("a", [])], [{}])[0].exchange_s is None


def test_measured_figures_take_the_place_of_assumed_ones(tmp_path: Path, clock: list[float], demo: Any) -> None:
    recipe, sites, plan = demo
    run = shown(tmp_path, clock, plan)
    again = make_plan(recipe, sites, run)
    for estimate in again.estimates:
        assert estimate.step is not None
        assert (estimate.step.value, estimate.step.assumed) == (pytest.approx(STEP_S, abs=0.002), False)
        assert estimate.step.formula == "measured.step of run r1"
        assert estimate.memory_per_rank.value == 500 << 20
        assert estimate.exchange.value == pytest.approx(1.2, abs=0.01)
    assert again.totals.duration is not None
    assert plan.totals.duration is None


def test_what_the_run_did_not_do_is_planned_as_before(tmp_path: Path, clock: list[float], demo: Any) -> None:
    recipe, sites, plan = demo
    run = shown(tmp_path, clock, plan)
    case = Case(recipe, sites, run)
    for path, value, kept, lost in (
        ("training.batch", 16, "sent", "step"),
        ("exchange.codec", "int4", "step", "sent"),
        ("site.wan.rtt", "20 ms", "sent", "exchange"),
        ("local-a.gpu.type", "H100-SXM", "sent", "step"),
    ):
        new = case.changed(path, value)
        first = make_plan(new.recipe, new.sites, new.shown).sites[0].measured
        assert getattr(first, kept) is not None, path
        assert getattr(first, lost) is None, path
    swept = sweep_plans(case, [parse_axis("training.batch=8,16")])
    assert [point.step_s is None for point in swept.points] == [False, True]


def test_a_profile_keeps_what_it_says_itself(tmp_path: Path, clock: list[float], demo: Any) -> None:
    recipe, sites, plan = demo
    case = Case(recipe, sites, shown(tmp_path, clock, plan)).changed("local-a.measured.step", "7 s")
    again = make_plan(case.recipe, case.sites, case.shown)
    assert [site.measured.step for site in again.sites] == [7, pytest.approx(STEP_S, abs=0.002)]


def test_failures_count_from_three_on(tmp_path: Path, clock: list[float], demo: Any) -> None:
    recipe, sites, plan = demo
    few = shown(tmp_path, clock, plan, failures=1)
    assert few.failures == 2
    assert make_plan(recipe, sites, few).sites[0].failures.per_gpu is None
    many = shown(tmp_path, clock, plan, failures=2)
    per_gpu = make_plan(recipe, sites, many).sites[0].failures.per_gpu
    assert per_gpu == pytest.approx(many.accelerator_hours * 3600 / 4)
