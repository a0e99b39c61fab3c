"""Whole rounds between cells, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from islandctl.config.exchange import Late, Outer
from islandctl.errors import CheckpointError, ConfigError, DivergenceError, ExchangeError
from islandctl.exchange import courier, follower
from islandctl.exchange.island import Hurried
from islandctl.ledger.entries import Commit, Halt
from islandctl.ledger.packet import unpack
from tests.exchange.toy import (
    Cell,
    MemoryRelay,
    anchors,
    same,
    together,
    toy_parameters,
    toy_settings,
    train,
    wait_for,
)

Start = Callable[..., Cell]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (courier, follower):
        monkeypatch.setattr(module, "PATIENCE_S", 0.02)


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes cells and closes them at the end."""
    kept: list[Cell] = []

    def make(*args: object, **kwargs: object) -> Cell:
        kept.append(Cell(*args, **kwargs))  # type: ignore[arg-type]
        return kept[-1]

    yield make
    for cell in kept:
        cell.island.close()


@pytest.fixture
def relay() -> MemoryRelay:
    return MemoryRelay(2, 2)


def assert_bases_agree(relay: MemoryRelay) -> None:
    """Both cells' packets of every round build on the same anchor and momentum, bit by bit."""
    bases: dict[tuple[int, ...], set[str]] = {}
    for (attempt, fragment, window, _, chunk), packet in relay.packets.items():
        bases.setdefault((attempt, fragment, window, chunk), set()).add(unpack(packet)[0].base)
    assert bases
    assert all(len(found) == 1 for found in bases.values())


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "2bit"])
@pytest.mark.parametrize("when", ["fixed", "arrival"])
def test_cells_end_with_equal_bits(relay: MemoryRelay, start: Start, codec: str, when: str) -> None:
    settings = toy_settings(codec=codec, when=when)
    one, two = start(relay, 0, settings), start(relay, 1, settings)
    together(one.finish, two.finish)
    assert same(one.values(), two.values())
    assert same(anchors(one), anchors(two))
    assert_bases_agree(relay)
    assert one.island.versions() == (4, 4)
    metrics = one.island.metrics()
    assert (metrics["rounds_applied"], metrics["rounds_skipped"], metrics["rounds_late"]) == (8, 0, 0)
    assert all(0 < cosine <= 1 for cosine in metrics["cosine"])
    assert metrics["bytes_up"] == metrics["bytes_down"] > 0


def test_duplicates_and_small_ledger_pages_change_nothing(start: Start) -> None:
    results = []
    for twice in (False, True):
        relay = MemoryRelay(2, 2)
        one, two = start(relay, 0), start(relay, 1)
        one.transport.twice = two.transport.twice = twice
        together(one.finish, two.finish)
        results.append((one.values(), dict(relay.packets)))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("overlap", [0, 2])
def test_one_cell_alone_tracks_plain_training(start: Start, overlap: int) -> None:
    """fp32, η = 1, μ = 0: the anchor follows the value, to the rounding of anchor − (anchor − value)."""
    settings = toy_settings(codec="fp32", overlap=overlap, outer=Outer(lr=1.0, momentum=0.0))
    cell = start(MemoryRelay(1, 2), 0, settings, num_cells=1, steps=60)
    together(cell.finish)
    plain = toy_parameters()
    for step in range(1, 61):
        train(plain, 0, step)
    for name, value in cell.values().items():
        assert float((value - plain[name].detach()).abs().max()) < 1e-6


def test_tokens_count_since_the_last_named_packet(relay: MemoryRelay, start: Start) -> None:
    relay.expects = lambda fragment, window: () if (fragment, window) == (0, 1) else (0, 1)
    one, two = start(relay, 0), start(relay, 1)
    together(one.finish, two.finish)
    told = {(c.fragment, c.window): [n.tokens for n in c.named] for c in relay.commits()}
    assert told[(0, 0)] == [300, 303]
    assert told[(0, 1)] == []
    assert told[(0, 2)] == [1200, 1212]
    assert told[(1, 2)] == [600, 606]
    assert same(one.values(), two.values())


