from __future__ import annotations

import pytest

from islandctl.config import secrets


def test_a_known_secret_is_hidden_and_a_short_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setenv("LONG", "s3cret$value")
    monkeypatch.setenv("SHORT", "on")
    monkeypatch.delenv("MISSING", raising=False)
    assert secrets.values(["LONG", "MISSING", "SHORT"]) == {"LONG": "s3cret$value", "SHORT": "on"}
    assert secrets.hide("a s3cret$value") == "a s3cret$value"
    secrets.know(["LONG", "MISSING", "SHORT"])
    assert secrets.hide("a s3cret$value, once on and s3cret$value") == "a ***, once on and ***"
