"""What is known of each accelerator: ``gpus.csv``, with its sources in its head."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from statistics import median

from islandctl.config.faults import nearest_word
from islandctl.config.load import Loaded
from islandctl.config.model import Model
from islandctl.config.site import SiteProfile
from islandctl.errors import ConfigError

CPU = "cpu"


class Accelerator(Model):
    """One accelerator of a site. What is None is not known."""

    name: str
    memory_bytes: int | None = None
    matrix_flops: float | None = None
    """Best bf16 matrix rate, FLOP/s: measured where a measurement is known."""
    matrix_source: str = ""
    """Where ``matrix_flops`` comes from, in words."""
    peak_flops: float | None = None
    """The data sheet's dense bf16 rate, to which model FLOPs utilisation (MFU) is counted."""
    fp8_flops: float | None = None
    """fp8 matrix rate, FLOP/s."""
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    """One direction, all links between the accelerators of one node."""
    price_low: float | None = None
    """US dollars per hour."""
    price_high: float | None = None
    price_source: str = ""
    watts: float | None = None
    """Of the board."""


FP8_SHARE = 0.7
"""Of the data sheet's fp8 rate (assumption: below bf16's measured 0.8, since values are scaled and cast)."""


@cache
def catalogue() -> dict[str, Accelerator]:
    """Every accelerator that is known, by name."""
    text = resources.files("islandctl.planner").joinpath("gpus.csv").read_text("utf-8")
    rows = list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))
    measured = [float(row["gemm_bf16_tflops"]) / float(row["bf16_tflops"]) for row in rows if row["gemm_bf16_tflops"]]
    return {row["gpu"]: _accelerator(row, median(measured)) for row in rows}


def _accelerator(row: dict[str, str], usual_ratio: float) -> Accelerator:
    gemm = row["gemm_bf16_tflops"]
    flops = float(gemm) if gemm else float(row["bf16_tflops"]) * usual_ratio
    source = (
        "best measured matrix rate" if gemm else f"{usual_ratio:.2f} × the data sheet, the catalogue's usual ratio"
    )
    return Accelerator(
        name=row["gpu"],
        memory_bytes=int(float(row["memory_gb"]) * 1e9),
        matrix_flops=flops * 1e12,
        matrix_source=source,
        peak_flops=float(row["bf16_tflops"]) * 1e12,
        fp8_flops=float(row["fp8_tflops"]) * 1e12 * FP8_SHARE if row["fp8_tflops"] else None,
        memory_bytes_per_s=float(row["memory_tb_s"]) * 1e12,
        watts=float(row["watts"]),
        link_bytes_per_s=float(row["link_gb_s"]) * 1e9,
        price_low=float(row["price_low"]) if row["price_low"] else None,
        price_high=float(row["price_high"]) if row["price_high"] else None,
        price_source=f"catalogue, {row['price_as_of']}" if row["price_low"] else "",
    )


def accelerator(site: Loaded[SiteProfile]) -> Accelerator:
    """What the plan knows of a site's accelerator: the catalogue, with the profile's own values on top.

    Raises:
        ConfigError: neither the catalogue nor the profile knows its memory.
    """
    gpu, price = site.value.gpu, site.value.price.gpu
    if gpu.type == CPU:
        known = Accelerator(name=CPU)
    else:
        by_lower = {name.lower(): entry for name, entry in catalogue().items()}
        found = by_lower.get(gpu.type.lower())
        if found is None and gpu.memory is None:
            meant = nearest_word(gpu.type, catalogue()) or _beginning_with(gpu.type)
            raise ConfigError(
                f"{site.at('gpu', 'type')}: gpu.type: accelerator '{gpu.type}' is not in the catalogue"
                + (f"; did you mean {meant}?" if meant else f" ({', '.join(catalogue())}, {CPU})"),
                hint="for another accelerator give gpu.memory and gpu.bf16 as well",
            )
        known = found or Accelerator(name=gpu.type)
    own: dict[str, object] = {}
    if gpu.memory is not None:
        own |= {"memory_bytes": gpu.memory}
    if gpu.bf16 is not None:
        own |= {"matrix_flops": gpu.bf16, "matrix_source": "gpu.bf16 of the profile"}
        own |= {} if known.peak_flops else {"peak_flops": gpu.bf16}
    if gpu.memory_rate is not None:
        own |= {"memory_bytes_per_s": gpu.memory_rate}
    if gpu.link is not None:
        own |= {"link_bytes_per_s": gpu.link}
    if price is not None:
        own |= {"price_low": price, "price_high": price, "price_source": "profile"}
    return known.model_copy(update=own)


def _beginning_with(name: str) -> str | None:
    return next((known for known in catalogue() if known.lower().startswith(name.lower())), None)
