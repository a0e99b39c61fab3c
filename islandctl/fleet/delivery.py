"""Brings contents to the nodes of a site: from here to one of them, and on from node to node where they can.

A content is named by its sha256 and lies in the node's store (``node_store.py``). What has arrived before a link was
cut is not sent again. Nodes that have a content give it to others of their site, two at a time each, so that the
time grows with the logarithm of their number; a node that no other can reach gets it from here.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from islandctl.errors import IslandError, UnreachableError
from islandctl.fleet.host import Host
from islandctl.fleet.wire import program

PEER_LEAST_BYTES = 64 << 20
"""Fewer bytes that the others of a site need are sent from here: handing them on would take longer."""
PEER_SLOTS = 2
"""Nodes that one node gives to at a time."""
DIRECT_SLOTS, SMALL_SLOTS = 8, 64
"""Nodes that are sent to from here at a time, where they cannot give to each other or need not."""
SMALL_BYTES = 4 << 20
TRIES = 5
"""In a row without a byte more."""
LEASE_S = 1800
"""Until a node that gives ends by itself, if nobody is left to tell it."""
SLOWEST_BYTES_PER_S = 50_000
TIMEOUT_S = 120.0
PATIENCE_S = 3.0
"""For a file of one node to be seen by another one that has the same folder: NFS remembers what was not there."""
_BLOCK = 1 << 18

Progress = Callable[[str, int, int], None]
"""Told of transfers from here: a name, the bytes sent so far, the bytes to send."""


@dataclass(frozen=True)
class Content:
    """Bytes with a name of their own."""

    name: str
    """sha256."""
    size: int
    source: Path | bytes
    label: str
    """For messages."""

    @classmethod
    def of(cls, source: Path | bytes, label: str) -> Content:
        """Of a file or of bytes.

        Raises:
            OSError: the file cannot be read.
        """
        total = hashlib.sha256()
        size = 0
        for block in _blocks(source, 0):
            total.update(block)
            size += len(block)
        return cls(total.hexdigest(), size, source, label)


@dataclass
class Member:
    """A node that needs contents, and what came of it."""

    host: Host
    work_dir: str
    error: IslandError | None = None

    def ask(self, do: str, timeout_s: float = TIMEOUT_S, **args: Any) -> Any:
        """Call a function of the node's store."""
        return self.host.python(
            program("node_store"), {"do": do, "work_dir": self.work_dir, **args}, timeout_s=timeout_s
        )

    @contextlib.contextmanager
    def sign(self) -> Iterator[str]:
        """Leave a sign in the work folder, by which others see that they have the same one; take it away again."""
        sign = secrets.token_hex(8)
        self.ask("leave", sign=sign)
        try:
            yield sign
        finally:
            with contextlib.suppress(IslandError):
                self.ask("clear", sign=sign)

    def sees(self, sign: str) -> bool:
        """Is another one's sign in this work folder?"""
        seen: bool = self.ask("see", sign=sign, patience_s=PATIENCE_S)
        return seen


def deliver(
    site: str,
    members: Sequence[Member],
    contents: Sequence[Content],
    say: Callable[[str], None],
    progress: Progress = lambda name, done, total: None,
) -> None:
    """Bring all contents to all members, whose errors are set where that failed.

    Args:
        site: its name, for messages.
    """
    for content in contents:
        alive = [member for member in members if member.error is None]
        if alive:
            _Spread(site, alive, content, say, progress).run()


def _blocks(source: Path | bytes, offset: int) -> Iterator[bytes]:
    if isinstance(source, bytes):
        for at in range(offset, len(source), _BLOCK):
            yield source[at : at + _BLOCK]
        return
    with source.open("rb") as file:
        file.seek(offset)
        while block := file.read(_BLOCK):
            yield block


