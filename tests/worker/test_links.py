"""Links to relay and exchange: what is missing is named, and waiting ends with a signal."""

from pathlib import Path, PurePosixPath

import pytest
import torch

from islandctl.config.paths import CellFolder
from islandctl.errors import ConfigError, RelayError, UnreachableError
from islandctl.worker import links
from islandctl.worker.parallel import Ranks
from islandctl.worker.wishes import Stopped, Wishes

ALONE = Ranks(0, 1, torch.device("cpu"))


class Refusing:
    """A relay that gives ``answers`` in turn."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def entries(self, after: int, wait_s: float) -> object:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_exchange_without_a_relay_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CellFolder(PurePosixPath(tmp_path))
    monkeypatch.delenv(links.RELAY_VARIABLE, raising=False)
    assert links.connect(folder, "none") is None
    with pytest.raises(ConfigError, match="needs a relay"):
        links.connect(folder, "two-site")
    monkeypatch.setenv(links.RELAY_VARIABLE, "https://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"token: No such file"):
        links.connect(folder, "two-site")
    (tmp_path / "token").write_text("t\n")
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        links.connect(folder, "two-site")


def test_the_ledger_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RETRY_S", 0.0)
    away = UnreachableError("no answer")
    assert links.read_ledger(Refusing(away, away, []), ALONE, Wishes(tmp_path)) == []  # type: ignore[arg-type]
    assert links.read_ledger(None, ALONE, Wishes(tmp_path)) == []
    with pytest.raises(RelayError, match="not yours"):
        links.read_ledger(Refusing(RelayError("not yours")), ALONE, Wishes(tmp_path))  # type: ignore[arg-type]


def test_a_signal_ends_the_waiting(tmp_path: Path) -> None:
    wishes = Wishes(tmp_path)
    wishes.stopping = True
    with pytest.raises(Stopped, match="while waiting for the relay"):
        links.read_ledger(Refusing(UnreachableError("no answer")), ALONE, wishes)  # type: ignore[arg-type]


def test_a_wish_for_a_checkpoint_is_granted_once(tmp_path: Path) -> None:
    wishes = Wishes(tmp_path)
    assert not wishes.take_save()
    (tmp_path / "save").touch()
    assert wishes.take_save()
    assert not wishes.take_save()
