"""A plan's schedule simulated: distributions of utilisation, waiting and lost work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from islandctl.config.model import Model
from islandctl.errors import UsageError
from islandctl.planner import chance, storage
from islandctl.planner.catalogue import CPU
from islandctl.planner.estimate import Setting
from islandctl.planner.plan import Plan
from islandctl.planner.simulate import Actor, Outcome, play_out
from islandctl.planner.warmup import EXACT_BYTES

MOST_ROUNDS = 80_000_000
"""Cells × rounds that are played at most: what comes after would be more of the same."""
REPEAT_UP_TO = 1_000_000
"""Cells × rounds up to which a run is played several times."""
MOST_RUNS = 20


class Spread(Model):
    """A distribution: one in ten lies below p10, half below p50, one in ten above p90."""

    p10: float
    p50: float
    p90: float


class Simulated(Model):
    """What came of it."""

    seed: int
    runs: int
    """Times that the run was played, from ``seed`` on."""
    cells: int
    windows: int
    """Played of each run; of a very long one the beginning."""
    windows_planned: int
    computing: Spread
    """Share of the time in which cells train, over windows."""
    computing_mean: float
    wait_s: Spread
    """The longest that a cell stood still for a round's result, over rounds."""
    late_rounds: float
    """Share of the rounds for which somebody stood still."""
    empty_rounds: float
    """Share of the rounds that were committed empty: what was learnt came with the next one."""
    partial_rounds: float
    """Share of the rounds that were committed without somebody."""
    failures: float
    """In a run: cells that went away, those that went with their whole site included."""
    site_outages: float
    """In a run."""
    lost_s: Spread | None
    """Over failures: seconds that the cell was away, and of steps that it repeated or skipped. None: no failure."""
    lost_share: float
    """Of all cells' time."""
    relay_restarts: float
    """In a run."""
    duration_s: Spread
    """To the recipe's end, over runs."""
    assumptions: tuple[str, ...]


def simulated(setting: Setting, plan: Plan, seed: int) -> Simulated:
    """Play the plan's schedule.

    Raises:
        UsageError: a step time is not known.
    """
    unknown = [estimate.cell for estimate in plan.estimates if estimate.step is None]
    if unknown:
        raise UsageError(
            f"--simulate: the step time of {unknown[0]} is unknown",
            hint="give gpu.bf16 or measured.step in the profile, --from-run, or --set site.measured.step='200 ms'",
        )
    exchange, training = plan.recipe.exchange, plan.recipe.training
    planned = max(1, (training.steps - exchange.warmup) // exchange.window)
    each = len(plan.cells) * exchange.fragments
    windows = max(1, min(planned, MOST_ROUNDS // each))
    runs = max(1, min(MOST_RUNS, REPEAT_UP_TO // (each * windows)))
    known = all(site.storage.write is not None for site in plan.sites)
    saving = max(one.checkpoint_write.value for one in plan.estimates) if known else 0.0
    outcomes = [
        play_out(
            exchange,
            [fragment.with_headers(fragment.encoded_bytes) for fragment in setting.fragments],
            _actors(setting, plan),
            windows=windows,
            checkpoint_every=plan.recipe.checkpoint.every,
            checkpoint_s=saving,
            seed=seed + number,
            seed_bytes=EXACT_BYTES * sum(fragment.values for fragment in setting.fragments),
            relay_site=_relay_site(setting, plan),
        )
        for number in range(runs)
    ]
    return _told(outcomes, plan, seed=seed, windows=windows, planned=planned)


def _relay_site(setting: Setting, plan: Plan) -> int | None:
    """The site among whose hosts the relay runs; None: it stands elsewhere."""
    host = plan.recipe.relay.host
    return next((number for number, site in enumerate(setting.sites.values()) if host in site.hosts), None)


def _actors(setting: Setting, plan: Plan) -> list[Actor]:
    actors, numbers = [], {name: number for number, name in enumerate(setting.sites)}
    for cell, estimate in zip(setting.cells, plan.estimates, strict=True):
        site, link, cells = setting.sites[cell.site], setting.links[cell.name], setting.cells_on[cell.site]
        rate = storage.failures_per_hour([site])
        saved = estimate.checkpoint_bytes.value
        breaks = rate is not None and rate.value > 0
        assert estimate.run_step is not None
        actors.append(
            Actor(
                step_s=estimate.run_step.value,
                up_s_per_byte=1 / link.up_bytes_per_s,
                down_s_per_byte=1 / link.down_bytes_per_s,
                rtt_s=link.rtt_s,
                between_failures_s=3600 * cells / rate.value if rate is not None and breaks else 0.0,
                outage_s=site.failures.outage,
                read_s=0.0 if site.gpu.type == CPU else storage.read_time(saved, site, cells, cell.num_ranks),
                site=numbers[cell.site],
                between_site_outages_s=site.failures.site if breaks else 0.0,
                site_outage_s=site.failures.site_outage,
            )
        )
    return actors


def _told(outcomes: Sequence[Outcome], plan: Plan, *, seed: int, windows: int, planned: int) -> Simulated:
    rounds = max(1, sum(one.rounds for one in outcomes))
    shares = [share for one in outcomes for share in one.computing]
    waits = [wait for one in outcomes for wait in one.waits_s]
    lost = [seconds for one in outcomes for seconds in one.lost_s]
    whole = sum(one.duration_s for one in outcomes) * len(plan.cells)
    outages = sorted({site.failures.outage for site in plan.sites})
    rate = plan.totals.failures_per_hour
    words = f"failures: {rate.formula}" if rate is not None else "no failures: no accelerator here is known to break"
    sites = f"a site has an outage once in {_few((one.failures.site for one in plan.sites), 86_400)} days "
    sites += f"(failures.site), which takes {_few((one.failures.site_outage for one in plan.sites), 3600)} h"
    away = f"a failure takes {' or '.join(f'{seconds:g} s' for seconds in outages[:3])} (failures.outage) until the "
    return Simulated(
        seed=seed,
        runs=len(outcomes),
        cells=len(plan.cells),
        windows=windows,
        windows_planned=planned,
        computing=spread(shares),
        computing_mean=sum(shares) / len(shares),
        wait_s=spread(waits),
        late_rounds=sum(wait > 0 for wait in waits) / max(1, len(waits)),
        empty_rounds=sum(one.empty for one in outcomes) / rounds,
        partial_rounds=sum(one.partial for one in outcomes) / rounds,
        failures=len(lost) / len(outcomes),
        site_outages=sum(one.site_outages for one in outcomes) / len(outcomes),
        lost_s=spread(lost) if lost else None,
        lost_share=sum(lost) / whole if whole else 0.0,
        relay_restarts=sum(one.relay_restarts for one in outcomes) / len(outcomes),
        duration_s=spread([one.warmup_s + (one.duration_s - one.warmup_s) * planned / windows for one in outcomes]),
        assumptions=(
            words,
            away + "first new step; one in ten three times as long",
            *((sites,) if rate is not None else ()),
            *chance.WORDS,
        ),
    )


def _few(values: Iterable[float], unit: float) -> str:
    return " or ".join(f"{value / unit:g}" for value in sorted(set(values))[:3])


def spread(values: Sequence[float]) -> Spread:
    """The deciles of ``values``; zeros of none."""
    ordered = sorted(values) or [0.0]
    p10, p50, p90 = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return Spread(p10=p10, p50=p50, p90=p90)
