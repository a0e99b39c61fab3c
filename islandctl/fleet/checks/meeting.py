"""Nodes of one cell: by which way they reach one another, and whether they can meet where a run would have them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from islandctl.fleet.checks.base import (
    Cell,
    CellCheck,
    Node,
    Verdict,
    Verdicts,
    fail,
    listed,
    ok,
    skipped,
    unknown,
    warn,
)
from islandctl.fleet.checks.load import judge_reduce, reduce_args, without_torch

T = TypeVar("T")
AT_ONCE = 32
NOT_A_WAY = ("lo", "docker", "virbr", "br-", "veth", "cni", "flannel", "podman")
LISTEN_S = 20.0
ACROSS_SHARE = 0.8
"""Of what the plan reckons with, that a collective over several nodes must reach."""
MOST_ADDRESSES = 4
NO_ADDRESS = "no address that its peers could reach: no default route"


def at_once(nodes: Sequence[Node], ask: Callable[[Node], T]) -> list[T]:
    """Ask several nodes at the same time. Raises what one of them raises."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return list(pool.map(ask, nodes))


def addresses(node: Node) -> list[str]:
    """Where a run would have its peers look for this node: where its default route leads out, or else where SSH came
    in; in a job of Slurm at all it has, since there they try one after another."""
    if "addresses" not in node.facts:
        told = node.ask("addresses", timeout_s=20.0)
        routed, came_in, others = told["routed"], told["came_in"], told["others"]
        node.facts["addresses"] = (routed or came_in)[:1] if node.kind == "host" else [*routed, *others]
    found: list[str] = node.facts["addresses"]
    return found


def own_address(node: Node) -> str:
    """The one at which its peers have found it, or the likeliest; empty: there is none."""
    return str(node.facts.get("met") or next(iter(addresses(node)), ""))


class Rendezvous(CellCheck):
    """Every node dials rank 0."""

    name, tier, title = "rendezvous", "quick", "every node of a cell reaches rank 0's address; its port can be bound"
    threshold, source = (
        "every pair",
        "pytorch#150532, #85300 (names that do not resolve), pytorch#126510 (port taken)",
    )
    remedy = "open the ports between the nodes of a site (a security group, a firewall)"
    deadline_s = 120.0

    def look(self, cell: Cell) -> Verdicts:
        """See ``CellCheck``."""
        first, others = cell.nodes[0], cell.nodes[1:]
        known = addresses(first)
        if not known:
            return fail(f"{first.label} has {NO_ADDRESS}", hint="check its network interfaces: ip address; ip route")
        heard: dict[str, str] = {}
        for address in known[:MOST_ADDRESSES]:
            port, word = first.ask("free_port", timeout_s=10.0, address=address)["port"], secrets.token_hex(8)
            bound = first.ask("can_bind", timeout_s=10.0, address=address, port=port)
            if not bound["free"]:
                return fail(f"{first.label}: {address} port {port} cannot be bound: {held_words(bound)}")
            asked = {"address": address, "port": port, "word": word, "seconds": LISTEN_S, "guests": len(others)}
            door = threading.Thread(target=_quietly, args=(first, asked), daemon=True)
            door.start()
            said = at_once(others, partial(_dial, address=address, port=port, word=word))
            heard = {node.label: why for node, why in zip(others, said, strict=True)}
            first.facts["meets"] = not any(heard.values())
            if first.facts["meets"]:
                first.facts["met"] = address
                break
        return judge_meeting(heard, first.label, f"{address} port {port}")


def held_words(bound: dict[str, Any]) -> str:
    """Why a port cannot be bound, with its holder where that may be seen."""
    holder = bound.get("holder") or {}
    if "pid" in holder:
        return f"pid {holder['pid']} ({holder['command']}) holds it"
    if "uid" in holder:
        return f"a process of another user (uid {holder['uid']}) holds it"
    return str(bound["error"])


def judge_meeting(heard: dict[str, str], first: str, place: str) -> Verdict:
    """``heard``: node → empty when it reached the first one, else why not."""
    blocked = [f"{label} → {first}: {why}" for label, why in heard.items() if why]
    if blocked:
        return fail(f"blocked at {place}: {listed(blocked, 3)}", value=len(blocked), unit="pairs")
    return ok(f"{len(heard)} nodes reach {first} at {place}", value=0, unit="pairs")


def _quietly(node: Node, asked: dict[str, Any]) -> None:
    try:
        node.ask("listen_once", timeout_s=LISTEN_S + 5.0, **asked)
    except Exception:  # the dials tell what came of it
        return


def _dial(node: Node, address: str, port: int, word: str) -> str:
    """Empty: reached. It is tried again while the listener may not be there yet."""
    end, why = time.monotonic() + LISTEN_S / 2, ""
    while time.monotonic() < end:
        told = node.ask("dial", timeout_s=10.0, targets=[[address, port]], each_s=5.0, listen=True)["answers"][0]
        if told.get("said") == word:
            return ""
        why = told.get("error", "something else answers there")
        if "refused" not in why:
            break
        time.sleep(0.3)
    return why


class Interfaces(CellCheck):
    """Which network the nodes use among themselves."""

    name, tier, title = "interfaces", "quick", "the network interface by which each node reaches its peers"
    threshold, source = "one that is not lo or a bridge of containers", "marin#6940, nccl#286, nccl-tests#9"
    remedy = "a launch names it to NCCL and gloo; NCCL_SOCKET_IFNAME in the recipe's worker.env overrides it"

    def look(self, cell: Cell) -> Verdicts:
        """See ``CellCheck``."""
        own = at_once(cell.nodes, own_address)
        found = {node.label: address for node, address in zip(cell.nodes, own, strict=True)}
        lost = [label for label, address in found.items() if not address]
        if lost:
            return fail(f"{listed(lost)}: {NO_ADDRESS}", hint="check its network interfaces: ip address; ip route")

        def ways(node: Node) -> Any:
            peers = [address for label, address in found.items() if label != node.label and address]
            return node.ask("routes", timeout_s=20.0, peers=peers)["routes"]

        told = at_once(cell.nodes, ways)
        return judge_interfaces({node.label: one for node, one in zip(cell.nodes, told, strict=True)})


