"""Measured figures in the profiles: they load, they are what was measured, and the file is otherwise as it was."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islandctl.config import units
from islandctl.config.load import load_site
from islandctl.errors import ConfigError, UsageError
from islandctl.runs.doctor.profile import UNITS, value_text, write_profiles

PROFILES = Path(__file__).parents[3] / "site-profiles"
MEASURED = {
    "wan.up": 9.4234e9,
    "wan.down": 7e6,
    "wan.rtt": 0.14251,
    "storage.write": 2.1e9,
    "storage.read": 812e6,
    "storage.free": 8.5e12,
    "gpu.bf16": 712.3e12,
}


@pytest.mark.parametrize("name", sorted(path.name for path in PROFILES.glob("*.yaml")))
def test_every_profile_of_ours_takes_all_figures(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    shutil.copy(PROFILES / name, path)
    path.chmod(0o640)
    before, loaded = path.read_text().splitlines(), load_site(path)
    written = write_profiles([loaded], {loaded.value.name: MEASURED})
    assert [one.key for one in written] == list(MEASURED)
    site, after = load_site(path).value, path.read_text().splitlines()
    assert (site.wan.up, site.wan.down, site.wan.rtt) == (9.42e9, 7e6, 0.143)
    assert (site.storage.write, site.storage.read, site.storage.free) == (2.1e9, 812e6, 8_500_000_000_000)
    assert site.gpu.bf16 == 712e12
    assert site.found_by_doctor == {key: value_text(key, value) for key, value in MEASURED.items()}
    touched = {"up", "down", "rtt", "write", "read", "free", "bf16", "storage", "examined", *MEASURED}
    assert _without(before, touched) == _without(after, touched)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == [name]
    again = path.read_bytes()
    write_profiles([load_site(path)], {site.name: MEASURED})
    assert path.read_bytes() == again


def _without(lines: list[str], keys: set[str]) -> list[str]:
    return [line for line in lines if line.strip() and line.split(":")[0].strip() not in keys]


def test_a_link_to_a_profile_stays_a_link(tmp_path: Path) -> None:
    shutil.copy(PROFILES / "local-a.yaml", tmp_path / "real.yaml")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    site = load_site(tmp_path / "link.yaml")
    (one,) = write_profiles([site], {"local-a": {"wan.up": 1e9}})
    assert (one.before, one.after) == ("50 Mbit/s", "1 Gbit/s")
    assert (tmp_path / "link.yaml").is_symlink()
    assert "up: 1 Gbit/s  " in (tmp_path / "real.yaml").read_text()


def test_what_was_not_measured_or_is_no_key_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "local-a.yaml"
    shutil.copy(PROFILES / "local-a.yaml", path)
    content, site = path.read_bytes(), load_site(path)
    assert write_profiles([site], {"local-b": MEASURED}) == ()
    assert write_profiles([site], {"local-a": {"of.a-plugin": 7.0, "wan.rtt": 0.0}}) == ()
    assert path.read_bytes() == content


def test_trouble_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "local-a.yaml"
    shutil.copy(PROFILES / "local-a.yaml", path)
    site = load_site(path)
    path.write_text(path.read_text().replace("rtt: 150 ms", "rtt: |\n    150 ms"))
    content = path.read_bytes()
    with pytest.raises(ConfigError, match=r"wan\.rtt is not a plain value"):
        write_profiles([site], {"local-a": MEASURED})
    assert path.read_bytes() == content

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        write_profiles([site], {"local-a": {"wan.up": 1e9}})
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["local-a.yaml"]


@given(st.sampled_from(sorted(UNITS)), st.floats(1e-5, 60.0), st.floats(1.0, 1e15))
def test_values_are_written_with_three_digits(key: str, seconds: float, amount: float) -> None:
    parse = {
        "s": units.parse_seconds,
        "B": units.parse_bytes,
        "B/s": units.parse_bytes_per_s,
        "bit/s": units.parse_bits_per_s,
        "FLOP/s": units.parse_flops,
    }
    value = seconds if UNITS[key] == "s" else amount
    tolerance = max(0.006 * value, 1.0 if UNITS[key] == "B" else 1e-9)
    assert parse[UNITS[key]](value_text(key, value)) == pytest.approx(value, abs=tolerance)
