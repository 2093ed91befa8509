"""Saving between steps: it counts in the host's peak and on the GPU, from flags and from files, and is named where unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.sizes import GIB
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

LLAMA = "meta-llama/Llama-3.2-1B"
PARAMS, EMBEDDING, BLOCK = 1_235_814_400, 128_256 * 2048, 60_821_504


def plan(**asked: Any) -> MemoryPlan:
    return estimate_report(Ask(**{"model": LLAMA, "gpus": 4, "seq_len": 512, "from_scratch": True, **asked})).plans[0]


def on_host(found: MemoryPlan) -> int:
    """Bytes of what is saved, on all ranks of the node."""
    (peak,) = (peak for peak in found.cpu.peaks if peak.phase == "save")
    return sum(buffer.bytes for buffer in peak.alive if buffer.buffer == "host.checkpoint")


def beside(found: MemoryPlan) -> int:
    """Bytes on the GPU beside what is alive between steps, while it is saved."""
    return found.gpu.phases["save"] - found.gpu.live_after_step


@pytest.mark.parametrize(
    ("engine", "stage", "form", "saver", "host", "gpu"),
    [
        # torch.save: one storage after another; safetensors: the file; a whole file in memory.
        ("ddp", 0, "full", "loop", 4 * EMBEDDING, 0),
        ("ddp", 0, "full", "trainer", 4 * PARAMS, 0),
        ("ddp", 0, "full", "lightning", 12 * PARAMS + 4 * EMBEDDING, 0),
        # Gathered one by one on every GPU, kept on one host: states alone, or beside the weights, the tied one twice.
        ("fsdp2", 3, "full", "trainer", 8 * PARAMS, 4 * EMBEDDING),
        ("fsdp2", 3, "full", "loop", 12 * PARAMS + 4 * EMBEDDING, 4 * EMBEDDING),
        ("fsdp2", 3, "sharded", "accelerate", 8 * PARAMS, 0),
        # The whole model once more on each GPU, the tied weight twice, beside the root, which goes last, without gradients.
        ("fsdp", 3, "full-gpu", "loop", 4 * (PARAMS + EMBEDDING), 4 * (PARAMS + 2 * EMBEDDING + 2048) - PARAMS),
        # A unit of the root's states, and two parts of it, where the step's gradients were.
        ("fsdp", 3, "full", "accelerate", 8 * PARAMS, 4 * (EMBEDDING + 2048) * 3 // 2 - PARAMS),
        ("deepspeed", 2, "full", "trainer", 4 * 2 * (PARAMS + EMBEDDING), 0),
    ],
)
def test_bytes_beside_what_a_step_leaves(engine: str, stage: int, form: str, saver: str, host: int, gpu: int) -> None:
    found = plan(engine=engine, stage=stage, save=form, save_by=saver)
    assert on_host(found) == pytest.approx(host, rel=1e-4)
    assert beside(found) == pytest.approx(gpu, rel=1e-4, abs=4096)
    without = plan(engine=engine, stage=stage)
    assert found.gpu.live_after_step == without.gpu.live_after_step
    assert {name: found.gpu.phases[name] for name in ("init", "step")} == {
        name: without.gpu.phases[name] for name in ("init", "step")
    }


def test_the_host_of_a_full_state_dict_decides_whether_it_fits() -> None:
    asked: dict[str, Any] = {"engine": "fsdp2", "stage": 3, "vram": "80G"}
    alone = plan(**asked)
    saved = plan(**asked, save="full", save_by="trainer")
    assert saved.cpu.per_node - on_host(saved) <= alone.cpu.per_node < saved.cpu.per_node
    between = f"{(alone.cpu.per_node + saved.cpu.per_node) / 2 / GIB * 64 / 63 + 2:.1f}G"
    assert plan(**asked, cpu_ram=between).fits is True
    judged = plan(**asked, cpu_ram=between, save="full", save_by="trainer")
    assert (judged.fits, judged.misfits) == (False, ("cpu",))
    # Without the optimizer's states the weights remain.
    weights = plan(**asked, save="full", save_by="trainer", save_only_model=True)
    assert on_host(weights) == pytest.approx(4 * (PARAMS + EMBEDDING), rel=1e-4)


def test_a_large_gather_can_decide_the_peak_of_the_gpu() -> None:
    """NO_SHARD clones the whole model on the GPU, an fp32 base here, which is more than few tokens beside adapters need."""
    found = plan(engine="fsdp", stage=0, save="full", seq_len=8, lora_rank=8, base_dtype="fp32")
    assert found.gpu.peak_phase == "save"
    assert beside(found) == pytest.approx(4 * (PARAMS + EMBEDDING), rel=0.02)
    assert found.gpu.peak_allocated == found.gpu.phases["save"]


@pytest.mark.parametrize(
    "asked",
    [
        {"engine": "zeroplan", "stage": 2, "save": "full"},
        {"engine": "fsdp2", "save": "sharded", "save_by": "lightning"},
        {"engine": "fsdp", "stage": 0, "save": "sharded"},
        {"engine": "ddp", "save": "full", "save_by": "trainer", "model": "Qwen/Qwen3-30B-A3B", "vram": "2000G"},
    ],
)
def test_what_no_figure_holds_leaves_the_answer_open(asked: dict[str, Any]) -> None:
    found = plan(vram="80G", **asked) if "vram" not in asked else plan(**asked)
    assert "saving" in [one.key for one in found.unmodelled]
    assert found.fits is None


def test_bad_words_are_refused() -> None:
    for asked, match in (
        ({"save": "whole"}, "sharded, full"),
        ({"save_by": "trainer"}, "--save"),
        ({"save_only_model": True}, "--save"),
    ):
        with pytest.raises(BadInput, match=match):
            plan(engine="ddp", **asked)


@pytest.mark.parametrize(
    ("arguments", "saving"),
    [
        ({}, None),
        ({"save_strategy": "no", "save_steps": 10}, None),
        ({"save_steps": 10}, {"state_dict": "full", "saver": "trainer", "optimizer": True}),
        ({"save_strategy": "epoch", "save_only_model": True}, {"state_dict": "full", "saver": "trainer", "optimizer": False}),
        (
            {"save_strategy": "epoch", "fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
            {"state_dict": "sharded", "saver": "trainer", "optimizer": True},
        ),
    ],
)
def test_the_trainers_keys_say_what_is_saved(tmp_path: Path, arguments: dict[str, Any], saving: dict[str, Any] | None) -> None:
    plain = {"output_dir": "out", "per_device_train_batch_size": 1, "bf16": True, "learning_rate": 1e-5}
    path = tmp_path / "arguments.json"
    path.write_text(json.dumps(plain | arguments))
    report = estimate_report(Ask(model=LLAMA, gpus=4, seq_len=512, files=(str(path),)))
    assert report.workload.get("saving") == saving
    assert ("save" in report.plans[0].gpu.phases) is (saving is not None)
    assert report.setup is not None
    assert any("no saves (by default it saves" in clause for clause in report.setup["assumed"]) is (not arguments)


def test_axolotl_saves_by_the_epoch_and_accelerates_file_says_in_which_form(tmp_path: Path) -> None:
    recipe, launcher = tmp_path / "recipe.yaml", tmp_path / "accelerate.yaml"
    recipe.write_text(f"base_model: {LLAMA}\nsequence_len: 512\nmicro_batch_size: 1\nsaves_per_epoch: 2\n")
    launcher.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 1\nnum_processes: 4\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
    )
    report = estimate_report(Ask(files=(str(recipe), str(launcher))))
    assert report.workload["saving"] == {"state_dict": "full", "saver": "trainer", "optimizer": True}
    with pytest.raises(BadInput, match="full"):
        estimate_report(Ask(files=(str(recipe), str(launcher)), save="sharded"))


def test_fsdp_1_makes_the_model_on_every_ranks_host_pretrained_or_not() -> None:
    made, other = plan(engine="fsdp", stage=3), plan(engine="fsdp2", stage=3)
    assert made.cpu.peak_phase == "weights"
    assert made.cpu.per_node == made.cpu.phases["weights"] >= 4 * 4 * PARAMS
    assert other.cpu.per_node < 4 * 4 * PARAMS
