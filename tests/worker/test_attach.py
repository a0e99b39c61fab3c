"""``islandctl.attach`` with known update sequences, and what it refuses."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import threading
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import islandctl
from islandctl.errors import (
    CheckpointError,
    ConfigError,
    ExchangeError,
    IslandError,
    NotFiniteError,
    RelayError,
    UsageError,
)
from islandctl.exchange import courier

from .small import STEPS, model, one_step, same, settings, train, values

pytestmark = pytest.mark.timeout(240)
Seen = dict[tuple[int, int], dict[str, Tensor]]


def watched() -> tuple[Seen, Any]:
    seen: Seen = {}

    def watch(cell: int, done: int, net: nn.Module) -> None:
        seen[cell, done] = values(net)

    return seen, watch


def diloco(num_cells: int, fragment_of: dict[str, int], num_fragments: int) -> Seen:
    """Streaming DiLoCo (arXiv 2501.18512) without overlap, as published; with one fragment DiLoCo (2311.08105).

    Every fragment has its own anchor and Nesterov momentum; fragment p of P is exchanged ⌊(p + 1)·W/P⌋ steps into
    every window of W. Written with whole tensors, from the papers alone.
    """
    window, lr, momentum = 4, 0.7, 0.9
    nets = [model() for _ in range(num_cells)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    anchor = values(nets[0])
    buffer = {name: torch.zeros_like(value) for name, value in anchor.items()}
    seen: Seen = {}
    for done in range(1, STEPS + 1):
        for cell, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            one_step(net, optimizer, cell, done - 1)
        due = [p for p in range(num_fragments) if (done - (p + 1) * window // num_fragments) % window == 0]
        for name in (name for name, fragment in fragment_of.items() if fragment in due):
            gradient = sum(anchor[name] - dict(net.named_parameters())[name].detach() for net in nets) / num_cells
            buffer[name] = momentum * buffer[name] + gradient
            anchor[name] = anchor[name] - lr * (gradient + momentum * buffer[name])
            for net in nets:
                dict(net.named_parameters())[name].data.copy_(anchor[name])
        for cell, net in enumerate(nets):
            seen[cell, done] = values(net)
    return seen


def close(one: Seen, other: Seen) -> None:
    assert one.keys() == other.keys()
    for key in one:
        for name in one[key]:
            torch.testing.assert_close(one[key][name], other[key][name], rtol=1e-5, atol=1e-6)


def test_one_cell_that_takes_its_own_steps_is_plain_training_bit_for_bit() -> None:
    seen, watch = watched()
    exchange = settings(outer={"lr": 1.0, "momentum": 0.0}, overlap=2)
    (end,) = islandctl.run_cells(train(exchange, watch=watch), 1, exchange)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        one_step(net, optimizer, 0, step)
        assert same(seen[0, step + 1], values(net)), f"step {step + 1}"
    assert same(end, values(net))


def test_one_fragment_without_overlap_is_diloco() -> None:
    seen, watch = watched()
    exchange = settings()
    islandctl.run_cells(train(exchange, finish=False, watch=watch), 2, exchange)
    close(seen, diloco(2, dict.fromkeys(values(model()), 0), 1))
    for done in range(4, STEPS + 1, 4):
        assert same(seen[0, done], seen[1, done])


@pytest.mark.parametrize("apply", ["carry", "blend"])
def test_fragments_without_overlap_are_streaming_diloco(apply: str) -> None:
    seen, watch = watched()
    exchange = settings(fragments=3, window=4, apply=apply, alpha=0.0)
    islandctl.run_cells(train(exchange, finish=False, watch=watch), 3, exchange)
    fragments = {name: {"0": 0, "2": 1, "4": 2}[name.split(".")[0]] for name in values(model())}
    close(seen, diloco(3, fragments, 3))


@pytest.mark.parametrize("overlap", [0, 3])
def test_cells_of_one_process_take_unequal_steps(overlap: int) -> None:
    """No cell waits in vain for its turn; all are at a window's end together, and it is the same every time."""
    exchange, windows = settings(pace="measured", fragments=3, overlap=overlap, codec="int8"), (3, 4, 7)
    told: list[tuple[int, int]] = []

    def loop(place: Any) -> tuple[int, dict[str, Tensor]]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with islandctl.attach(net, optimizer, steps=STEPS, tokens_per_step=8, transport=place) as island:
            for step in island.steps():
                one_step(net, optimizer, place.cell, step)
                island.step()
                if island.is_due(4):
                    told.append((place.cell, island.done))
            assert island.finish()
            return island.num_steps, values(net)

    ends = islandctl.run_cells(loop, 3, exchange, windows=windows)
    assert [steps for steps, _ in ends] == [9, 12, 21]
    assert sorted(told) == [(cell, own * number) for cell, own in enumerate(windows) for number in (1, 2, 3)]
    assert all(same(ends[0][1], end) for _, end in ends)
    again = islandctl.run_cells(loop, 3, exchange, windows=windows)
    assert same(ends[0][1], again[0][1])