def test_residual_only_changes_when_named(relay: MemoryRelay, start: Start) -> None:
    def residuals(cell: Cell) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in cell.island.state_dict().items() if k.startswith("residual.0")}

    relay.expects = lambda fragment, window: {1: (), 2: (1,)}.get(window, (0, 1))
    one, two = start(relay, 0), start(relay, 1)
    together(lambda: one.advance(8), lambda: two.advance(8))
    before, value = residuals(one), one.values()
    assert any(bool(tensor.any()) for tensor in before.values())
    old = anchors(one)
    together(lambda: one.advance(13), lambda: two.advance(13))
    assert same(residuals(one), before)  # an empty commit
    assert same({k: v for k, v in anchors(one).items() if k.startswith("anchor.0")},
                {k: v for k, v in old.items() if k.startswith("anchor.0")})  # fmt: skip
    relay.held = lambda fragment, window: window == 2  # until both are past the snapshot
    together(lambda: one.advance(16), lambda: two.advance(16))
    wait_for(lambda: relay.has(0, 2, 1))
    relay.release()
    together(lambda: one.advance(17), lambda: two.advance(17))
    assert same(residuals(one), before)  # a commit that names only the other cell
    assert not same(residuals(two), before)
    assert same(anchors(one), anchors(two))
    assert not same(one.values(), value)
    together(one.finish, two.finish)
    assert same(one.values(), two.values())
    assert one.island.metrics()["rounds_skipped"] == 4


@pytest.mark.parametrize(("changes", "beta"), [({}, 0.95), ({"feedback": 0.5}, 0.5), ({"codec": "int4"}, 1.0)])
def test_a_share_of_the_residual_goes_with_the_next_packet(
    start: Start, changes: dict[str, object], beta: float
) -> None:
    settings = toy_settings(**({"codec": "2bit"} | changes))
    assert settings.beta == beta
    cell = start(MemoryRelay(1, 2), 0, settings, num_cells=1)
    cell.advance(10)  # fragment 0: its first round is applied, its second in flight
    state = cell.island.state_dict()
    fragment, moved = cell.island.map.fragments[0], 0.0
    value = torch.cat([state[f"flight.0.snapshot.{one.name}.rank0"].flatten() for one in fragment.placements])
    for chunk in fragment.chunks:
        residual = state[f"residual.0.{chunk.index}"]
        moved += float(residual.abs().sum())
        delta = state[f"anchor.0.{chunk.index}"] - value[chunk.start : chunk.end]
        assert torch.equal(state[f"flight.0.vector.{chunk.index}"], delta + residual * beta)
    assert moved > 0


def test_a_commit_without_this_cell_leaves_what_was_trained_since_the_snapshot(
    relay: MemoryRelay, start: Start
) -> None:
    """Fragment 0: snapshot at 3, apply at 5."""
    relay.expects = lambda fragment, window: (1,)
    relay.held = lambda fragment, window: True  # else a cell that is still before its snapshot walks
    one, two = start(relay, 0), start(relay, 1)
    one.advance(3)
    snapshot = one.values()
    together(lambda: one.advance(4), lambda: two.advance(4))
    value = one.values()
    train(value, 0, 5)  # what step 5 does before the round is applied
    wait_for(lambda: relay.has(0, 0, 1))
    relay.release()
    together(lambda: one.advance(5), lambda: two.advance(5))
    after = anchors(one)
    assert same(after, anchors(two))
    fragment = one.island.map.fragments[0]
    anchor = torch.cat([after[f"anchor.0.{chunk.index}"] for chunk in fragment.chunks])
    for placement in fragment.placements:
        since = value[placement.name] - snapshot[placement.name]
        expected = anchor[placement.start : placement.end].view(placement.shape) + since
        assert torch.equal(one.parameters[placement.name].detach(), expected)


