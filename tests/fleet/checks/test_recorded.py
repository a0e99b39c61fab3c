"""What tools of several generations say, and what the checks make of it. The head of each file says what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from islandctl.fleet.checks import amd, gpus, links, load, smi
from islandctl.fleet.checks.base import Tool, Verdict
from islandctl.fleet.checks.on_node import other_fields

DATA = Path(__file__).parent / "data"
NOTHING = Tool(0, "", "", "/usr/bin")
GONE = Tool(127, "", "", "/usr/bin:/bin", missing=True)


def said(name: str, code: int = 0) -> Tool:
    """A recorded output; its head is ours."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines[0].startswith("# "), name
    return Tool(code, "".join(lines[1:]), "", "/usr/bin")


COUNT = partial(gpus.judge_count, kind="H100-SXM", expected=8)
A100 = partial(gpus.judge_count, kind="A100-SXM-80", expected=4)
REST, LOADED = partial(load.judge_heat, loaded=False), partial(load.judge_heat, loaded=True)
AMD = partial(amd.judge_amd, expected=2)


CASES: list[tuple[Callable[..., Verdict], tuple[str, ...], str, str]] = [
    (COUNT, ("gpus-h100-550.csv",), "ok", "8 × NVIDIA H100 80GB HBM3, driver 550.127.05"),
    (partial(COUNT, kind="B200"), ("gpus-h100-550.csv",), "warn", "the profile says B200"),
    (A100, ("gpus-h100-550.csv",), "warn", "the profile says A100-SXM-80"),
    (A100, ("gpus-lost.csv",), "fail", "lost: GPU 2; 3 answer"),
    (A100, ("gpus-handle.txt",), "fail", "GPU 0000:9D:00.0: GPU is lost"),
    (COUNT, ("driver-gone.txt",), "fail", "couldn't communicate with the NVIDIA driver"),
    (COUNT, ("driver-mismatch.txt",), "fail", "Driver/library version mismatch"),
    (COUNT, ("no-devices.txt",), "fail", "No devices were found"),
    (gpus.judge_ecc, ("no-devices.txt",), "skipped", "No devices were found"),
    (gpus.judge_mig, ("list-mig.txt",), "fail", "2 MIG devices: MIG 3g.40gb"),
    (gpus.judge_mig, ("list.txt",), "ok", "off"),
    (gpus.judge_ecc, ("ecc-h100.csv",), "fail", "GPU 1: 2"),
    (gpus.judge_ecc, ("ecc-corrected.csv",), "warn", "GPU 0: 6e+07"),
    (gpus.judge_ecc, ("ecc-none.csv",), "skipped", "do not count memory errors"),
    (gpus.judge_ecc, ("ecc-old.csv",), "skipped", "do not count memory errors"),
    (gpus.judge_rows, ("rows-pending.csv",), "fail", "wait for a reset: GPU-ab000000"),
    (gpus.judge_rows, ("rows-fine.csv",), "ok", "none"),
    (gpus.judge_rows, ("rows-none.csv",), "skipped", "do not replace rows"),
    (gpus.judge_free, ("used-535.csv", "apps-none.csv"), "ok", "free"),
    (gpus.judge_free, ("used-killed.csv", "apps.csv"), "fail", "in use by pid 21877 /usr/bin/python3"),
    (gpus.judge_free, ("used-killed.csv", "apps-none.csv"), "fail", "without a process: GPU 0: 60211 MiB"),
    (gpus.judge_free, ("used-reserved.csv", "apps-none.csv"), "warn", "GPU 0: 648 MiB, GPU 1: 648 MiB"),
    (REST, ("heat-470.csv",), "fail", "slowed at rest: GPU 1 hw_slowdown, GPU 1 hw_thermal_slowdown"),
    (REST, ("heat-550.csv",), "ok", "up to 33 °C at rest"),
    (LOADED, ("heat-550.csv",), "fail", "PCIe under load: GPU 0 generation 1 of 5"),
    (LOADED, ("heat-warm.csv",), "warn", "up to 88 °C under load"),
    (links.judge_pcie, ("pcie.csv", "dmesg-lesser.txt"), "fail", "narrow: GPU 1: 8 of 16 lanes"),
    (links.judge_pcie, ("pcie-virtual.csv", "dmesg-lesser.txt"), "skipped", "virtual machine"),
    (links.judge_pcie, ("pcie-virtual.csv", "dmesg-pcie.txt"), "fail", "held back by its slot: 0000:c1:00.0"),
    (
        partial(links.judge_nvlink, kind="H100-SXM"),
        ("nvlink-h100.txt", "list.txt"),
        "ok",
        "36 links on 2 accelerators",
    ),
    (
        partial(links.judge_nvlink, kind="H100-SXM"),
        ("nvlink-h100.txt", "nvlink-errors.txt"),
        "warn",
        "up to 12 errors",
    ),
    (partial(links.judge_nvlink, kind="H100-SXM"), ("nvlink-down.txt", "list.txt"), "fail", "down: GPU 0 link 7"),
    (partial(links.judge_nvlink, kind="B200"), ("nvlink-h100.txt", "list.txt"), "fail", "slow: GPU 0: 26.562 GB/s"),
    (partial(links.judge_nvlink, kind="L40S"), ("list.txt", "list.txt"), "skipped", "no NVLink"),
    (links.judge_xid, ("dmesg-xid.txt",), "fail", "Xid 79 on PCI:0000:18:00"),
    (links.judge_xid, ("dmesg-lesser.txt",), "warn", "only lesser ones: Xid 31"),
    (links.judge_xid, ("dmesg-denied.txt",), "skipped", "no right to read the kernel's log"),
    (links.judge_infiniband, ("ibstat.txt",), "fail", "mlx5_1 port 1 Down/Polling"),
    (links.judge_infiniband, ("ibstat-up.txt",), "ok", "2 ports up, 400 Gbit/s"),
    (load.judge_dcgm, ("dcgm-3.json",), "fail", "failed: GPU Memory"),
    (load.judge_dcgm, ("dcgm-4.json",), "ok", "3 tests passed"),
    (load.judge_dcgm, ("dcgm-2.txt",), "fail", "failed: Page Retirement/Row Remap"),
    (load.judge_dcgm, ("dcgm-no-engine.txt",), "skipped", "no host engine"),
    (AMD, ("rocm-smi.json", "list.txt"), "ok", "2 × AMD Instinct MI300X, up to 44 °C"),
    (partial(AMD, expected=8), ("rocm-smi.json", "list.txt"), "fail", "the profile says 8"),
    (AMD, ("rocm-smi.json", "rocm-ras.txt"), "fail", "uncorrectable memory errors on GPU 1"),
    (AMD, ("amd-smi-6.json", "list.txt"), "fail", "memory in use on GPU 1"),
    (AMD, ("amd-smi-7.json", "list.txt"), "fail", "uncorrectable memory errors on GPU 1"),
]