def test_unequal_steps_are_told_or_refused() -> None:
    exchange = settings(pace="measured", fragments=3)
    with pytest.raises(ConfigError, match="takes 2 windows, one a cell, not 0"):
        islandctl.run_cells(train(exchange), 2, exchange)
    with pytest.raises(ConfigError, match="2 steps are fewer than 3 fragments"):
        islandctl.run_cells(train(exchange), 2, exchange, windows=(2, 4))
    with pytest.raises(ConfigError, match="windows are for exchange"):
        islandctl.run_cells(train(settings()), 2, settings(), windows=(4, 4))
    longer = settings(pace="measured", window=5, fragments=3)
    with pytest.raises(ConfigError, match="12 steps are no whole windows of 5"):
        islandctl.run_cells(train(longer), 2, longer, windows=(5, 6))


def test_pairs_without_overlap_are_plain_gossip() -> None:
    """Every window partners take their mean, bit after bit of their numbers; the end is the mean of all."""
    seen, watch = watched()
    exchange = settings(mode="butterfly", codec="fp32", overlap=0, fragments=1, outer={})
    ends = islandctl.run_cells(train(exchange, watch=watch), 4, exchange)
    nets = [model() for _ in range(4)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    expected: Seen = {}
    for done in range(1, STEPS + 1):
        for cell, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            one_step(net, optimizer, cell, done - 1)
        if done % exchange.window == 0:
            before = [values(net) for net in nets]
            for cell, net in enumerate(nets):
                other = cell ^ (1 << (done // exchange.window - 1) % 2)
                for name, parameter in net.named_parameters():
                    parameter.data.copy_((before[cell][name] + before[other][name]) / 2)
        expected |= {(cell, done): values(net) for cell, net in enumerate(nets)}
    close(seen, expected)
    last = [expected[cell, STEPS] for cell in range(4)]
    for name, end in ends[0].items():
        assert all(torch.equal(end, other[name]) for other in ends[1:])
        torch.testing.assert_close(end, torch.stack([one[name] for one in last]).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_twice_the_same_gives_the_same_bits_also_with_the_process_s_own_random_numbers(codec: str) -> None:
    exchange = settings(codec=codec, overlap=1, fragments=2)

    def loop(place: Any) -> dict[str, Tensor]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        island = islandctl.attach(net, optimizer, transport=place, steps=STEPS, tokens_per_step=8)
        for step in island.steps():
            one_step(net, optimizer, place.cell, step)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn(parameter.shape), alpha=1e-3)  # from the one generator of all cells
            island.step()
        island.finish()
        return values(net)

    ends = []
    for _ in range(2):
        torch.manual_seed(5)
        ends.append(islandctl.run_cells(loop, 4, exchange))
    assert all(same(one, ends[0][0]) for end in ends for one in end)


def test_saved_in_the_middle_and_gone_on_it_is_the_same_run() -> None:
    exchange = settings(codec="int8", overlap=2, fragments=2)
    whole = islandctl.run_cells(train(exchange), 2, exchange)

    def loop(place: Any) -> dict[str, Tensor]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        journal = islandctl.MemoryJournal()
        kinds: dict[str, Any] = {"transport": place, "steps": STEPS, "tokens_per_step": 8, "journal": journal}
        first = islandctl.attach(net, optimizer, **kinds)
        for step in first.steps():
            one_step(net, optimizer, place.cell, step)
            if first.step() == 5:
                break
        saved = (values(net), optimizer.state_dict(), first.state_dict())
        first.close()

        again = model()
        again.load_state_dict(saved[0])
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
        optimizer.load_state_dict(saved[1])
        second = islandctl.attach(again, optimizer, **kinds)
        second.load_state_dict(saved[2])
        assert second.done == 5
        for step in second.steps():
            assert step >= 5
            one_step(again, optimizer, place.cell, step)
            second.step()
        assert second.finish()
        assert second.tokens == 8 * STEPS
        return values(again)

    assert [same(a, b) for a, b in zip(islandctl.run_cells(loop, 2, exchange), whole, strict=True)] == [True, True]


@pytest.mark.parametrize(
    "changes", [{"codec": "int8", "overlap": 2}, {"mode": "butterfly", "codec": "int4", "outer": {}}]
)
def test_what_was_saved_goes_on_at_a_new_relay(changes: dict[str, Any]) -> None:
    """As in another process, where the first relay's ledger is gone."""
    exchange = settings(fragments=2, **changes)
    num_cells = 4 if exchange.mode == "butterfly" else 2
    whole = islandctl.run_cells(train(exchange), num_cells, exchange)
    saved: dict[int, Any] = {}

    def part(place: Any) -> dict[str, Tensor]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with islandctl.attach(net, optimizer, transport=place, steps=STEPS, tokens_per_step=8) as island:
            if place.cell in saved:
                for one, state in zip((net, optimizer, island), saved[place.cell], strict=True):
                    one.load_state_dict(state)
            for step in island.steps():
                one_step(net, optimizer, place.cell, step)
                if island.step() == 7 and len(saved) < num_cells:
                    saved[place.cell] = values(net), optimizer.state_dict(), island.state_dict()
                    return {}
            assert island.finish()
        return values(net)

    assert islandctl.run_cells(part, num_cells, exchange) == [{}] * num_cells
    ends = islandctl.run_cells(part, num_cells, exchange)
    assert [same(a, b) for a, b in zip(ends, whole, strict=True)] == [True] * num_cells

    del saved[1]
    with pytest.raises(CheckpointError, match="cell 1 begins with version 0, 0 of its fragments, the other cells"):
        islandctl.run_cells(part, num_cells, exchange)


def test_metrics_tell_of_the_rounds() -> None:
    exchange = settings(fragments=2)

    def loop(place: Any) -> dict[str, Any]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        island = islandctl.attach(net, optimizer, transport=place, steps=STEPS)
        for step in island.steps():
            island.step(tokens=7, loss=one_step(net, optimizer, place.cell, step))
        assert island.evaluate(lambda: 2.5) == 2.5
        assert island.finish()
        return {**island.metrics(), "tokens": island.tokens, "evaluated": island.evaluated}

    told = islandctl.run_cells(loop, 2, exchange)[1]
    assert told["rounds_applied"] == 2 * STEPS // 4 + 2
    assert told["bytes_up"] > 0
    assert (told["tokens"], told["evaluated"]) == (7 * STEPS, [(STEPS, 2.5)])


# What is refused


def refused(loop: Any, num_cells: int = 1, exchange: Any = None) -> IslandError:
    with pytest.raises(IslandError) as caught:
        islandctl.run_cells(loop, num_cells, exchange or settings())
    assert "\n" not in caught.value.message
    return caught.value


def attached(place: Any, net: nn.Module, **changes: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return islandctl.attach(net, optimizer, **{"transport": place, "steps": STEPS, "tokens_per_step": 1} | changes)


def test_attach_without_a_launch_and_without_a_transport() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="not started by `islandctl launch`") as caught:
        islandctl.attach(net, optimizer)
    for word in ("worker.command", "islandctl.run_cells", "transport=place", "docs/attach.md"):
        assert word in str(caught.value)
    with pytest.raises(UsageError, match="steps is given, but no transport") as caught:
        islandctl.attach(net, optimizer, steps=3)
    shown = traceback.format_exception(caught.value)[-1]  # as a notebook shows it
    assert shown.startswith("hint: transport=place inside islandctl.run_cells")


def test_cells_with_different_models_are_refused_by_the_parameter_s_name() -> None:
    touched = []

    def loop(place: Any) -> None:
        net = model(width=5 + place.cell)
        before = values(net)
        try:
            island = attached(place, net)
            for _ in island.steps():
                island.step()
        finally:
            touched.append(not same(before, values(net)))

    error = refused(loop, 2)
    assert isinstance(error, RelayError)
    assert error.code == "model"
    assert "parameter '0.bias': its shape is (5,) in cell-0, its shape is (6,) in cell-1" in error.message
    assert touched == [False, False]


@pytest.mark.parametrize("warmup", [0, 3])
def test_cells_that_begin_with_other_values_are_told_so(warmup: int) -> None:
    def loop(place: Any) -> None:
        net = model()
        with torch.no_grad():
            net[0].bias.add_(place.cell)
        for _ in (island := attached(place, net)).steps():
            island.step()

    error = refused(loop, 2, settings(warmup=warmup))
    if warmup:
        assert "all cells must begin with equal values" in str(error.hint)
    else:
        assert error.message.endswith("different anchors at version 0: they did not begin with equal values")


def test_a_value_that_is_no_number_is_named_before_it_is_sent() -> None:
    def loop(place: Any) -> None:
        net = model()
        island = attached(place, net)
        for step in island.steps():
            if step == 3:
                with torch.no_grad():
                    net[2].weight[1, 1] = math.nan
            island.step()

    error = refused(loop)
    assert isinstance(error, NotFiniteError)  # a launched run ends with it: a repetition would meet it again
    assert "parameter '2.weight' holds a value that is not finite" in error.message
    assert error.hint.startswith("lower the learning rate or clip gradients, and begin anew (a launched run:")


@pytest.mark.parametrize("exchange", [settings(), settings(warmup=3), settings(mode="butterfly", outer={})])
def test_a_model_that_begins_with_no_number_is_refused_before_it_trains(exchange: Any) -> None:
    trained = []

    def loop(place: Any) -> None:
        net = model()
        with torch.no_grad():
            net[2].bias[1] = math.inf
        for step in attached(place, net).steps():
            trained.append(step)

    error = refused(loop, 2, exchange)
    assert isinstance(error, ConfigError)
    assert "parameter '2.bias' holds a value that is not finite before the first step" in error.message
    assert error.hint == "give it first values before islandctl.attach()"
    assert not trained


def saved_at(done: int, exchange: Any, num_cells: int = 2) -> list[dict[str, Tensor]]:
    """The exchange's states of all cells after so many steps."""

    def loop(place: Any) -> dict[str, Tensor]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with islandctl.attach(net, optimizer, transport=place, steps=STEPS, tokens_per_step=8) as island:
            for step in island.steps():
                one_step(net, optimizer, place.cell, step)
                if island.step() == done:
                    break
            return island.state_dict()

    return islandctl.run_cells(loop, num_cells, exchange)


@pytest.mark.parametrize("kind", ["anchor", "residual", "flight.0.vector", "flight.0.snapshot"])
def test_a_state_that_holds_no_number_is_refused_with_the_parameter_s_name(kind: str) -> None:
    exchange = settings(codec="int8", overlap=2)
    states = saved_at(5, exchange)
    key = min(key for key in states[1] if key.startswith(kind))
    states[1][key].view(-1)[3] = math.nan

    def loop(place: Any) -> None:
        attached(place, model()).load_state_dict(states[place.cell])

    error = refused(loop, 2, exchange)
    assert isinstance(error, CheckpointError)
    word = kind.rpartition(".")[2]
    assert f"cell 1: the loaded state holds a value that is not finite: {word} of parameter '0." in error.message


def test_parameters_that_go_on_with_no_number_are_named() -> None:
    exchange = settings()
    states = saved_at(5, exchange)

    def loop(place: Any) -> None:
        net = model()
        island = attached(place, net)
        island.load_state_dict(states[place.cell])
        net[0].weight.data.fill_(math.nan)
        island.step()

    error = refused(loop, 2, exchange)
    assert isinstance(error, CheckpointError)
    assert "parameter '0.weight' holds a value that is not finite at step 5, where it is to go on" in error.message
    assert error.hint.startswith("load into all cells what they saved at an earlier step")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"codec": "int4"}, "exchange.codec: int8 then, int4 now"),
        ({"window": 6, "overlap": 1}, "exchange.window: 4 then, 6 now; exchange.overlap: 2 then, 1 now"),
        ({"fragments": 3}, "exchange.fragments: 2 then, 3 now"),
        ({"outer": {"lr": 0.5, "momentum": 0.9}}, "exchange.outer.lr: 0.7 then, 0.5 now"),
        ({"feedback": 0.9}, "exchange.feedback: not set then, 0.9 now"),
    ],
)
def test_a_state_of_another_exchange_is_refused_with_what_differs(changes: dict[str, Any], told: str) -> None:
    kept = {"codec": "int8", "overlap": 2, "fragments": 2}
    states = saved_at(5, settings(**kept))

    def loop(place: Any) -> None:
        attached(place, model()).load_state_dict(states[place.cell])

    error = refused(loop, 2, settings(**kept | changes))
    assert isinstance(error, CheckpointError)
    assert error.message == f"cell 0: the state was saved under another exchange: {told}"


