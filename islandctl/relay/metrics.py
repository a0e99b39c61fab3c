"""The relay's status as OpenMetrics text."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from islandctl.relay.messages import CellStatus, RelayStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LARGEST = 2**63


def openmetrics(status: RelayStatus) -> bytes:
    """One scrape of ``/metrics``."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


class _Collector(Collector):
    def __init__(self, status: RelayStatus) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status
        yield InfoMetricFamily("islandctl_run", "Which run", value={"run": status.run, "config": status.config_hash})
        yield _gauge("islandctl_attempt", "Attempt of the run", status.attempt)
        yield _gauge("islandctl_ledger_seq", "Number of the ledger's newest entry", status.ledger_seq)
        yield _gauge("islandctl_rounds_open", "Rounds that wait for packets", status.rounds_open)
        yield _gauge("islandctl_halted", "1 when the run is halted", bool(status.halted))
        yield _gauge("islandctl_stopping", "1 when the run was asked to stop", status.stopping)
        rounds = GaugeMetricFamily("islandctl_rounds", "Commits of this attempt", labels=["result"])
        rounds.add_metric(["full"], status.rounds_committed - status.rounds_partial)
        rounds.add_metric(["partial"], status.rounds_partial)
        rounds.add_metric(["empty"], status.rounds_empty)
        yield rounds
        if status.joint_checkpoints:
            newest = status.joint_checkpoints[-1].step
            yield _gauge("islandctl_joint_checkpoint_step", "Newest joint checkpoint", newest)
        yield from self._cells(status.cells)

    def _cells(self, cells: tuple[CellStatus, ...]) -> Iterable[Metric]:
        sent = CounterMetricFamily(
            "islandctl_cell_bytes", "Packet bytes since the relay started", labels=["cell", "way"]
        )
        away = GaugeMetricFamily(
            "islandctl_cell_away", "1 when the late policy counts the cell as gone", labels=["cell"]
        )
        packets = GaugeMetricFamily("islandctl_cell_packets", "Packets since the relay started", labels=["cell"])
        age = GaugeMetricFamily("islandctl_cell_heartbeat_age_seconds", "Since the last heartbeat", labels=["cell"])
        values = {
            name: GaugeMetricFamily(f"islandctl_cell_{name}", text, labels=["cell"])
            for name, text in (
                ("step", "Inner steps done"),
                ("tokens", "Tokens trained"),
                ("tokens_per_s", "Recent mean"),
                ("loss", "Training loss of the last step, nats per token"),
                ("rounds_late", "Rounds resolved after their planned step"),
            )
        }
        held_out = GaugeMetricFamily("islandctl_cell_bits_per_byte", "Newest held-out value", labels=["cell"])
        for cell in cells:
            sent.add_metric([cell.name, "up"], cell.bytes_up)
            sent.add_metric([cell.name, "down"], cell.bytes_down)
            away.add_metric([cell.name], int(cell.away))
            packets.add_metric([cell.name], cell.packets)
            if cell.heartbeat is None or cell.age_s is None:
                continue
            age.add_metric([cell.name], cell.age_s)
            for name, family in values.items():
                value = getattr(cell.heartbeat, name)
                if value is not None:
                    family.add_metric([cell.name], _bounded(value))
            if cell.heartbeat.bits_per_byte:
                held_out.add_metric([cell.name], cell.heartbeat.bits_per_byte[-1][1])
        yield from (sent, away, packets, age, held_out, *values.values())


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=_bounded(value))


def _bounded(value: float) -> float:
    """What a cell tells may be any integer; OpenMetrics wants a float."""
    return float(max(-_LARGEST, min(_LARGEST, value)))