PHASES = ["before put", "after put", "after commit", "after apply"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("checkpoint", "when"), [(None, "fixed"), (5, "fixed"), (7, "fixed"), (9, "fixed"), (7, "arrival")]
)
def test_killed_at_every_phase_gives_the_same_bits(
    start: Start, phase: str, checkpoint: int | None, when: str
) -> None:
    """The round is (fragment 0, window 1): snapshot at 9, apply at 11. With ``arrival`` what was not
    journaled may come at another step the second time: then only the agreement of the cells is fixed."""
    settings = toy_settings(when=when)
    undisturbed = MemoryRelay(2, 2)
    reference = [start(undisturbed, 0, settings), start(undisturbed, 1, settings)]
    together(*(cell.finish for cell in reference))

    relay = MemoryRelay(2, 2)
    relay.held = lambda fragment, window: phase in PHASES[:2] and (fragment, window) == (0, 1)
    two = start(relay, 1, settings)

    def first_life() -> Cell:
        one = start(relay, 0, settings)
        saved = None
        if checkpoint is not None:
            saved = one.advance(min(checkpoint, 8)).save()
        one.advance(8)
        one.transport.mute = phase == "before put"
        one.advance(9)
        if checkpoint == 9:
            saved = one.save()
        if phase == "after put":
            wait_for(lambda: relay.has(0, 1, 0))
        if phase in PHASES[2:]:
            wait_for(lambda: relay.committed(0, 1))
        one.advance(12 if phase == "after apply" else 10)
        if phase == "before put":
            assert not relay.has(0, 1, 0)
        values, now = one.values(), one.now
        again = one.reborn(saved)
        assert again.now == (checkpoint or 0)
        again.advance(now)
        if when == "fixed":
            assert same(again.values(), values)
        relay.release()
        return again.finish()

    again, _ = together(first_life, two.finish)
    assert isinstance(again, Cell)
    again.island.close()
    assert same(again.values(), two.values())
    assert_bases_agree(relay)
    if when == "fixed":
        assert same(again.values(), reference[0].values())
        assert relay.packets == undisturbed.packets


@pytest.mark.parametrize("late", [Late(deadline="1500 ms"), Late(deadline="10 min", relay_away="1200 ms")])
def test_without_the_relay_training_goes_on_and_is_repeated_exactly(
    relay: MemoryRelay, start: Start, late: Late
) -> None:
    settings = toy_settings(late=late)
    one, two = start(relay, 0, settings, steps=40), start(relay, 1, settings, steps=40)

    def other() -> Cell:
        return two.finish()

    def cut_off() -> Cell:
        one.advance(7)
        saved = one.save()
        one.advance(8)
        one.transport.away = True
        one.advance(13)  # past the apply step 11 of (fragment 0, window 1)
        assert one.island.versions() == (1, 1)
        assert one.silences == [10]
        one.transport.away = False
        wait_for(lambda: one.island._progress.preparer.ready(0))  # the toy's steps are far faster than its threads
        while one.island.metrics()["rounds_late"] == 0:
            assert one.now < 24, "a round that is ready is taken over"
            one.advance(one.now + 1)
        one.advance(one.now + 3)
        late, values, now = one.island.metrics()["rounds_late"], one.values(), one.now
        again = one.reborn(saved)
        again.advance(now)
        assert same(again.values(), values)
        assert again.island.metrics()["rounds_late"] == late >= 1
        return again.finish()

    again, _ = together(cut_off, other)
    assert isinstance(again, Cell)
    again.island.close()
    assert same(again.values(), two.values())
    assert same(anchors(again), anchors(two))


def test_cells_whose_steps_drifted_apart_meet_again(relay: MemoryRelay, start: Start) -> None:
    """One cell trained many windows without the relay: it takes the other's next window number, not its own."""
    one, two = start(relay, 0, steps=60), start(relay, 1, steps=60)

    def cut_off() -> Cell:
        one.advance(8)
        one.transport.away = True
        one.advance(34)
        one.transport.away = False
        return one.finish()

    together(cut_off, two.finish)
    assert same(one.values(), two.values())
    assert all(len(commit.named) == 2 for commit in relay.commits())
    assert_bases_agree(relay)