def test_a_state_of_another_number_of_cells_and_one_with_more_patience() -> None:
    states = saved_at(5, settings())

    def loop(place: Any) -> int:
        island = attached(place, model())
        island.load_state_dict(states[place.cell % 2])
        return island.done

    assert refused(loop, 1).message.endswith("another exchange: exchange.cells: 2 then, 1 now")
    assert islandctl.run_cells(loop, 2, settings(late={"deadline": "5 s"})) == [5, 5]


def test_an_optimizer_of_another_model() -> None:
    def loop(place: Any) -> None:
        islandctl.attach(model(), torch.optim.SGD(model().parameters(), lr=0.1), transport=place, steps=3)

    assert "the optimizer holds a parameter of shape (5, 4)" in refused(loop).message


@pytest.mark.parametrize("of", ["none", "one", "scheduler"])
def test_parameters_that_no_optimizer_steps(of: str) -> None:
    def loop(place: Any) -> None:
        net = model()
        one: Any = torch.optim.SGD(net[0].parameters(), lr=0.1)
        kinds = {"none": [], "one": one, "scheduler": torch.optim.lr_scheduler.ConstantLR(one)}
        islandctl.attach(net, kinds[of], transport=place, steps=3)

    told = {
        "none": "parameter '0.weight' is trained (requires_grad), but no optimizer holds it; the same of 5 more",
        "one": "parameter '2.weight' is trained (requires_grad), but no optimizer holds it; the same of 3 more",
        "scheduler": "a ConstantLR is no torch optimizer",
    }
    assert refused(loop).message == f"attach: {told[of]}"


