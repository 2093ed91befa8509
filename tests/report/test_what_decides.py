"""The lines below a table that say what decides."""

from __future__ import annotations

from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.request import Request
from zeroplan.report.plans import decides


def test_formulas_are_bytes_and_measured_items_are_sentences() -> None:
    report = estimate_report(Request(model="gpt2", depth="formula"))
    said = decides(report)
    assert said[0] == "Largest item at stage 0: grad.master, 949.40 MiB = master_bytes × trainable × 2 bytes."
    assert said[1].startswith("What changes it most: ")
    first = report.plans[0]
    kernels = max(first.lines, key=lambda line: line.bytes).model_copy(
        update={"buffer": "device.context", "bytes": 1 << 40, "formula": "measured: kernels that CUDA loads"}
    )
    alike = report.model_copy(update={"plans": (first.model_copy(update={"lines": (*first.lines, kernels)}), first)})
    assert decides(alike) == ["Largest item at stage 0: device.context, 1.00 TiB, measured: kernels that CUDA loads."]


def test_a_traced_item_is_no_formula() -> None:
    report = estimate_report(Request(model="Qwen/Qwen2.5-0.5B", stage=3, gpus=8, offload_optimizer="cpu", micro_batch=4))
    assert decides(report)[0].endswith("GiB, traced, at the peak.")
