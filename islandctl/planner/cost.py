"""What a run costs, where prices are known."""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.site import SiteProfile
from islandctl.planner.catalogue import CPU, Accelerator
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Finding


def cost_per_hour(
    sites: Sequence[tuple[SiteProfile, Accelerator]],
    estimates: Sequence[CellEstimate],
    cells: Sequence[CellPlan],
    windows_per_hour: tuple[float, float, float],
) -> Figure | None:
    """US dollars an hour over all sites: accelerators, and egress where the profile prices it.

    None when one site's price is not known: a sum with a hole in it would be believed.

    Args:
        windows_per_hour: fewest, expected, most; zeros where the step time is unknown, and egress is left out.
    """
    low = high = usual = 0.0
    parts = []
    sent: dict[str, float] = {}
    for estimate, cell in zip(estimates, cells, strict=True):
        sent[cell.site] = sent.get(cell.site, 0.0) + estimate.bytes_up_per_window.high
    for site, known in sites:
        if known.price_low is None or known.price_high is None:
            return None
        low += site.gpu.count * known.price_low
        high += site.gpu.count * known.price_high
        usual += site.gpu.count * (known.price_low + known.price_high) / 2
        parts.append(
            f"{site.name}: {site.gpu.count} × {_span(known.price_low, known.price_high)} ({known.price_source})"
        )
        if site.price.egress:
            window = sent.get(site.name, 0.0) / 1e9 * site.price.egress
            least, expected, most = (window * number for number in windows_per_hour)
            low, usual, high = low + least, usual + expected, high + most
            parts.append(f"egress {_span(least, most)}")
    words = "; ".join(parts if len(parts) <= 6 else [*parts[:5], f"and {len(parts) - 5} more"])
    return Figure(value=usual, low=low, high=high, unit="USD/h", formula=words)


def cost_per_billion_tokens(per_hour: Figure, tokens_per_s: Figure) -> Figure:
    """US dollars for 10⁹ tokens at the speed that is left after waits and failures."""
    return Figure(
        value=per_hour.value / (tokens_per_s.value * 3600) * 1e9,
        low=per_hour.low / (tokens_per_s.high * 3600) * 1e9,
        high=per_hour.high / (tokens_per_s.low * 3600) * 1e9,
        unit="USD/10⁹ tokens",
        formula="cost an hour / tokens an hour",
    )


def cost_to_end(per_hour: Figure, duration: Figure) -> Figure:
    """US dollars until the recipe's last step, waits and expected failures included."""
    return Figure(
        value=per_hour.value * duration.value / 3600,
        low=per_hour.low * duration.low / 3600,
        high=per_hour.high * duration.high / 3600,
        unit="USD",
        formula="cost an hour × time to the end",
    )


def cost_finding(sites: Sequence[tuple[SiteProfile, Accelerator]]) -> list[Finding]:
    """Sites whose price is not known. This machine costs nothing that a price list knows."""
    return [
        Finding(
            level="ok" if site.gpu.type == CPU else "warn",
            place=f"site {site.name}",
            text="no price known: the cost is left out",
            hint="" if site.gpu.type == CPU else "give price.gpu in the profile",
        )
        for site, known in sites
        if known.price_low is None
    ]


def _span(low: float, high: float) -> str:
    return f"{low:.2f} USD/h" if low == high else f"{low:.2f} to {high:.2f} USD/h"