def test_what_is_frozen_or_stepped_by_the_loop_needs_no_optimizer() -> None:
    def loop(place: Any) -> list[int]:
        frozen, by_hand = model(), model()
        frozen[0].requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD([one for one in frozen.parameters() if one.requires_grad], lr=0.1)
        kinds: dict[str, Any] = {"transport": place, "steps": 3, "tokens_per_step": 1}
        first = islandctl.attach(frozen, optimizer, **kinds)
        first.close()
        with islandctl.attach(by_hand, None, **kinds) as second:
            done = [second.step() for _ in second.steps()]
            assert second.finish()
        return done

    assert islandctl.run_cells(loop, 1, settings()) == [[1, 2, 3]]


def test_one_parameter_under_two_names() -> None:
    def loop(place: Any) -> None:
        net = model()
        twice = dict(net.named_parameters()) | {"again": net[0].weight}
        islandctl.attach(twice, torch.optim.SGD(net.parameters(), lr=0.1), transport=place, steps=3)

    assert "'0.weight' and 'again' are one parameter" in refused(loop).message
    wrapped = {"module.w": nn.Parameter(torch.ones(2)), "w": nn.Parameter(torch.ones(2))}
    error = refused(lambda place: islandctl.attach(wrapped, None, transport=place, steps=3))
    assert error.message == "attach: two parameters of the model are called 'w'"


