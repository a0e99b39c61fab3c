"""A whole run in a folder: real worker processes, a real relay, small text. No supervisor: the test plays it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from islandctl.config.job import CellJob
from islandctl.config.recipe import Recipe
from islandctl.ledger.packet import canonical_json, digest
from islandctl.relay.certificate import write_certificate
from islandctl.relay.client import RelayClient
from islandctl.relay.tokens import token_hash
from islandctl.worker import tensors as disk
from islandctl.worker.checkpoint import MANIFEST, Manifest, listing
from islandctl.worker.parallel import Ranks

DEADLINE_S = 240.0


def recipe(text: Path, **changes: Any) -> Recipe:
    """A tiny mixture of experts; ``changes`` replace or extend whole sections."""
    base: dict[str, Any] = {
        "name": "rehearsal",
        "model": {
            "kind": "moe",
            "layers": 2,
            "width": 32,
            "heads": 2,
            "hidden": 32,
            "experts": 4,
            "active_experts": 2,
        },
        "data": {"paths": [str(text)], "held_out": 0.2},
        "training": {
            "steps": 24,
            "batch": 4,
            "sequence": 32,
            "optimizer": {"lr": 3e-3},
            "schedule": {"warmup": 4},
        },
        "exchange": {"mode": "none", "window": 8, "fragments": 2, "overlap": 2, "chunk": 4096},
        "checkpoint": {"every": 6},
        "evaluation": {"every": 8, "sequences": 8},
    }
    for section, value in changes.items():
        base[section] = {**base[section], **value}
    return Recipe.model_validate(base)


def write_text(folder: Path) -> Path:
    """Some hundred kilobytes of text with something to learn in it."""
    folder.mkdir(parents=True)
    for number in range(40):
        lines = [f"def function_{number}_{line}(x):\n    return x * {line * number}\n" for line in range(30)]
        (folder / f"{number}.py").write_text("\n".join(lines))
    return folder


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll shortly until it holds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.005)


class Cell:
    """One cell's folder and processes."""

    def __init__(self, folder: Path, job: CellJob) -> None:
        self.folder, self.job = folder, job
        self.url = ""
        self.script: list[str] = []
        """A script of its own and its words, in place of the built-in loop."""
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        self.write_job()

    def write_job(self, **changes: Any) -> None:
        """cell.json, as launch or resume writes it."""
        self.job = self.job.model_copy(update=changes)
        (self.folder / "cell.json").write_text(self.job.model_dump_json())

    def start(self) -> None:
        """Start the workers, as the supervisor would."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ISLANDCTL_NODE_FOLDER": str(self.folder / "node-0")}
        if self.url:
            env["ISLANDCTL_RELAY_URL"] = self.url
        argv = [sys.executable, "-m", "islandctl.worker", str(self.folder), *self.script]
        if self.job.num_ranks > 1:
            torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.job.num_ranks}"]
            argv = [sys.executable, "-m", *torchrun, *argv[1:]]
        with open(self.folder / "launch.log", "ab") as log:
            self.process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> int:
        """The exit code."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def run(self) -> dict[str, Any]:
        """Start, wait, and give the outcome."""
        self.start()
        code = self.wait()
        outcome = self.outcome()
        assert (code == 0) == (outcome["outcome"] != "failed"), self.log()
        return outcome

    def kill(self) -> None:
        """kill -9 of the whole group."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def term(self, rank: int | None) -> None:
        """TERM to one rank, or (None) to the whole group, as the supervisor sends it."""
        assert self.process is not None
        if rank is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            return
        wanted = {f"RANK={rank}".encode(), f"ISLANDCTL_NODE_FOLDER={self.folder / 'node-0'}".encode()}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                    os.kill(int(path.name), signal.SIGTERM)

    def gone(self) -> None:
        """Wait for the processes' end, whatever the launcher makes of it."""
        assert self.process is not None
        self.process.wait(DEADLINE_S)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def outcome(self) -> dict[str, Any]:
        """outcome.json."""
        path = self.folder / "outcome.json"
        assert path.exists(), self.log()
        return dict(json.loads(path.read_text()))

    def log(self, rank: int = 0) -> str:
        """What rank and launcher wrote."""
        path = self.folder / "node-0" / "logs" / f"rank-{rank}.log"
        return (self.folder / "launch.log").read_text() + (path.read_text() if path.exists() else "")

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """All lines of a kind, repetitions included."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in found if line["kind"] == kind]

    def step(self) -> int:
        """The last step in the metrics."""
        lines = self.lines("train")
        return int(lines[-1]["step"]) if lines else 0

    def losses(self) -> dict[int, float]:
        """Step → loss; the last line of a step wins."""
        return {line["step"]: line["loss"] for line in self.lines("train")}

    def curve(self) -> dict[int, float]:
        """Step → bits per byte."""
        return {line["step"]: line["bits_per_byte"] for line in self.lines("eval")}

    def checkpoints(self) -> list[str]:
        """Names, oldest first."""
        return [saved.path.name for saved in reversed(listing(self.folder / "checkpoints"))]

    def weights(self) -> dict[str, Tensor]:
        """Model and optimizer of the newest checkpoint, whole."""
        path = listing(self.folder / "checkpoints")[0].path
        files = {record.name for record in Manifest.model_validate_json((path / MANIFEST).read_bytes()).files}
        ranks = Ranks(0, 1, torch.device("cpu"))
        index = disk.Reader(path, files).read_metadata().state_dict_metadata
        target = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.items()
            if key.startswith(("model/", "optimizer/"))
        }
        disk.load(path, target, files, ranks)
        return target


class Run:
    """Cells that share a relay, or one alone."""

    def __init__(self, folder: Path, plan: Recipe, *, ranks: tuple[int, ...] = (1,), relay: bool = False) -> None:
        self.folder = folder
        names = tuple(f"cell-{index}" for index in range(len(ranks)))
        config_hash = digest(canonical_json([plan.model_dump(mode="json", exclude={"checkpoint"}), names]))
        self.cells = [
            Cell(
                folder / name,
                CellJob(
                    run="rehearsal",
                    attempt=1,
                    cell=index,
                    cells=names,
                    site=name,
                    num_ranks=ranks[index],
                    config_hash=config_hash,
                    recipe=plan,
                ),
            )
            for index, name in enumerate(names)
        ]
        self.relay: subprocess.Popen[bytes] | None = None
        if relay:
            self._prepare_relay(plan, names, config_hash)
            self.start_relay()

    def _prepare_relay(self, plan: Recipe, names: tuple[str, ...], config_hash: str) -> None:
        home = self.folder / "relay"
        home.mkdir()
        write_certificate(home / "key.pem", home / "ca.pem", ["127.0.0.1"], common_name="rehearsal")
        roles = {token_hash("controller-token"): "controller"}
        for index, cell in enumerate(self.cells):
            token = f"token-of-{index}"
            roles[token_hash(token)] = str(index)
            (cell.folder / "token").write_text(token)
            (cell.folder / "ca.pem").write_bytes((home / "ca.pem").read_bytes())
        (home / "tokens.json").write_text(json.dumps(roles))
        settings = {
            "run": "rehearsal",
            "config_hash": config_hash,
            "cells": names,
            "num_fragments": plan.exchange.fragments,
            "late": plan.exchange.late.model_dump(mode="json"),
            "seeded": plan.exchange.warmup > 0,
        }
        (home / "relay.json").write_text(json.dumps(settings))

    def start_relay(self) -> None:
        """Start it (again, at the same port)."""
        home = self.folder / "relay"
        address = home / "address.json"
        if address.exists():
            settings = json.loads((home / "relay.json").read_text())
            settings["port"] = json.loads(address.read_text())["port"]
            (home / "relay.json").write_text(json.dumps(settings))
            address.unlink()
        with open(home / "log", "ab") as log:
            self.relay = subprocess.Popen([sys.executable, "-m", "islandctl.relay", str(home)], stderr=log)
        until(address.exists, "the relay")
        self.url = f"https://127.0.0.1:{json.loads(address.read_text())['port']}"
        for cell in self.cells:
            cell.url = self.url

    def kill_relay(self) -> None:
        """kill -9."""
        assert self.relay is not None
        self.relay.kill()
        self.relay.wait(10)

    def controller(self) -> RelayClient:
        """The relay as the controller sees it."""
        return RelayClient(self.url, "controller-token", self.folder / "relay" / "ca.pem", retry_s=5)

    def run(self) -> list[dict[str, Any]]:
        """Start all cells, wait for all, and give their outcomes."""
        for cell in self.cells:
            cell.start()
        for cell in self.cells:
            assert cell.wait() == 0, cell.log()
        return [cell.outcome() for cell in self.cells]

    def end(self) -> None:
        """Leave nothing behind."""
        for cell in self.cells:
            cell.end()
        if self.relay is not None and self.relay.poll() is None:
            self.kill_relay()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
