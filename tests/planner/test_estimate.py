"""The API, the paper's numbers through it, and what the flags select."""

from __future__ import annotations

from typing import Any

import pytest

import zeroplan
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import Report
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

LLAMA = "meta-llama/Llama-3.2-1B"
GB = 10**9


def test_parameters_that_stay_in_host_memory_are_remarked() -> None:
    """DeepSpeed's default of `max_in_cpu` holds a small model altogether; none of it is then in a file."""
    disk = {"device": "nvme", "nvme_path": "/nvme"}
    for param, count in ((disk, 1), ({**disk, "max_in_cpu": 0}, 0)):
        section = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": param}
        config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": section}
        report = estimate_report(Ask(model="gpt2", engine="zeroplan", ds_config=config, depth="formula"))
        assert sum("as max_in_cpu is 1,000,000,000" in said for said in report.warnings) == count
        assert (report.plans[0].nvme.per_node == 0) is (count == 1)


@pytest.mark.parametrize(
    ("engine", "param", "optimizer"),
    [("zeroplan", "cpu", "cpu"), ("zeroplan", "nvme", "cpu"), ("deepspeed", "cpu", "cpu"), ("deepspeed", "nvme", "none")],
)
def test_where_the_optimizer_goes_with_its_parameters(engine: str, param: str, optimizer: str) -> None:
    asked = Ask(model="gpt2", engine=engine, stage=3, offload_param=param, depth="formula")
    (plan,) = estimate_report(asked).plans
    assert (plan.offload_param, plan.offload_optimizer) == (param, optimizer)


@pytest.mark.parametrize(
    ("given", "zero"),
    [
        ({}, {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        ({"optimizer": {"type": "Lion", "params": {}}}, {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        ({}, {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 2}}),
        ({"optimizer": {"type": "Lamb", "params": {}}}, {"stage": 2}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"stage": 0}),
        ({}, {"stage": 2, "allgather_bucket_size": 5}),
    ],
    ids=str,
)
def test_the_runtime_does_what_deepspeed_refuses(given: dict[str, Any], zero: dict[str, Any]) -> None:
    """Rules of DeepSpeed's own do not stand in the way of the runtime's plan; `ratio` divides the masters between places."""
    optimizer = {"type": "AdamW", "params": {}}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, **given}
    config["zero_optimization"] = zero
    asked: dict[str, Any] = {"ds_config": config, "depth": "formula", "gpus": 2}
    with pytest.raises(BadInput):
        estimate_report(Ask(model="gpt2", **asked))
    (plan,) = estimate_report(Ask(model="gpt2", engine="zeroplan", **asked)).plans
    places = {str(line.place): line.bytes for line in plan.lines if line.buffer == "param.master"}
    assert sum(places.values()) == pytest.approx(4 * 124_439_808 / (2 if zero["stage"] else 1), rel=2e-3)
    away = places.get("dram", 0) / sum(places.values())
    assert away == pytest.approx(zero.get("offload_optimizer", {}).get("ratio", 0), abs=0.1)


def test_the_papers_figure_through_the_api() -> None:
    plans = zeroplan.estimate(params=7_500_000_000, gpus=8, nodes=8, depth="formula")
    states = {plan.stage: plan.gpu.model_states / GB for plan in plans if plan.offload_optimizer == "none"}
    assert states == pytest.approx({0: 120, 1: 31.4, 2: 16.6, 3: 1.9}, abs=0.05)


def test_mingpt_45b_with_offload_needs_the_host_memory_its_authors_saw() -> None:
    """About nine tenths of 1 TB between steps, and no more than 1 TiB while fp16 is looked through; and the 12.8B on eight GPUs
    cannot have been all of its states, offload or not.
    """
    plan = zeroplan.estimate_zero3_mem("minGPT-45B", gpus=8, dtype="fp16", offload_optimizer="cpu")
    assert 0.85e12 <= plan.cpu.phases["backward"] <= 0.95e12 < plan.cpu.per_node < 2**40
    plan = zeroplan.estimate_zero3_mem("minGPT-12.8B", gpus=8, dtype="fp16")
    assert plan.gpu.model_states == 16 * 12_888_735_744 // 8 > 3 * 7797 * 2**20


def test_every_stage_with_every_offload_it_allows() -> None:
    plans = zeroplan.estimate(LLAMA, gpus=8)
    assert [(p.stage, p.offload_optimizer, p.offload_param) for p in plans] == [
        (0, "none", "none"),
        (1, "none", "none"),
        (1, "cpu", "none"),
        (2, "none", "none"),
        (2, "cpu", "none"),
        (3, "none", "none"),
        (3, "cpu", "none"),
        (3, "cpu", "cpu"),
        (3, "nvme", "none"),
        (3, "nvme", "nvme"),
    ]


def test_the_short_forms_give_the_plan_of_their_stage() -> None:
    for stage, call in ((1, zeroplan.estimate_zero1_mem), (2, zeroplan.estimate_zero2_mem), (3, zeroplan.estimate_zero3_mem)):
        plan = call(LLAMA, gpus=4, depth="formula")
        assert plan.stage == stage
        same = zeroplan.estimate(LLAMA, gpus=4, stage=stage, offload_optimizer="none", offload_param="none", depth="formula")
        assert [plan] == same


def test_offload_moves_states_from_the_gpu_to_the_host_and_the_disk() -> None:
    none, cpu, both = (
        zeroplan.estimate_zero3_mem(LLAMA, gpus=2, offload_optimizer=o, offload_param=p, depth="formula")
        for o, p in (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))
    )
    assert none.gpu.model_states > cpu.gpu.model_states > both.gpu.model_states
    assert none.cpu.pinned == 0 < cpu.cpu.pinned < both.cpu.pinned
    disk = zeroplan.estimate_zero3_mem(LLAMA, gpus=2, offload_optimizer="nvme", offload_param="nvme", depth="formula")
    params = disk.nvme.per_node
    # Master 4, two moments 8, gradients 4 and parameters 2 bytes each.
    assert params == pytest.approx(18 * 1_235_814_400, rel=1e-3)


