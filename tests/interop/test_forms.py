"""The Trainer's and Lightning's own code turns each form back into the explicit config."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.framework_forms import hf_trainer_form, lightning_form
from zeroplan.ds_config.reader import inspect_ds_config, read_ds_config
from zeroplan.ds_config.writer import write_ds_config

OPTIMIZER = {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
WORKLOADS = {
    "bf16": Workload.of(micro_batch=4, grad_accum=2),
    "fp16": Workload.of(micro_batch=1, grad_accum=1, dtype=DType.FP16),
    "fp32": Workload.of(micro_batch=2, grad_accum=8, dtype=DType.FP32, precision=Precision.FP32),
}


def explicit(name: str) -> dict[str, Any]:
    zero = ZeroConfig.of(3, "cpu", "cpu", reduce_bucket_size=4_000_000, gradient_clipping=0.5)
    return write_ds_config(zero, WORKLOADS[name], world_size=8, optimizer=OPTIMIZER)


@pytest.mark.torch
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_trainer_makes_the_explicit_config_of_its_form(name: str) -> None:
    pytest.importorskip("deepspeed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    config = explicit(name)
    form, arguments = hf_trainer_form(config)
    assert form["train_batch_size"] == form["gradient_clipping"] == form["optimizer"]["params"]["lr"] == "auto"
    assert form["zero_optimization"] == config["zero_optimization"]
    assert "learning_rate" in arguments
    assert inspect_ds_config(form).errors == []
    defaults = {"save_on_each_node": False, "fp16_full_eval": False, "bf16_full_eval": False, "bf16": False, "fp16": False}
    args = SimpleNamespace(world_size=8, get_warmup_steps=lambda steps: 0, **(defaults | arguments))
    try:
        trainer = HfTrainerDeepSpeedConfig(form)
        trainer.trainer_config_process(args)
        trainer.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=64)), 100)
    finally:
        unset_hf_deepspeed_config()
    assert trainer.config == config


@pytest.mark.parametrize(
    ("kind", "taken"), [("AdamW", {"lr", "weight_decay", "betas", "eps"}), ("SGD", {"lr", "weight_decay"})]
)
def test_what_the_config_leaves_open_the_trainer_fills(kind: str, taken: set[str]) -> None:
    form, arguments = hf_trainer_form({"train_batch_size": 8, "optimizer": {"type": kind}})
    assert form["optimizer"]["params"] == dict.fromkeys(taken, "auto")
    assert not arguments.keys() & {"learning_rate", "weight_decay", "adam_beta1", "adam_epsilon"}


@pytest.mark.torch
@pytest.mark.parametrize("name", WORKLOADS)
def test_lightning_makes_the_explicit_config_of_its_form(name: str) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("lightning")
    logging.getLogger("lightning").setLevel(logging.CRITICAL)
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision
    from lightning.pytorch.strategies import DeepSpeedStrategy

    config = explicit(name)
    form, arguments = lightning_form(config)
    strategy = DeepSpeedStrategy(config=form)
    strategy.precision_plugin = DeepSpeedPrecision(arguments["precision"])
    trainer = SimpleNamespace(accumulate_grad_batches=arguments["accumulate_grad_batches"], gradient_clip_val=None)
    strategy._lightning_module = SimpleNamespace(trainer=trainer)  # type: ignore[assignment]
    strategy._format_config()
    made = read_ds_config(json.loads(json.dumps(strategy.config)), world_size=8)
    wanted = read_ds_config(config, world_size=8)
    assert made.zero == wanted.zero
    assert made.training == wanted.training


def test_a_form_leaves_its_source_alone() -> None:
    config = explicit("bf16")
    before = json.dumps(config)
    hf_trainer_form(config)
    lightning_form(config)
    assert json.dumps(config) == before
