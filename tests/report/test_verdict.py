"""The sentences of an estimate: whether it fits, what the peak is made of, what would lower it."""

from __future__ import annotations

import pytest

from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.core.sizes import GIB, parse_size
from zeroplan.planner.estimate import estimate_report
from zeroplan.report.plans import notes, report_text
from zeroplan.report.terminal import PLAIN, Terminal
from zeroplan.report.verdict import largest_item, need, peak_sentence, relief_sentence, sizes_text, verdict
from zeroplan.run.ask import Ask

LLAMA = "meta-llama/Llama-3.2-1B"


@pytest.fixture(scope="module")
def report() -> Report:
    """Every plan on cards that hold some of them."""
    return estimate_report(Ask(model=LLAMA, gpus=8, vram="16G"))


@pytest.fixture(scope="module")
def single() -> Report:
    """One plan whose peak is the loss."""
    return estimate_report(Ask(model=LLAMA, gpus=8, stage=2, vram="24G", micro_batch=2, gradient_checkpointing=True))


def _gib(count: int | None) -> str:
    assert count is not None
    return f"{count / GIB:.1f}"


def test_the_first_plan_that_fits_is_the_verdict(report: Report) -> None:
    plan = next(plan for plan in report.plans if plan.fits)
    assert report.decisive is plan
    assert plan.gpu.interval is not None
    assert plan.gpu.usable is not None
    spare = round(100 * (1 - plan.gpu.interval[1] / plan.gpu.usable))
    assert verdict(report) == (
        f"Fits: ZeRO-1, {_gib(plan.gpu.total)} of {_gib(plan.gpu.usable)} GiB a GPU"
        f" (at most {_gib(plan.gpu.interval[1])}), {spare} % spare."
    )


def test_where_nothing_fits_the_nearest_is_named() -> None:
    """It exceeds its tightest limit by the smallest factor, though others need less of the GPU and lack host memory."""
    found = estimate_report(Ask(model=LLAMA, vram="8G", cpu_ram="6G"))
    assert found.decisive is not None
    assert verdict(found).startswith("Nothing fits: nearest is ZeRO-3, ")
    assert found.decisive.misfits == ("gpu",)
    assert found.decisive.gpu.needed > min(plan.gpu.needed for plan in found.plans)


def test_host_and_disk_may_be_what_lacks() -> None:
    limits = {"vram": "80G", "cpu_ram": "4G", "nvme": "1G"}
    found = estimate_report(Ask(model=LLAMA, stage=3, offload_optimizer="nvme", **limits))  # type: ignore[arg-type]
    (plan,) = found.plans
    assert plan.misfits == ("cpu", "nvme")
    assert f", {_gib(plan.cpu.per_node)} of 2.0 GiB of host memory a node and " in verdict(found)
    assert verdict(found).endswith(f" and {_gib(plan.nvme.per_node)} of 1.0 GiB of disk a node.")


def test_a_need_stands_in_the_unit_of_its_limit() -> None:
    """``1.4 of 2.0 TiB``, and no GiB of TiB."""
    big = Ask(model="meta-llama/Llama-3.1-70B", gpu="8xH100", stage=3, offload_optimizer="cpu", depth="formula")
    for size, unit in (("2T", 1024), ("1000G", 1)):
        (plan,) = (found := estimate_report(big.replace(cpu_ram=parse_size(size)))).plans
        usable = found.cluster["usable_cpu_ram"]
        assert usable
        shown = f"{plan.cpu.per_node / GIB / unit:.1f} of {usable / GIB / unit:.1f} {'TiB' if unit > 1 else 'GiB'}"
        assert shown in verdict(found)


def test_one_plan_that_does_not_fit_says_how_much_is_too_much() -> None:
    found = estimate_report(Ask(model=LLAMA, stage=0, vram="8G"))
    (plan,) = found.plans
    assert plan.gpu.interval is not None
    assert plan.gpu.usable is not None
    assert verdict(found).startswith("Does not fit: ZeRO-0, ")
    assert verdict(found).endswith(f", {_gib(plan.gpu.interval[1] - plan.gpu.usable)} GiB too much.")