def judge_interfaces(told: dict[str, Sequence[dict[str, str]]]) -> Verdict:
    """``told``: node → its way to each peer."""
    broken = [
        f"{label} → {one['peer']}: {one['error']}" for label, ways in told.items() for one in ways if "error" in one
    ]
    if broken:
        return fail(f"no way: {listed(broken, 3)}")
    names = {label: sorted({one["interface"] for one in ways}) for label, ways in told.items()}
    strange = [label for label, found in names.items() if any(name.startswith(NOT_A_WAY) for name in found)]
    text = "; ".join(f"{label} {'/'.join(found) or '?'}" for label, found in list(names.items())[:3])
    if strange:
        return warn(f"{text}: not a way between machines on {listed(strange)}")
    if len({tuple(found) for found in names.values()}) > 1:
        return warn(f"{text}: other names on other nodes, so one name for all would be wrong")
    return ok(text)


class Names(CellCheck):
    """Do nodes know one another by name?"""

    name, tier, title = "names", "quick", "each node's own name is known to its peers"
    threshold, source = (
        "it resolves; islandctl passes addresses, so only other tools need it",
        "pytorch#85300, #73656",
    )
    remedy = "a line in /etc/hosts of each node, for tools that want names"

    def look(self, cell: Cell) -> Verdicts:
        """See ``CellCheck``."""
        first = cell.nodes[0]
        name = first.ask("routes", timeout_s=20.0, peers=[])["name"]

        def ask(node: Node) -> bool:
            return "error" in node.ask("routes", timeout_s=20.0, peers=[name])["routes"][0]

        said = at_once(cell.nodes[1:], ask)
        unknown_to = [node.label for node, lost in zip(cell.nodes[1:], said, strict=True) if lost]
        if unknown_to:
            return warn(f"{name} ({first.label}) is not known on {listed(unknown_to)}")
        return ok(f"{name} is known to all {len(cell.nodes) - 1} peers")


class CellCollective(CellCheck):
    """All-reduce over all nodes of a cell."""

    name, tier, title = "cell-all-reduce", "deep", "an all-reduce over all ranks of a cell of several nodes"
    threshold = (
        "≥ 80 % of network.bandwidth × the accelerators of a node / oversubscription, or of its links where they are "
        "narrower; NET/IB or OFI, not NET/Socket"
    )
    source = "ml-engineering; the plan's own figure"
    remedy = "NCCL_DEBUG=INFO tells the way that it takes; ib_write_bw measures one pair"
    deadline_s = 180.0
    measures = True

    def look(self, cell: Cell) -> Verdicts:
        """See ``CellCheck``."""
        first = cell.nodes[0]
        address = own_address(first)
        if not address:
            return skipped(f"{first.label} has {NO_ADDRESS}")
        if not first.facts.get("meets", True):
            return skipped("its nodes do not reach one another: see rendezvous")
        port = first.ask("free_port", timeout_s=10.0, address=address)["port"]
        world, answers = sum(node.ranks for node in cell.nodes), dict[str, dict[str, Any]]()
        begun, before = [], 0
        for node in cell.nodes:
            peer = own_address(cell.nodes[1]) if node is first else address
            way = node.ask("routes", timeout_s=20.0, peers=[peer])["routes"][0]
            args = reduce_args(node, world, before, address, port) | {"interface": way.get("interface", "")}
            begun.append(threading.Thread(target=_reduce, args=(node, args, answers), daemon=True))
            before += node.ranks
        for thread in begun:
            thread.start()
        for thread in begun:
            thread.join(self.deadline_s - 20.0)
        silent = [node.label for node in cell.nodes if node.label not in answers]
        if silent:
            return unknown(f"no answer from {listed(silent)}")
        for label, told in answers.items():
            no = without_torch(told)
            if no is not None:
                return Verdict(no.level, f"{label}: {no.text}", hint=no.hint)
        whole = {
            "answers": [one for told in answers.values() for one in told["answers"]],
            "lines": [line for told in answers.values() for line in told["lines"]],
        }
        return judge_across(whole, kind=first.site.gpu.type, ranks=world, expected=cell.bus_bytes_per_s)


def judge_across(told: dict[str, Any], *, kind: str, ranks: int, expected: float | None) -> Verdict:
    """As in one node, and against what the plan reckons with. ``expected``: B/s of bus bandwidth."""
    verdict = judge_reduce(told, kind=kind, ranks=0)
    bus = verdict.value or 0.0
    text = verdict.text.replace("0 ranks", f"{ranks} ranks")
    figures: dict[str, Any] = {"value": bus, "unit": "B/s"}
    if expected is not None:
        figures["threshold"] = f"{ACROSS_SHARE * expected / 1e9:.3g} GB/s"
        if verdict.level != "fail" and bus < ACROSS_SHARE * expected:
            return fail(text, **figures)
    return Verdict(verdict.level, text, **figures)


def _reduce(node: Node, args: dict[str, Any], answers: dict[str, dict[str, Any]]) -> None:
    try:
        answers[node.label] = node.worker_python("all_reduce", timeout_s=110.0, **args)
    except Exception as error:  # told as the node's answer
        answers[node.label] = {"error": str(error)}
