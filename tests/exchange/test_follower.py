from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from islandctl.errors import ConfigError, DivergenceError, ExchangeError, IslandError, RelayError, UnreachableError
from islandctl.exchange import follower as module
from islandctl.exchange.follower import Follower, Latch
from islandctl.ledger.entries import Commit, Entry, Genesis, Halt, Rewind, Stop

PLACE = {"at": "", "previous": ""}
GENESIS = Genesis(seq=0, attempt=1, run="r", config_hash="c", cells=("a", "b"), num_fragments=2, **PLACE)


def commit(seq: int, fragment: int = 0, attempt: int = 1) -> Commit:
    return Commit(
        seq=seq, attempt=attempt, fragment=fragment, window=seq, version=0, named=(), reason="deadline", **PLACE
    )


class Pages:
    """A transport that gives each page once; an exception is raised; afterwards there is nothing new."""

    def __init__(self, pages: Sequence[Sequence[Entry] | Exception]) -> None:
        self.pages = list(pages)
        self.asked: list[float] = []

    def put(self, packet: bytes) -> None:
        raise AssertionError

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        raise AssertionError

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        self.asked.append(time.monotonic())
        page = self.pages.pop(0) if self.pages else ()
        if isinstance(page, Exception):
            raise page
        return page


def follow(
    pages: Sequence[Sequence[Entry] | Exception],
    until: Callable[[Follower], bool],
    *,
    attempt: int = 1,
    resolved: Sequence[int] = (-1, -1),
) -> tuple[Follower, IslandError | None]:
    latch = Latch()
    followed = Follower(
        Pages(pages),
        run="r",
        config_hash="c",
        num_fragments=2,
        attempt=attempt,
        cell=0,
        latch=latch,
        on_commit=lambda fragment: None,
    )
    followed.start(lambda commit: commit.seq <= resolved[commit.fragment])
    with latch.changed:
        assert latch.changed.wait_for(lambda: until(followed) or latch.error is not None, timeout=60)
    error = latch.error
    latch.closed.set()
    followed.join()
    return followed, error


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)


def test_queues_hold_what_is_not_applied_of_this_attempt() -> None:
    rewind = Rewind(seq=3, attempt=2, step=0, manifests=(), versions=(0, 0), **PLACE)
    entries = [GENESIS, commit(1), commit(2, 1), rewind, commit(4, 0, 2), commit(5, 1, 2), commit(6, 0, 2)]
    followed, error = follow([entries], lambda f: f.caught_up, attempt=2, resolved=(4, 2))
    assert error is None
    assert [[each.seq for each in queue] for queue in followed.queues] == [[6], [5]]
    assert followed.head == 6
    first = followed.next_commit(0)
    assert first is followed.pop(0)
    assert followed.next_commit(0) is None


def test_pages_may_overlap_and_the_relay_may_be_away() -> None:
    pages = [[GENESIS, commit(1)], UnreachableError("away"), [commit(1), commit(2)]]
    followed, error = follow(pages, lambda f: f.caught_up)
    assert error is None
    assert followed.in_touch
    assert [each.seq for each in followed.queues[0]] == [1, 2]


def test_away_is_told() -> None:
    followed, error = follow([UnreachableError("away")] * 10**4, lambda f: not f.in_touch)
    assert error is None
    assert not followed.in_touch
    assert not followed.caught_up


def test_the_stop_round_is_the_first_commit_after_the_stop() -> None:
    stop = Stop(seq=2, attempt=1, reason="asked", **PLACE)
    followed, _ = follow([[GENESIS, commit(1), stop, commit(3, 1), commit(4)]], lambda f: f.caught_up)
    assert followed.stop_round is not None
    assert followed.stop_round.seq == 3


@pytest.mark.parametrize(
    ("page", "kind", "reason"),
    [
        ([GENESIS, commit(2)], ExchangeError, "gap: entry 2 follows 0"),
        ([GENESIS.model_copy(update={"run": "other"})], ConfigError, "run 'other'"),
        ([GENESIS, Halt(seq=1, attempt=1, cell=1, reason="disk", **PLACE)], ExchangeError, "by cell 1: disk"),
        (
            [GENESIS, Halt(seq=1, attempt=1, cell=1, fragment=0, window=2, reason="bases", **PLACE)],
            DivergenceError,
            "by cell 1: bases",
        ),
        (
            [GENESIS, Rewind(seq=1, attempt=2, step=9, manifests=(), versions=(0, 0), **PLACE)],
            ExchangeError,
            r"rewound to step 9 \(attempt 2\)",
        ),
        (RelayError("no token", code="forbidden"), RelayError, "no token"),
        (ZeroDivisionError("bug"), ExchangeError, "ZeroDivisionError: bug"),
    ],
)
def test_what_ends_the_exchange(page: Sequence[Entry] | Exception, kind: type, reason: str) -> None:
    _, error = follow([page], lambda f: f.caught_up)
    assert type(error) is kind
    with pytest.raises(kind, match=reason):
        raise error


def test_the_first_error_stays() -> None:
    latch = Latch()
    first = ExchangeError("first")
    latch.fail(first)
    latch.fail(ExchangeError("second"))
    assert latch.error is first


def test_silence_counts_from_the_question_and_not_from_its_timeout() -> None:
    class Hanging(Pages):
        def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
            if not self.pages:
                self.asked.append(time.monotonic())
                latch.closed.wait(0.2)
                raise UnreachableError("no answer")
            return super().entries(after, wait_s)

    latch = Latch()
    pages = Hanging([[GENESIS], ()])
    followed = Follower(
        pages,
        run="r",
        config_hash="c",
        num_fragments=2,
        attempt=1,
        cell=0,
        latch=latch,
        on_commit=lambda fragment: None,
    )
    followed.start([-1, -1])
    with latch.changed:
        assert latch.changed.wait_for(lambda: not followed.in_touch, timeout=60)
        first = pages.asked[2]
        assert latch.changed.wait_for(lambda: len(pages.asked) > 4, timeout=60)
    latch.closed.set()
    followed.join()
    assert followed.silent_since == pytest.approx(first, abs=0.1)
