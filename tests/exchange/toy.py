"""A relay of dictionaries, a toy model and a cell that trains it: everything an exchange needs, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from islandctl.config.exchange import Exchange, Late, Outer
from islandctl.errors import RelayError, UnreachableError
from islandctl.exchange.island import Island
from islandctl.exchange.journal import Journal, MemoryJournal
from islandctl.exchange.transport import Transport
from islandctl.ledger.entries import ENTRY, Commit, Contribution, Entry, Genesis, Rewind, Stop
from islandctl.ledger.packet import digest, unpack

torch.set_num_threads(1)

RUN, CONFIG = "toy", "c" * 64
Place = tuple[int, int, int, int, int]


class MemoryRelay:
    """Commits a round when all cells that ``expects`` names for it have put all chunks.

    ``expects(fragment, window)`` gives the cells whose packets count: all by default, fewer for a commit without
    somebody, none for an empty commit as soon as the first packet is there.
    """

    def __init__(self, num_cells: int, num_fragments: int) -> None:
        self.num_cells = num_cells
        self.expects: Callable[[int, int], Sequence[int]] = lambda fragment, window: range(num_cells)
        self.held: Callable[[int, int], bool] = lambda fragment, window: False
        self.attempt = 1
        self.versions = [0] * num_fragments
        self.packets: dict[Place, bytes] = {}
        self.ledger: list[Entry] = []
        self.changed = threading.Condition()
        cells = tuple(f"cell-{cell}" for cell in range(num_cells))
        self._write(Genesis, run=RUN, config_hash=CONFIG, cells=cells, num_fragments=num_fragments)

    def _write(self, kind: type, **fields: object) -> None:
        with self.changed:
            entry = kind(seq=len(self.ledger), attempt=self.attempt, at="", previous="", **fields)
            self.ledger.append(ENTRY.validate_json(entry.model_dump_json()))
            self.changed.notify_all()

    def committed(self, fragment: int, window: int) -> bool:
        with self.changed:
            return self._closed(fragment, window)

    def has(self, fragment: int, window: int, cell: int) -> bool:
        """Whether all the cell's packets of the round are stored."""
        with self.changed:
            parts = [d for p, d in self.packets.items() if p[:4] == (self.attempt, fragment, window, cell)]
            return bool(parts) and len(parts) == unpack(parts[0])[0].num_chunks

    def stop(self) -> None:
        self._write(Stop, reason="asked")

    def rewind(self, step: int, versions: Sequence[int]) -> None:
        with self.changed:
            self.attempt += 1
            self.versions = list(versions)
            self._write(Rewind, step=step, manifests=(), versions=tuple(versions))

    def commits(self) -> list[Commit]:
        return [entry for entry in self.ledger if isinstance(entry, Commit)]

    def put(self, packet: bytes) -> None:
        header, _ = unpack(packet)
        place = (header.attempt, header.fragment, header.window, header.cell, header.chunk)
        with self.changed:
            if header.attempt != self.attempt:
                raise RelayError("old attempt", code="stale")
            if place in self.packets:
                if self.packets[place] == packet:
                    return
                raise RelayError("other bytes", code="exists")
            if self._closed(header.fragment, header.window):
                raise RelayError("committed", code="closed")
            if header.version != self.versions[header.fragment]:
                raise RelayError("old anchor", code="stale")
            self.packets[place] = bytes(packet)
            self._commit(header.fragment, header.window)

    def release(self) -> None:
        """Look at held rounds again."""
        with self.changed:
            self.held = lambda fragment, window: False
            for fragment, window in sorted({place[1:3] for place in self.packets}, key=lambda key: key[::-1]):
                if not self._closed(fragment, window):
                    self._commit(fragment, window)

    def _closed(self, fragment: int, window: int) -> bool:
        return any((c.attempt, c.fragment, c.window) == (self.attempt, fragment, window) for c in self.commits())

    def _commit(self, fragment: int, window: int) -> None:
        if self.held(fragment, window):
            return
        named = []
        for cell in self.expects(fragment, window):
            parts = {p[4]: d for p, d in self.packets.items() if p[:4] == (self.attempt, fragment, window, cell)}
            if not parts:
                return
            header, _ = unpack(next(iter(parts.values())))
            if len(parts) != header.num_chunks:
                return
            hashes = tuple(digest(parts[chunk]) for chunk in range(header.num_chunks))
            named.append(Contribution(cell=cell, step=header.step, tokens=header.tokens, chunks=hashes))
        self.versions[fragment] += bool(named)
        self._write(
            Commit,
            fragment=fragment,
            window=window,
            version=self.versions[fragment],
            named=tuple(named),
            missing=tuple(cell for cell in range(self.num_cells) if cell not in {n.cell for n in named}),
            reason="complete" if len(named) == self.num_cells else "deadline",
        )

    def fetch(self, place: Place) -> bytes:
        with self.changed:
            if place not in self.packets:
                raise RelayError("no such packet", code="unknown")
            return self.packets[place]

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        with self.changed:
            self.changed.wait_for(lambda: len(self.ledger) > after + 1, timeout=min(wait_s, 0.05))
            return self.ledger[after + 1 : after + 3]


