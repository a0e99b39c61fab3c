"""What figures mean: pure judges, without a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from islandctl.config.site import SiteProfile
from islandctl.fleet.checks import disk, forwarding, load, meeting, software, system, wan
from islandctl.fleet.checks.base import Link
from tests.sshd import site_profile

SYSTEM: dict[str, Any] = {
    "python": "3.11.9",
    "arch": "x86_64",
    "path": "/usr/bin:/bin",
    "setup_error": "",
    "cores": 96,
    "memory_bytes": 1 << 40,
    "available_bytes": 1 << 39,
    "limit_bytes": None,
    "shm_bytes": 64 << 30,
    "nofile": 1048576,
    "memlock": None,
    "rdma": [],
}
SPACE: dict[str, Any] = {
    "work_dir": "/scratch/islandctl",
    "total_bytes": 10e12,
    "free_bytes": 4e12,
    "used": 0.6,
    "inodes": 1_000_000,
    "inodes_free": 900_000,
    "kind": "ext4",
    "mounted": "/dev/sda1",
    "shared": False,
}


@pytest.mark.parametrize(
    ("offset_s", "level"), [(0.0, "ok"), (-0.4, "ok"), (0.6, "warn"), (-2.9, "warn"), (3.1, "fail"), (-7.5, "fail")]
)
def test_clock(offset_s: float, level: str) -> None:
    assert system.judge_clock(offset_s).level == level


def test_login_tells_the_path_and_a_broken_setup() -> None:
    verdict = system.judge_login(0.4, SYSTEM, way="a login node; 400 ms")
    assert verdict.text.startswith("a login node; 400 ms; Python")
    assert (verdict.level, "PATH /usr/bin:/bin" in verdict.text) == ("ok", True)
    assert system.judge_login(16.0, SYSTEM, way="16 s").level == "warn"
    broken = SYSTEM | {"setup_error": "environment.setup ended with code 1: module: not found"}
    assert system.judge_login(0.4, broken, way="400 ms").level == "fail"


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, "ok", "1 TiB"),
        ({"cores": 48}, "warn", "less than the profile says"),
        ({"limit_bytes": 1 << 36}, "warn", "the session's limit"),
        ({"available_bytes": 1 << 38}, "warn", "others use it"),
        ({"memory_bytes": None}, "skipped", "/proc/meminfo"),
    ],
)
def test_memory(changes: dict[str, Any], level: str, words: str) -> None:
    verdict = system.judge_memory(SYSTEM | changes, memory=1 << 40, cores=96)
    assert (verdict.level, words in verdict.text) == (level, True), verdict


def test_limits() -> None:
    assert system.judge_limits(SYSTEM, gpus=True).level == "ok"
    low = SYSTEM | {"shm_bytes": 64 << 20, "nofile": 1024, "memlock": 65536, "rdma": ["mlx5_0"]}
    verdict = system.judge_limits(low, gpus=True)
    assert verdict.level == "warn"
    for words in ("/dev/shm holds 67.1 MB", "1024 open files", "65.5 kB locked, with mlx5_0"):
        assert words in verdict.text
    assert system.judge_limits(SYSTEM | {"shm_bytes": 64 << 20}, gpus=False).level == "ok"


def test_leftovers() -> None:
    assert system.judge_leftovers({}).level == "ok"
    verdict = system.judge_leftovers({"paper-1.0123456789abcdef": [17, 18]})
    assert (verdict.level, verdict.text) == ("warn", "of paper-1 (pid 17, 18)")
    assert verdict.hint.startswith("islandctl stop paper-1")


@pytest.mark.parametrize(
    ("changes", "need", "level", "words"),
    [
        ({}, 2e12, "ok", "4 TB free of 10 TB"),
        ({}, 5e12, "fail", "2.2 checkpoints take 5 TB"),
        ({"free_bytes": 1e8}, None, "fail", "less than 200 MB"),
        ({"inodes_free": 12}, None, "fail", "12 files (inodes) are left"),
        ({"used": 0.96}, None, "warn", "nearly full"),
        ({"used": 0.85, "kind": "lustre"}, None, "warn", "nearly full"),
        ({"inodes": None, "inodes_free": None}, None, "ok", "free"),
        ({"unfit": "Read-only file system"}, None, "fail", "cannot write into /scratch/islandctl: Read-only"),
    ],
)
def test_disk_space(changes: dict[str, Any], need: float | None, level: str, words: str) -> None:
    verdict = disk.judge_space(SPACE | changes, need=need)
    assert (verdict.level, words in verdict.text) == (level, True), verdict


def test_disk_rate_and_the_sites_storage() -> None:
    told = {"bytes": 4_000_000_000, "write_s": 2.0, "read_s": 1.0, "cached": False, "small_s": 0.2}
    assert disk.judge_rate(told).text == "write 2 GB/s, read 4 GB/s, 100 small files 200 ms"
    assert disk.judge_rate(told | {"small_s": 30.0}).level == "warn"
    assert disk.judge_rate({"error": "No space left on device"}).level == "fail"
    own = {"write": 10e9, "read": None, "free": 7e12}
    both = disk.judge_storage([SPACE, SPACE], [told, told], own)
    assert both.measured == {"storage.free": 8e12, "storage.write": 4e9, "storage.read": 8e9}
    assert (both.level, "write 4 GB/s (profile: 10 GB/s)" in both.text) == ("warn", True)
    shared = SPACE | {"shared": True, "mounted": "nas:/home"}
    one = disk.judge_storage([shared, shared], [], {"write": None, "read": None, "free": None})
    assert (one.level, one.measured) == ("ok", {"storage.free": 4e12})
    assert disk.judge_storage([], [], own).level == "skipped"
    assert "storage.read" not in disk.judge_storage([], [told | {"cached": True}], own).measured


def test_import_time() -> None:
    assert [disk.judge_import(*took).level for took in ((5.0, 1.2), (60.0, 2.0), (4.0, 3.5))] == [
        "ok",
        "warn",
        "warn",
    ]


VERSIONS = {"version": "3.11.9", "torch": "2.10.1+cu128", "cuda": "12.8", "hip": "", "nccl": "2.27.3", "gpus": 8}


@pytest.mark.parametrize(
    ("changes", "driver", "level", "words"),
    [
        ({}, "570.86.15", "ok", "torch 2.10.1+cu128 (CUDA 12.8), NCCL 2.27.3, driver 570.86.15"),
        ({}, "470.82.01", "fail", "wants driver 525.60"),
        ({"cuda": "13.0"}, "570.86.15", "fail", "wants driver 580.65"),
        ({"torch": "2.4.0"}, "570.86.15", "fail", "torch 2.10 is the least"),
        ({"version": "3.10.2"}, "570.86.15", "fail", "Python 3.11 is the least"),
        ({"cuda": ""}, "570.86.15", "fail", "for processors only"),
        ({"gpus": 0}, "570.86.15", "fail", "torch sees no accelerator"),
        ({"cuda": "", "hip": "6.2", "nccl": "2.20.5"}, "", "ok", "ROCm 6.2"),
    ],
)
def test_software(changes: dict[str, Any], driver: str, level: str, words: str) -> None:
    verdict = software.judge_software(VERSIONS | changes, driver=driver, gpus=True)
    assert (verdict.level, words in verdict.text) == (level, True), verdict


def test_software_that_is_not_there() -> None:
    judge = software.judge_software
    assert judge({"unbuilt": "/home/a/islandctl/env"}, driver="", gpus=True).level == "skipped"
    assert judge({"error": "No module named 'torch'"}, driver="", gpus=False).level == "fail"
    assert judge({"error": "… not done", "late": True}, driver="", gpus=False).level == "unknown"


def test_agreement_names_who_differs() -> None:
    told = {f"east/n{at}": ("east", VERSIONS) for at in range(3)}
    assert software.judge_agreement(told).text == "alike on 3 nodes"
    told["west/n0"] = ("west", VERSIONS | {"nccl": "2.26.2", "version": "3.12.1"})
    verdict = software.judge_agreement(told)
    assert verdict.level == "warn"
    assert verdict.text == "Python 3.11.9, but west/n0 3.12.1; NCCL 2.27.3, but west/n0 2.26.2"
    told["east/n3"] = ("east", VERSIONS | {"nccl": "2.26.2"})
    assert software.judge_agreement(told).level == "fail"
    assert software.judge_agreement({"east/n0": ("east", VERSIONS)}).level == "skipped"


def test_the_slowest_node_of_a_site() -> None:
    verdict = software.judge_site_rate({"a/1": 700e12, "a/2": 710e12, "a/3": 500e12})
    assert (verdict.level, verdict.text) == ("fail", "of the median 700 TFLOP/s: a/3 71%")
    assert software.judge_site_rate({"a/1": 700e12, "a/2": 690e12}).level == "ok"
    assert software.judge_site_rate({"a/1": 700e12}).level == "skipped"


def test_matrix_rate() -> None:
    told = {"rates": [700e12, 710e12, 690e12], "devices": 8, "each": [700e12] * 8}
    verdict = load.judge_matrix(told, best=794e12, kind="H100-SXM")
    assert (verdict.level, verdict.text) == ("ok", "700 TFLOP/s on each of 8, all at once")
    assert verdict.measured == {"gpu.bf16": 700e12}
    slow = load.judge_matrix({**told, "rates": [600e12]}, best=794e12, kind="H100-SXM")
    assert (slow.level, "76% of the best that is known" in slow.text) == ("fail", True)
    one = load.judge_matrix({**told, "each": [*[700e12] * 7, 400e12]}, best=None, kind="X")
    assert (one.level, "GPU 7: 400 TFLOP/s" in one.text) == ("fail", True)
    assert load.judge_matrix({"rates": [1e9], "devices": 0}, best=None, kind="H100-SXM").level == "fail"


def test_all_reduce() -> None:
    answers = [{"rank": rank, "bus": 400e9 - rank, "right": True} for rank in range(8)]
    assert load.judge_reduce({"answers": answers, "lines": []}, kind="H200-SXM", ranks=8).level == "ok"
    assert load.judge_reduce({"answers": answers, "lines": []}, kind="B200", ranks=8).level == "fail"
    socket = {"answers": answers, "lines": ["NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0"]}
    assert load.judge_reduce(socket, kind="H200-SXM", ranks=4).level == "warn"
    wrong = [*answers[:7], {"rank": 7, "bus": 400e9, "right": False}]
    assert "wrong on rank 7" in load.judge_reduce({"answers": wrong}, kind="cpu", ranks=8).text
    across = meeting.judge_across({"answers": answers, "lines": []}, kind="X", ranks=8, expected=450e9)
    assert (across.level, across.text, across.threshold) == ("ok", "400 GB/s between 8 ranks", "360 GB/s")
    slow = meeting.judge_across(socket, kind="X", ranks=8, expected=600e9)
    assert (slow.level, slow.threshold, "over TCP" in slow.text) == ("fail", "480 GB/s", True)
    assert meeting.judge_across(socket, kind="X", ranks=8, expected=None).level == "warn"


def test_forwarding_tells_why() -> None:
    assert forwarding.judge_forwarding(True, "").level == "ok"
    refused = "Warning: x\nError: remote port forwarding failed for listen port 40123\n"
    verdict = forwarding.judge_forwarding(False, refused)
    assert (verdict.level, "remote port forwarding failed" in verdict.text) == ("fail", True)
    assert "the port did not answer" in forwarding.judge_forwarding(False, "").text


def test_meeting_names_the_blocked_pair() -> None:
    assert meeting.judge_meeting({"a/n1": "", "a/n2": ""}, "a/n0", "10.0.0.1 port 4000").level == "ok"
    verdict = meeting.judge_meeting({"a/n1": "", "a/n2": "No route to host"}, "a/n0", "10.0.0.1 port 4000")
    assert verdict.text == "blocked at 10.0.0.1 port 4000: a/n2 → a/n0: No route to host"
    assert meeting.held_words({"holder": {"pid": 7, "command": "python x"}}) == "pid 7 (python x) holds it"
    assert "another user (uid 1000)" in meeting.held_words({"holder": {"uid": 1000}})
    assert meeting.held_words({"holder": None, "error": "Permission denied"}) == "Permission denied"


def test_interfaces() -> None:
    def ways(interface: str) -> list[dict[str, str]]:
        return [{"peer": "10.0.0.2", "address": "10.0.0.1", "interface": interface}]

    judge = meeting.judge_interfaces
    assert judge({"a/1": ways("ib0"), "a/2": ways("ib0")}).level == "ok"
    assert "other names" in judge({"a/1": ways("eth0"), "a/2": ways("ens3")}).text
    assert judge({"a/1": ways("docker0"), "a/2": ways("docker0")}).level == "warn"
    assert judge({"a/1": [{"peer": "10.0.0.2", "error": "Network is unreachable"}]}).level == "fail"


SITE: SiteProfile = site_profile("east", [], {}, "/tmp/x")  # 1 Gbit/s both ways, 1 ms
LINK = Link(SITE, (), "", tunnelled=True, streams=4)
FULL = [125_000_000] * 8


def test_wan_tells_p10_and_what_one_stream_carries() -> None:
    told = {
        ("up", 1): [{"seconds": [30_000_000] * 8}],
        ("up", 4): [{"seconds": [5_000_000, *[60_000_000] * 7]}, {"seconds": [9, *[60_000_000] * 7]}],
        ("down", 1): [{"seconds": FULL}],
        ("down", 4): [{"seconds": [0, 0, *[45_000_000] * 6]}],
    }
    up, down, loss = wan.judge_wan(told, LINK)
    assert (up.level, up.measured) == ("ok", {"wan.up": 960e6})
    assert "1 stream : 4 = 0.25" in up.text
    assert "tcp_rmem" in up.hint
    assert (down.level, down.measured) == ("ok", {"wan.down": 1e9})
    assert loss.level == "skipped"


def test_wan_below_the_profile_or_broken() -> None:
    def level(rate: int) -> str:
        told = {(way, 4): [{"seconds": [rate] * 8}] for way in ("up", "down")}
        told |= {(way, 1): [{"seconds": [rate] * 8}] for way in ("up", "down")}
        return wan.judge_wan(told, LINK)[0].level

    assert [level(rate) for rate in (120_000_000, 100_000_000, 50_000_000)] == ["ok", "warn", "fail"]
    broken = {(way, 1): [{"error": "no answer"}] for way in ("up", "down")}
    assert [one.level for one in wan.judge_wan(broken, LINK)] == ["fail", "fail", "skipped"]


def test_loss_and_reach() -> None:
    told = {("up", 1): [{"seconds": FULL, "again": 3, "segments": 100_000}]}
    assert wan.judge_loss(told, tunnelled=False).level == "ok"
    told = {("up", 1): [{"seconds": FULL, "again": 300, "segments": 100_000}]}
    verdict = wan.judge_loss(told, tunnelled=False)
    assert (verdict.level, verdict.value) == ("warn", 0.003)
    assert wan.judge_loss({("up", 1): [{"seconds": FULL}]}, tunnelled=False).level == "skipped"
    trips = {"trips": [0.1] * 19 + [0.5], "mtu": 1500}
    near, far = replace(LINK).site.wan.rtt, 0.08
    assert wan.judge_reach({"east/n0": trips}, rtt_s=near).level == "warn"
    good = wan.judge_reach({"east/n0": trips}, rtt_s=far)
    assert (good.level, good.measured) == ("ok", {"wan.rtt": 0.1})
    assert good.text == "1 node, round trip 100 ms, p95 100 ms, MTU 1500"
    blocked = wan.judge_reach({"east/n0": trips, "east/n1": {"error": "no answer"}}, rtt_s=far)
    assert (blocked.level, blocked.text) == ("fail", "blocked: east/n1 → relay: no answer")
