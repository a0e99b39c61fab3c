"""Cells that exchange in pairs, with the real relay's rules: equal ends, exact repetition, a cell that was away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from islandctl.config.exchange import Late
from islandctl.errors import DivergenceError, ExchangeError, UnreachableError
from islandctl.exchange import courier, follower
from islandctl.exchange.schedule import Schedule
from islandctl.exchange.stopping import common_step, reached
from islandctl.ledger.entries import Commit, Entry
from islandctl.ledger.pairs import Pairing
from islandctl.relay.inprocess import InProcessRelay
from tests.exchange.stress import Mishaps, Trouble
from tests.exchange.toy import CONFIG, RUN, Cell, same, together, toy_parameters, toy_settings, train, wait_for

STEPS, WINDOW = 20, 6


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (courier, follower):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)


class Way:
    """One cell's way to the relay: it can be cut, lose what it puts, and say everything twice."""

    def __init__(self, relay: InProcessRelay, cell: int) -> None:
        self.relay, self.inner = relay, relay.transport(cell)
        self.away = self.mute = self.twice = False

    def put(self, packet: bytes) -> None:
        if self.away or self.mute:
            raise UnreachableError("relay away")
        for _ in range(2 if self.twice else 1):
            self.inner.put(packet)

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        if self.away:
            raise UnreachableError("relay away")
        return self.inner.fetch(attempt, fragment, window, cell, chunk)

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        if self.away:
            raise UnreachableError("relay away")
        found = self.inner.entries(after, min(wait_s, 0.02))
        return [entry for entry in found for _ in range(2 if self.twice else 1)]