class MemoryTransport:
    """One cell's way to the relay, which can be cut, and be told to say everything twice."""

    def __init__(self, relay: MemoryRelay) -> None:
        self.relay = relay
        self.away = False
        self.mute = False
        """Puts get no answer; reading works."""
        self.twice = False

    def put(self, packet: bytes) -> None:
        if self.away or self.mute:
            raise UnreachableError("relay away")
        self.relay.put(packet)
        if self.twice:
            self.relay.put(packet)

    def fetch(self, attempt: int, fragment: int, window: int, cell: int, chunk: int) -> bytes:
        if self.away:
            raise UnreachableError("relay away")
        return self.relay.fetch((attempt, fragment, window, cell, chunk))

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        if self.away:
            raise UnreachableError("relay away")
        entries = self.relay.entries(after, wait_s)
        return [entry for entry in entries for _ in range(2 if self.twice else 1)]


def toy_parameters() -> dict[str, torch.nn.Parameter]:
    """Two blocks, an embedding, a head; odd sizes, so that chunks and shards are uneven."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed.weight": (13, 6), "norm.weight": (6,), "head.weight": (13, 6), "scale": (1,)}
    for block in range(3):
        shapes |= {
            f"blocks.{block}.norm.weight": (6,),
            f"blocks.{block}.router.weight": (3, 6),
            f"blocks.{block}.experts.up": (3, 6, 25),
            f"blocks.{block}.experts.down": (3, 25, 6),
        }
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def train(parameters: Mapping[str, Tensor], cell: int, step: int) -> None:
    """One inner step: towards this cell's own target, with noise that only depends on cell and step."""
    generator = torch.Generator().manual_seed(1000 * cell + step)
    for name in sorted(parameters):
        value = parameters[name].data
        pull = torch.randn(value.shape, generator=generator) * 0.1 + 1.0 + 0.2 * cell
        if isinstance(value, DTensor):
            pull = distribute_tensor(pull, value.device_mesh, value.placements).to_local()
            value = value.to_local()
        value.sub_((value - pull) * 0.05)


def toy_settings(**changes: object) -> Exchange:
    fields: dict[str, object] = {"window": 6, "fragments": 2, "overlap": 2, "codec": "int8", "chunk": 256}
    fields |= {"outer": Outer(lr=0.7, momentum=0.9), "late": Late(deadline="200 ms")}
    return Exchange.model_validate(fields | changes)


