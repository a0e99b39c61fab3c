"""Figures from a metrics file."""

from __future__ import annotations

import json
from typing import Any

from islandctl.runs.metrics import heartbeat_from, newest_time


def lines(*entries: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


TRAIN = {"kind": "train", "attempt": 1, "step": 7, "loss": 2.5, "tokens": 700, "tokens_per_s": 50.0}
EVAL = {"kind": "eval", "attempt": 1, "step": 5, "bits_per_byte": 4.0}


def test_the_newest_figures() -> None:
    beat = heartbeat_from(
        lines(
            EVAL,
            TRAIN,
            {"kind": "exchange", "attempt": 1, "step": 7, "rounds_applied": 3, "rounds_skipped": 1, "rounds_late": 2},
        ),
        cell=1,
        attempt=1,
        steps=10,
    )
    assert beat is not None
    assert (beat.step, beat.tokens_per_s, beat.loss, beat.bits_per_byte) == (7, 50.0, 2.5, ((5, 4.0),))
    assert (beat.rounds_applied, beat.rounds_skipped, beat.rounds_late) == (3, 1, 2)
    assert beat.state == "training"


def test_cut_lines_and_noise_are_passed_over() -> None:
    content = b'"loss": 3}\nnot json\n[1]\n{"kind": "train"}\n' + lines(TRAIN) + b'{"kind": "tr'
    beat = heartbeat_from(content, cell=0, attempt=1, steps=10)
    assert beat is not None
    assert beat.step == 7


def test_figures_of_an_earlier_attempt_are_history_only() -> None:
    first = heartbeat_from(lines(EVAL, TRAIN), cell=0, attempt=2, steps=10)
    assert first is not None
    assert (first.state, first.step, first.bits_per_byte) == ("starting", 0, ())
    beat = heartbeat_from(lines(EVAL, TRAIN, {**TRAIN, "attempt": 2, "step": 6}), cell=0, attempt=2, steps=10)
    assert beat is not None
    assert (beat.step, beat.bits_per_byte) == (6, ((5, 4.0),))


def test_a_cell_that_stands_still_has_no_rate() -> None:
    waits = {"kind": "waiting", "attempt": 1, "step": 7, "reason": "the relay does not answer"}
    beat = heartbeat_from(lines(TRAIN, waits), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert (beat.state, beat.step, beat.tokens_per_s) == ("waiting", 7, 0.0)
    assert beat.message == "waits: the relay does not answer"
    again = heartbeat_from(lines(TRAIN, waits, {**TRAIN, "step": 8}), cell=0, attempt=1, steps=10)
    assert again is not None
    assert (again.state, again.step, again.tokens_per_s, again.message) == ("training", 8, 50.0, "")


def test_the_end_is_told() -> None:
    beat = heartbeat_from(
        lines(TRAIN, {"kind": "end", "attempt": 1, "step": 10, "outcome": "finished"}), cell=0, attempt=1, steps=10
    )
    assert beat is not None
    assert (beat.state, beat.step) == ("finished", 10)


def test_a_new_life_takes_back_the_last_words_of_the_one_before() -> None:
    end = {"kind": "end", "attempt": 1, "step": 7, "outcome": "stopped"}
    start = {"kind": "start", "attempt": 1, "step": 4}
    beat = heartbeat_from(lines(TRAIN, end, start), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert (beat.state, beat.step) == ("starting", 4)
    beat = heartbeat_from(lines(TRAIN, end, start, {**TRAIN, "step": 5}), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert (beat.state, beat.step) == ("training", 5)


def test_an_attempt_without_lines_goes_on_from_its_checkpoint() -> None:
    ends = {"kind": "end", "attempt": 2, "step": 0, "outcome": "stopped"}  # stopped before it was restored
    for content in (lines(EVAL, {**EVAL, "step": 10}, TRAIN), lines(EVAL, {**EVAL, "step": 10}, TRAIN, ends)):
        beat = heartbeat_from(content, cell=0, attempt=2, steps=20, begins_at=7)
        assert beat is not None
        assert (beat.step, beat.tokens, beat.bits_per_byte) == (7, 700, ((5, 4.0),))
    assert heartbeat_from(b"", cell=0, attempt=2, steps=20, begins_at=7) is None


def test_a_life_that_begins_has_the_tokens_of_its_step() -> None:
    start = {"kind": "start", "attempt": 1, "step": 7, "life": "9.1"}
    beat = heartbeat_from(lines(TRAIN, {**TRAIN, "step": 8, "tokens": 800}, start), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert (beat.step, beat.tokens, beat.tokens_per_s, beat.life) == (7, 700, 0.0, "9.1")


def test_a_failed_checkpoint_is_told_until_one_succeeds() -> None:
    bad = {"kind": "checkpoint", "attempt": 1, "step": 7, "error": "no space"}
    beat = heartbeat_from(lines(TRAIN, bad), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert beat.message == "no checkpoint at step 7: no space"
    good = {"kind": "checkpoint", "attempt": 1, "step": 8, "path": "p"}
    beat = heartbeat_from(lines(TRAIN, bad, good), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert beat.message == ""


def test_when_the_newest_whole_line_was_written() -> None:
    content = lines({**TRAIN, "time": 100.5}, {**TRAIN, "step": 8, "time": 101.25}) + b'{"kind": "train", "time": 1'
    assert newest_time(content) == 101.25
    assert newest_time(lines(TRAIN)) is None


def test_a_checkpoint_that_is_owed_stays_so_over_the_workers_lives() -> None:
    failed = {"kind": "checkpoint", "attempt": 1, "step": 6, "error": "the disk is full"}
    start = {"kind": "start", "attempt": 1, "step": 0}
    beat = heartbeat_from(lines(TRAIN, failed, start), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert (beat.step, beat.message) == (0, "no checkpoint at step 6: the disk is full")
    good = {"kind": "checkpoint", "attempt": 1, "step": 6, "path": "step-6"}
    beat = heartbeat_from(lines(TRAIN, failed, start, good), cell=0, attempt=1, steps=10)
    assert beat is not None
    assert beat.message == ""