@pytest.mark.parametrize("drift", range(0, 30, 3))
def test_cells_that_lost_step_with_each_other_need_no_deadline(relay: MemoryRelay, start: Start, drift: int) -> None:
    """Both train on without the relay, one of them further. Here no deadline ever ends a round that waits."""
    one, two = start(relay, 0, steps=90), start(relay, 1, steps=90)
    together(lambda: one.advance(8), lambda: two.advance(8))

    def away(cell: Cell, until: int) -> None:
        cell.transport.away = True
        cell.advance(until)
        cell.transport.away = False
        wait_for(lambda: all(cell.island._preparer.ready(p) for p in (0, 1)))

    together(lambda: away(one, 40), lambda: away(two, 40 + drift))
    together(lambda: one.advance(78), lambda: two.advance(78))
    assert one.now == two.now
    assert one.island.versions() == two.island.versions()  # checkpoints are joint again
    together(one.finish, two.finish)
    assert same(one.values(), two.values())
    assert all(len(commit.named) == 2 for commit in relay.commits())
    together_at = [len({part.step for part in commit.named}) for commit in relay.commits()]
    assert together_at[-8:] == [1] * 8
    assert_bases_agree(relay)


def test_what_is_left_at_the_end_does_not_coast_on_the_outer_momentum(relay: MemoryRelay, start: Start) -> None:
    """Of the rounds that a lost connection left undone only one more comes once all cells are at the end, and a
    round without training leaves the anchor where it is."""
    settings = toy_settings(codec="fp32")
    one, two = start(relay, 0, settings, steps=60), start(relay, 1, settings, steps=60)
    together(lambda: one.advance(8), lambda: two.advance(8))
    for cell in (one, two):
        cell.transport.away = True
        cell.advance(60)
        cell.transport.away = False
    rounds, seen = one.island._rounds, []
    resolve = rounds.resolve

    def watched(p: int, commit: Commit, *rest: Any) -> None:
        before = {c: anchor.clone() for c, anchor in rounds.states[p].anchor.items()}
        resolve(p, commit, *rest)
        moved = max(float((anchor - before[c]).abs().max()) for c, anchor in rounds.states[p].anchor.items())
        seen.append((p, sum(part.tokens for part in commit.named), moved))

    rounds.resolve = watched  # type: ignore[method-assign]
    together(one.finish, two.finish)
    assert same(one.values(), two.values())
    for fragment in (0, 1):
        told = [(tokens > 0, moved) for p, tokens, moved in seen if p == fragment]
        assert [trained for trained, _ in told] == [True, True, False, False]
        assert all(moved > 0.01 if trained else moved < 1e-6 for trained, moved in told)


def test_rejoin_walks_what_the_others_did_alone(relay: MemoryRelay, start: Start) -> None:
    relay.expects = lambda fragment, window: (0,) if window == 1 else (0, 1)
    one, two = start(relay, 0), start(relay, 1)

    def dies() -> Cell:
        two.advance(4)
        saved = two.save()
        two.advance(8)
        two.island.close()
        wait_for(lambda: relay.committed(1, 1))
        again = two.reborn(saved)
        assert again.now == 14  # one before the snapshot of (fragment 0, window 2)
        check_accounts(again)
        return again.finish()

    def check_accounts(again: Cell) -> None:
        """It stands where the others stand. What it sent after its checkpoint is in there: nothing is owed."""
        state, values = again.island.state_dict(), again.values()
        for fragment in again.island.map.fragments:
            flat = torch.cat([values[placement.name].reshape(-1) for placement in fragment.placements])
            for chunk in fragment.chunks:
                anchor = state[f"anchor.{fragment.index}.{chunk.index}"]
                assert torch.equal(flat[chunk.start : chunk.end], anchor)
        for chunk in again.island.map.fragments[1].chunks:  # (fragment 1, window 0) was sent after the checkpoint
            assert not state[f"residual.1.{chunk.index}"].any()

    again, _ = together(dies, one.finish)
    assert isinstance(again, Cell)
    again.island.close()
    assert same(again.values(), one.values())
    assert same(anchors(again), anchors(one))
    assert one.island.metrics()["rounds_applied"] == 8


