"""What is told to the relay beside the loop: in order, patiently, without harm."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from islandctl.config.exchange import Late
from islandctl.errors import RelayError, UnreachableError
from islandctl.ledger.entries import Checkpoint, Entry
from islandctl.relay.inprocess import InProcessRelay, InProcessTransport
from islandctl.relay.messages import Heartbeat
from islandctl.worker import reporter as module
from islandctl.worker.checkpoint import Saved
from islandctl.worker.reporter import Reporter, registered

from ..ledger.builders import Book
from .rehearsal import until

BEAT = Heartbeat(attempt=1, cell=0, state="starting", step=0, steps=9, tokens=0, tokens_per_s=0.0, held_out_hash="h")


class Flaky:
    """The in-process relay behind a link that can be cut."""

    def __init__(self, inner: InProcessTransport) -> None:
        self.inner, self.up = inner, threading.Event()
        self.up.set()

    def _check(self) -> InProcessTransport:
        if not self.up.is_set():
            raise UnreachableError("relay: no answer")
        return self.inner

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self._check().heartbeat(heartbeat)

    def register_checkpoint(self, step: int, manifest: str, versions: Sequence[int], attempt: int) -> Entry:
        return self._check().register_checkpoint(step, manifest, versions, attempt)

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        return self._check().entries(after, wait_s)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)


@pytest.fixture
def relay() -> InProcessRelay:
    return InProcessRelay("r", "c", ("a", "b"), 1, late=Late())


@pytest.fixture
def link(relay: InProcessRelay) -> Flaky:
    return Flaky(relay.transport(0))


@pytest.fixture
def reporter(link: Flaky, tmp_path: Path) -> Iterator[Reporter]:
    one = Reporter(link, BEAT, num_cells=2, checkpoints=tmp_path, keep=1)
    yield one
    one.close(wait_s=0.0)


def on_disk(folder: Path, step: int) -> Saved:
    path = folder / f"step-{step:08d}-attempt-1"
    path.mkdir()
    return Saved(path, 1, step, f"hash-{step}")


def steps(relay: InProcessRelay) -> list[int]:
    return [entry.step for entry in relay.archive.ledger if isinstance(entry, Checkpoint)]


def beat(relay: InProcessRelay) -> Heartbeat | None:
    return relay.status().cells[0].heartbeat


def test_the_last_state_arrives(relay: InProcessRelay, reporter: Reporter) -> None:
    reporter.update(state="training", step=3, loss=1.5)
    until(lambda: (told := beat(relay)) is not None and told.step == 3, "the heartbeat")
    with reporter.doing("checkpointing"):
        until(lambda: (told := beat(relay)) is not None and told.state == "checkpointing", "the state")
    reporter.update(state="finished", step=9)
    assert reporter.close(wait_s=5.0)
    told = beat(relay)
    assert told is not None
    assert (told.state, told.step, told.loss) == ("finished", 9, 1.5)


def test_checkpoints_wait_for_the_relay_and_keep_their_order(
    relay: InProcessRelay, link: Flaky, reporter: Reporter, tmp_path: Path
) -> None:
    link.up.clear()
    for step in (10, 20, 30):
        reporter.register(on_disk(tmp_path, step), (0,))
    assert not steps(relay)
    link.up.set()
    until(lambda: len(steps(relay)) == 3, "the registrations")
    assert steps(relay) == [10, 20, 30]


def test_what_is_made_while_the_relay_is_away_does_not_pile_up(
    relay: InProcessRelay, link: Flaky, reporter: Reporter, tmp_path: Path
) -> None:
    """Also where cells are unequally fast meanwhile, one step is left that all of them have."""

    def there() -> list[int]:
        return sorted(int(path.name[5:13]) for path in tmp_path.glob("step-*"))

    reporter.register(on_disk(tmp_path, 5), (0,))
    until(lambda: steps(relay) == [5], "the registration")
    link.up.clear()
    for step in range(10, 100, 10):
        reporter.register(on_disk(tmp_path, step), (0,))
    until(lambda: there() == [5, 10, 80, 90], "the tidying")
    link.up.set()
    until(lambda: steps(relay) == [5, 10, 80, 90], "the registrations")
    for step in (5, 10, 20, 30):
        relay.transport(1).register_checkpoint(step, f"other-{step}", (0,), 1)
    assert [one.step for one in relay.status().joint_checkpoints] == [5, 10]


def test_only_what_is_joint_lets_older_ones_go(
    relay: InProcessRelay, link: Flaky, reporter: Reporter, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        reporter.register(on_disk(tmp_path, step), (0,))
    until(lambda: len(steps(relay)) == 3, "the registrations")
    assert len(list(tmp_path.iterdir())) == 3
    for step in (10, 20, 30):
        relay.transport(1).register_checkpoint(step, f"other-{step}", (0,), 1)
    reporter.register(on_disk(tmp_path, 40), (0,))
    until(lambda: len(list(tmp_path.iterdir())) == 3, "the tidying")
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "step-00000020-attempt-1"


def test_a_verdict_is_handed_to_the_loop(relay: InProcessRelay, reporter: Reporter) -> None:
    assert reporter.verdict is None
    relay.transport(1).heartbeat(BEAT.model_copy(update={"cell": 1, "held_out_hash": "h"}))
    reporter.update(held_out_hash="another")
    until(lambda: reporter.verdict is not None, "the verdict")
    assert isinstance(reporter.verdict, RelayError)
    assert reporter.verdict.code == "held_out"


def test_a_stop_is_heard(relay: InProcessRelay, reporter: Reporter) -> None:
    assert not reporter.stop_heard
    relay.stop("by the user")
    until(lambda: reporter.stop_heard, "the stop")


def test_an_end_without_the_relay_is_told_to_the_caller(link: Flaky, reporter: Reporter, tmp_path: Path) -> None:
    link.up.clear()
    reporter.register(on_disk(tmp_path, 10), (0,))
    assert not reporter.close(wait_s=0.05)


def test_without_a_relay_own_checkpoints_count_as_joint(tmp_path: Path) -> None:
    alone = Reporter(None, BEAT, num_cells=1, checkpoints=tmp_path, keep=1)
    for step in (10, 20, 30):
        alone.register(on_disk(tmp_path, step), (0,))
    assert alone.close(wait_s=5.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020-attempt-1", "step-00000030-attempt-1"]


def test_registered_means_this_cell_and_this_manifest(relay: InProcessRelay, tmp_path: Path) -> None:
    saved = on_disk(tmp_path, 10)
    relay.transport(1).register_checkpoint(10, "hash-10", (0,), 1)
    assert not registered(relay.archive.ledger, saved, 0)
    assert registered(relay.archive.ledger, saved, 1)


def test_a_spent_budget_stops_all_cells_through_the_relay_and_a_cell_alone_by_itself(
    link: Flaky, relay: InProcessRelay, tmp_path: Path
) -> None:
    spent = threading.Event()
    one = Reporter(link, BEAT, num_cells=2, checkpoints=tmp_path, keep=1, spent=spent.is_set)
    alone = Reporter(None, BEAT, num_cells=1, checkpoints=tmp_path, keep=1, spent=spent.is_set)
    assert (one.stop_heard, alone.stop_heard) == (False, False)
    spent.set()
    until(lambda: one.stop_heard and alone.stop_heard, "the stop")
    stops = [entry for entry in relay.transport(1).entries(-1, 0.0) if entry.kind == "stop"]
    assert [stop.reason for stop in stops] == ["stopped by budget"]
    for each in (one, alone):
        each.close(wait_s=0.0)


def test_what_an_earlier_life_could_not_save_is_told_until_a_checkpoint_is_good(
    link: Flaky, relay: InProcessRelay, tmp_path: Path
) -> None:
    note = tmp_path / ".failed-step-00000020-attempt-1"
    note.write_text("disk: No space left")
    one = Reporter(link, BEAT, num_cells=2, checkpoints=tmp_path, keep=1)

    def says(text: str) -> bool:
        return (told := beat(relay)) is not None and told.message == text

    until(lambda: says("no checkpoint at step 20: disk: No space left"), "the note")
    one.register(on_disk(tmp_path, 10), (0,))  # the one that this life began with
    one.update(message="waits for somebody")
    until(lambda: says("waits for somebody"), "the message")
    one.update(message="")
    until(lambda: says("no checkpoint at step 20: disk: No space left"), "the note again")
    note.unlink()
    one.register(on_disk(tmp_path, 30), (0,))
    until(lambda: says(""), "the note's end")
    one.close(wait_s=0.0)


def test_what_is_made_while_another_cell_is_away_does_not_pile_up(tmp_path: Path) -> None:
    class Away:
        """A relay at which the other cell does not take part any more."""

        def __init__(self) -> None:
            self.book = Book()

        def heartbeat(self, heartbeat: Heartbeat) -> None: ...

        def register_checkpoint(self, step: int, manifest: str, versions: Sequence[int], attempt: int) -> None:
            self.book.checkpoint(0, step, manifest)
            if step > 20:
                self.book.alone()
            else:
                self.book.checkpoint(1, step)

        def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
            return self.book.entries[after + 1 :]

    one = Reporter(Away(), BEAT, num_cells=2, checkpoints=tmp_path, keep=2)
    for step in range(10, 100, 10):
        one.register(on_disk(tmp_path, step), (0, 0))
    assert one.close(wait_s=5.0)
    assert sorted(int(path.name[5:13]) for path in tmp_path.iterdir()) == [10, 20, 80, 90]
