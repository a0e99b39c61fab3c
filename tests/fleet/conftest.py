from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from islandctl.fleet import supervisor
from tests.sshd import Sshd, servers

from .kept import Kept


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


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    supervisor.end_marked(kept.mark, None, 0.0)
    assert kept.left() == []
