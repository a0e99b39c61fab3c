"""The schedule played out with what goes wrong: jitter, stragglers, outages of sites, restarts of the relay.

Every cell's clock is a line over a window's steps: ``begin + step · pace``. Waits and outages move it on from where
they happen. So a round costs a few passes over the cells, and where nobody waits only a look at the fastest and the
slowest. Commits follow the relay's late policy (see ``relay/rounds.py``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from islandctl.config.exchange import Exchange
from islandctl.planner.chance import RELAY_AWAY_S, RELAY_DAYS, Chance


class Actor(NamedTuple):
    """One cell."""

    step_s: float
    up_s_per_byte: float
    down_s_per_byte: float
    rtt_s: float
    between_failures_s: float
    """0: it never fails."""
    outage_s: float
    read_s: float
    """Of its checkpoint."""


class Outcome:
    """What came of one run."""

    def __init__(self) -> None:
        self.computing: list[float] = []
        """Of each window: planned seconds of training, of all cells, over the seconds that they took."""
        self.waits_s: list[float] = []
        """Of each round: the longest that a cell stood still for it."""
        self.rounds = self.empty = self.partial = 0
        self.relay_restarts = 0
        self.lost_s: list[float] = []
        """Of each failure: seconds away, and of steps that were repeated or skipped."""
        self.duration_s = 0.0


def play_out(
    exchange: Exchange,
    sizes: Sequence[int],
    actors: Sequence[Actor],
    *,
    windows: int,
    checkpoint_every: int,
    checkpoint_s: float,
    seed: int,
) -> Outcome:
    """Play ``windows`` windows. The same arguments give the same outcome, everywhere.

    Args:
        sizes: bytes of every fragment on the wire.
        checkpoint_s: seconds for which training stands still at each checkpoint.
    """
    run = _Run(exchange, sizes, actors, checkpoint_every, checkpoint_s, seed)
    for window in range(windows):
        run.window(window)
    run.out.duration_s = max(run.begin)
    return run.out


class _Due(NamedTuple):
    """A round that is to be applied."""

    step: int
    """Of the window in which it is applied."""
    fragment: int
    commit: float | list[float]
    """When it is written; in a butterfly, for each cell."""
    delay: float
    """Of that, what the relay's restart has cost."""


