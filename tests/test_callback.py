"""ZeroplanCallback: real runs of Trainer and Lightning on the CPU, and what it says where it cannot plan."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zeroplan

Run = Callable[..., subprocess.CompletedProcess[str]]
TINY: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 101, "n_positions": 32}


@pytest.mark.torch
def test_a_trainers_run_is_planned_before_and_measured_after(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY))
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4
    said: list[str] = []
    callback = zeroplan.ZeroplanCallback(say=said.append, seq_len=16)
    assert isinstance(callback, transformers.TrainerCallback)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, use_cpu=True, report_to=[], save_strategy="no"
    )
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert callback.report is not None
    (plan,) = callback.report.plans
    assert (callback.report.workload["micro_batch"], callback.report.workload["seq_len"]) == (2, 16)
    assert callback.report.model.params == sum(parameter.numel() for parameter in model.parameters())
    assert said[0].startswith("zeroplan: Needs ")
    assert said[-1].startswith("zeroplan: plan beside measurement\n  GPU, peak allocated")
    assert plan.gpu.peak_allocated is not None
    assert " measured" in said[-1].splitlines()[-1]


@pytest.mark.torch
def test_a_lightning_run_is_planned_and_warned_before_it_runs_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    lightning = pytest.importorskip("lightning.pytorch")
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY))

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    said: list[str] = []
    callback = zeroplan.ZeroplanCallback(say=said.append, seq_len=16, micro_batch=2, vram="1G", model="openai-community/gpt2")
    assert isinstance(callback, lightning.Callback)
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
        callbacks=[callback],
    )
    batches = torch.utils.data.DataLoader([torch.arange(16)] * 8, batch_size=2)
    trainer.fit(Module(), batches)
    assert said[0].startswith("zeroplan: This run is about to run out of memory.\nzeroplan: Does not fit: DDP, ")
    assert callback.report is not None
    assert (callback.report.workload["grad_accum"], callback.report.workload["dtype"]) == (2, "fp32")
    assert callback.report.plans[0].engine == "ddp"
    assert said[-1].startswith("zeroplan: plan beside measurement")


class _Trainer:
    """As much of Lightning's trainer as the callback asks."""

    is_global_zero, num_devices, num_nodes, accumulate_grad_batches = True, 4, 1, 1

    def __init__(self, strategy: Any, precision: str) -> None:
        self.strategy, self.precision = strategy, precision


@pytest.mark.torch
def test_lightnings_fsdp_is_planned_as_fsdp_1_and_nothing_else_as_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    import torch

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY))
    module = torch.nn.ModuleDict({"model": model})
    unit = type("FullyShardedDataParallel", (torch.nn.Module,), {})  # its own refuses to be made without ranks
    blocks = torch.nn.ModuleList([unit(), unit()])

    def told(strategy: Any, precision: str = "bf16-mixed", **options: Any) -> tuple[zeroplan.ZeroplanCallback, str]:
        said: list[str] = []
        callback = zeroplan.ZeroplanCallback(say=said.append, seq_len=16, **options)
        callback.on_train_start(_Trainer(strategy, precision), module)
        return callback, "\n".join(said)

    for sharding, stage in (("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0)):
        strategy = strategies.FSDPStrategy(sharding_strategy=sharding)
        strategy.model = blocks
        report = told(strategy)[0].report
        assert report is not None
        assert (report.plans[0].engine, report.plans[0].stage) == ("fsdp", stage)
        assert (report.cluster["gpus"], report.workload["dtype"]) == (4, "bf16")
    strategy.model = torch.nn.ModuleList([unit()])
    assert "no plan: FSDPStrategy: the whole model is one unit" in told(strategy)[1]
    strategy.sharding_strategy = torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD
    assert "no plan: FSDPStrategy: HYBRID_SHARD is not modelled" in told(strategy)[1]
    assert "no plan: strategy: object is not modelled" in told(object())[1]
    plans = {precision: told(strategies.DDPStrategy(), precision)[0].report for precision in ("bf16-mixed", "bf16-true")}
    states = {precision: report.plans[0].gpu.model_states for precision, report in plans.items() if report is not None}
    assert states["bf16-mixed"] == 2 * states["bf16-true"]
    model.gradient_checkpointing_enable()
    report = told(object(), engine="ddp")[0].report
    assert report is not None
    assert report.workload["gradient_checkpointing"] is True


def test_a_run_that_cannot_be_planned_goes_on() -> None:
    said: list[str] = []
    callback = zeroplan.ZeroplanCallback(say=said.append, stage=9)

    class Trainer:
        strategy, is_global_zero, num_devices, num_nodes, accumulate_grad_batches, precision = object(), True, 1, 1, 1, "32"

    class Module:
        def children(self) -> list[Any]:
            return []

    callback.on_train_start(Trainer(), Module())
    callback.on_train_batch_end()
    callback.on_train_end()
    assert said == [said[0]]
    assert said[0].startswith("zeroplan: no plan: ")
    with pytest.raises(TypeError, match="did you mean 'seq_len'"):
        zeroplan.ZeroplanCallback(seq_le=3)


def test_it_imports_neither_library(fresh_python: Run) -> None:
    code = (
        "import sys, zeroplan\nzeroplan.ZeroplanCallback(seq_len=8)\n"
        "print([name for name in ('torch', 'transformers', 'lightning') if name in sys.modules])"
    )
    assert fresh_python(code).stdout == "[]\n"