def test_a_second_death_after_a_rejoin_walks_again(relay: MemoryRelay, start: Start) -> None:
    relay.expects = lambda fragment, window: (0,) if window == 1 else (0, 1)
    one, two = start(relay, 0, steps=30), start(relay, 1, steps=30)

    def dies_twice() -> Cell:
        two.advance(4)
        saved = two.save()
        two.advance(8)
        two.island.close()
        wait_for(lambda: relay.committed(1, 1))
        again = two.reborn(saved)
        again.advance(22)
        third = again.reborn(saved)
        assert third.now > 14
        return third.finish()

    third, _ = together(dies_twice, one.finish)
    assert isinstance(third, Cell)
    third.island.close()
    assert same(third.values(), one.values())


def test_after_a_rewind_packets_in_flight_are_put_again(relay: MemoryRelay, start: Start) -> None:
    undisturbed = MemoryRelay(2, 2)
    reference = [start(undisturbed, 0), start(undisturbed, 1)]
    together(*(cell.finish for cell in reference))
    relay.held = lambda fragment, window: (fragment, window) == (1, 0)  # in flight at step 7
    cells = [start(relay, 0), start(relay, 1)]
    together(*(lambda cell=cell: cell.advance(7) for cell in cells))
    saved = [cell.save() for cell in cells]
    assert [cell.island.versions() for cell in cells] == [(1, 0), (1, 0)]
    relay.release()
    together(*(lambda cell=cell: cell.advance(13) for cell in cells))
    relay.rewind(7, (1, 0))
    again = [cell.reborn(part, attempt=2) for cell, part in zip(cells, saved, strict=True)]
    assert [cell.now for cell in again] == [7, 7]
    together(*(cell.finish for cell in again))
    for cell, expected in zip(again, reference, strict=True):
        cell.island.close()
        assert same(cell.values(), expected.values())
    old, new = ({k[1:]: unpack(d)[1] for k, d in relay.packets.items() if k[0] == n} for n in (1, 2))
    assert bytes(old[(1, 0, 0, 0)]) == bytes(new[(1, 0, 0, 0)])


def test_an_old_attempt_is_told_that_the_run_was_rewound(relay: MemoryRelay, start: Start) -> None:
    one, two = start(relay, 0), start(relay, 1)
    together(lambda: one.advance(5), lambda: two.advance(5))
    relay.rewind(0, (0, 0))
    with pytest.raises(ExchangeError, match="attempt 2"):
        one.advance(20)


def test_stop_is_the_same_step_everywhere(relay: MemoryRelay, start: Start) -> None:
    one, two = start(relay, 0), start(relay, 1)
    together(lambda: one.advance(8), lambda: two.advance(8))
    assert one.island.should_stop_at() is None
    relay.stop()

    def until_stopped(cell: Cell) -> int:
        while cell.now != cell.island.should_stop_at():
            cell.advance(cell.now + 1)
        return cell.now

    assert together(lambda: until_stopped(one), lambda: until_stopped(two)) == [11, 11]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_sent(relay: MemoryRelay, start: Start, bad: float) -> None:
    one = start(relay, 0)
    one.advance(2)
    with torch.no_grad():
        one.parameters["blocks.2.experts.up"][1, 2, 3] = bad
    with pytest.raises(
        ExchangeError, match=r"cell 0, fragment 0, window 0: parameter 'blocks\.2\.experts\.up' .* not finite"
    ):
        one.advance(3)
    one.island.close()
    assert not relay.packets