def test_without_a_limit_the_need_is_the_verdict() -> None:
    one, many = (estimate_report(Ask(model="gpt2", stage=stage)) for stage in (2, None))
    assert verdict(one) == f"Needs {need(one.plans[0])} a GPU: ZeRO-2. No limit is given: add --gpu H100 or --vram 80G."
    assert many.decisive is None
    small, large = (choose(many.plans, key=lambda plan: plan.gpu.needed) for choose in (min, max))
    assert verdict(many).startswith(f"Needs {need(small)} a GPU at least: ZeRO-{small.stage}, optimizer on cpu; ")
    assert f"at most {need(large)}: ZeRO-{large.stage}." in verdict(many)


def test_nothing_is_promised_without_activations() -> None:
    found = estimate_report(Ask(model="gpt2", stage=2, vram="24G", depth="formula"))
    assert verdict(found).startswith("Unknown: ZeRO-2, ")
    assert found.reliefs == ()
    assert peak_sentence(found.plans[0]) == largest_item(found.plans[0])


def test_the_peak_adds_up_and_names_the_loss(single: Report) -> None:
    gpu = single.plans[0].gpu
    assert sum(share.bytes for share in gpu.at_peak) == gpu.peak_allocated
    assert [share.bytes for share in gpu.at_peak] == sorted((share.bytes for share in gpu.at_peak), reverse=True)
    loss = next(share.bytes for share in gpu.at_peak if share.what == "logits and loss")
    # 2 × 2048 tokens, 128,256 words: fp32 logits, their gradient and the 16-bit logits' own, of which two to three are alive.
    assert 2 * 4 <= loss / (2 * 2048 * 128_256) <= 3 * 4 + 0.1
    assert peak_sentence(single.plans[0]).startswith(f"Peak, in the {gpu.peak_phase}: logits and loss {_gib(loss)} GiB, ")


def test_adapters_do_not_hide_the_loss() -> None:
    """With LoRA the loss is computed by a module within the adapters' own."""
    shares = []
    for rank in (None, 8):
        found = estimate_report(Ask(model=LLAMA, gpus=8, stage=2, lora_rank=rank))
        shares.append(next(one.bytes for one in found.plans[0].gpu.at_peak if one.what == "logits and loss"))
    assert shares[0] == pytest.approx(shares[1], rel=0.01)
    assert shares[0] > GIB


def test_whole_parameters_are_gathered_ones_where_they_are_sharded() -> None:
    whats = [
        {share.what for share in estimate_report(Ask(model="gpt2", gpus=2, stage=stage)).plans[0].gpu.at_peak}
        for stage in (2, 3)
    ]
    assert "gathered parameters" not in whats[0]
    assert {"gathered parameters", "parameters"} <= whats[1]


@pytest.mark.parametrize("engine", ["deepspeed", "zeroplan"])
def test_a_relief_is_what_its_flags_give(engine: str) -> None:
    """Each knob's total is that of the plan with the knob turned, and it is worth naming."""
    base = {"model": LLAMA, "gpus": 2, "stage": 2, "micro_batch": 2, "vram": "80G", "engine": engine}
    found = estimate_report(Ask(**base))  # type: ignore[arg-type]
    total = found.plans[0].gpu.total
    assert total is not None
    turned = {
        "--gradient-checkpointing": {"gradient_checkpointing": True},
        "--micro-batch 1": {"micro_batch": 1},
        "--stage 3": {"stage": 3},
        "--chunked-head": {"chunked_head": True},
        "--stage 2 --offload-optimizer cpu": {"offload_optimizer": "cpu"},
        "--alloc-conf expandable_segments:True": {"alloc_conf": "expandable_segments:True"},
    }
    assert {"--gradient-checkpointing", "--micro-batch 1"} <= {relief.flags for relief in found.reliefs} <= turned.keys()
    for relief in found.reliefs:
        after = estimate_report(Ask(**base | turned[relief.flags])).plans[0]  # type: ignore[arg-type]
        assert (relief.total, relief.saves, relief.fits) == (after.gpu.total, total - relief.total, after.fits)
        assert relief.saves >= 0.02 * total


