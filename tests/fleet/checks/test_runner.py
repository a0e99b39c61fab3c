"""Checks that hang, break or die: each is one row, and the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from islandctl.errors import PreflightError, UnreachableError, UsageError
from islandctl.fleet.checks import registry
from islandctl.fleet.checks.base import Check, Node, NodeCheck, Verdict, Verdicts, ok
from islandctl.fleet.checks.runner import AT_ONCE, Task, run


class Plain(NodeCheck):
    name, tier, title = "plain", "quick", "nothing"
    threshold, source, remedy = "none", "this test", "nothing"

    def look(self, node: Node) -> Verdicts:
        return ok("fine")


def task(place: str, ask: Callable[[], Verdicts], deadline_s: float = 60.0, key: str = "") -> Task:
    return Task(Plain(), place, ask, deadline_s, key)


def raising(error: BaseException) -> Callable[[], Verdicts]:
    def ask() -> Verdicts:
        raise error

    return ask


def outcome(tasks: list[Task], **more: Any) -> dict[str, Verdict]:
    return {done.task.place: done.verdicts[0] for done in run(tasks, **more)}


def test_one_that_hangs_breaks_or_dies_holds_nobody_up() -> None:
    forever = threading.Event()
    told = outcome(
        [
            task("hangs", lambda: ok(str(forever.wait())), deadline_s=0.2),
            task("breaks", raising(KeyError("temperature"))),
            task("dies", raising(SystemExit(3))),
            task("a/away", raising(UnreachableError("a/away: no route", hint="look"))),
            task("unfit", raising(PreflightError("unfit: too old"))),
            task("fine", lambda: ok("fine")),
        ]
    )
    forever.set()
    assert {place: verdict.level for place, verdict in told.items()} == {
        "hangs": "unknown",
        "breaks": "unknown",
        "dies": "unknown",
        "a/away": "unknown",
        "unfit": "fail",
        "fine": "ok",
    }
    assert told["hangs"].text == "no answer in 0.2 s"
    assert told["breaks"].text == "the check itself broke: KeyError: 'temperature'"
    assert told["breaks"].hint == "islandctl doctor --skip plain"
    assert (told["a/away"].text, told["a/away"].hint) == ("no route", "look")
    assert told["unfit"].text == "too old"


def test_an_answer_after_the_deadline_is_not_taken_twice() -> None:
    late, release = threading.Event(), threading.Event()

    def slow() -> Verdicts:
        release.wait(60)
        late.set()
        return ok("too late")

    def second() -> Verdicts:
        release.set()
        assert late.wait(60)
        time.sleep(0.01)  # so that the late answer lies in the queue first
        return ok("second")

    seen = list(run([task("slow", slow, deadline_s=0.1, key="n"), task("second", second, key="n")], at_once_each=1))
    assert [(done.task.place, done.verdicts[0].level) for done in seen] == [("slow", "unknown"), ("second", "ok")]


def test_no_more_at_once_than_allowed_and_in_order_on_a_node() -> None:
    lock, now, most, order = threading.Lock(), dict[str, int](), dict[str, int](), list[str]()

    def ask(key: str, name: str) -> Callable[[], Verdicts]:
        def work() -> Verdicts:
            with lock:
                order.append(name)
                for counted in (key, "all"):
                    now[counted] = now.get(counted, 0) + 1
                    most[counted] = max(most.get(counted, 0), now[counted])
            time.sleep(0.002)
            with lock:
                for counted in (key, "all"):
                    now[counted] -= 1
            return ok(name)

        return work

    tasks = [task(f"{key}{at}", ask(key, f"{key}{at}"), key=key) for at in range(12) for key in "abc"]
    assert len(list(run(tasks, at_once_each=1))) == 36
    assert {key: most[key] for key in "abc"} == {"a": 1, "b": 1, "c": 1}
    assert [name for name in order if name[0] == "b"] == [f"b{at}" for at in range(12)]
    few = Plain()
    few.at_once = 3
    most.clear()
    assert len(list(run([Task(few, str(at), ask("", str(at)), 60.0) for at in range(20)]))) == 20
    assert most["all"] <= 3
    many = [task(str(at), ask("", str(at))) for at in range(2 * AT_ONCE)]
    assert len(list(run(many))) == 2 * AT_ONCE
    assert most["all"] <= AT_ONCE


def test_many_verdicts_of_one_check() -> None:
    (done,) = run([task("both", lambda: [ok("up"), ok("down")])])
    assert [verdict.text for verdict in done.verdicts] == ["up", "down"]


def test_every_check_says_what_it_asks_and_what_passes() -> None:
    checks = registry.all_checks()
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.name == check.name.lower().replace(" ", "-")
        assert all((check.title, check.threshold, check.source, check.remedy)), check.name
        assert len(check.title) <= 90, check.name


def test_picking() -> None:
    checks = registry.all_checks()
    names = {check.name for check in registry.pick(checks, "quick", (), ("gpus",))}
    assert "login" in names
    assert not names & {"gpus", "wan", "cell-all-reduce"}
    assert {"wan", "dcgm"} <= {check.name for check in registry.pick(checks, "standard", (), ())}
    assert [check.name for check in registry.pick(checks, "quick", ("wan",), ())] == ["wan"]
    with pytest.raises(UsageError, match="no check called gpu-eccc") as error:
        registry.pick(checks, "quick", ("gpu-eccc",), ())
    assert "gpu-ecc" in error.value.hint


class Point:
    """What importlib.metadata gives for an entry point."""

    dist = None

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name, self.load = name, load


def test_checks_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(*given: Point) -> list[Check]:
        monkeypatch.setattr(registry, "entry_points", lambda group: list(given))
        return registry.all_checks()

    def broken() -> Any:
        raise ImportError("no module named fans")

    class Twin(Plain):
        name = "gpus"

    assert points(Point("plain", lambda: Plain))[-1].name == "plain"
    for point, words in (
        (Point("fans", broken), "the check fans of another package cannot be loaded: ImportError"),
        (Point("text", lambda: str), "the check text of another package is no check"),
        (Point("twin", lambda: Twin), "the name gpus is taken"),
    ):
        with pytest.raises(UsageError, match=words):
            points(point)