def test_cells_that_train_unequal_steps() -> None:
    def loop(place: Any) -> None:
        for _ in (island := attached(place, model(), steps=STEPS + place.cell)).steps():
            island.step()

    assert "is to train 13 steps, cell 0 12" in refused(loop, 2).message


@pytest.mark.parametrize("mode", ["two-site", "butterfly"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_a_loop_that_leaves_the_others_waiting(mode: str, overlap: int) -> None:
    exchange = settings(overlap=overlap, mode=mode, **({"outer": {}} if mode == "butterfly" else {}))

    def loop(place: Any) -> None:
        with attached(place, model()) as island:
            for _ in island.steps():
                if island.step() == 6 and place.cell == 1:
                    return
            island.finish()

    error = refused(loop, 2, exchange)
    assert isinstance(error, ExchangeError)
    assert error.message == "cell 0 waits for cell 1, whose loop has ended before its last step"


def test_an_interrupt_ends_the_loops_too() -> None:
    threads = []

    def loop(place: Any) -> None:
        threads.append(threading.current_thread())
        for step in (island := attached(place, model(), steps=10_000)).steps():
            if step == 3 and place.cell == 0:
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, signal.SIGINT)
            island.step()

    with pytest.raises(KeyboardInterrupt):
        islandctl.run_cells(loop, 2, settings())
    assert len(threads) == 2
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_what_is_no_model() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for given, told in ((optimizer, "a SGD"), (net.parameters(), "a Parameter"), ([("a", 1)], "a tuple")):
        error = refused(lambda place, given=given: islandctl.attach(given, optimizer, transport=place, steps=3))
        assert error.message == f"attach: {told} is no parameter with its name"


def test_figures_and_intervals_that_are_no_numbers() -> None:
    def figure(place: Any) -> None:
        attached(place, model()).step(loss=torch.ones(2))

    assert refused(figure).message == "island.step(): loss must be a single number, not a Tensor"
    error = refused(lambda place: attached(place, model()).is_due(0))
    assert error.message == "island.is_due(): every must be at least 1, not 0"


def test_a_loop_that_was_left_goes_on_by_hand_or_in_another_one() -> None:
    def loop(place: Any) -> list[int]:
        net, seen = model(), []
        with attached(place, net) as island:
            for step in island.steps():
                seen.append(step)
                if island.step() == 2:
                    break
            while island.done < 5:
                seen.append(island.done)
                island.step()
            old = island.steps()
            for step in old:
                seen.append(step)
                if island.step() == 7:
                    break
            for step in island.steps():
                old.close()  # as when its last name is taken away: it changes nothing for this loop
                seen.append(step)
                island.step()
                with pytest.raises(UsageError, match="was called twice" if step < STEPS - 1 else "after the last"):
                    island.step()
            assert island.finish()
        return seen

    assert islandctl.run_cells(loop, 2, settings()) == [list(range(STEPS))] * 2


def test_step_after_finish_and_after_the_last() -> None:
    def after_finish(place: Any) -> None:
        island = attached(place, model(), steps=1)
        for _ in island.steps():
            island.step()
        island.finish()
        island.step()

    def after_last(place: Any) -> None:
        island = attached(place, model(), steps=1)
        island.step()
        island.step()

    def too_early(place: Any) -> None:
        attached(place, model()).finish()

    def forgotten(place: Any) -> None:
        for _ in attached(place, model()).steps():
            pass

    def twice(place: Any) -> None:
        island = attached(place, model())
        for _ in island.steps():
            island.step()
            island.step()

    def no_number(place: Any) -> None:
        attached(place, model()).evaluate(lambda: "2.5 bits")  # type: ignore[arg-type, return-value]

    def no_state(place: Any) -> None:
        attached(place, model()).load_state_dict({})

    assert "was called twice in step 1" in refused(twice).message
    assert "the function must give one number: could not convert" in refused(no_number).message
    assert "not what island.state_dict() has given" in refused(no_state).message
    assert "after island.finish()" in refused(after_finish).message
    assert "after the last of 1 steps" in refused(after_last).message
    assert "0 of 12 steps" in refused(too_early).message
    assert "was not called in step 1" in refused(forgotten).message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "attach: steps must be at least 1, not 0"),
        ({"steps": 7.5}, "attach: steps must be a whole number, not 7.5"),
        ({"tokens_per_step": -3}, "attach: tokens_per_step must be at least 0, not -3"),
        ({"seed": -1}, "attach: seed must be at least 0, not -1"),
    ],
)
def test_numbers_that_count_nothing(changes: dict[str, Any], message: str) -> None:
    assert refused(lambda place: attached(place, model(), **changes)).message == message


