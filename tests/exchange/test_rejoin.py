"""A cell that was away comes back while the others went on: its packets are of the usual size, nothing is unlearnt.

A little language model on a noisy Markov chain, so that "worse" has a number: nats per token on held-out text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from islandctl.config.exchange import Outer
from islandctl.exchange import courier, follower
from islandctl.exchange.codecs import decode
from islandctl.exchange.ranks import Ranks
from islandctl.ledger.packet import unpack
from tests.exchange.toy import Cell, MemoryRelay, same, together, toy_settings, wait_for

WINDOW, STEPS, LEAVES, BACK = 10, 300, 10, 20
"""The windows from ``LEAVES`` to ``BACK`` are the others' alone."""
SYMBOLS, WIDTH = 24, 12


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (courier, follower):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)


def new_model() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"embed.weight": (SYMBOLS, WIDTH), "head.weight": (SYMBOLS, WIDTH)}
    shapes |= {f"blocks.{block}.weight": (WIDTH, WIDTH) for block in range(2)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.3) for name, shape in shapes.items()}


def text(seed: int, num: int) -> tuple[Tensor, Tensor]:
    """(symbol, the one after it): ``num`` pairs of the chain that all cells learn."""
    generator = torch.Generator().manual_seed(1)
    chain = torch.softmax(2.0 * torch.randn(SYMBOLS, SYMBOLS, generator=generator), dim=1)
    generator = torch.Generator().manual_seed(seed)
    seen = torch.randint(SYMBOLS, (num,), generator=generator)
    return seen, torch.multinomial(chain[seen], 1, generator=generator)[:, 0]


def nats(parameters: Mapping[str, Tensor], seen: Tensor, following: Tensor) -> Tensor:
    hidden = parameters["embed.weight"][seen]
    for block in range(2):
        hidden = hidden + torch.tanh(hidden @ parameters[f"blocks.{block}.weight"])
    return functional.cross_entropy(hidden @ parameters["head.weight"].T, following)


HELD_OUT = text(0, 4096)


def learn(parameters: Mapping[str, Tensor], cell: int, step: int) -> None:
    """One inner step of plain gradient descent; the batch depends on cell and step only."""
    gradients = torch.autograd.grad(
        nats(parameters, *text(10_000 * (cell + 1) + step, 64)), list(parameters.values())
    )
    with torch.no_grad():
        for value, gradient in zip(parameters.values(), gradients, strict=True):
            value.sub_(gradient, alpha=0.3)


def new_cell(relay: MemoryRelay, number: int) -> Cell:
    settings = toy_settings(window=WINDOW, overlap=2, outer=Outer(lr=0.7, momentum=0.6))
    return Cell(relay, number, settings, steps=STEPS, model=new_model, train=learn)


def norms(relay: MemoryRelay, cell: int) -> dict[int, float]:
    """Window → norm of what the cell sent in it."""
    squares: dict[int, float] = {}
    for (_, _, window, sender, _), packet in relay.packets.items():
        if sender == cell:
            values = decode(unpack(packet)[1])
            squares[window] = squares.get(window, 0.0) + float(values @ values)
    return {window: math.sqrt(square) for window, square in sorted(squares.items())}


def leave(two: Cell, relay: MemoryRelay) -> None:
    two.advance(WINDOW * LEAVES)
    wait_for(lambda: relay.committed(1, LEAVES - 1))


def killed(two: Cell, relay: MemoryRelay) -> Cell:
    """Dies eight windows after its checkpoint; a new life begins when the others are ten windows further."""
    two.advance(WINDOW * 2 + 2)
    saved = two.save()
    leave(two, relay)
    two.island.close()
    relay.release()
    wait_for(lambda: relay.committed(1, BACK - 1))
    return two.reborn(saved)


def frozen(two: Cell, relay: MemoryRelay) -> Cell:
    """Its process is stopped, and goes on when the others are ten windows further."""
    leave(two, relay)
    relay.release()
    wait_for(lambda: relay.committed(1, BACK - 1))
    return two


def cut_off(two: Cell, relay: MemoryRelay) -> Cell:
    """Trains on without the relay, as far as the others."""
    leave(two, relay)
    two.transport.away = True
    wait_for(lambda: not two.island._follower.in_touch)
    relay.release()
    two.advance(WINDOW * BACK)
    two.transport.away = False
    wait_for(lambda: relay.committed(1, BACK - 1))
    wait_for(lambda: two.island._follower.head == len(relay.ledger) - 1)
    return two


@pytest.mark.parametrize("away", [killed, frozen, cut_off])
def test_a_rejoin_is_of_the_usual_size_and_unlearns_nothing(
    away: Callable[[Cell, MemoryRelay], Cell], caplog: pytest.LogCaptureFixture
) -> None:
    relay = MemoryRelay(2, 2)
    relay.expects = lambda fragment, window: (0,) if LEAVES <= window < BACK else (0, 1)
    relay.held = lambda fragment, window: window == LEAVES  # until the other one is away
    one, two = new_cell(relay, 0), new_cell(relay, 1)
    losses: dict[int, float] = {}

    def stays() -> Cell:
        while one.now < STEPS:
            one.advance(one.now + 1)
            losses[one.now] = float(nats(one.values(), *HELD_OUT))
        return one.finish()

    _, back = together(stays, lambda: away(two, relay).finish())
    assert isinstance(back, Cell)
    for cell in (one, back):
        cell.island.close()
    assert same(one.values(), back.values())

    sent = norms(relay, 1)
    usual = max(sent[window] for window in range(LEAVES - 4, LEAVES))
    first = max(sent[window] for window in range(BACK, BACK + 3))
    before = min(loss for step, loss in losses.items() if step <= WINDOW * BACK)
    after = max(loss for step, loss in losses.items() if step > WINDOW * BACK)
    print(f"{away.__name__}: norm {usual:.2f} -> {first:.2f}, loss {before:.3f} -> at most {after:.3f}")
    assert first < 1.3 * usual
    assert after < before + 0.02
    assert caplog.text.count("rejoined at step") == 1
    (dropped,) = re.findall(r"in its present life at most (\d+) tokens", caplog.text)
    assert (int(dropped) > 0) == (away is not killed)  # what a dead life had trained, nobody counts


@pytest.mark.parametrize("leads", [True, False])
def test_a_rejoin_while_the_others_go_on_is_told_once(
    leads: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the cell's first rank; the others say nothing."""
    monkeypatch.setattr(Ranks, "leads", property(lambda ranks: leads))
    caplog.set_level("INFO")
    left, walked, back, steps = 4, 8, 12, 84
    relay = MemoryRelay(2, 2)
    relay.expects = lambda fragment, window: (0,) if left <= window < back else (0, 1)
    relay.held = lambda fragment, window: window in (left, walked)
    one, two = (Cell(relay, number, toy_settings(), steps=steps) for number in range(2))

    def comes_back() -> Cell:
        two.advance(6 * left)
        saved = two.save()
        with relay.changed:
            relay.release()
            relay.held = lambda fragment, window: window == walked
        wait_for(lambda: relay.committed(1, walked - 1))
        again = two.reborn(saved)
        relay.release()
        wait_for(lambda: relay.committed(1, back - 1))
        return again.finish()

    _, again = together(one.finish, comes_back)
    assert isinstance(again, Cell)
    for cell in (one, again):
        cell.island.close()
    assert same(one.values(), again.values())
    assert caplog.text.count("rejoined at step") == int(leads)
    assert ("the others had gone on; took over" in caplog.text) == leads