@pytest.mark.parametrize(("judge", "files", "level", "words"), CASES)
def test_recorded(judge: Callable[..., Verdict], files: tuple[str, ...], level: str, words: str) -> None:
    verdict = judge(*map(said, files))
    assert (verdict.level, words in verdict.text) == (level, True), verdict


def test_every_recorded_output_is_judged() -> None:
    used = {name for _, files, _, _ in CASES for name in files}
    assert used == {path.name for path in DATA.iterdir()}


def test_a_tool_that_is_missing_or_hangs_is_never_a_pass() -> None:
    hanging = Tool(-1, "", "", "", late=True)
    judges: list[Callable[[Tool], Verdict]] = [
        gpus.judge_mig,
        gpus.judge_ecc,
        gpus.judge_rows,
        lambda tool: gpus.judge_free(tool, tool),
        REST,
        lambda tool: links.judge_pcie(tool, tool),
        lambda tool: links.judge_nvlink(tool, tool, kind="H100-SXM"),
        links.judge_xid,
        links.judge_infiniband,
        load.judge_dcgm,
    ]
    for judge in judges:
        assert judge(GONE).level == "skipped"
        assert judge(hanging).level == "unknown"
        assert judge(NOTHING).level in ("fail", "skipped", "ok")
    assert COUNT(GONE).level == "fail"
    assert "PATH /usr/bin:/bin" in COUNT(GONE).text
    assert AMD(GONE, GONE).level == "fail"


def test_silence_is_not_health() -> None:
    for judge in (gpus.judge_mig, gpus.judge_ecc, gpus.judge_rows, REST, links.judge_infiniband, load.judge_dcgm):
        assert judge(NOTHING).level in ("fail", "skipped"), judge


def test_fields_that_a_driver_does_not_know_are_asked_otherwise() -> None:
    name = "clocks_event_reasons.hw_slowdown"
    argv = ["nvidia-smi", f"--query-gpu=index,{name},fan.speed", "--format=csv"]
    refused = f'Field "{name}" is not a valid field to query.\n'
    again = other_fields(argv, refused, smi.ALIASES)
    assert again == ["nvidia-smi", "--query-gpu=index,clocks_throttle_reasons.hw_slowdown,fan.speed", "--format=csv"]
    left = other_fields(argv, 'Field "fan.speed" is not a valid field to query.', smi.ALIASES)
    assert left == ["nvidia-smi", f"--query-gpu=index,{name}", "--format=csv"]
    assert other_fields(["nvidia-smi", "--query-gpu=x"], 'Field "x" is not a valid field to query.', {}) is None
    assert other_fields(argv, "index, …", smi.ALIASES) is None


def test_rows_take_units_off_and_leave_noise_out() -> None:
    noise = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0\n" + said("used-535.csv").out + "\nsome warning\n"
    table = smi.rows(noise)
    assert [smi.number(row, "memory.used") for row in table] == [4.0, 4.0]
    assert smi.rows("") == []
    told: dict[str, Any] = {"x": "[Insufficient Permissions]"}
    assert (smi.word(told, "x"), smi.number(told, "x"), smi.word(told, "y")) == ("", None, "")