def test_a_live_module_on_the_meta_device_is_counted() -> None:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 8))
    (plan,) = zeroplan.estimate(module, stage=0, depth="formula")
    assert plan.gpu.model_states == 16 * sum(p.numel() for p in module.parameters())


def test_limits_decide_what_fits() -> None:
    report = estimate_report(Ask(model=LLAMA, gpus=1, vram="24G", cpu_ram="64G", depth="formula"))
    by_option = {(p.stage, p.offload_optimizer, p.offload_param): p for p in report.plans}
    assert by_option[0, "none", "none"].fits is False
    assert by_option[0, "none", "none"].misfits == ("gpu",)
    assert by_option[2, "cpu", "none"].undecided
    assert all(p.fits is None for p in zeroplan.estimate(LLAMA, depth="formula"))


def test_more_host_memory_than_there_is_does_not_fit() -> None:
    report = estimate_report(Ask(model=LLAMA, gpus=1, vram="80G", cpu_ram="8G", stage=2, offload_optimizer="cpu"))
    assert report.plans[0].misfits == ("cpu",)


def test_the_report_is_the_contract() -> None:
    report = estimate_report(Ask(model=LLAMA, gpus=8, stage=2, depth="formula"))
    data = Report.model_validate_json(report.to_json())
    assert data == report
    import json

    plain = json.loads(report.to_json())
    assert plain["schema"] == 1
    assert plain["model"] == {"name": LLAMA, "params": 1_235_814_400, "trainable": 1_235_814_400, "source": "catalog"}
    plan = plain["plans"][0]
    assert set(plan) >= {
        "engine",
        "engine_version",
        "stage",
        "offload_optimizer",
        "offload_param",
        "depth",
        "gpu",
        "cpu",
        "nvme",
    }
    assert set(plan["gpu"]) >= {"model_states", "activations", "live_after_step", "peak_allocated", "peak_reserved"}
    assert set(plan["gpu"]) >= {"total", "interval", "peak_phase", "phases"}
    assert plan["gpu"]["total"] is None
    assert {"buffer", "place", "bytes", "phases", "formula"} == set(plan["lines"][0])