@dataclass
class _Giver:
    """A node that has the content."""

    member: Member
    free: int = PEER_SLOTS
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it begins to give."""
    address: dict[str, Any] | None = None
    """Port and addresses, once it gives."""
    dead: bool = False


class _Spread:
    """One content on its way to the nodes of one site."""

    def __init__(
        self,
        site: str,
        members: Sequence[Member],
        content: Content,
        say: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._site, self._members, self._content = site, members, content
        self._say, self._progress = say, progress
        self._turn = threading.Condition()
        self._givers: list[_Giver] = []
        self._sending = 0
        self._peers = False
        self._from_peers = 0
        self._unreachable = 0
        self._here: dict[str, int] = {}
        """By node: bytes that lie there, where nothing has been tried since."""
        self._sent: dict[str, tuple[int, int]] = {}
        """By node: bytes sent to it from here, and to send."""

    @cached_property
    def _ticket(self) -> tuple[str, str]:
        """Name of the file that keeps the givers alive, and what askers must know."""
        return f"serving-{secrets.token_hex(8)}", secrets.token_urlsafe(32)

    def run(self) -> None:
        """Until every member has it or has an error."""
        with ThreadPoolExecutor(max_workers=min(len(self._members), 64), thread_name_prefix="delivery") as pool:
            lacking = [member for member in pool.map(self._look, self._members) if member is not None]
        need = len(lacking) - (0 if self._givers else 1)
        self._peers = need * self._content.size >= PEER_LEAST_BYTES
        if not lacking:
            return
        try:
            with ThreadPoolExecutor(max_workers=len(lacking), thread_name_prefix="delivery") as pool:
                list(pool.map(self._bring, lacking))
        finally:
            self._hush()
        if self._from_peers:
            self._say(f"{self._site}: {self._content.label}: {self._from_peers} nodes had it from their neighbours")

    def _look(self, member: Member) -> Member | None:
        """The member, if it lacks the content."""
        try:
            (here,) = member.ask("have", contents=[self._content.name])
        except IslandError as error:
            member.error = error
            return None
        if here == -1:
            self._givers.append(_Giver(member))
            return None
        self._here[member.host.label] = here
        return member

    def _bring(self, member: Member) -> None:
        """Get the content to one node, from wherever."""
        try:
            failed = 0
            while (giver := self._take(alone=failed >= 3)) is not None:
                if self._fetch(member, giver):
                    break
                failed += 1
            else:
                try:
                    self._send(member)
                finally:
                    with self._turn:
                        self._sending -= 1
                        self._turn.notify_all()
        except IslandError as error:
            member.error = error
            return
        with self._turn:
            self._givers.append(_Giver(member))
            self._turn.notify_all()

    def _take(self, alone: bool) -> _Giver | None:
        """Wait for a node that has time to give; None: it is sent from here, and counted as such."""
        with self._turn:
            while True:
                if self._peers and not alone:
                    giver = next((one for one in self._givers if one.free and not one.dead), None)
                    if giver is not None:
                        giver.free -= 1
                        return giver
                    wait = self._sending > 0 or any(not one.dead for one in self._givers)
                else:
                    wait = self._sending >= (SMALL_SLOTS if self._content.size < SMALL_BYTES else DIRECT_SLOTS)
                if not wait:
                    self._sending += 1
                    return None
                self._turn.wait()

    def _fetch(self, member: Member, giver: _Giver) -> bool:
        """Have the member take the content from the giver; whether that worked."""
        here, trouble = 0, ""
        try:
            if self._begin(giver):
                self._here.pop(member.host.label, None)
                told = member.ask(
                    "fetch",
                    TIMEOUT_S + self._content.size / SLOWEST_BYTES_PER_S,
                    content=self._content.name,
                    size=self._content.size,
                    token=self._ticket[1],
                    **(giver.address or {}),
                )
                here, trouble = told["here"], told["trouble"]
        finally:
            with self._turn:
                giver.free += 1
                self._turn.notify_all()
        with self._turn:
            if here == -1:
                self._from_peers += 1
                return True
            if here == 0:
                self._unreachable += 1
            # Two that got nothing, and none that got all: the site's nodes do not reach each other.
            if self._peers and self._unreachable >= 2 and not self._from_peers:
                self._peers = False
                self._say(
                    f"{self._site}: its nodes do not reach each other ({member.host.label}: {trouble}); "
                    f"{self._content.label} is sent to each from here"
                )
        return False

    def _begin(self, giver: _Giver) -> bool:
        """Have a node give, if it does not yet; whether it does."""
        with giver.lock:
            if giver.address is None and not giver.dead:
                ticket, token = self._ticket
                try:
                    giver.address = giver.member.ask(
                        "serve", ticket=ticket, token=token, contents=[self._content.name], lease_s=LEASE_S
                    )
                except IslandError:
                    giver.dead = True  # what is wrong with it will be told when it is needed itself
        return not giver.dead

    def _send(self, member: Member) -> None:
        """Send it from here, and go on after a cut where it was cut."""
        best = -1

        def no_progress(state: RetryCallState) -> bool:
            return state.attempt_number - last_gain >= TRIES

        last_gain = 0
        for attempt in Retrying(
            retry=retry_if_exception_type(UnreachableError),
            stop=no_progress,
            wait=wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        ):
            with attempt:
                here = self._here.pop(member.host.label, -2)
                if here == -2:
                    (here,) = member.ask("have", contents=[self._content.name])
                if here > best:
                    best, last_gain = here, attempt.retry_state.attempt_number
                while here != -1:
                    before, here = here, self._feed(member, here)
                    if -1 < here <= before:
                        raise UnreachableError(
                            f"{member.host.label}: of {self._content.label} only {here} bytes of "
                            f"{self._content.size} have arrived",
                            hint="run the command again: it goes on from there",
                        )

    def _feed(self, member: Member, offset: int) -> int:
        content = self._content

        def pieces() -> Iterator[bytes]:
            done = 0
            self._tell(member, 0, content.size - offset)
            for block in _blocks(content.source, offset):
                yield block
                done += len(block)
                self._tell(member, done, content.size - offset)

        return int(
            member.host.feed(
                program("node_store"),
                {
                    "do": "receive",
                    "work_dir": member.work_dir,
                    "content": content.name,
                    "size": content.size,
                    "offset": offset,
                },
                pieces(),
                timeout_s=TIMEOUT_S + (content.size - offset) / SLOWEST_BYTES_PER_S,
            )
        )

    def _tell(self, member: Member, done: int, total: int) -> None:
        with self._turn:
            self._sent[member.host.label] = (done, total)
            sums = [sum(column) for column in zip(*self._sent.values(), strict=True)]
        self._progress(f"{self._site}: {self._content.label}", sums[0], sums[1])

    def _hush(self) -> None:
        """Tell all who give to end; who cannot be told ends with its lease."""
        giving = [giver.member for giver in self._givers if giver.address is not None]
        if not giving:
            return

        def hush(member: Member) -> None:
            try:
                member.ask("hush", ticket=self._ticket[0])
            except IslandError:
                return

        with ThreadPoolExecutor(max_workers=min(len(giving), 64)) as pool:
            list(pool.map(hush, giving))
