"""Computes a commit's result before it is due: fetches what it names and does the arithmetic, chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

from islandctl.exchange.follower import Follower, Latch
from islandctl.exchange.fragments import Chunk
from islandctl.ledger.entries import Commit

Result = TypeVar("Result")


class Preparer(Generic[Result]):
    """Of each fragment, the result of the next commit, on top of what is installed now.

    At most one commit of a fragment is prepared at a time: the next one builds on its result.

    Args:
        chunks: of every fragment, those that this rank owns.
        work: one chunk's result of one commit that names somebody. Called in the pool's threads.
        pool: where the work is done.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[Chunk]],
        follower: Follower,
        latch: Latch,
        pool: Executor,
        work: Callable[[Commit, Chunk], Result],
    ) -> None:
        self._chunks = chunks
        self._follower = follower
        self._latch = latch
        self._pool = pool
        self._work = work
        self._begun: list[tuple[int, dict[int, Future[Result]]] | None] = [None] * len(chunks)
        self.done_at = [0.0] * len(chunks)
        """When the last chunk of each fragment's newest result was ready here, by the monotonic clock."""

    def begin(self, fragment: int) -> None:
        """Prepare the fragment's next commit, if there is one that names somebody. Any thread may call."""
        with self._latch.changed:
            head, begun = self._follower.next_commit(fragment), self._begun[fragment]
            if head is None or not head.named or self._latch.closed.is_set():
                return
            if begun is not None and begun[0] == head.seq:
                return
            futures = {}
            for chunk in self._chunks[fragment]:
                futures[chunk.index] = self._pool.submit(self._prepare, head, chunk)
                futures[chunk.index].add_done_callback(lambda _: self._done(fragment))
            self._begun[fragment] = (head.seq, futures)

    def _done(self, fragment: int) -> None:
        self.done_at[fragment] = time.monotonic()
        self._latch.notify()

    def ready(self, fragment: int) -> bool:
        """Whether the next commit is there and can be installed at once."""
        head = self._follower.next_commit(fragment)
        if head is None:
            return False
        if not head.named:
            return True
        begun = self._begun[fragment]
        return begun is not None and begun[0] == head.seq and all(future.done() for future in begun[1].values())

    def take(self, fragment: int) -> dict[int, Result]:
        """The result by chunk index, only when ``ready`` and nothing failed; empty when nobody is named."""
        head, begun = self._follower.next_commit(fragment), self._begun[fragment]
        if begun is None or head is None or not head.named:
            return {}
        return {c: future.result() for c, future in begun[1].items()}

    def next(self, fragment: int) -> None:
        """The commit is installed: go on to the one after it."""
        with self._latch.changed:
            done = self._follower.pop(fragment)
            begun = self._begun[fragment]
            if begun is not None and begun[0] == done.seq:
                self._begun[fragment] = None
            self.begin(fragment)

    def _prepare(self, commit: Commit, chunk: Chunk) -> Result:
        try:
            return self._work(commit, chunk)
        except BaseException as error:
            self._latch.fail(error)
            raise
