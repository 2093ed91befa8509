"""What is written reads back the same, keeps what it does not know, and starts under DeepSpeed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agreement_cases import CASES
from hypothesis import HealthCheck, given, settings
from strategies import SHAPED, WORKLOADS, ZERO_CONFIGS

from tests.workloads import with_flat
from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import write_atomic
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import OffloadOptimizer, ZenFlow, ZeroConfig
from zeroplan.ds_config.reader import inspect_ds_config, read_ds_config
from zeroplan.ds_config.writer import dump_ds_config, write_ds_config

RELAXED = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@RELAXED
@given(ZERO_CONFIGS, WORKLOADS)
def test_reads_back_the_same(zero: ZeroConfig, workload: Workload) -> None:
    if zero.step.bf16_optimizer_states:
        zero = zero.but(fp32_optimizer_states=False)  # what DeepSpeed makes of it
    text = dump_ds_config(write_ds_config(zero, workload, world_size=2))
    again = inspect_ds_config(json.loads(text), world_size=2)
    assert again.zero == zero
    assert again.training.train_batch == workload.batch.micro_batch * workload.batch.grad_accum * 2
    expected = workload
    if (
        zero.step.bf16_master_weights_and_grads
        and zero.step.bf16_optimizer_states
        and workload.numerics.precision is Precision.MIXED
    ):
        expected = with_flat(workload, precision=Precision.PURE)
    assert again.workload(Workload()) == expected


@RELAXED
@given(SHAPED, ZERO_CONFIGS, WORKLOADS)
def test_any_source_carries_any_config(source: dict[str, Any], zero: ZeroConfig, workload: Workload) -> None:
    zero = zero.but(fp32_optimizer_states=not zero.step.bf16_optimizer_states)
    try:
        inspect_ds_config(source)
    except BadInput:
        return
    source.pop("optimizer", None)
    before = json.dumps(source)
    again = inspect_ds_config(write_ds_config(zero, workload, source=source))
    assert json.dumps(source) == before
    assert again.zero == zero


def test_writing_twice_changes_nothing() -> None:
    zero = ZeroConfig.of(3, "cpu", "cpu", reduce_bucket_size=7_000_000, zenflow=ZenFlow())
    once = write_ds_config(zero, Workload(), optimizer={"type": "AdamW", "params": {"lr": 2e-5}})
    assert write_ds_config(read_ds_config(once).zero, source=once) == once


def test_only_what_differs_is_written() -> None:
    written = write_ds_config(ZeroConfig.of(2, "cpu"), Workload.of(micro_batch=4, grad_accum=2), world_size=8)
    assert written == {
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000_000, "offload_optimizer": {"device": "cpu"}},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 64,
        "bf16": {"enabled": True},
    }


def test_a_source_keeps_its_other_keys_and_loses_its_autos() -> None:
    source = {
        "wandb": {"enabled": True},
        "made_up": [1, {"a": None}],
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "cpu_offload": True, "ignore_unused_parameters": False, "overlap_comm": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "flops_profiler": {},
    }
    config = inspect_ds_config(source)
    written = write_ds_config(config.zero.but(reduce_bucket_size=1000), Workload.of(micro_batch=3), source=source)
    assert written["wandb"] == {"enabled": True}
    assert written["made_up"] == [1, {"a": None}]
    assert written["flops_profiler"] == {}
    assert written["optimizer"] == {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}
    assert written["zero_optimization"] == {
        "stage": 2,
        "ignore_unused_parameters": False,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu"},
    }
    assert "train_batch_size" not in written
    assert source["zero_optimization"]["cpu_offload"] is True


@pytest.mark.parametrize("name", [name for name, (_, rule) in CASES.items() if rule is None])
def test_rewriting_a_config_that_runs_loses_nothing(name: str) -> None:
    config, _ = CASES[name]
    first = read_ds_config(config, world_size=1)
    again = read_ds_config(write_ds_config(first.zero, source=config), world_size=1)
    assert again.zero == first.zero
    assert again.training == first.training


EMITTED = {
    f"stage {stage} {offload} {dtype} {precision}": write_ds_config(
        ZeroConfig.of(stage, OffloadOptimizer() if offload == "none" else "cpu", "cpu" if offload == "both" else "none"),
        Workload.of(dtype=dtype, precision=precision),
        world_size=1,
        optimizer={"type": "AdamW", "params": {"lr": 2e-5}},
    )
    for stage in (0, 1, 2, 3)
    for offload in ("none", "cpu", "both")
    for dtype, precision in ((DType.BF16, Precision.MIXED), (DType.FP32, Precision.FP32), (DType.BF16, Precision.AUTOCAST))
    if (offload == "none" or stage) and (offload != "both" or stage == 3)
}


@pytest.mark.torch
@pytest.mark.slow
def test_deepspeed_builds_an_engine_from_every_written_config(
    oracle: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
) -> None:
    answers = dict(zip(EMITTED, oracle(list(EMITTED.values())), strict=True))
    assert {name: answer["error"] for name, answer in answers.items() if not answer["builds"]} == {}


def test_atomic_write_replaces_whole_files(tmp_path: Path) -> None:
    target = tmp_path / "ds_config.json"
    write_atomic(target, "one")
    target.chmod(0o640)
    write_atomic(target, "two é")
    assert target.read_text(encoding="utf-8") == "two é"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["ds_config.json"]


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.parametrize("place", ["missing/ds_config.json", "", "nul\0", "surrogate"])
def test_what_cannot_be_written_is_bad_input(tmp_path: Path, place: str) -> None:
    text = "\ud800" if place == "surrogate" else "{}"
    with pytest.raises(BadInput, match=r"cannot be written|is a folder"):
        write_atomic(tmp_path / place if place else tmp_path, text)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "kept"
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