def test_lora_trains_the_adapters_only() -> None:
    report = estimate_report(Ask(model=LLAMA, lora_rank=16, stage=2, depth="formula"))
    assert report.model.trainable == 11_272_192  # 16 × (in + out) over the seven linear kinds of 16 blocks
    assert report.plans[0].gpu.model_states < 2.2 * 1_235_814_400 * 1.1


def test_a_ds_config_gives_exactly_one_plan() -> None:
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    report = estimate_report(Ask(model=LLAMA, ds_config=config, depth="formula"))
    assert len(report.plans) == 1
    assert report.workload["micro_batch"] == 2


def test_a_flag_that_contradicts_the_ds_config_is_bad_input() -> None:
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    with pytest.raises(BadInput):
        estimate_report(Ask(model=LLAMA, ds_config=config, stage=3))
    with pytest.raises(BadInput):
        estimate_report(Ask(model=LLAMA, ds_config=config, micro_batch=4))


def test_buckets_of_a_ds_config_change_the_plan() -> None:
    """A knob of the file has its effect: two overlapping buckets of 5e8 bf16 elements are 2e9 bytes."""

    def buckets(**knobs: object) -> int:
        config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, **knobs}}
        (plan,) = estimate_report(Ask(model=LLAMA, ds_config=config, depth="formula")).plans
        return sum(line.bytes for line in plan.lines if line.buffer == "comm.bucket")

    assert buckets() == 10**9
    assert buckets(overlap_comm=True) == 2 * 10**9
    assert buckets(reduce_bucket_size=2e8) == 4 * 10**8
    assert buckets(contiguous_gradients=False) == 0


def test_a_model_that_cannot_be_traced_is_tried_once_for_each_way_of_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten configurations of DeepSpeed run the model in two ways: as stage 3 does, and plainly."""
    from zeroplan.planner import tapes

    tried = []

    def fail(engine: object, case: object) -> None:
        tried.append(case)
        raise tapes.NoTapeError("no way")

    monkeypatch.setattr(tapes, "expanded_tape_of", fail)
    report = estimate_report(Ask(model=LLAMA))
    assert len(tried) == 2
    assert {plan.depth for plan in report.plans} == {"formula"}
    assert len(report.warnings) == 1


def test_a_removed_optimizer_is_planned_for_the_versions_that_had_it() -> None:
    asked = Ask(params=10**9, optimizer="onebitadam", depth="formula", gpus=4)
    with pytest.raises(BadInput, match=r"DeepSpeed 0.19.8 has no onebitadam: 0.19.7 removed it"):
        estimate_report(asked)
    with pytest.raises(BadInput, match="ddp reads none"):
        estimate_report(asked.replace(engine="ddp"))
    older = estimate_report(asked.replace(deepspeed_version="0.19.6"))
    assert [plan.stage for plan in older.plans] == [0]  # ZeRO never took it
    assert "optimizer.type" in {one.key for one in older.plans[0].unmodelled if one.effect == "more"}


def test_the_runtime_steps_a_removed_optimizer_where_ranks_keep_their_gradients() -> None:
    report = estimate_report(Ask(params=10**9, optimizer="onebitadam", engine="zeroplan", depth="formula", gpus=4))
    assert {(plan.stage, plan.offload_optimizer) for plan in report.plans} == {(0, "none"), (1, "none")}


def test_a_card_without_bf16_is_said() -> None:
    asked = Ask(model="openai-community/gpt2", gpu="T4", stage=2, depth="formula")
    assert any("T4 has no bf16 arithmetic" in said for said in estimate_report(asked).warnings)
    for other in (asked.replace(dtype="fp16"), asked.replace(gpu="L4")):
        assert not any("bf16" in said for said in estimate_report(other).warnings)


def test_more_gpus_than_a_node_holds_are_nodes_and_said_so() -> None:
    asked = Ask(params=10**9, gpu="64xH100", stage=3, depth="formula")
    report = estimate_report(asked)
    assert (report.cluster["gpus"], report.cluster["nodes"]) == (8, 8)
    assert any("taken to be 8 nodes of 8" in said for said in report.warnings)
    same = estimate_report(asked.replace(gpu="H100", gpus=8, nodes=8))
    assert not any("taken to be" in said for said in same.warnings)
    assert [plan.gpu for plan in report.plans] == [plan.gpu for plan in same.plans]
