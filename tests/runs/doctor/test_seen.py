"""A node's accelerators, held against those of the last time."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.runs.doctor.seen import compared


def test_other_accelerators_behind_the_same_name_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISLANDCTL_HOME", str(tmp_path))
    first = compared({"east/n0": ["GPU-aaaa", "GPU-bbbb"], "east/n1": []})
    assert {label: verdict.level for label, verdict in first.items()} == {"east/n0": "ok"}
    assert compared({"east/n0": ["GPU-aaaa", "GPU-bbbb"]})["east/n0"].text == "the same as last time"
    other = compared({"east/n0": ["GPU-aaaa", "GPU-cccc"]})["east/n0"]
    assert (other.level, other.text) == ("warn", "others than last time: new GPU-cccc, gone GPU-bbbb")
    assert compared({"east/n0": ["GPU-aaaa", "GPU-cccc"]})["east/n0"].level == "ok"
    (tmp_path / "doctor" / "accelerators.json").write_text("{")
    assert compared({"east/n0": ["GPU-aaaa"]})["east/n0"].level == "ok"
