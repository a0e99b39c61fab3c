"""What-ifs: a recipe and sites with single values changed."""

from __future__ import annotations

from typing import Any

import pytest

from islandctl.errors import UsageError
from islandctl.planner.change import Case, parse_setting


def changed(case: Case, *settings: str) -> Case:
    return case.changed_together([parse_setting(one) for one in settings])


def test_lists_as_in_yaml_and_null_for_a_key_that_is_left_out(recipe: Any, site: Any) -> None:
    case = Case(recipe(exchange__fragments=2), [site("a", price__gpu="3 USD/h"), site("b")])
    given = changed(
        case, "training.optimizer.betas=[0.8, 0.9]", "exchange.fragments=null", "site.price=~"
    ).recipe.value
    assert (given.training.inner.betas, given.exchange.fragments) == ((0.8, 0.9), 4)
    assert changed(case, "a.price.gpu=null").sites[0].value.price.gpu is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("exchange.exact=[*.router]", "--set exchange.exact:1:3: "),
        ("exchange.nothing=null", "--set exchange.nothing=null: there is no key 'nothing'"),
        ("training=null", "--set training=null: training: key 'training' is missing"),
        ("site.wan.up=5 Gbps", "--set site.wan.up=5 Gbps: wan.up: unit 'Gbps' is ambiguous"),
        ("exchange.alpha=0.3", "--set exchange.alpha=0.3: means nothing with apply: carry"),
    ],
)
def test_what_is_not_possible_is_told_as_it_was_typed(recipe: Any, site: Any, setting: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        changed(Case(recipe(), [site("a")]), setting)
    assert caught.value.message.startswith(message)


def test_what_lies_idle_after_a_what_if_is_no_fault_of_it(recipe: Any) -> None:
    optimizer = {"kind": "shampoo", "block": 64, "lr": 1e-3}
    case = Case(recipe(training__optimizer=optimizer), [])
    assert changed(case, "training.optimizer.kind=muon").recipe.value.training.inner.kind == "muon"
    assert changed(case, "exchange.alpha=0.3", "exchange.apply=blend").recipe.value.exchange.alpha == 0.3


def test_a_site_that_is_called_as_a_section_hides_none_of_it(recipe: Any, site: Any) -> None:
    case = Case(recipe(), [site("exchange"), site("relay")])
    given = changed(case, "exchange.overlap=3", "exchange.wan.rtt=9 ms", "relay.port=5000", "relay.wan.rtt=8 ms")
    assert (given.recipe.value.exchange.overlap, given.recipe.value.relay.port) == (3, 5000)
    assert [one.value.wan.rtt for one in given.sites] == [0.009, 0.008]
    assert given.now("exchange.overlap") == 3
    assert given.now("exchange.wan.rtt") == "0.009 s"
