"""One rank of a cell of several, as a process of its own, with FSDP2 on the CPU."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence
from multiprocessing.managers import BaseManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from islandctl.config.exchange import Exchange, Late
from islandctl.ledger.entries import Entry
from islandctl.ledger.packet import unpack
from islandctl.relay.inprocess import InProcessRelay
from tests.exchange.toy import CONFIG, RUN, Cell, MemoryRelay, Place, toy_parameters, toy_settings

_RELAY: list[MemoryRelay] = []


def _relay() -> MemoryRelay:
    if not _RELAY:
        _RELAY.append(MemoryRelay(2, 2))
    return _RELAY[0]


class PairRelay:
    """The real relay's rules for a butterfly of two cells, with the calls of ``MemoryRelay``."""

    def __init__(self) -> None:
        late = Late.model_validate({"deadline": "10 min"})
        self.relay = InProcessRelay(RUN, CONFIG, ["cell-0", "cell-1"], 2, late=late, final_window=4)

    def put(self, packet: bytes) -> None:
        self.relay.transport(unpack(packet)[0].cell).put(packet)

    def fetch(self, place: Place) -> bytes:
        return self.relay.transport(1 - place[3]).fetch(*place)

    def entries(self, after: int, wait_s: float) -> Sequence[Entry]:
        return list(self.relay.wait(after, min(wait_s, 0.05), 1000))


_PAIRS: list[PairRelay] = []


def _pairs() -> PairRelay:
    if not _PAIRS:
        _PAIRS.append(PairRelay())
    return _PAIRS[0]


class RelayManager(BaseManager):
    """Serves one ``MemoryRelay`` to processes."""


RelayManager.register("relay", callable=_relay)
RelayManager.register("pairs", callable=_pairs)
SPAWN = multiprocessing.get_context("spawn")


class Toy(nn.Module):
    """The toy's parameters under the same dotted names, as FSDP2 wants them: in a module."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in toy_parameters().items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, parameter)


def whole(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().full_tensor().clone() for name, value in parameters.items()}


def rank_main(
    rank: int, size: int, store: str, address: Any, key: bytes, restart_at: int, poison: bool, mode: str
) -> None:
    """Train cell 0 to the end; at ``restart_at`` leave the island and go on with a new one from its state.

    The results (or the error's kind and text) go to ``<store>.<rank>``.
    """
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=ResourceWarning)
    torch.set_num_threads(1)
    multiprocessing.current_process().authkey = key
    manager = RelayManager(address=address, authkey=key)
    manager.connect()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        relay = manager.pairs() if mode == "butterfly" else manager.relay()
        result = _train(rank, relay, size, restart_at, poison, toy_settings(mode=mode))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    torch.save(result, f"{store}.{rank}")
    dist.destroy_process_group()


def _train(rank: int, relay: Any, size: int, restart_at: int, poison: bool, settings: Exchange) -> dict[str, Any]:
    model = Toy()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    parameters = dict(model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    group = dist.group.WORLD
    cell = Cell(relay, 0, settings, parameters=parameters, group=group)
    try:
        if poison:
            cell.advance(8)
            if rank == size - 1:
                parameters["blocks.2.experts.up"].detach().to_local().fill_(float("nan"))
            cell.finish()
        cell.advance(restart_at)
        saved = {key: tensor.clone() for key, tensor in cell.island.state_dict().items()}
        keys: list[list[str]] = [[] for _ in range(size)]
        dist.all_gather_object(keys, sorted(saved))
        everyones = [key for part in keys for key in part]
        assert len(everyones) == len(set(everyones)), "two ranks save the same key"
        cell.island.close()
        again = Cell(relay, 0, settings, parameters=parameters, group=group, journal=cell.journal)
        assert sorted(key for key in everyones if again.island.needs(key)) == sorted(saved)
        again.island.load_state_dict(saved)
        again.now = again.island.resume()
        cell = again
        assert cell.now == restart_at
        cell.finish()
        metrics = cell.island.metrics()
        return {"values": whole(parameters), "versions": cell.island.versions(), "metrics": metrics}
    finally:
        cell.island.close()
