"""The command line: run arms, try settings, write the table."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from islandctl.errors import IslandError
from scripts.experiments.equal_compute_lib.arms import ARMS, Arm, other
from scripts.experiments.equal_compute_lib.cache import Cache
from scripts.experiments.equal_compute_lib.settings import Run
from scripts.experiments.equal_compute_lib.table import write

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    cache = Cache(options.results / "equal_compute")
    try:
        return int(options.what(options, cache))
    except (IslandError, ValueError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="equal_compute", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of tables and kept runs (docs/results)")
    commands = parser.add_subparsers(required=True, metavar="run | try | table | list | kept")

    run = commands.add_parser("run", help="train what is missing of some arms, or of all, then write the table")
    run.add_argument("arms", nargs="*", metavar="ARM", help="names as `list` gives them; none: all")
    run.set_defaults(what=_run)

    attempt = commands.add_parser("try", help="train once with the settings given, as `steps=200 exchange.window=25`")
    attempt.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    attempt.set_defaults(what=_try)

    table = commands.add_parser("table", help="write the table from what is kept")
    table.set_defaults(what=_table)
    for each in (run, table):
        each.add_argument("--seeds", help="other seeds, as 3,4,5")
        each.add_argument("--text", help="other text: a folder, file or glob")
    commands.add_parser("list", help="list the arms").set_defaults(what=_list)
    commands.add_parser("kept", help="list every kept run, the best first").set_defaults(what=_kept)
    return parser


def _run(options: argparse.Namespace, cache: Cache) -> int:
    unknown = set(options.arms) - {arm.name for arm in ARMS}
    if unknown:
        raise ValueError(f"no arm named {', '.join(sorted(unknown))}; `equal_compute list` lists them")
    arms = _arms(options)
    wanted = [arm for arm in arms if not options.arms or arm.name in options.arms]
    bases = {arm.against for arm in wanted}
    for arm in arms:
        if arm in wanted or arm.name in bases:
            fill(arm, cache)
            write(arms, cache, options.results)
    return 0


def _arms(options: argparse.Namespace) -> list[Arm]:
    seeds = tuple(int(seed) for seed in options.seeds.split(",")) if options.seeds else None
    return [other(arm, options.text, seeds) for arm in ARMS]


def fill(arm: Arm, cache: Cache) -> None:
    """The best rate by the first seed, then that rate with all seeds."""
    first = {rate: run for rate in arm.rates for run in list(arm.runs(rate))[:1]}
    best = climb(arm.rates, lambda rate: _one(arm, first[rate], cache))
    for run in arm.runs(best):
        _one(arm, run, cache)


def climb(rates: Sequence[float], cost: Callable[[float], float]) -> float:
    """The rate of the least cost: from the middle of the grid downhill, until the next is worse on both sides."""
    grid = sorted(rates)
    place = len(grid) // 2
    best = cost(grid[place])
    for way in (1, -1):
        while 0 <= place + way < len(grid) and (found := cost(grid[place + way])) < best:
            place, best = place + way, found
    return grid[place]


def _one(arm: Arm, run: Run, cache: Cache) -> float:
    """Bits per byte; infinite when it diverged."""
    place = f"{arm.name}, rate {run.inner.lr}, seed {run.seed}"
    try:
        result = cache.result(run, lambda line: print(f"{place}: {line}", flush=True))
    except FloatingPointError as error:
        print(f"{place}: {error}", flush=True)
        return math.inf
    found = float(result["bits_per_byte"])
    print(f"{place}: {found:.4f} bits per byte", flush=True)
    return found


def _try(options: argparse.Namespace, cache: Cache) -> int:
    run = parse(options.settings)
    result = cache.result(run, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps({"settings": run.told(), "result": result}, indent=1))
    return 0


def _table(options: argparse.Namespace, cache: Cache) -> int:
    write(_arms(options), cache, options.results)
    return 0


def _list(options: argparse.Namespace, cache: Cache) -> int:
    for arm in ARMS:
        print(f"{arm.name:28} {arm.title}")
    return 0


def _kept(options: argparse.Namespace, cache: Cache) -> int:
    for run, result in sorted(cache, key=lambda one: float(one[1]["bits_per_byte"])):
        print(f"{result['bits_per_byte']:.4f}  {' '.join(words(run.told()))}")
    return 0


def words(tree: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Settings as ``try`` takes them."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from words(value, f"{place}{key}.")
        else:
            yield f"{place}{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"


def parse(settings: Sequence[str]) -> Run:
    """A run from ``key=value`` words; values are JSON or plain words.

    Raises:
        ValueError: a word without ``=``, an unknown key, or a value that does not fit.
    """
    tree: dict[str, Any] = {}
    for word in settings:
        path, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"'{word}' is not KEY=VALUE")
        place = tree
        *outer, last = path.split(".")
        for name in outer:
            place = place.setdefault(name, {})
        try:
            place[last] = json.loads(text)
        except json.JSONDecodeError:
            place[last] = text
    return Run.model_validate(tree)
