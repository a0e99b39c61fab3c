"""Nodes of one cell: by which way they reach one another, and whether they can meet where a run would have them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

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

NOT_A_WAY = ("lo", "docker", "virbr", "br-", "veth", "cni", "flannel", "podman")
LISTEN_S = 20.0
ACROSS_SHARE = 0.8
"""Of what the plan reckons with, that a collective over several nodes must reach."""
NO_ADDRESS = "no address that its peers could reach: no default route"


def own_address(node: Node) -> str:
    """The address of node 0 at which a run lets its peers meet: where its default route leads out, or SSH came in."""
    if "address" not in node.facts:
        told = node.ask("routes", timeout_s=10.0, peers=["192.0.2.1", "2001:db8::1"])
        node.facts["address"] = next((one["address"] for one in told["routes"] if "address" in one), told["came_in"])
    return str(node.facts["address"])


class Rendezvous(CellCheck):
    """Every node dials rank 0."""

    name, tier, title = "rendezvous", "quick", "every node of a cell reaches rank 0's address; its port can be bound"
    threshold, source = (
        "every pair",
        "pytorch#150532, #85300 (names that do not resolve), pytorch#126510 (port taken)",
    )
    remedy = "open the ports between the nodes of a site (a security group, a firewall)"

    def look(self, cell: Cell) -> Verdicts:
        """See ``CellCheck``."""
        first, others = cell.nodes[0], cell.nodes[1:]
        if first.is_login:
            return skipped("a login node: its nodes are the scheduler's")
        address = own_address(first)
        if not address:
            return fail(f"{first.label} has {NO_ADDRESS}", hint="check its network interfaces: ip address; ip route")
        port, word = first.ask("free_port", timeout_s=10.0, address=address)["port"], secrets.token_hex(8)
        bound = first.ask("can_bind", timeout_s=10.0, address=address, port=port)
        if not bound["free"]:
            return fail(f"{first.label}: {address} port {port} cannot be bound: {held_words(bound)}")
        asked = {"address": address, "port": port, "word": word, "seconds": LISTEN_S, "guests": 1000}
        door = threading.Thread(target=_quietly, args=(first, asked), daemon=True)
        door.start()
        heard = {node.label: _dial(node, address, port, word) for node in others}
        first.facts["meets"] = not any(heard.values())
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
        if cell.nodes[0].is_login:
            return skipped("a login node: its nodes are the scheduler's")
        addresses = {node.label: own_address(node) for node in cell.nodes}
        lost = [label for label, address in addresses.items() if not address]
        if lost:
            return fail(f"{listed(lost)}: {NO_ADDRESS}", hint="check its network interfaces: ip address; ip route")
        told = {}
        for node in cell.nodes:
            peers = [address for label, address in addresses.items() if label != node.label and address]
            told[node.label] = node.ask("routes", timeout_s=20.0, peers=peers)["routes"]
        return judge_interfaces(told)


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
        if cell.nodes[0].is_login:
            return skipped("a login node: its nodes are the scheduler's")
        first = cell.nodes[0]
        name = first.ask("routes", timeout_s=20.0, peers=[])["name"]
        unknown_to = []
        for node in cell.nodes[1:]:
            told = node.ask("routes", timeout_s=20.0, peers=[name])["routes"][0]
            if "error" in told:
                unknown_to.append(node.label)
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
        if first.is_login:
            return skipped("a login node: its nodes are the scheduler's")
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