class Cell:
    """One cell: a toy model and its island."""

    def __init__(
        self,
        relay: Any,
        cell: int,
        settings: Exchange | None = None,
        *,
        steps: int = 20,
        own: int | None = None,
        attempt: int = 1,
        journal: Journal | None = None,
        transport: Transport | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        group: ProcessGroup | None = None,
        num_cells: int = 2,
        save_every: int | None = None,
        model: Callable[[], Mapping[str, Tensor]] = toy_parameters,
        train: Callable[[Mapping[str, Tensor], int, int], None] = train,
    ) -> None:
        self.relay = relay
        self.model = model
        self.train = train
        self.cell = cell
        self.settings = settings or toy_settings()
        self.run_steps, self.own = steps, own
        self.num_cells = num_cells
        self.save_every = save_every
        self.journal = journal or MemoryJournal()
        self.transport: Any = transport or MemoryTransport(relay)
        self.parameters = parameters if parameters is not None else model()
        self.now = 0
        self.silences: list[int] = []
        """The last step done before each wait in which the relay did not answer."""
        self.island = Island(
            self.parameters,
            settings=self.settings,
            steps=steps,
            own=own,
            seed=3,
            run=RUN,
            config_hash=CONFIG,
            attempt=attempt,
            cell=cell,
            num_cells=num_cells,
            group=group,
            transport=self.transport,
            journal=self.journal,
            save_every=save_every,
            deadline_grace_s=0.1,
            on_silence=lambda: self.silences.append(self.now),
        )
        self.steps = self.island.pace.own_step(steps)

    @property
    def saves(self) -> bool:
        """Whether it has just reached a step of the run at which all cells save, and is not at the end."""
        step = self.island.run_step
        due = self.save_every is not None and step % self.save_every == 0
        return due and self.now < self.steps and self.island.pace.reaches(step, self.now)

    def advance(self, until: int) -> Cell:
        """To that step; less far when it is hurried while it waits for the first cell's warm-up."""
        while self.now < until:
            if self.island.warming_up:
                before, self.now = self.now, self.island.await_warmup()
                if self.now == before:
                    return self
                continue
            self.train(self.parameters, self.cell, self.now + 1)
            self.now = self.island.step(tokens=100 + self.cell)
        return self

    def finish(self) -> Cell:
        self.advance(self.steps)
        assert self.island.finish()
        return self

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def save(self) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
        tensors = {key: tensor.clone() for key, tensor in self.island.state_dict().items()}
        return self.now, self.values(), tensors

    def reborn(
        self,
        saved: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None,
        *,
        attempt: int = 1,
        transport: Transport | None = None,
    ) -> Cell:
        """This cell after its death: a new process with the same journal, from the checkpoint or the beginning."""
        self.island.close()
        again = Cell(
            self.relay,
            self.cell,
            self.settings,
            steps=self.run_steps,
            own=self.own,
            attempt=attempt,
            journal=self.journal,
            transport=transport,
            num_cells=self.num_cells,
            save_every=self.save_every,
            model=self.model,
            train=self.train,
        )
        if saved is not None:
            again.restore(saved)
        again.now = again.island.resume()
        return again

    def restore(self, saved: tuple[int, dict[str, Tensor], dict[str, Tensor]]) -> None:
        self.now, values, tensors = saved
        for name, value in values.items():
            self.parameters[name].data.copy_(value)
        self.island.load_state_dict(tensors)


def together(*tasks: Callable[[], object]) -> list[object]:
    """Run the tasks side by side; the first error is raised at once, though others may still wait for that cell."""
    futures: list[Future[object]] = [Future() for _ in tasks]

    def run(task: Callable[[], object], future: Future[object]) -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    for task, future in zip(tasks, futures, strict=True):
        threading.Thread(target=run, args=(task, future), daemon=True).start()
    wait(futures, return_when=FIRST_EXCEPTION)
    return [future.result() for future in sorted(futures, key=lambda future: not future.done())]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal keys and bits."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def anchors(cell: Cell) -> dict[str, Tensor]:
    """With what the outer optimizer remembers."""
    kept = ("anchor", "momentum", "sum", "held")
    return {k: v for k, v in cell.island.state_dict().items() if k.startswith(kept)}


def wait_for(condition: Callable[[], bool]) -> None:
    """Until the condition holds; the background gets there by itself."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
