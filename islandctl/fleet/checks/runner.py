"""Many questions side by side, each with a deadline of its own: one that hangs holds nobody up.

A thread that does not come back cannot be ended. It is left behind (it never keeps the process alive), its verdict is
"no answer", and another takes its place.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from islandctl.errors import IslandError, UnreachableError
from islandctl.fleet.checks.base import Check, Verdict, Verdicts, fail, unknown

AT_ONCE = 64
"""Questions under way: each is a thread here and a command there."""
AT_ONCE_EACH = 4
"""On one node: half of what ssh.py lets through, so that nobody's deadline runs while it waits for its turn."""


@dataclass(frozen=True)
class Task:
    """One check of one place."""

    check: Check
    place: str
    ask: Callable[[], Verdicts]
    deadline_s: float
    key: str = ""
    """Tasks of one key share a node."""


@dataclass(frozen=True)
class Done:
    """What came of a task."""

    task: Task
    verdicts: tuple[Verdict, ...]
    seconds: float


def run(
    tasks: Sequence[Task], *, at_once_each: int = AT_ONCE_EACH, clock: Callable[[], float] = time.monotonic
) -> Iterator[Done]:
    """Ask all; give each answer as it comes. Tasks of one key begin in the order given."""
    waiting, running = deque(tasks), dict[int, tuple[Task, float]]()
    answers: queue.SimpleQueue[tuple[int, tuple[Verdict, ...]]] = queue.SimpleQueue()
    busy: Counter[str] = Counter()
    asking: Counter[str] = Counter()
    numbers = iter(range(len(tasks)))
    while waiting or running:
        for task in _next(waiting, busy, asking, AT_ONCE - len(running), at_once_each):
            number = next(numbers)
            running[number] = (task, clock())
            busy[task.key] += 1
            asking[task.check.name] += 1
            threading.Thread(target=_ask, args=(number, task, answers), daemon=True, name=task.check.name).start()
        first = min(began + task.deadline_s for task, began in running.values())
        try:
            number, verdicts = answers.get(timeout=max(0.0, first - clock()))
        except queue.Empty:
            late = [number for number, (task, began) in running.items() if clock() >= began + task.deadline_s]
            came = [(number, _late(running[number][0])) for number in late]
        else:
            came = [(number, verdicts)]
        for number, verdicts in came:
            if number in running:  # else it comes after its deadline, and has been told as late
                task, began = running.pop(number)
                busy[task.key] -= 1
                asking[task.check.name] -= 1
                yield Done(task, verdicts, clock() - began)


def _next(waiting: deque[Task], busy: Counter[str], asking: Counter[str], room: int, each: int) -> list[Task]:
    """Take from ``waiting`` what may begin now. ``busy``: tasks by key; ``asking``: by check."""
    if room <= 0:
        return []
    chosen: list[Task] = []
    taken: Counter[str] = Counter()
    begun: Counter[str] = Counter()
    for task in list(waiting):
        if len(chosen) >= room:
            break
        name = task.check.name
        free = not task.key or busy[task.key] + taken[task.key] < each
        if free and asking[name] + begun[name] < task.check.at_once:
            chosen.append(task)
            taken[task.key] += 1
            begun[name] += 1
            waiting.remove(task)
    return chosen


def _late(task: Task) -> tuple[Verdict, ...]:
    hint = "look at the node: a tool hangs there, or the link does"
    return (unknown(f"no answer in {task.deadline_s:g} s", hint=hint),)


def _ask(number: int, task: Task, answers: queue.SimpleQueue[tuple[int, tuple[Verdict, ...]]]) -> None:
    try:
        said = task.ask()
        verdicts = (said,) if isinstance(said, Verdict) else tuple(said)
    except IslandError as error:
        verdicts = (told_by(error, task.place),)
    except BaseException as error:  # of a plugin: it must not end the others
        what = f"the check itself broke: {type(error).__name__}: {error}".rstrip(": ")
        verdicts = (unknown(" ".join(what.split()), hint=f"islandctl doctor --skip {task.check.name}"),)
    answers.put((number, verdicts))


def told_by(error: IslandError, place: str) -> Verdict:
    """What an error says of ``place``, which its message need not name again."""
    say = unknown if isinstance(error, UnreachableError) else fail
    return say(error.message.removeprefix(f"{place}: "), hint=error.hint)