class Butterfly:
    """Some cells and their relay."""

    def __init__(self, num_cells: int = 4, *, steps: int = STEPS, then: str = "wait", **changes: Any) -> None:
        late = Late.model_validate({"deadline": changes.pop("deadline", "10 min"), "windows": 1, "then": then})
        self.settings = toy_settings(mode="butterfly", window=WINDOW, late=late, **changes)
        names = [f"cell-{cell}" for cell in range(num_cells)]
        final_window = -(-steps // WINDOW)
        self.relay = InProcessRelay(RUN, CONFIG, names, 2, late=late, final_window=final_window)
        self.cells = [
            Cell(
                self.relay,
                cell,
                self.settings,
                steps=steps,
                num_cells=num_cells,
                transport=Way(self.relay, cell),
            )
            for cell in range(num_cells)
        ]
        self.all = list(self.cells)

    def reborn(self, cell: int, saved: Any) -> Cell:
        again = self.cells[cell].reborn(saved, transport=Way(self.relay, cell))
        self.all.append(again)
        self.cells[cell] = again
        return again

    def finish(self) -> list[dict[str, Tensor]]:
        together(*(cell.finish for cell in self.cells))
        return [cell.values() for cell in self.cells]

    def commits(self) -> list[Commit]:
        return [entry for entry in self.relay.archive.ledger if isinstance(entry, Commit)]


@pytest.fixture
def make() -> Iterator[Callable[..., Butterfly]]:
    made: list[Butterfly] = []

    def butterfly(*args: Any, **kwargs: Any) -> Butterfly:
        made.append(Butterfly(*args, **kwargs))
        return made[-1]

    yield butterfly
    for one in made:
        for cell in one.all:
            cell.island.close()


Make = Callable[..., Butterfly]


@pytest.mark.parametrize("num_cells", [2, 4, 8])
def test_all_cells_end_with_the_same_bits_and_the_mean(make: Make, num_cells: int) -> None:
    run = make(num_cells, codec="int8")
    ends = run.finish()
    assert all(same(ends[0], end) for end in ends[1:])
    # What they have trained is linear in the values, so their mean is what mixing must have left.
    values = [toy_parameters() for _ in range(num_cells)]
    for cell, parameters in enumerate(values):
        for step in range(1, STEPS + 1):
            train(parameters, cell, step)
    for name, end in ends[0].items():
        mean = torch.stack([parameters[name].detach().double() for parameters in values]).mean(0)
        assert torch.allclose(end.double(), mean, rtol=0, atol=1e-5)
    commits, num_bits = run.commits(), num_cells.bit_length() - 1
    regular = [one for one in commits if one.window < 4]
    assert len(regular) == num_cells // 2 * (3 + 3)  # two fragments, three windows each
    assert len(commits) - len(regular) == num_cells // 2 * 2 * num_bits
    assert all(tuple(part.cell for part in one.named) == one.pair for one in commits)
    told = run.cells[0].island.metrics()
    assert told["rounds_applied"] == 6 + 2 * num_bits
    assert all(distance is not None for distance in told["distance"])
    assert {cell.island.versions() for cell in run.cells} == {(4 + num_bits,) * 2}


def test_everything_said_twice_and_one_that_is_slow_change_nothing(make: Make) -> None:
    straight, doubled = make(), make()
    for cell in doubled.cells:
        cell.transport.twice = True
    slow = doubled.cells[3]

    def train_slowly(parameters: Any, cell: int, step: int) -> None:
        threading.Event().wait(0.01)
        train(parameters, cell, step)

    slow.train = train_slowly
    for one, other in zip(straight.finish(), doubled.finish(), strict=True):
        assert same(one, other)
    assert straight.relay.archive.packets == doubled.relay.archive.packets


PHASES = ["before put", "after put", "after commit", "after apply"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("codec", "checkpoint"), [("int8", 7), ("bf16", 9), ("fp32", 5), ("int4", 9), ("2bit", 7)])
def test_killed_at_every_phase_gives_the_same_bits(make: Make, phase: str, codec: str, checkpoint: int) -> None:
    """The round is (fragment 0, window 1) of cells 0 and 2: snapshot at 9, apply at 11."""
    straight, run = make(codec=codec), make(codec=codec)
    expected = straight.finish()
    partner, died = run.cells[2], threading.Event()

    def other() -> Cell:
        partner.advance(8)
        partner.transport.mute = phase == "after put"
        partner.advance(9)
        died.wait(20)
        partner.transport.mute = False
        return partner.finish()

    def first_life() -> Cell:
        one = run.cells[0]
        saved = one.advance(min(checkpoint, 8)).save()
        one.advance(8)
        one.transport.mute = phase == "before put"
        one.advance(9)
        if checkpoint == 9:
            saved = one.save()
        if phase == "after put":
            wait_for(lambda: any(place[1:4] == (0, 1, 0) for place in run.relay.archive.packets))
        if phase in PHASES[2:]:
            wait_for(lambda: any((c.fragment, c.window, c.pair) == (0, 1, (0, 2)) for c in run.commits()))
        one.advance(12 if phase == "after apply" else 10)
        values, now = one.values(), one.now
        again = run.reborn(0, saved)
        assert again.now == checkpoint
        assert same(again.advance(now).values(), values)
        died.set()
        return again.finish()

    others = [cell.finish for cell in (run.cells[1], run.cells[3])]
    together(first_life, other, *others)
    for cell, values in zip(run.cells, expected, strict=True):
        assert same(cell.values(), values)
    assert run.relay.archive.packets == straight.relay.archive.packets


def test_a_cell_that_was_away_is_skipped_and_paired_again(make: Make) -> None:
    """With ``then: alone``: it dies after two windows, the others train on; it comes back and ends with them."""
    steps = 120
    run = make(steps=steps, then="alone", deadline="600 ms")
    gone, back = threading.Event(), threading.Event()

    def lost() -> Cell:
        one = run.cells[3]
        saved = one.advance(13).save()
        one.advance(15)
        one.island.close()
        gone.set()
        back.wait(30)
        again = run.reborn(3, saved)
        assert again.now > 40, "it goes on where the others are"
        return again.finish()

    def stay(cell: Cell) -> Callable[[], Cell]:
        def live() -> Cell:
            cell.advance(60)
            back.set()
            while cell.now < steps:
                threading.Event().wait(0.02)  # so that there is something left to take part in
                cell.advance(cell.now + 1)
            return cell.finish()

        return live

    together(lost, *(stay(cell) for cell in run.cells[:3]))
    skipped = [one for one in run.commits() if one.reason == "alone" and 3 in one.missing]
    assert skipped
    assert not any(one.named for one in skipped)
    last_skipped = max(one.seq for one in skipped)
    assert [one for one in run.commits() if one.seq > last_skipped and any(part.cell == 3 for part in one.named)]
    assert run.relay.status().halted == ""
    ends = [cell.values() for cell in run.cells]
    assert all(same(ends[0], end) for end in ends[1:])


def test_partners_with_different_references_stop_by_name(make: Make) -> None:
    run = make(2)
    state = run.cells[1].island._rounds.states[1]
    state.reference[0][0] = state.reference[0][0] + 1
    state.rehash()
    with pytest.raises((DivergenceError, ExchangeError), match="fragment 1, window 0"):
        run.finish()
    assert "cell-1 and cell-0" in run.relay.status().halted or "cell-0 and cell-1" in run.relay.status().halted


@pytest.mark.parametrize("mode", ["two-site", "butterfly"])
@pytest.mark.parametrize("when", ["fixed", "arrival"])
def test_a_stop_ends_in_a_joint_checkpoint(mode: str, when: str) -> None:
    """Whatever the cells' pace: ``Trouble`` checks it, and resumes from there."""
    for seed in range(3):
        late = Late.model_validate({"deadline": "10 min"})
        settings = toy_settings(mode=mode, when=when, window=6, fragments=3, overlap=4, late=late)
        trouble = Trouble(seed, Mishaps(slow=0.4, stops=1), settings=settings, num_cells=4, steps=60)
        trouble.run()
        with trouble.relays.call() as relay:
            joint = {one.step for one in relay.status().joint_checkpoints}
        assert joint >= set(range(5, 60, 5))


def test_the_end_keeps_the_order_of_all_rounds(make: Make) -> None:
    """Seen as a hang: after the last step, a cell behind in one fragment began a final round of the other at once."""
    cell = make().cells[0]
    rounds = cell.island._rounds
    rounds.states[0].window, rounds.states[1].window = 1, 3
    assert rounds.next_last() == [(0, 2)]
    rounds.states[0].window = 2
    assert rounds.next_last() == [(0, 4), (1, 4)]
    rounds.states[0].final = True
    assert rounds.next_last() == [(1, 4)]


def test_a_resume_repeats_arrivals(make: Make) -> None:
    """With ``arrival`` a round is applied when it comes; the journal has the step, and the next attempt takes it."""
    run = make(2, when="arrival", overlap=4)

    def first_attempt(cell: Cell) -> Callable[[], Any]:
        def live() -> Any:
            for step, fragment in ((9, 0), (12, 1)):  # the second round of either begins; it comes at once
                cell.advance(step)
                wait_for(lambda fragment=fragment: cell.island._preparer.ready(fragment))  # type: ignore[misc]
            cell.advance(14)
            return cell.values()

        return live

    firsts = together(*(first_attempt(cell) for cell in run.cells))
    for cell in run.cells:
        assert [cell.journal.step_of(1, fragment, 1) for fragment in (0, 1)] == [10, 13]
    run.relay.rewind(0, (), (0, 0))

    def second_attempt(number: int) -> Callable[[], Any]:
        way = Way(run.relay, number)
        cell = run.cells[number].reborn(None, attempt=2, transport=way)
        run.all.append(cell)

        def live() -> Any:
            for step in (9, 12):
                cell.advance(step - 1)
                way.mute = number == 1  # this time the commit is long in coming
                threading.Timer(0.3, lambda: setattr(way, "mute", False)).start()
                cell.advance(step + 1)
            return cell.advance(14).values()

        return live

    seconds = together(*(second_attempt(number) for number in range(2)))
    for values, repeated in zip(firsts, seconds, strict=True):
        assert same(values, repeated)  # type: ignore[arg-type]


def test_nobody_is_where_he_cannot_be() -> None:
    """Two cells, one fragment: who has applied a round knows that the other has begun it."""
    schedule = Schedule(steps=100, window=10, fragments=1, overlap=3)
    assert reached(13, schedule, Pairing(2)) == [13, 10]
    assert reached(12, schedule, Pairing(2)) == [12, 0]
    # Four: the first round joins 0 with 1, the second 0 with 2 and 1 with 3.
    assert reached(23, schedule, Pairing(4)) == [23, 10, 20, 10]


def test_the_stop_lies_behind_everybody() -> None:
    schedule = Schedule(steps=1000, window=10, fragments=2, overlap=3)
    place = {"seq": 9, "attempt": 1, "at": "", "previous": "", "fragment": 0, "window": 4, "version": 5}
    commit = Commit.model_validate(place | {"named": (), "reason": "deadline", "pair": (0, 1)})
    assert common_step(commit, schedule, None, arrival=False) == 48
    assert common_step(commit, schedule, None, arrival=True) == 51
    for num_cells in (2, 4, 8, 16):
        step = common_step(commit, schedule, Pairing(num_cells), arrival=False)
        ahead = max(at for at in range(1, 200) if min(reached(at, schedule, Pairing(num_cells))) <= 48)
        assert ahead < step <= ahead + 13
