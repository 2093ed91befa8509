"""The answers of ``models`` and ``gpus`` as tables and JSON: the names that are known, with the facts behind each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroplan.core.gpus import Gpu
from zeroplan.core.sizes import format_count, format_gib
from zeroplan.models.catalog import Entry
from zeroplan.report.table import render


def models_table(found: Sequence[Entry], style: str = "plain") -> str:
    """Return one row for each model, with its number of parameters and its family, smallest of a family first."""
    rows = [[entry.id, format_count(entry.params), str(entry.config.get("model_type", "-"))] for entry in _sorted(found)]
    return render(["model", "parameters", "family"], rows, style)


def models_json(found: Sequence[Entry]) -> dict[str, Any]:
    """Return one object that JSON can hold. ``also`` are ids of models with the same shapes."""
    rows = [
        {"model": entry.id, "params": entry.params, "family": entry.config.get("model_type"), "also": list(entry.also)}
        for entry in _sorted(found)
    ]
    return {"schema": 1, "models": rows}


def _sorted(found: Sequence[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: (str(entry.config.get("model_type", "")), entry.params, entry.id.lower()))


def gpus_table(found: Sequence[Gpu], style: str = "plain") -> str:
    """Return one row for each GPU: its memory, its 16-bit rate and its bandwidths (one direction)."""
    headers = ["GPU", "GiB", "usable GiB", "TFLOP/s", "memory GB/s", "link GB/s", "host GB/s"]
    rows = [
        [
            gpu.name,
            format_gib(gpu.memory, digits=1),
            format_gib(gpu.usable, digits=1),
            f"{gpu.bf16_tflops:,.0f}",
            f"{gpu.bandwidth_gbs:,.0f}",
            f"{gpu.link_gbs:,.0f}",
            f"{gpu.pcie_gbs:,.0f}",
        ]
        for gpu in found
    ]
    return render(headers, rows, style)


def gpus_json(found: Sequence[Gpu]) -> dict[str, Any]:
    """Return one object that JSON can hold. Memory is in bytes, bandwidths in 10^9 bytes a second."""
    rows = [
        {
            "gpu": gpu.name,
            "memory": gpu.memory,
            "usable": gpu.usable,
            "tflops": gpu.bf16_tflops,
            "bf16": gpu.bf16,
            "memory_gbs": gpu.bandwidth_gbs,
            "link_gbs": gpu.link_gbs,
            "host_link_gbs": gpu.pcie_gbs,
            "source": gpu.source,
        }
        for gpu in found
    ]
    return {"schema": 1, "gpus": rows}