class _Run:
    def __init__(
        self,
        exchange: Exchange,
        sizes: Sequence[int],
        actors: Sequence[Actor],
        checkpoint_every: int,
        checkpoint_s: float,
        seed: int,
    ) -> None:
        self.exchange, self.sizes, self.actors = exchange, sizes, actors
        self.every, self.saving_s = checkpoint_every, checkpoint_s / checkpoint_every
        self.butterfly = exchange.mode == "butterfly"
        self.partners = 0 if exchange.mode == "none" else 1 if self.butterfly else len(actors) - 1
        self.chance = Chance(seed, len(actors))
        self.out = Outcome()
        self.step_s = [actor.step_s for actor in actors]
        self.begin = [0.0] * len(actors)
        """When each cell begins the present window; moved on by what it has waited in it."""
        self.pace = list(self.step_s)
        self.up: list[float] = []
        self.down: list[float] = []
        self.rtt = [actor.rtt_s for actor in actors]
        self.fixed = [1.5 * actor.rtt_s for actor in actors]
        """From a commit to a fetch's first byte: the news, and the request."""
        self.most_down = [
            max(1.5 * one.rtt_s + self.partners * size * one.down_s_per_byte / 0.7 for one in actors)
            for size in sizes
        ]
        """The longest that a cell takes from a commit to the result, for each fragment."""
        self.failing = [(self.chance.after(one.between_failures_s), cell) for cell, one in enumerate(actors)]
        heapq.heapify(self.failing)
        self.back: dict[int, tuple[float, float]] = {}
        """Cells that are away: when they are back, and how much of that is steps trained again."""
        self.missed: dict[int, set[int]] = {}
        """Windows that a cell has missed in a row."""
        self.relay_at = self.chance.after(RELAY_DAYS * 86_400)
        self.relay_back = self.relay_at + self.chance.lasting(RELAY_AWAY_S)
        self.pending: list[_Due] = []
        """Rounds to be applied in the next window."""
        self.skipped_s = 0.0
        self.link_free = [0.0] * len(actors)
        gap_s = min(self.step_s) * exchange.window / exchange.fragments
        self.queueing = any(max(sizes) * one.up_s_per_byte > 0.5 * gap_s for one in actors)
        """Whether a fragment may still be on its way when the next one begins."""

    def window(self, window: int) -> None:
        """All rounds of one window."""
        length, fragments, overlap = self.exchange.window, self.exchange.fragments, self.exchange.overlap
        before = sum(self.begin)
        extra = self.saving_s
        self.pace = [step * times + extra for step, times in zip(self.step_s, self.chance.paces(), strict=True)]
        links = self.chance.links()
        self.up = [one.up_s_per_byte * times for one, times in zip(self.actors, links, strict=True)]
        self.down = [one.down_s_per_byte * times for one, times in zip(self.actors, links, strict=True)]
        self.skipped_s = 0.0
        due, self.pending = self.pending, []
        begins = [((p + 1) * length // fragments, p) for p in range(fragments if self.partners else 0)]
        while due or begins:
            # what is due comes first; without an overlap a round is there and back within the step
            if due and (not begins or due[0].step <= begins[0][0]):
                one = due.pop(0)
                self._fail_until(one.step, window)
                self._apply(one)
                continue
            step, fragment = begins.pop(0)
            self._fail_until(step, window)
            commit, delay = self._commit(step, window, fragment)
            ahead = step + overlap - length
            (self.pending if ahead > 0 else due).append(
                _Due(ahead if ahead > 0 else step + overlap, fragment, commit, delay)
            )
        self._fail_until(length, window)
        self.begin = [begin + length * pace for begin, pace in zip(self.begin, self.pace, strict=True)]
        useful = length * sum(self.step_s) - self.skipped_s
        spent = sum(self.begin) - before
        self.out.computing.append(min(1.0, max(0.0, useful / spent)) if spent > 0 else 1.0)

    def _at(self, cell: int, step: int) -> float:
        return self.begin[cell] + step * self.pace[cell]

    def _fail_until(self, step: int, window: int) -> None:
        """Failures that come before the cell has done ``step`` steps of the window."""
        while self.failing[0][0] < self._at(self.failing[0][1], step):
            at, cell = heapq.heappop(self.failing)
            one = self.actors[cell]
            done = max(0.0, (at - self.begin[cell]) / self.pace[cell])
            again = (window * self.exchange.window + done) % self.every * one.step_s
            away = self.chance.lasting(one.outage_s) + one.read_s + again
            self.begin[cell] += away
            self.back[cell] = (at + away, again)
            self.out.lost_s.append(away)
            heapq.heappush(self.failing, (at + away + self.chance.after(one.between_failures_s), cell))

    def _commit(self, step: int, window: int, fragment: int) -> tuple[float | list[float], float]:
        """When the round's commit is written, and how much of that is the relay's delay."""
        size = self.sizes[fragment]
        sent = [
            begin + step * pace + size * up + rtt
            for begin, pace, up, rtt in zip(self.begin, self.pace, self.up, self.rtt, strict=True)
        ]
        if self.queueing:
            sent = [max(one, free + size * up) for one, free, up in zip(sent, self.link_free, self.up, strict=True)]
            self.link_free = sent
        first, last = min(sent), max(sent)
        self.out.rounds += 1
        late = self.exchange.late
        if self.butterfly:
            return self._in_pairs(window + fragment, sent)
        if last - first > late.deadline:
            last = self._without(step, window, sent, first)
        elif self.missed or self.back:
            self.missed.clear()
            self.back = {cell: told for cell, told in self.back.items() if told[0] > last}
        return self._relayed(last)

    def _in_pairs(self, turn: int, sent: list[float]) -> tuple[list[float], float]:
        """A butterfly's commits: both have sent, or the deadline has passed and both skip."""
        bit = 1 << turn % max(1, (len(sent) - 1).bit_length())
        commits, skipped = [], 0
        for cell, at in enumerate(sent):
            other = sent[cell ^ bit]
            end = min(at, other) + self.exchange.late.deadline
            skipped += max(at, other) > end
            commits.append(max(at, min(other, end)))
        self.out.partial += skipped > 0
        _, delay = self._relayed(max(commits))
        return [commit + delay for commit in commits], delay

    def _without(self, step: int, window: int, sent: list[float], first: float) -> float:
        """The commit of a round for which somebody is too late: the relay's late policy.

        Who has missed it goes on where the others are, as soon as it is back.
        """
        late, end = self.exchange.late, first + self.exchange.late.deadline
        missing = [cell for cell, at in enumerate(sent) if at > end]
        away = all(len(self.missed.get(cell, ())) >= late.windows for cell in missing)
        present = max(at for at in sent if at <= end)
        for cell in missing:
            self._go_on(cell, step, present if away and late.then == "alone" else end)
        if not away:
            for cell in missing:
                self.missed.setdefault(cell, set()).add(window)
            self.out.empty += 1
            return end
        if late.then == "wait":  # open until all are there
            self.missed.clear()
            arrived = (self._at(cell, step) + self.sizes[0] * self.up[cell] + self.rtt[cell] for cell in missing)
            return max(present, *arrived)
        self.out.partial += 1
        return present

    def _go_on(self, cell: int, step: int, others: float) -> None:
        """The cell does not take the steps that it has missed: it is where the others are once it is back."""
        back, again = self.back.get(cell, (0.0, 0.0))
        if self.exchange.late.then == "alone":
            back -= again  # it walks through the commits in place of repeating its steps
        now = self._at(cell, step)
        there = min(now, max(back, others))
        if there < now:
            steps_s = (now - there) * self.step_s[cell] / self.pace[cell]
            self.begin[cell] -= now - there
            self.skipped_s += min(steps_s, step * self.step_s[cell])

    def _relayed(self, commit: float) -> tuple[float, float]:
        """The same with the relay's restarts: what comes while it is away waits for it."""
        while self.relay_back < commit:
            self._next_relay()
        if self.relay_at > commit:
            return commit, 0.0
        delay = self.relay_back - commit
        self._next_relay()
        return commit + delay, delay

    def _next_relay(self) -> None:
        self.out.relay_restarts += 1
        self.relay_at = self.relay_back + self.chance.after(RELAY_DAYS * 86_400)
        self.relay_back = self.relay_at + self.chance.lasting(RELAY_AWAY_S)

    def _apply(self, due: _Due) -> None:
        """Who is not through with the fetch stands still; for a relay that is away no longer than the recipe says."""
        begin, pace, step, commit = self.begin, self.pace, due.step, due.commit
        last = commit if isinstance(commit, float) else max(commit)
        fastest = min([start + step * each for start, each in zip(begin, pace, strict=True)])
        if last + self.most_down[due.fragment] <= fastest:
            self.out.waits_s.append(0.0)
            return
        size = self.partners * self.sizes[due.fragment]
        commits = [commit] * len(begin) if isinstance(commit, float) else commit
        ahead = [  # how long after the cell's own step its result is there
            at + fixed + size * each - start - step * steps_s
            for at, fixed, each, start, steps_s in zip(commits, self.fixed, self.down, begin, pace, strict=True)
        ]
        most = self.exchange.late.relay_away if due.delay else math.inf
        waits = [0.0 if wait <= 0 else wait if wait < most else most for wait in ahead]
        self.begin = [start + wait for start, wait in zip(begin, waits, strict=True)]
        self.out.waits_s.append(max(waits))
