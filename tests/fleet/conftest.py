from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sshd import Sshd, servers


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Starts real SSH servers; see tests/sshd.py."""
    with servers(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One SSH server for all tests that leave it as it is."""
    with servers(tmp_path_factory.mktemp("server")) as start:
        yield start()