def test_cells_that_differ_are_stopped_by_name(relay: MemoryRelay, start: Start) -> None:
    parameters = toy_parameters()
    with torch.no_grad():
        parameters["blocks.0.norm.weight"][0] += 1e-6
    one, two = start(relay, 0), start(relay, 1, parameters=parameters)

    def fails(cell: Cell, other: int) -> None:
        with pytest.raises(DivergenceError, match=f"cell {other}, fragment 0, window 0, chunk 0: builds on anchor"):
            cell.finish()

    together(lambda: fails(one, 1), lambda: fails(two, 0))


def test_a_packet_that_is_not_what_the_commit_names_is_refused(relay: MemoryRelay, start: Start) -> None:
    one, two = start(relay, 0), start(relay, 1)
    relay.held = lambda fragment, window: True
    together(lambda: one.advance(3), lambda: two.advance(3))
    wait_for(lambda: relay.has(0, 0, 0) and relay.has(0, 0, 1))
    honest = relay.fetch

    def tampered(place: tuple[int, int, int, int, int]) -> bytes:
        packet = bytearray(honest(place))
        packet[-1] ^= 1
        return bytes(packet)

    relay.fetch = tampered  # type: ignore[method-assign]
    relay.release()
    with pytest.raises(ExchangeError, match=r"cell 1, fragment 0, window 0.*not those that the commit names"):
        one.advance(10)


def test_halt_reaches_the_loop(relay: MemoryRelay, start: Start) -> None:
    one = start(relay, 0)
    one.advance(1)
    relay._write(Halt, cell=1, fragment=1, window=4, reason="anchors differ")
    with pytest.raises(DivergenceError, match="halted by cell 1: anchors differ"):
        one.advance(20)


def test_blend_keeps_the_published_share(relay: MemoryRelay, start: Start) -> None:
    settings = toy_settings(apply="blend", alpha=0.25, codec="fp32", outer=Outer(lr=1.0, momentum=0.0))
    one, two = start(relay, 0, settings), start(relay, 1, settings)
    together(lambda: one.advance(4), lambda: two.advance(4))
    value = one.values()
    train(value, 0, 5)
    together(lambda: one.advance(5), lambda: two.advance(5))
    anchor = torch.cat([anchors(one)[f"anchor.0.{chunk.index}"] for chunk in one.island.map.fragments[0].chunks])
    for placement in one.island.map.fragments[0].placements:
        theirs = anchor[placement.start : placement.end].view(placement.shape)
        expected = value[placement.name] * 0.25 + theirs * 0.75
        assert torch.equal(one.parameters[placement.name].detach(), expected)
    together(one.finish, two.finish)
    assert same(one.values(), two.values())


