"""Contents on their way to nodes: over real SSH servers, cut, from node to node, and where these do not meet."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from islandctl.config.site import SiteProfile
from islandctl.errors import PreflightError, UnreachableError
from islandctl.fleet import delivery, node_store
from islandctl.fleet.bundle import make_bundle
from islandctl.fleet.connect import connect
from islandctl.fleet.delivery import Content, Member, deliver
from islandctl.fleet.needs import Needs
from islandctl.fleet.provision import Place, prepare_all
from tests.sshd import Sshd, namespaces_work

Start = Callable[..., Sshd]
NOTHING = Needs("a test", (), (("json", ()),))


def own_python(site: SiteProfile) -> SiteProfile:
    own = site.environment.model_copy(update={"build": False, "python": sys.executable})
    return site.model_copy(update={"environment": own})


@contextmanager
def members(servers: list[Sshd]) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        made = []
        for index, server in enumerate(servers):
            site = own_python(server.site(f"node-{index}"))
            host = connect(site, server.host, known_hosts=server.folder / "kh", on_message=print)
            stack.callback(host.close)
            made.append(Member(host, str(server.home / "island work")))
        yield made


class Watched:
    """Takes progress; what was sent from here, in bytes."""

    def __init__(self, at_block: Callable[[int], None] = lambda done: None) -> None:
        self.told: list[tuple[int, int]] = []
        self._at_block = at_block

    def __call__(self, name: str, done: int, total: int) -> None:
        self.told.append((done, total))
        self._at_block(done)


def stored(member: Member, content: Content) -> bytes:
    return Path(member.work_dir, "store", content.name).read_bytes()


def content(num_bytes: int) -> Content:
    return Content.of(os.urandom(num_bytes), "wheels")


def test_one_copy_goes_to_the_site_and_the_nodes_hand_it_on(sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PEER_LEAST_BYTES", 1)
    sent, messages, watched = content(3_000_000), list[str](), Watched()
    with members([sshd() for _ in range(5)]) as nodes:
        deliver("east", nodes, [sent], messages.append, watched)
        assert [node.error for node in nodes] == [None] * 5
        assert all(stored(node, sent) == sent.source for node in nodes)
        assert watched.told[-1] == (sent.size, sent.size)
        assert messages == ["east: wheels: 4 nodes had it from their neighbours"]
        assert not [name for node in nodes for name in os.listdir(f"{node.work_dir}/store") if "serving" in name]
        watched.told.clear()
        deliver("east", nodes, [sent], messages.append, watched)
        assert watched.told == []
        # a node whose copy was spoilt on its disk hands on nothing that would be believed
        for node in nodes[:-1]:
            Path(node.work_dir, "store", sent.name).write_bytes(b"x" * sent.size)
        Path(nodes[-1].work_dir, "store", sent.name).unlink()
        deliver("east", nodes, [sent], messages.append, watched)
        assert stored(nodes[-1], sent) == sent.source


@pytest.mark.slow
def test_nodes_that_do_not_reach_each_other_have_it_from_here(sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    if not namespaces_work():
        pytest.skip("this user may not make network namespaces")
    monkeypatch.setattr(delivery, "PEER_LEAST_BYTES", 1)
    sent, messages = content(1_000_000), list[str]()
    with members([sshd(namespace=True) for _ in range(4)]) as nodes:
        deliver("east", nodes, [sent], messages.append)
        assert [node.error for node in nodes] == [None] * 4
        assert all(stored(node, sent) == sent.source for node in nodes)
    assert len(messages) == 1
    assert messages[0].startswith("east: its nodes do not reach each other (node-")
    assert messages[0].endswith("; wheels is sent to each from here")


def test_after_a_cut_it_goes_on_where_it_was_cut(sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "TRIES", 2)
    # with one session a connection the transfer and the Python that stays take turns
    server, sent = sshd(options=["MaxSessions 1"]), content(12_000_000)
    cut = threading.Event()

    def at_block(done: int) -> None:
        if done > 6_000_000 and not cut.is_set():
            cut.set()
            server.drop()

    watched = Watched(at_block)
    with members([server]) as (node,):
        deliver("east", [node], [sent], print, watched)
        assert isinstance(node.error, UnreachableError)
        here = Path(node.work_dir, "store", sent.name + ".part").stat().st_size
        assert 0 < here < sent.size
        server.start()
        watched.told.clear()
        again = Member(node.host, node.work_dir)
        deliver("east", [again], [sent], print, watched)
        assert again.error is None
        assert watched.told[0] == (0, sent.size - here)
        assert stored(again, sent) == sent.source


@pytest.mark.slow
def test_a_short_cut_is_not_even_told(sshd: Start) -> None:
    server, sent = sshd(), content(12_000_000)
    cuts = iter([3_000_000, 5_000_000])
    limit = [next(cuts)]

    def at_block(done: int) -> None:
        if done > limit[0]:
            limit[0] = next(cuts, sent.size)
            server.drop()
            server.start()

    with members([server]) as (node,):
        deliver("east", [node], [sent], print, Watched(at_block))
        assert node.error is None
        assert stored(node, sent) == sent.source


def test_who_does_not_know_the_token_gets_nothing(tmp_path: Path) -> None:
    sent = content(1000)
    for folder in ("a", "b"):
        (tmp_path / folder / "store").mkdir(parents=True)
    (tmp_path / "a" / "store" / sent.name).write_bytes(bytes(sent.source))  # type: ignore[arg-type]
    serving = {"work_dir": str(tmp_path / "a"), "token": "right", "contents": [sent.name]}
    asking = {"work_dir": str(tmp_path / "b"), "content": sent.name, "size": sent.size, "addresses": ["127.0.0.1"]}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asking["port"] = listener.getsockname()[1]
        (tmp_path / "ticket").touch()
        giving = threading.Thread(target=node_store.give, args=(listener, serving, str(tmp_path / "ticket")))
        giving.start()
        try:
            told = node_store.fetch({**asking, "token": "wrong"}, b"")
            assert told["here"] == 0
            assert "it ended after 0 bytes" in told["trouble"]
            assert node_store.fetch({**asking, "token": "right"}, b"") == {"here": -1, "trouble": ""}
        finally:
            (tmp_path / "ticket").unlink()
            giving.join(10)
    assert (tmp_path / "b" / "store" / sent.name).read_bytes() == sent.source


def test_what_arrives_damaged_is_thrown_away(tmp_path: Path) -> None:
    path = str(tmp_path / "store" / "x")
    data = iter([b"abc", b"def"])
    with pytest.raises(ValueError, match="arrived damaged"):
        node_store.arrive(path, hashlib.sha256(b"other").hexdigest(), 6, 0, lambda most: next(data))
    assert sorted(os.listdir(tmp_path / "store")) == ["x.lock"]


def places(servers: list[Sshd], stack: ExitStack, work_dir: str = "~/work") -> list[Place]:
    made = []
    for server in servers:
        site = own_python(server.site()).model_copy(update={"work_dir": work_dir})
        host = connect(site, server.host, known_hosts=server.folder / "kh", on_message=print)
        stack.callback(host.close)
        made.append(Place(site, lambda host=host: host))  # type: ignore[misc]
    return made


def test_a_folder_that_nodes_share_is_filled_once(sshd: Start, tmp_path: Path) -> None:
    servers = [sshd() for _ in range(4)]
    for server in servers[1:3]:
        server.home.rmdir()
        server.home.symlink_to(servers[0].home)
    # a disk that was copied, with all that lies on it, is not a shared one
    for server in (servers[0], servers[3]):
        (server.home / "work").mkdir()
        (server.home / "work" / ".identity").write_text("copied")
    package, said = make_bundle(), list[str]()
    with ExitStack() as stack:
        done = prepare_all(places(servers, stack), [package], said.append, needs=NOTHING)
    assert [getattr(one, "error", None) for one in done] == [None] * 4
    assert len([line for line in said if line.endswith("is there")]) == 2
    assert [line for line in said if "share" in line] == [
        f"east: 3 nodes share the folder {servers[0].home}/work; it is filled once"
    ]
    assert all((server.home / "work" / "code" / package.hash).is_dir() for server in servers)
    assert not list((servers[0].home / "work" / "store").glob("sign-*"))


def test_one_node_s_trouble_is_its_own(sshd: Start) -> None:
    servers = [sshd() for _ in range(3)]
    (servers[1].home / "work").write_text("a file where the folder should be")
    with ExitStack() as stack:
        done = prepare_all(places(servers, stack), [make_bundle()], needs=NOTHING)
    assert isinstance(done[1], PreflightError)
    assert "cannot write into the work folder" in done[1].message
    assert [type(one).__name__ for one in (done[0], done[2])] == ["Prepared", "Prepared"]