def test_reliefs_of_a_table_are_its_own_rows(report: Report) -> None:
    totals = {(plan.stage, plan.offload_optimizer, plan.offload_param): plan.gpu.total for plan in report.plans}
    relief = next(relief for relief in report.reliefs if relief.what == "optimizer on cpu")
    assert relief.total == totals[1, "cpu", "none"]


def test_a_ds_configs_own_knobs_stay() -> None:
    """Stage 3 in place of 2 keeps the file's buckets."""
    files = [
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 400_000_000}}
        for stage in (0, 3)
    ]
    before, after = (estimate_report(Ask(model=LLAMA, gpus=8, vram="80G", ds_config=file)) for file in files)
    relief = next(relief for relief in before.reliefs if relief.what == "ZeRO-3")
    assert relief.total == after.plans[0].gpu.total
    assert relief.total != estimate_report(Ask(model=LLAMA, gpus=8, stage=3)).plans[0].gpu.total


def test_sizes_share_the_unit_of_the_largest() -> None:
    assert sizes_text([("a", 2 * GIB), ("b", GIB // 2)]) == "a 2.0 GiB, b 0.5"
    assert sizes_text([("a", GIB // 2), ("b", GIB // 4)], sign="−") == "a −512 MiB, b −256"
    assert relief_sentence(()) == ""


def test_the_largest_item_is_a_formula_or_says_where_it_is_from() -> None:
    plan = estimate_report(Ask(model="gpt2", depth="formula")).plans[0]
    assert largest_item(plan) == "Largest: grad.master, 949.40 MiB = master_bytes × trainable × 2 bytes."
    assert largest_item(_with_line(plan, "measured: kernels")) == "Largest: device.context, 1.00 TiB, measured: kernels."


def _with_line(plan: MemoryPlan, formula: str) -> MemoryPlan:
    line = plan.lines[0].model_copy(update={"buffer": "device.context", "place": "hbm", "bytes": 1 << 40, "formula": formula})
    return plan.model_copy(update={"lines": (*plan.lines, line)})


def test_notes_are_said_once() -> None:
    assert notes(["b", "a", "b"], PLAIN) == ["", "note: b", "note: a"]
    assert notes([], PLAIN) == []


def test_quiet_is_the_verdict_alone(report: Report) -> None:
    assert report_text(report, quiet=True).replace("\n  ", " ") == verdict(report)


def test_colour_is_only_where_it_shows(report: Report) -> None:
    assert "\x1b[" not in report_text(report)
    coloured = report_text(report, terminal=Terminal(colour=True))
    assert coloured.startswith("\x1b[32m\x1b[1mFits:\x1b[0m ")
    assert coloured.count("\x1b[31m\x1b[1mno (gpu)\x1b[0m") == sum(plan.fits is False for plan in report.plans)


def test_no_command_claims_to_start_a_layout() -> None:
    """No form of recommend starts ranks that share a model; whether its command keeps to the degrees is said."""
    command = ["zeroplan", "recommend", LLAMA, "--engine", "fsdp2", "--gpus", "4", "--vram", "80G"]
    for tp, says in (
        (1, "\nNext: zeroplan recommend "),
        (2, "\nNext: your own program starts this layout, no file that recommend"),
    ):
        found = estimate_report(Ask(model=LLAMA, engine="fsdp2", gpus=4, vram="80G", stage=3, tp=tp))
        assert says in report_text(found, terminal=PLAIN, next_command=command)
        assert ("Without it:" in report_text(found, terminal=PLAIN, next_command=command)) == (tp > 1)
        assert "Without it:" not in report_text(found, terminal=PLAIN, next_command=[*command, "--tp", "2"])