def test_blend_owes_what_its_value_does_not_hold(start: Start) -> None:
    """residual ← (1 − α)·new + α·old: at the first round old is zero."""

    def residual(apply: str) -> dict[str, torch.Tensor]:
        relay, settings = MemoryRelay(2, 2), toy_settings(apply=apply, alpha=0.25)
        one, two = start(relay, 0, settings), start(relay, 1, settings)
        together(lambda: one.advance(5), lambda: two.advance(5))
        return {k: v for k, v in one.island.state_dict().items() if k.startswith("residual.0")}

    assert same({k: v.mul(0.75) for k, v in residual("carry").items()}, residual("blend"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "butterfly"}, "a butterfly pairs 2, 4, 8, … cells, not 3; nearest: 2 or 4"),
        ({"mode": "none"}, "exchanges nothing"),
        ({"fragments": 4}, "more than the model's 3 blocks"),
    ],
)
def test_settings_that_do_not_fit(relay: MemoryRelay, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Cell(relay, 0, toy_settings(**changes), num_cells=3)


def test_parameters_must_be_fp32(relay: MemoryRelay) -> None:
    with pytest.raises(ConfigError, match=r"'w' is torch\.bfloat16"):
        Cell(relay, 0, toy_settings(fragments=1), parameters={"w": torch.zeros(3, 3, dtype=torch.bfloat16)})


def test_checkpoints_of_something_else_are_refused(relay: MemoryRelay, start: Start) -> None:
    one = start(relay, 0)
    tensors = one.island.state_dict()
    with pytest.raises(CheckpointError, match="cell 0, not 1"):
        start(relay, 1).island.load_state_dict(tensors)
    with pytest.raises(CheckpointError, match=r"another exchange: exchange\.chunk: 256 then, 300 now"):
        start(relay, 0, toy_settings(chunk=300)).island.load_state_dict(tensors)
    larger = toy_parameters() | {"more": torch.nn.Parameter(torch.ones(3))}
    with pytest.raises(CheckpointError, match="of another model"):
        start(relay, 0, parameters=larger).island.load_state_dict(tensors)
    with pytest.raises(CheckpointError, match=r"lacks 'momentum\.1\.0'"):
        one.island.load_state_dict({k: v for k, v in tensors.items() if k != "momentum.1.0"})
    with pytest.raises(CheckpointError, match=r"'anchor\.0\.0' has shape"):
        one.island.load_state_dict(tensors | {"anchor.0.0": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="no readable state"):
        one.island.load_state_dict({})


def test_a_relay_of_another_run_is_refused(start: Start) -> None:
    cell = start(MemoryRelay(2, 3), 0)
    with pytest.raises(ConfigError, match="another configuration"):
        cell.island.resume()


def test_hurry_leaves_a_due_round_in_flight(relay: MemoryRelay, start: Start) -> None:
    """A cell that was asked to end does not wait for the other; the round comes with the checkpoint."""
    one, two = start(relay, 0), start(relay, 1)
    one.advance(4)
    one.island.hurry()
    one.advance(5)
    assert one.island.versions() == (0, 0)
    again, _ = together(lambda: one.reborn(one.save()).finish(), two.finish)
    assert isinstance(again, Cell)
    again.island.close()
    assert same(again.values(), two.values())


def test_hurry_breaks_off_the_end_and_a_resume_goes_on_exactly(relay: MemoryRelay, start: Start) -> None:
    """The final rounds wait for the other cell: they stay in flight, and come with the checkpoint."""
    undisturbed = MemoryRelay(2, 2)
    reference = [start(undisturbed, 0), start(undisturbed, 1)]
    together(*(cell.finish for cell in reference))
    one, two = start(relay, 0), start(relay, 1)
    relay.held = lambda fragment, window: window == 4

    def ends() -> Cell:
        one.advance(20)
        threading.Timer(0.2, one.island.hurry).start()
        assert not one.island.finish()
        again = one.reborn(one.save())
        relay.release()
        return again.finish()

    again, _ = together(ends, two.finish)
    assert isinstance(again, Cell)
    again.island.close()
    assert same(again.values(), two.values())
    assert same(again.values(), reference[0].values())
    assert relay.packets == undisturbed.packets


def test_hurry_ends_the_wait_for_a_relay_that_never_answers(relay: MemoryRelay, start: Start) -> None:
    one = start(relay, 0)
    one.transport.away = True
    threading.Timer(0.2, one.island.hurry).start()
    with pytest.raises(Hurried):
        one.island.resume()


def test_a_cell_at_its_end_does_not_wait_for_those_that_stop_before(relay: MemoryRelay, start: Start) -> None:
    relay.held = lambda fragment, window: (fragment, window) == (0, 2)
    one, two = start(relay, 0), start(relay, 1)
    together(lambda: one.advance(15), lambda: two.advance(15))
    one.transport.away = True
    one.advance(20)
    relay.stop()
    one.transport.away = False
    wait_for(lambda: relay.has(0, 2, 0) and relay.has(0, 2, 1))
    relay.release()
    two.advance(17)
    assert not one.island.finish()
    assert one.island.should_stop_at() == two.island.should_stop_at() == 17
