"""A real relay process on loopback, with its own certificate and tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from islandctl.relay.certificate import write_certificate
from islandctl.relay.client import RelayClient
from islandctl.relay.tokens import token_hash

from .builders import CELLS, CONFIG, RUN

TOKENS = {"controller": "token-of-the-controller", "0": "token-of-usa", "1": "token-of-asia"}


def prepare(folder: Path, **settings: Any) -> Path:
    """Write everything that a relay reads into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_certificate(folder / "key.pem", folder / "ca.pem", ["127.0.0.1", "localhost"], common_name=RUN)
    (folder / "tokens.json").write_text(json.dumps({token_hash(token): role for role, token in TOKENS.items()}))
    told = {"run": RUN, "config_hash": CONFIG, "cells": CELLS, "num_fragments": 2}
    (folder / "relay.json").write_text(json.dumps(told | settings))
    return folder


class LiveRelay:
    """``python -m islandctl.relay FOLDER``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = (folder / "log").open("ab")
        address = folder / "address.json"
        address.unlink(missing_ok=True)
        self.process = subprocess.Popen([sys.executable, "-m", "islandctl.relay", str(folder)], stderr=self.log)
        end = time.monotonic() + 20
        while not address.exists():
            assert self.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, "the relay did not begin to listen"
            time.sleep(0.02)
        self.address = json.loads(address.read_text())
        self.url = f"https://127.0.0.1:{self.address['port']}"

    def client(self, role: str, **options: Any) -> RelayClient:
        return RelayClient(self.url, TOKENS[role], self.folder / "ca.pem", **({"retry_s": 5} | options))

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(10)
        self.log.close()

    def end(self) -> int:
        """SIGTERM; gives the exit code."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
        code = self.process.wait(20)
        self.log.close()
        return code
