"""``islandctl compare``: which sites, and whether to rent, expand or own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from islandctl.cli.options import Json
from islandctl.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from islandctl.planner.compare import Compared, Way


def compare(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe (YAML).", show_default=False)],
    sites: Annotated[
        list[str], typer.Option("--sites", metavar="A,B", help="A set of site profiles; once for each set.")
    ],
    use: Annotated[
        str, typer.Option("--use", metavar="SHARE", help="Of the hours in which seasonal use needs them.")
    ] = "25 %",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="What if, in every set: as in `islandctl plan`."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare sets of sites for one recipe: speed and cost, rented or owned, used continuously or in seasons.

    A site whose profile has a `purchase` section is reckoned both ways: rented at price.gpu, and owned (capital
    written off, power, hours of people, also while it is idle). Says after how many months a purchase pays, and from
    which use on. A set of one site trains alone, without an exchange. Ends with 3 when no set works.

    Examples:
      islandctl compare recipe.yaml --sites us.yaml,asia.yaml --sites one-large.yaml
      islandctl compare recipe.yaml --sites mine.yaml,rented.yaml --use '30 %' --json
    """
    from islandctl.config.load import load_recipe, load_site
    from islandctl.config.units import parse_share
    from islandctl.planner.change import Case, parse_setting
    from islandctl.planner.make import compare_plans

    try:
        share = parse_share(use)
    except ValueError as error:
        raise UsageError(f"--use {use}: {error}", hint="for example --use '25 %'") from error
    if share <= 0:
        raise UsageError(f"--use {use}: must be more than nothing", hint="for example --use '25 %'")
    loaded = load_recipe(recipe)
    changes = [parse_setting(setting) for setting in settings or ()]
    cases = [
        Case(loaded, [load_site(path.strip()) for path in one.split(",") if path.strip()]).changed_together(changes)
        for one in sites
    ]
    compared = compare_plans(cases, share)
    if json:
        typer.echo(compared.model_dump_json(indent=2))
    else:
        _show(compared)
    if not any(way.feasible for way in compared.ways):
        raise InfeasibleError(
            "no set of sites works: "
            + "; ".join(f"{', '.join(way.sites)}: {way.binds}" for way in compared.ways[:3]),
            hint="islandctl plan says for one set what binds and what lifts it",
        )


def _show(compared: Compared) -> None:
    from rich.text import Text

    from islandctl.cli.tables import plain_table, print_table, wide_console
    from islandctl.config.units import count_text

    console = wide_console()
    seasonal = f"at {compared.seasonal_share:.0%}"
    table = plain_table(
        "", "sites", "way", "tokens/s", "to the end", "USD/month", seasonal, "USD/10⁹", seasonal, "capital"
    )
    for column in table.columns[3:]:
        column.justify = "right"
    table.columns[1].no_wrap = False
    for index, way in enumerate(compared.ways):
        cheapest = "◀" * (index == compared.cheapest) or "◁" * (index == compared.cheapest_seasonal)
        table.add_row(
            "✓" if way.feasible else "✗",
            _together(way.sites),
            way.way,
            "unknown" if way.tokens_per_s is None else count_text(way.tokens_per_s),
            "unknown" if way.days_to_end is None else f"{way.days_to_end:,.3g} d",
            f"{way.continuous.usd_per_month:,.0f}",
            f"{way.seasonal.usd_per_month:,.0f}",
            _dollars(way.continuous.usd_per_billion_tokens) + f" {cheapest}".rstrip(),
            _dollars(way.seasonal.usd_per_billion_tokens),
            f"{way.capital_usd:,.0f}" if way.capital_usd else "",
        )
    print_table(console, table)
    console.print(
        Text("◀ cheapest used continuously, ◁ in seasons; USD/month with the capital written off", style="dim")
    )
    for way in compared.ways:
        if way.way != "rent":
            console.print(Text(f"{_together(way.sites)}: {_pays(way, compared)}"))
    for words in compared.missing:
        console.print(Text(f"! {words}"))
    for way in compared.ways:
        if not way.feasible:
            console.print(Text(f"✗ {_together(way.sites)}, {way.way}: {way.binds} binds"))


def _pays(way: Way, compared: Compared) -> str:
    """When a purchase pays, in words."""
    if compared.ways.index(way) == 0 or compared.ways[compared.ways.index(way) - 1].sites != way.sites:
        return "no rent to compare with"
    if not way.capital_usd:
        at = "at no use" if way.pays_from_use is None else f"from {way.pays_from_use:.0%} use on"
        return f"all of it is owned already: cheaper than renting the same {at}"
    if way.pays_after_months is None:
        return "a purchase never pays against renting the same"
    text = f"a purchase pays after {way.pays_after_months:,.3g} months of continuous use; at "
    seasonal = way.pays_after_months_seasonal
    text += f"{compared.seasonal_share:.0%} " + ("never" if seasonal is None else f"after {seasonal:,.3g} months")
    from_use = way.pays_from_use
    return text + (f"; written off, from {from_use:.0%} use on" if from_use else "; written off, at no use")


def _dollars(number: float | None) -> str:
    return "?" if number is None else f"{number:,.2f}"


def _together(names: tuple[str, ...]) -> str:
    return " + ".join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} more"])
