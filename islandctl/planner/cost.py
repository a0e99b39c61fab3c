"""What a run costs an hour, where prices are known."""

from __future__ import annotations

from collections.abc import Sequence

from islandctl.config.recipe import Recipe
from islandctl.config.site import SiteProfile
from islandctl.planner.catalogue import CPU, Accelerator
from islandctl.planner.plan import CellEstimate, CellPlan, Figure, Finding


def cost_per_hour(
    recipe: Recipe,
    sites: Sequence[tuple[SiteProfile, Accelerator]],
    estimates: Sequence[CellEstimate],
    cells: Sequence[CellPlan],
) -> Figure | None:
    """US dollars an hour over all sites: accelerators, and egress where the profile prices it.

    None when one site's price is not known: a sum with a hole in it would be believed.
    """
    low = high = 0.0
    parts = []
    for site, known in sites:
        if known.price_low is None or known.price_high is None:
            return None
        low += site.gpu.count * known.price_low
        high += site.gpu.count * known.price_high
        parts.append(
            f"{site.name}: {site.gpu.count} × {_span(known.price_low, known.price_high)} ({known.price_source})"
        )
        if site.price.egress:
            own = [estimate for estimate, cell in zip(estimates, cells, strict=True) if cell.site == site.name]
            least, most = _egress(recipe, own, site.price.egress)
            low, high = low + least, high + most
            parts.append(f"egress {_span(least, most)}")
    return Figure(value=(low + high) / 2, low=low, high=high, unit="USD/h", formula="; ".join(parts))


def _egress(recipe: Recipe, estimates: Sequence[CellEstimate], usd_per_gb: float) -> tuple[float, float]:
    """Dollars an hour for what the site's cells send. A cell whose step time is unknown counts as 0."""
    least = most = 0.0
    for estimate in estimates:
        if estimate.step is not None:
            per_window = estimate.bytes_up_per_window.high / 1e9 * usd_per_gb
            windows_per_hour = 3600 / (recipe.exchange.window * estimate.step.low)
            most += per_window * windows_per_hour
            least += per_window * 3600 / (recipe.exchange.window * estimate.step.high)
    return least, most


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