def test_tokens_below_zero() -> None:
    def loop(place: Any) -> None:
        attached(place, model()).step(tokens=-1)

    assert refused(loop).message == "island.step(): tokens must be at least 0, not -1"


def test_a_packet_that_cannot_be_made_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(header: Any, payload: bytes) -> bytes:
        raise ValueError("no such packet")

    monkeypatch.setattr("islandctl.exchange.courier.pack", broken)
    error = refused(train(settings()))
    assert error.message == "the exchange's background failed: ValueError: no such packet"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "none"}, "exchange.mode: none is one cell alone, not 2"),
        ({"cells": 4}, "exchange.cells: 4, but there are 2 cells here"),
    ],
)
def test_an_exchange_of_another_number_of_cells(changes: dict[str, Any], message: str) -> None:
    exchange = settings(**changes)
    assert refused(train(exchange), 2, exchange).message == message


def test_a_relay_of_another_exchange() -> None:
    def loop(place: Any) -> None:
        attached(place, model(), exchange={"window": 8, "fragments": 1})

    error = refused(loop)
    assert isinstance(error, ConfigError)
    assert "was made for another exchange" in error.message


def test_what_is_no_place_at_a_relay() -> None:
    error = refused(lambda place: attached(object(), model(), exchange=settings()))
    assert error.message == "attach: a object is no cell's place at a relay"


