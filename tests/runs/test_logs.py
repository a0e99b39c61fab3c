"""Logs of several nodes as one stream, from real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from islandctl.errors import UnreachableError, UsageError
from islandctl.fleet.host import Host
from islandctl.fleet.local import LocalHost
from islandctl.runs.logs import LogReader
from islandctl.runs.reach import Reach
from islandctl.runs.record import RunRecord

from . import builders as make


class Shaky(Reach):
    """This machine twice; a site in ``away`` does not answer."""

    def __init__(self) -> None:
        super().__init__(make.plan(), "demo", lambda _: None)
        self.away: set[str] = set()

    def host(self, site: str, host: str) -> Host:
        if site in self.away:
            raise UnreachableError(f"{site}: no answer")
        return LocalHost(site)


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    made = make.record()
    cells = []
    for cell in made.cells:
        (tmp_path / cell.name / "logs").mkdir(parents=True)
        nodes = tuple(node.model_copy(update={"folder": str(tmp_path / cell.name)}) for node in cell.nodes)
        cells.append(cell.model_copy(update={"nodes": nodes}))
    return made.model_copy(update={"cells": tuple(cells)})


def append(root: Path, cell: str, name: str, text: str) -> None:
    with (root / cell / "logs" / name).open("a") as file:
        file.write(text)


def test_nothing_is_lost_or_doubled_over_a_lost_link(tmp_path: Path, record: RunRecord) -> None:
    said: list[str] = []
    reach = Shaky()
    append(tmp_path, "east", "rank-0.log", "2030-01-31 12:00:01 a\n2030-01-31 12:00:03 c\nhal")
    append(tmp_path, "west", "node-0.log", "2030-01-31 12:00:02 b\n")
    append(tmp_path, "west", "supervisor.log", "not a worker's\n")
    with LogReader(record, make.plan(), said.append, reach=reach) as reader:
        assert [line.text[-1] for line in reader.first()] == ["a", "b", "c"]
        reach.away = {"east"}
        append(tmp_path, "east", "rank-0.log", "f\n")
        append(tmp_path, "west", "node-0.log", "d\n")
        assert [line.text for line in reader.more()] == ["d"]
        assert reader.more() == []
        assert "reconnecting" in said[-1]
        reach.away = set()
        assert [(line.source, line.text) for line in reader.more()] == [("east/rank-0", "half")]
        assert "connected again" in said[-1]
        assert reader.unreachable == []
        assert len(said) == 2


def test_the_last_lines_of_all(tmp_path: Path, record: RunRecord) -> None:
    append(tmp_path, "east", "rank-0.log", "2030-01-31 12:00:01 a\n2030-01-31 12:00:03 c\n")
    append(tmp_path, "west", "rank-0.log", "2030-01-31 12:00:02 b\n2030-01-31 12:00:04 no newline")
    with LogReader(record, make.plan(), print, reach=Shaky()) as reader:
        assert [line.text[20:] for line in reader.first(tail=2, final=True)] == ["c", "no newline"]
    with LogReader(record, make.plan(), print, reach=Shaky()) as reader:
        assert [line.text[20:] for line in reader.first(since=1896091202.0)] == ["b", "c"]


def test_lines_without_a_time_stay_behind_the_last_one_with_one(tmp_path: Path, record: RunRecord) -> None:
    """A script's bare prints, also where ``--tail`` leaves out the line that has their time."""
    append(tmp_path, "east", "rank-0.log", "a bare beginning\n2030-01-31 12:00:03 c\nprint 1\nprint 2\nprint 3\n")
    append(tmp_path, "west", "rank-0.log", "2030-01-31 12:00:02 b\nprint 0\n2030-01-31 12:00:04 d\n")
    with LogReader(record, make.plan(), print, reach=Shaky()) as reader:
        assert [line.text.removeprefix("2030-01-31 12:00:0") for line in reader.first()] == [
            "2 b", "print 0", "a bare beginning", "3 c", "print 1", "print 2", "print 3", "4 d",
        ]  # fmt: skip
    with LogReader(record, make.plan(), print, reach=Shaky()) as reader:
        assert [line.text[-7:] for line in reader.first(tail=3)] == ["print 2", "print 3", "00:04 d"]


def test_a_file_that_begins_anew_is_read_from_its_start(tmp_path: Path, record: RunRecord) -> None:
    append(tmp_path, "east", "rank-0.log", "a long first life\n")
    with LogReader(record, make.plan(), print, sites=["east"], ranks=[0], reach=Shaky()) as reader:
        reader.first()
        (tmp_path / "east" / "logs" / "rank-0.log").write_text("second\n")
        assert [line.text for line in reader.more()] == ["second"]


def test_unknown_site_or_rank(record: RunRecord) -> None:
    with pytest.raises(UsageError, match="no site north"):
        LogReader(record, make.plan(), print, sites=["north"])
    with pytest.raises(UsageError, match="no rank 4"):
        LogReader(record, make.plan(), print, ranks=[4])


def test_pieces_of_a_log_are_read_as_one(tmp_path: Path, record: RunRecord) -> None:
    """Followed over new pieces, a late line in an old one, and pieces that are gone; and read from their end."""
    said: list[str] = []
    append(tmp_path, "east", "rank-0.log", "2030-01-31 12:00:01 a\nno time\n")
    with LogReader(record, make.plan(), said.append, sites=["east"], reach=Shaky()) as reader:
        assert [line.text for line in reader.first()] == ["2030-01-31 12:00:01 a", "no time"]
        append(tmp_path, "east", "rank-0.log", "cut")
        append(tmp_path, "east", "rank-0.1.log", "still none\n2030-01-31 12:00:03 b\n")
        append(tmp_path, "east", "rank-0.2.log", "2030-01-31 12:00:05 c\n2030-01-31 12:00:06 d\n")
        more = reader.more()
        assert [line.text[-1] for line in more] == ["t", "e", "b", "c", "d"]
        assert {line.source for line in more} == {"east/rank-0"}
        assert all(line.at > 0 for line in more)
        append(tmp_path, "east", "rank-0.1.log", "2030-01-31 12:00:04 of a child\n")
        assert [line.text[20:] for line in reader.more()] == ["of a child"]
        for number in ("", ".1", ".2"):
            (tmp_path / "east" / "logs" / f"rank-0{number}.log").unlink()
        append(tmp_path, "east", "rank-0.9.log", "2030-01-31 12:00:09 e\n")
        append(tmp_path, "east", "rank-0.10.log", "2030-01-31 12:00:10 f\n")
        assert said == []
        assert [line.text[-1] for line in reader.more()] == ["e", "f"]
        (told,) = said
        assert told.endswith("rank-0: what came before rank-0.9.log was removed before it could be read")
        assert reader.more() == []
    with LogReader(record, make.plan(), print, sites=["east"], reach=Shaky()) as reader:
        assert [line.text[-1] for line in reader.first(tail=1, final=True)] == ["f"]
