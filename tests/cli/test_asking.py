"""Questions at a real terminal, asked from threads."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

ASK_TWICE = """
from concurrent.futures import ThreadPoolExecutor
from islandctl.cli.asking import questions
try:
    with questions(json=False) as ask, ThreadPoolExecutor() as pool:
        print([ask] if ask is None else list(pool.map(ask, ["one?", "two?"])))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("typed", "answers"),
    [(b"y\nYES\n", "[True, True]"), (b"\nmaybe\n", "[False, False]"), (None, "interrupted")],
)
def test_one_question_at_a_time(typed: bytes | None, answers: str) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ASK_TWICE], stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, text=True
    ) as process:
        os.close(theirs)
        shown = b""
        while b"? [y/N] " not in shown:
            shown += os.read(ours, 100)
        assert shown.count(b"?") == 1
        if typed is None:
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, typed)
        assert process.communicate(timeout=60)[0].strip() == answers
    os.close(ours)


def test_without_a_terminal_nobody_is_asked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK_TWICE], input="y\ny\n", capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[None]"
