"""The relay in this process: what other rooms' tests stand on."""

from __future__ import annotations

import threading

import pytest

from islandctl.config.exchange import Late
from islandctl.errors import RelayError
from islandctl.exchange.transport import Transport
from islandctl.ledger.chain import verify
from islandctl.relay.inprocess import InProcessRelay
from islandctl.relay.messages import Heartbeat

from .builders import CELLS, CONFIG, RUN, packet


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def relay(**options: object) -> InProcessRelay:
    return InProcessRelay(RUN, CONFIG, CELLS, 2, **options)  # type: ignore[arg-type]


def test_a_round_is_committed_once_all_packets_are_there() -> None:
    office = relay()
    usa: Transport = office.transport(0)
    asia: Transport = office.transport(1)
    usa.put(packet(0))
    with pytest.raises(RelayError) as refused:
        asia.fetch(1, 0, 0, 0, 0)
    assert refused.value.code == "early"
    assert usa.fetch(1, 0, 0, 0, 0) == packet(0)
    asia.put(packet(1))
    genesis, commit = asia.entries(-1, 0)
    assert genesis.kind == "genesis"
    assert commit.kind == "commit"
    assert [one.cell for one in commit.named] == [0, 1]
    assert (commit.reason, commit.version) == ("complete", 1)
    assert asia.fetch(1, 0, 0, 0, 0) == packet(0)
    verify(usa.entries(-1, 0))


def test_entries_waits_for_a_put_of_another_thread() -> None:
    office = relay()
    office.transport(0).put(packet(0))
    late = threading.Timer(0.05, office.transport(1).put, [packet(1)])
    late.start()
    assert [entry.kind for entry in office.transport(0).entries(0, 10)] == ["commit"]
    late.join()


def test_entries_lets_the_deadline_pass() -> None:
    office = relay(late=Late(deadline="50 ms"))
    office.transport(0).put(packet(0))
    (commit,) = office.transport(0).entries(0, 10)
    assert commit.kind == "commit"
    assert (commit.reason, commit.named, commit.missing) == ("deadline", (), (1,))


def test_a_relay_on_the_same_archive_goes_on() -> None:
    first = relay()
    first.transport(0).put(packet(0))
    second = relay(archive=first.archive)
    second.transport(1).put(packet(1))
    assert second.status().rounds_committed == 1


def test_another_cells_packet_is_forbidden() -> None:
    with pytest.raises(RelayError) as refused:
        relay().transport(1).put(packet(0))
    assert refused.value.code == "forbidden"


def test_checkpoints_join_and_a_rewind_begins_a_new_attempt() -> None:
    office = relay()
    for cell in (0, 1):
        office.transport(cell).register_checkpoint(50, f"m{cell}", [0, 0], 1)
    (joint,) = office.status().joint_checkpoints
    assert joint.manifests == ("m0", "m1")
    entry = office.rewind(50, joint.manifests, joint.versions)
    assert entry.attempt == 2
    assert office.rewind(50, joint.manifests, joint.versions).seq == entry.seq
    with pytest.raises(RelayError) as refused:
        office.transport(0).put(packet(0))
    assert refused.value.code == "stale"
    with pytest.raises(RelayError) as refused:
        office.rewind(51, joint.manifests, joint.versions)
    assert refused.value.code == "not-joint"


def test_different_held_out_texts_are_refused() -> None:
    office = relay()
    beat = {"attempt": 1, "state": "training", "step": 1, "steps": 9, "tokens": 1, "tokens_per_s": 1.0}
    office.transport(0).heartbeat(Heartbeat(cell=0, held_out_hash="a" * 64, **beat))
    with pytest.raises(RelayError, match="usa and asia") as refused:
        office.transport(1).heartbeat(Heartbeat(cell=1, held_out_hash="b" * 64, **beat))
    assert refused.value.code == "held_out"


def test_the_status_tells_for_how_long_a_cell_has_told_the_same_step() -> None:
    clock = Clock()
    office = relay(clock=clock)
    beat = Heartbeat(cell=0, attempt=1, state="training", step=1, steps=9, tokens=1, tokens_per_s=1.0)
    for step, now in ((1, 10.0), (1, 12.0), (2, 14.0), (2, 16.0)):
        clock.now = now
        office.transport(0).heartbeat(beat.model_copy(update={"step": step}))
    clock.now = 17.0
    usa, asia = office.status().cells
    assert (usa.age_s, usa.still_s) == (1.0, 3.0)
    assert asia.still_s is None


def test_a_halt_stops_all_puts() -> None:
    office = relay()
    office.transport(1).halt("anchors differ", 0, 0)
    with pytest.raises(RelayError, match="anchors differ") as refused:
        office.transport(0).put(packet(0))
    assert refused.value.code == "halted"
    assert office.status().halted == "anchors differ"


def test_different_models_are_refused_by_the_first_parameter_that_differs() -> None:
    office = relay()
    usa, asia = office.transport(0), office.transport(1)
    usa.tell_model(1, [("b", (2,)), ("a", (3, 4))])
    usa.tell_model(1, [("a", (3, 4)), ("b", (3,))])  # a later life of the same cell
    asia.tell_model(1, [("b", (3,)), ("a", (3, 4))])
    for other, text in (
        ([("a", (3, 4))], "parameter 'b': its shape is \\(3,\\) in usa, asia has no such parameter"),
        (
            [("b", (3,)), ("a", (3, 5))],
            "parameter 'a': its shape is \\(3, 4\\) in usa, its shape is \\(3, 5\\) in asia",
        ),
    ):
        with pytest.raises(RelayError, match=text) as refused:
            asia.tell_model(1, other)
        assert refused.value.code == "model"
    asia.tell_model(2, [("c", (1,))])  # another attempt
