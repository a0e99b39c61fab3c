"""How far a transfer is: a bar on a terminal, a line now and then elsewhere, nothing for what is over at once."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from islandctl.cli import transfers
from islandctl.cli.transfers import Transfers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_nobody_looks_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Transfers() as shown:
        for second in range(0, 26, 5):
            now[0] = float(second)
            shown.progress("east: wheels", second * 10**7, 25 * 10**7)
            shown.progress("east: code", second, 25)
        shown.say("ready")
    assert capsys.readouterr().err == (
        "east: wheels: 100 MB of 250 MB sent\neast: wheels: 200 MB of 250 MB sent\nready\n"
    )


def test_on_a_terminal_a_bar_with_messages_above(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Transfers() as shown:
        shown.progress("east: wheels", 10**7, 25 * 10**7)
        shown.say("east/node-1: [trouble]")
        shown.progress("east: wheels", 25 * 10**7, 25 * 10**7)
        shown.say("ready")
    assert "east: wheels" in screen.getvalue()
    assert "250.0 MB" in screen.getvalue()
    assert "east/node-1: [trouble]\n" in screen.getvalue()
    assert "ready\n" in screen.getvalue()
