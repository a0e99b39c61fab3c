"""The schedule played out with what goes wrong: jitter, stragglers, failures of cells, outages of whole sites and of
the relay.

Every cell's clock is a line over a window's steps: ``begin + step · pace``. Waits and outages move it on from where
they happen. So a round costs a few passes over the cells, and where nobody waits only a look at the fastest and the
slowest. Commits follow the relay's late policy (see ``relay/rounds.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from islandctl.config.exchange import Exchange
from islandctl.planner.chance import Chance
from islandctl.planner.outages import RelayTimes


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
    site: int = 0
    """Cells with the same number go away together."""
    between_site_outages_s: float = 0.0
    """0: its site has none."""
    site_outage_s: float = 0.0


class Outcome:
    """What came of one run."""

    def __init__(self) -> None:
        self.computing: list[float] = []
        """Of each window: planned seconds of training, of all cells, over the seconds that they took."""
        self.waits_s: list[float] = []
        """Of each round: the longest that a cell stood still for it."""
        self.rounds = self.empty = self.partial = 0
        self.relay_restarts = 0
        self.site_outages = 0
        self.lost_s: list[float] = []
        """Of each cell at each failure or outage: seconds away, and of steps that were repeated or skipped."""
        self.warmup_s = 0.0
        """Of the duration: until all cells train."""
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
    seed_bytes: int = 0,
    relay_site: int | None = None,
) -> Outcome:
    """Play the warm-up, if the exchange has one, and ``windows`` windows. The same arguments give the same outcome,
    everywhere.

    Args:
        sizes: bytes of every fragment on the wire.
        checkpoint_s: seconds for which training stands still at each checkpoint.
        seed_bytes: what the first cell gives to the others after the warm-up.
        relay_site: the site that the relay stands in; None: it stands elsewhere.
    """
    run = _Run(exchange, sizes, actors, checkpoint_every, checkpoint_s, seed, relay_site)
    if exchange.warmup:
        run.warm_up(seed_bytes)
    for window in range(windows):
        run.window(window)
    run.out.duration_s = max(run.begin)
    run.out.relay_restarts = run.relay.num_until(run.out.duration_s)
    return run.out


class _Due(NamedTuple):
    """A round that is to be applied."""

    step: int
    """Of the window in which it is applied."""
    fragment: int
    commit: float | list[float]
    """When it is written; in a butterfly, for each cell."""
    silent_since: float | None
    """When the relay went away, where that has delayed it."""


class _Run:
    def __init__(
        self,
        exchange: Exchange,
        sizes: Sequence[int],
        actors: Sequence[Actor],
        checkpoint_every: int,
        checkpoint_s: float,
        seed: int,
        relay_site: int | None,
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
        self.before = 0
        """Steps trained before the first window."""
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
        self.failing = [(self.chance.after(one.between_failures_s), cell, False) for cell, one in enumerate(actors)]
        """When what fails next: a cell, or (True) the whole site of which it is the first."""
        self.on_site: dict[int, list[int]] = {}
        for cell, one in enumerate(actors):
            self.on_site.setdefault(one.site, []).append(cell)
        firsts = [cells[0] for cells in self.on_site.values()]
        self.failing += [(self.chance.after(actors[cell].between_site_outages_s), cell, True) for cell in firsts]
        heapq.heapify(self.failing)
        self.back: dict[int, tuple[float, float]] = {}
        """Cells that are away: when they are back, and how much of that is steps trained again."""
        self.missed: dict[int, set[int]] = {}
        """Windows that a cell has missed in a row."""
        self.relay_site = relay_site
        outages = any(one.between_site_outages_s for one in actors)
        self.relay = RelayTimes(self.chance, region=outages and relay_site is None)
        self.pending: list[_Due] = []
        """Rounds to be applied in the next window."""
        self.skipped_s = 0.0
        self.link_free = [0.0] * len(actors)
        gap_s = min(self.step_s) * exchange.window / exchange.fragments
        self.queueing = any(max(sizes) * one.up_s_per_byte > 0.5 * gap_s for one in actors)
        """Whether a fragment may still be on its way when the next one begins."""

    def warm_up(self, seed_bytes: int) -> None:
        """The first cell trains alone; then the whole model goes to the relay, and from there to the others."""
        steps, first = self.exchange.warmup, self.actors[0]
        self._fail_until(steps, 0, only=0)
        end = self.begin[0] + steps * (self.pace[0] + self.saving_s) + seed_bytes * first.up_s_per_byte + first.rtt_s
        self.begin = [end + 1.5 * one.rtt_s + seed_bytes * one.down_s_per_byte for one in self.actors]
        self.begin[0] = end
        self.back.clear()
        self.before, self.out.warmup_s = steps, max(self.begin)
        spent = sum(self.begin)
        share = steps * first.step_s / spent if spent else 1.0
        self.out.computing += [share] * max(1, steps // self.exchange.window)

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
            commit, silent = self._commit(step, window, fragment)
            ahead = step + overlap - length
            (self.pending if ahead > 0 else due).append(
                _Due(ahead if ahead > 0 else step + overlap, fragment, commit, silent)
            )
        self._fail_until(length, window)
        self.begin = [begin + length * pace for begin, pace in zip(self.begin, self.pace, strict=True)]
        useful = length * sum(self.step_s) - self.skipped_s
        spent = sum(self.begin) - before
        self.out.computing.append(min(1.0, max(0.0, useful / spent)) if spent > 0 else 1.0)

    def _at(self, cell: int, step: int) -> float:
        return self.begin[cell] + step * self.pace[cell]

    def _fail_until(self, step: int, window: int, only: int | None = None) -> None:
        """Failures that come before the cell has done ``step`` steps of the window.

        Args:
            only: nobody else trains yet: what breaks elsewhere is mended by then.
        """
        while self.failing[0][0] < self._at(self.failing[0][1] if only is None else only, step):
            at, cell, whole_site = heapq.heappop(self.failing)
            one = self.actors[cell]
            if whole_site:
                lasts, between = self.chance.lasting(one.site_outage_s), one.between_site_outages_s
                self.out.site_outages += 1
                if one.site == self.relay_site:
                    self.relay.gone(at, at + lasts)
            else:
                lasts, between = self.chance.lasting(one.outage_s), one.between_failures_s
            back = at
            for each in self.on_site[one.site] if whole_site else (cell,):
                if only in (None, each):
                    back = max(back, self._away(each, at, lasts, window))
            heapq.heappush(self.failing, (back + self.chance.after(between), cell, whole_site))

    def _away(self, cell: int, at: float, lasts: float, window: int) -> float:
        """The cell is away from ``at`` on, and trains again what it had not saved. Gives when it is through."""
        one = self.actors[cell]
        done = max(0.0, (at - self.begin[cell]) / self.pace[cell])
        again = (self.before + window * self.exchange.window + done) % self.every * one.step_s
        away = lasts + one.read_s + again
        self.begin[cell] += away
        self.back[cell] = (at + away, again)
        self.out.lost_s.append(away)
        return at + away

    def _commit(self, step: int, window: int, fragment: int) -> tuple[float | list[float], float | None]:
        """When the round's commit is written, and since when the relay was away, if that has delayed it."""
        size = self.sizes[fragment]
        sent = [
            begin + step * pace + size * up + rtt
            for begin, pace, up, rtt in zip(self.begin, self.pace, self.up, self.rtt, strict=True)
        ]
        if self.queueing:
            sent = [max(one, free + size * up) for one, free, up in zip(sent, self.link_free, self.up, strict=True)]
            self.link_free = sent
        first, late = min(sent), self.exchange.late
        self.out.rounds += 1
        if self.butterfly:
            return self._in_pairs(window + fragment, sent)
        gone = self.relay.between(first, first + late.deadline)
        if gone is not None:
            sent, first = self._met_again(step, sent, *gone), max(first, gone[1])
        last = max(sent)
        if last - first > late.deadline:
            last = self._without(step, window, sent, first)
        elif self.missed or self.back:
            self.missed.clear()
            self.back = {cell: told for cell, told in self.back.items() if told[0] > last}
        written, silent = self.relay.written(last)
        return written, gone[0] if gone is not None and written >= gone[1] else silent

    def _met_again(self, step: int, sent: list[float], gone: float, back: float) -> list[float]:
        """The relay was away, and nothing was committed. Who is behind skips what the others have trained since."""
        for cell in [cell for cell in range(len(sent)) if self._at(cell, step) > back]:
            before = self.begin[cell]
            self._go_on(cell, step, back)
            sent[cell] -= before - self.begin[cell]
        return [max(at, back) if at >= gone else at for at in sent]

    def _in_pairs(self, turn: int, sent: list[float]) -> tuple[list[float], float | None]:
        """A butterfly's commits: both have sent, or the deadline has passed and both skip."""
        bit = 1 << turn % max(1, (len(sent) - 1).bit_length())
        commits, skipped = [], 0
        for cell, at in enumerate(sent):
            other = sent[cell ^ bit]
            end = min(at, other) + self.exchange.late.deadline
            skipped += max(at, other) > end
            commits.append(max(at, min(other, end)))
        self.out.partial += skipped > 0
        last = max(commits)
        written, silent = self.relay.written(last)
        return [commit + written - last for commit in commits], silent

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
        if due.silent_since is not None:  # from then on they wait so long, and then train on
            end = due.silent_since + self.exchange.late.relay_away
            ahead = [
                min(wait, end - start - step * steps_s)
                for wait, start, steps_s in zip(ahead, begin, pace, strict=True)
            ]
        waits = [max(0.0, wait) for wait in ahead]
        self.begin = [start + wait for start, wait in zip(begin, waits, strict=True)]
        self.out.waits_s.append(max(waits))
