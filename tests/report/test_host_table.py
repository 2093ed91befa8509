"""The host by phase as people see it: every phase adds up, the peak is the plan's, and the tables say so."""

from __future__ import annotations

import pytest

from zeroplan.core.plan import HostBuffer, HostPeak, Report
from zeroplan.core.sizes import MIB
from zeroplan.planner.estimate import estimate_report
from zeroplan.report.host import alive_text
from zeroplan.report.plans import report_text
from zeroplan.report.plans_html import html_report
from zeroplan.run.ask import Ask

MODEL = "Qwen/Qwen2.5-0.5B"
TRAINING = ["load", "init", "forward", "backward", "step"]


def report(engine: str, stage: int, **options: str) -> Report:
    return estimate_report(Ask(model=MODEL, engine=engine, stage=stage, gpus=2, depth="simulated", **options))


@pytest.mark.parametrize(
    ("engine", "stage", "options", "phases"),
    [
        ("deepspeed", 2, {"offload_optimizer": "cpu"}, [*TRAINING, "weights", "save", "resume"]),
        ("deepspeed", 3, {"offload_optimizer": "nvme", "offload_param": "nvme"}, [*TRAINING, "weights", "save", "resume"]),
        ("zeroplan", 3, {"offload_optimizer": "cpu", "offload_param": "cpu"}, [*TRAINING, "save", "resume"]),
        ("zeroplan", 3, {"offload_optimizer": "nvme"}, [*TRAINING, "save", "resume"]),
        ("ddp", 0, {}, [*TRAINING, "weights"]),
    ],
)
def test_what_is_alive_adds_up_in_every_phase(engine: str, stage: int, options: dict[str, str], phases: list[str]) -> None:
    found = report(engine, stage, **options)
    cpu = found.plans[0].cpu
    assert [peak.phase for peak in cpu.peaks] == phases
    for peak in cpu.peaks:
        assert sum(one.bytes for one in peak.alive) == peak.bytes == cpu.phases[peak.phase]
        assert sum(one.bytes for one in peak.alive if one.place == "pinned") == peak.pinned
        assert min(one.bytes for one in peak.alive) > 0
    trained = {peak.phase: peak.bytes for peak in cpu.peaks if peak.phase in (*TRAINING, "weights")}
    assert cpu.per_node == max(trained.values()) == trained[str(cpu.peak_phase)]
    assert cpu.pinned == max(peak.pinned for peak in cpu.peaks if peak.phase in TRAINING)
    text, page = report_text(found), html_report(found)
    for peak in cpu.peaks:
        assert f"\n{peak.phase} " in text
        assert f"<td>{peak.phase}</td>" in page


def test_named_are_the_largest_and_the_rest_is_summed_up() -> None:
    sizes = [("a", "dram", 9), ("b", "pinned", 7), ("c", "dram", 5), ("d", "dram", 3)]
    alive = tuple(HostBuffer(buffer=buffer, place=place, bytes=count * MIB) for buffer, place, count in sizes)
    peak = HostPeak(phase="step", bytes=24 * MIB, pinned=7 * MIB, alive=alive)
    assert alive_text(peak, 2) == "a 9.00 MiB, b 7.00 MiB pinned, 8.00 MiB in 2 more"
    assert alive_text(peak, 4).endswith("d 3.00 MiB")


@pytest.mark.parametrize(("stage", "copies"), [(2, 2), (3, 1)])
def test_pretrained_weights_are_on_every_rank_or_mapped_by_one(stage: int, copies: int) -> None:
    """Below stage 3 each of the two ranks reads the whole model; under zero.Init the first alone."""
    found = report("deepspeed", stage)
    peaks = {peak.phase: peak for peak in found.plans[0].cpu.peaks}
    model = 2 * found.model.params  # bf16
    assert peaks["weights"].bytes - peaks["load"].bytes == copies * model
    assert "weights" not in found.plans[0].gpu.phases
    assert found.plans[0].cpu.per_node >= peaks["load"].bytes