def test_the_others_wait_for_the_first_cell_s_warm_up() -> None:
    exchange = settings(warmup=3)
    seen: dict[int, list[int]] = {0: [], 1: []}
    ends = islandctl.run_cells(train(exchange, watch=lambda cell, done, _: seen[cell].append(done)), 2, exchange)
    assert same(*ends)
    assert seen == {0: list(range(1, STEPS + 1)), 1: list(range(4, STEPS + 1))}


@pytest.mark.parametrize("warmup", [STEPS, STEPS + 1])
def test_a_warm_up_that_the_run_is_too_short_for(warmup: int) -> None:
    error = refused(train(settings(warmup=warmup)), 2, settings(warmup=warmup))
    assert isinstance(error, ConfigError)
    assert error.message == f"attach: exchange.warmup: {warmup} steps must be fewer than the run's {STEPS}"


def test_parameters_without_values() -> None:
    error = refused(lambda place: attached(place, model().to("meta")))
    assert isinstance(error, ConfigError)
    assert error.message == "parameter '0.weight' is on the meta device: it has no values yet"


def test_a_payload_that_cannot_be_read_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = courier.encode
    monkeypatch.setattr(courier, "encode", lambda codec, vector, key: whole(codec, vector, key)[:-1])
    told = refused(train(settings())).message
    assert re.fullmatch(r"cell 0, fragment 0, window 0, chunk \d: damaged fp32 payload: \d+ bytes for .*", told)


def test_an_exchange_with_a_wrong_key() -> None:
    error = refused(lambda place: attached(place, model(), exchange={"alpha": 0.5}))
    assert "exchange.alpha: means nothing with apply: carry" in error.message
    error = refused(lambda place: attached(place, model(), exchange={"windows": 8}))
    assert error.message == "exchange: windows: unknown key 'windows'; did you mean 'window'?"
    for make in (lambda **keys: islandctl.Exchange(**keys), lambda **keys: islandctl.run_cells(train, 2, keys)):
        with pytest.raises(ConfigError) as caught:
            make(window=4, overlap=4, fragments=1)
        assert caught.value.message == "exchange: overlap: overlap 4 must be smaller than window 4"
    with pytest.raises(UsageError, match="exchange is NoneType, not how the cells exchange"):
        islandctl.run_cells(train, 2, None)  # type: ignore[arg-type]


def test_more_fragments_than_blocks() -> None:
    error = refused(lambda place: attached(place, model()), exchange=settings(fragments=4))
    assert "exchange.fragments: 4 is more than the model's 3 blocks" in error.message


def test_the_package_itself_needs_no_torch() -> None:
    code = "import sys, islandctl; assert 'torch' not in sys.modules; islandctl.attach; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200).returncode == 0
    with pytest.raises(AttributeError, match="nothing"):
        _ = islandctl.nothing  # type: ignore[attr-defined]
