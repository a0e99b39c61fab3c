"""The first cell trains alone, its values seed the others: exact through deaths, stops and resumes.

With the real relay's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from islandctl.config.exchange import Late
from islandctl.errors import ExchangeError
from islandctl.exchange import courier, follower
from islandctl.ledger.entries import Commit
from islandctl.ledger.packet import digest, unpack
from islandctl.relay.inprocess import InProcessRelay
from tests.exchange.toy import (
    CONFIG,
    RUN,
    Cell,
    anchors,
    same,
    together,
    toy_parameters,
    toy_settings,
    train,
    wait_for,
)

WARMUP, STEPS = 7, 26
SETTINGS = toy_settings(warmup=WARMUP, late=Late(deadline="30 ms", windows=1))
"""The deadline is far shorter than a warm-up: nothing must depend on it."""
Saved = tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Run:
    """Two cells and their relay."""

    def __init__(self) -> None:
        self.relay = InProcessRelay(RUN, CONFIG, ["one", "two"], 2, late=Late(deadline="10 min"), seeded=True)
        self.cells: list[Cell] = []
        self.settings = SETTINGS

    def start(self, number: int, saved: Saved | None = None, *, attempt: int = 1, life: Cell | None = None) -> Cell:
        """A new process of that cell; ``life``: the one before, whose journal it has."""
        journal = None if life is None else life.journal
        transport = self.relay.transport(number)
        cell = Cell(None, number, self.settings, steps=STEPS, attempt=attempt, transport=transport, journal=journal)
        if life is not None:
            life.island.close()
        self.cells.append(cell)
        if saved is not None:
            cell.restore(saved)
        cell.now = cell.island.resume()
        return cell

    def register(self, cell: Cell, attempt: int = 1) -> Saved:
        """Save, and tell the relay."""
        saved = cell.save()
        manifest = digest(f"{cell.cell} {saved[0]}".encode())
        self.relay.transport(cell.cell).register_checkpoint(saved[0], manifest, cell.island.versions(), attempt)
        return saved

    def commits(self) -> list[Commit]:
        return [entry for entry in self.relay.archive.ledger if isinstance(entry, Commit)]

    def payloads(self) -> dict[Sequence[int], bytes]:
        """Without the attempt."""
        return {place[1:]: bytes(unpack(packet)[1]) for place, packet in sorted(self.relay.archive.packets.items())}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (courier, follower):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)


@pytest.fixture
def new_run() -> Iterator[Callable[[], Run]]:
    runs: list[Run] = []

    def make() -> Run:
        runs.append(Run())
        return runs[-1]

    yield make
    for run in runs:
        for cell in run.cells:
            cell.island.close()


@pytest.fixture
def untouched(new_run: Callable[[], Run]) -> Run:
    """A run in which nothing happens, at its end."""
    run = new_run()
    one, two = run.start(0), run.start(1)
    together(one.finish, two.finish)
    return run


def ends_as(run: Run, cells: list[Cell], untouched: Run) -> None:
    for cell, expected in zip(cells, untouched.cells, strict=True):
        assert same(cell.values(), expected.values())
        assert same(anchors(cell), anchors(expected))
    assert run.payloads() == untouched.payloads()


def test_the_others_begin_with_the_first_cells_values(new_run: Callable[[], Run]) -> None:
    run = new_run()
    one, two = run.start(0), run.start(1)
    assert not one.island.warming_up
    assert two.island.warming_up
    together(lambda: one.advance(WARMUP), lambda: two.advance(WARMUP))
    assert (one.now, two.now) == (WARMUP, WARMUP)
    assert not two.island.warming_up
    assert same(one.values(), two.values())
    plain = toy_parameters()
    for step in range(1, WARMUP + 1):
        train(plain, 0, step)
    assert all(float((value - plain[name].detach()).abs().max()) < 1e-6 for name, value in one.values().items())
    seeds = run.commits()
    assert [(c.fragment, c.window, c.reason, c.missing) for c in seeds] == [
        (p, 0, "complete", ()) for p in sorted(c.fragment for c in seeds)
    ]
    assert all([(n.cell, n.step, n.tokens) for n in commit.named] == [(0, WARMUP, 700)] for commit in seeds)
    headers = [unpack(packet)[0] for packet in run.relay.archive.packets.values()]
    assert {(header.cell, header.codec) for header in headers} == {(0, "fp32")}
    together(one.finish, two.finish)
    assert same(one.values(), two.values())
    tokens = {(c.fragment, c.window): [n.tokens for n in c.named] for c in run.commits()}
    assert tokens[(0, 1)] == [300, 303]
    assert two.island.metrics()["rounds_skipped"] == 0


def test_nothing_of_the_seed_coasts_on_the_outer_momentum(new_run: Callable[[], Run]) -> None:
    run = new_run()
    one, two = run.start(0), run.start(1)
    together(lambda: one.advance(WARMUP), lambda: two.advance(WARMUP))
    kept: Any = one.island.state_dict()
    assert not any(tensor.any() for key, tensor in kept.items() if key.startswith(("momentum", "residual")))


@pytest.mark.parametrize("saved_at", [None, 3])
@pytest.mark.parametrize("dies_at", [5, WARMUP, WARMUP + 3])
def test_a_death_of_the_first_cell_changes_nothing(
    new_run: Callable[[], Run], untouched: Run, dies_at: int, saved_at: int | None
) -> None:
    run = new_run()
    two = run.start(1)

    def lives() -> Cell:
        one = run.start(0)
        saved = None if saved_at is None else one.advance(saved_at).save()
        one.advance(dies_at)
        return run.start(0, saved, life=one).finish()

    one, _ = together(lives, two.finish)
    assert isinstance(one, Cell)
    ends_as(run, [one, two], untouched)


@pytest.mark.parametrize("dies_at", [0, WARMUP, WARMUP + 3])
def test_a_death_of_a_waiting_cell_changes_nothing(new_run: Callable[[], Run], untouched: Run, dies_at: int) -> None:
    run = new_run()
    one = run.start(0)

    def lives() -> Cell:
        two = run.start(1)
        two.advance(dies_at)
        return run.start(1, life=two).finish()

    _, two = together(one.finish, lives)
    assert isinstance(two, Cell)
    ends_as(run, [one, two], untouched)


def test_a_death_between_seed_and_commit_changes_nothing(new_run: Callable[[], Run], untouched: Run) -> None:
    """TERM while the first cell waits for the relay: the seed is in flight in its checkpoint."""
    run = new_run()
    one, two = run.start(0), run.start(1)
    one.advance(WARMUP - 1)
    one.transport.put = lambda packet: None
    one.island.hurry()
    one.advance(WARMUP)
    assert one.island.versions() == (0, 0)
    again = run.start(0, one.save(), life=one)
    assert again.island.versions() == (1, 1)
    together(again.finish, two.finish)
    ends_as(run, [again, two], untouched)


def test_waiting_cells_save_where_the_first_has_saved(new_run: Callable[[], Run], untouched: Run) -> None:
    """So there is a joint checkpoint within the warm-up, and a resume from it."""
    run = new_run()
    one, two = run.start(0), run.start(1)
    saved = [run.register(one.advance(4))]
    assert two.island.await_warmup() == 4
    assert two.island.warming_up
    two.now = 4
    saved.append(run.register(two))
    joint = run.relay.status().joint_checkpoints[-1]
    assert joint.step == 4
    together(lambda: one.advance(12), lambda: two.advance(12))
    run.relay.rewind(joint.step, joint.manifests, joint.versions)
    cells = [run.start(number, saved[number], attempt=2, life=(one, two)[number]) for number in (0, 1)]
    assert [cell.now for cell in cells] == [4, 4]
    together(*(cell.finish for cell in cells))
    ends_as(run, cells, untouched)


def test_a_stop_within_the_warm_up_leaves_a_joint_checkpoint(new_run: Callable[[], Run], untouched: Run) -> None:
    run = new_run()
    one, two = run.start(0), run.start(1)
    one.advance(3)
    run.register(one)
    run.relay.stop("asked")
    wait_for(lambda: one.island._follower.stopping)
    one.advance(4)
    assert one.island.should_stop_at() == 5
    one.advance(5)
    saved = [run.register(one)]
    while two.now < 5:
        two.now = two.island.await_warmup()
    assert two.island.should_stop_at() == 5
    saved.append(run.register(two))
    back = run.start(1, saved[1], life=two)  # it died before it had ended
    assert back.island.should_stop_at() == 5
    joint = run.relay.status().joint_checkpoints[-1]
    assert joint.step == 5
    run.relay.rewind(joint.step, joint.manifests, joint.versions)
    cells = [run.start(0, saved[0], attempt=2, life=one), run.start(1, saved[1], attempt=2, life=back)]
    together(*(cell.finish for cell in cells))
    ends_as(run, cells, untouched)


@pytest.mark.parametrize(
    ("heard_at", "dies", "stops_at", "versions"),
    [
        (WARMUP - 1, False, WARMUP + 2, (1, 1)),
        (WARMUP, False, WARMUP + 3 + 2, (2, 1)),
        (WARMUP, True, WARMUP + 3 + 2, (2, 1)),
    ],
)
def test_a_stop_at_the_end_of_the_warm_up_is_the_same_step_everywhere(
    new_run: Callable[[], Run], heard_at: int, dies: bool, stops_at: int, versions: tuple[int, int]
) -> None:
    """At the apply step of the seed, or of the first round behind it."""
    run = new_run()
    run.settings = toy_settings(warmup=WARMUP, late=Late(windows=1))  # no round ends empty, however slow the machine
    one, two = run.start(0), run.start(1)
    one.advance(heard_at)
    run.relay.stop("asked")
    if dies:
        one = run.start(0, life=one)  # to repeat the warm-up, though the others may have its seed
    elif heard_at == WARMUP:
        run.register(one)  # of the seed's own step, though the seed is older than the stop
    wait_for(lambda: one.island._follower.stopping)

    def until_stopped(cell: Cell) -> int:
        while (at := cell.island.should_stop_at()) is None or cell.now < at:
            cell.advance(cell.now + 1)
        return cell.now

    assert together(lambda: until_stopped(one), lambda: until_stopped(two)) == [stops_at] * 2
    assert one.island.versions() == two.island.versions() == versions


def test_a_hurried_cell_waits_no_more(new_run: Callable[[], Run]) -> None:
    two = new_run().start(1)
    two.island.hurry()
    assert two.island.await_warmup() == 0
    assert two.island.warming_up


def test_a_waiting_cell_must_not_train(new_run: Callable[[], Run]) -> None:
    two = new_run().start(1)
    with pytest.raises(ExchangeError, match="cell 1 waits for the first cell's warm-up"):
        two.island.step(tokens=1)
