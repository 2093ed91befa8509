"""LightningCLI's YAML, read as Lightning 2.6 does; scripts with a module of their own are captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup

DATA = {"class_path": "my.Data", "init_args": {"batch_size": 4, "max_length": 512}}


def of_yaml(**trainer: Any) -> Setup:
    return read_setup({"trainer": trainer, "data": DATA, "model": {"class_path": "my.Module"}})


def keys(setup: Setup) -> set[str]:
    return {one.key for one in setup.unmodelled}


STRATEGIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "auto": ("auto", {"engine": "ddp"}),
    "ddp": ("ddp_find_unused_parameters_true", {"engine": "ddp"}),
    "a class of DDP": ({"class_path": "lightning.pytorch.strategies.DDPStrategy"}, {"engine": "ddp"}),
    "FSDP without a policy": ("fsdp", {"fsdp_version": 1, "stage": 3, "one_unit": True, "state_dict": "full"}),
    "FSDP with one": (
        {
            "class_path": "FSDPStrategy",
            "init_args": {
                "sharding_strategy": "SHARD_GRAD_OP",
                "auto_wrap_policy": ["B"],
                "activation_checkpointing_policy": ["B"],
            },
        },
        {"stage": 2, "one_unit": False, "gradient_checkpointing": True},
    ),
    "FSDP on the host": ("fsdp_cpu_offload", {"offload_param": "cpu"}),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_strategy_decides_the_engine(kind: str) -> None:
    strategy, expected = STRATEGIES[kind]
    setup = of_yaml(strategy=strategy, devices=2, precision="bf16-mixed")
    read = {name: setup.ask.value(name) if isinstance(expected[name], bool) else setup.value(name) for name in expected}
    assert read == expected
    assert (setup.value("gpus"), setup.ask.micro_batch, setup.ask.seq_len, setup.ask.dtype, setup.ask.model_dtype) == (
        2,
        4,
        512,
        "bf16",
        "fp32",
    )


@pytest.mark.parametrize(
    ("strategy", "stage", "offloads"),
    [
        ("deepspeed", 2, ()),
        ("deepspeed_stage_1", 1, ()),
        ("deepspeed_stage_2_offload", 2, ("offload_optimizer",)),
        ("deepspeed_stage_3_offload", 3, ("offload_optimizer", "offload_param")),
        (
            {
                "class_path": "DeepSpeedStrategy",
                "init_args": {"stage": 3, "offload_optimizer": True, "reduce_bucket_size": 1000},
            },
            3,
            ("offload_optimizer",),
        ),
    ],
)
def test_a_strategy_of_deepspeed_is_its_ds_config(strategy: Any, stage: int, offloads: tuple[str, ...]) -> None:
    zero = (of_yaml(strategy=strategy, devices=2).ds_config or {})["zero_optimization"]
    assert (zero["stage"], tuple(key for key in zero if key.startswith("offload"))) == (stage, offloads)
    assert zero["reduce_bucket_size"] == (1000 if isinstance(strategy, dict) else 200_000_000)
    own = {"class_path": "DeepSpeedStrategy", "init_args": {"config": {"zero_optimization": {"stage": 1}}}}
    assert of_yaml(strategy=own, devices=2).ds_config == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("said", "read"),
    [("16-mixed", ("fp16", "fp32", True)), ("bf16-true", ("bf16", "bf16", False)), (32, ("fp32", "fp32", True))],
)
def test_precision(said: Any, read: tuple[str, str, bool]) -> None:
    setup = of_yaml(precision=said, devices="0,1,2")
    assert (setup.ask.dtype, setup.ask.model_dtype, setup.ask.autocast, setup.value("gpus")) == (*read, 3)


def test_what_the_file_cannot_say_is_said() -> None:
    setup = of_yaml(devices=-1, callbacks=[{"class_path": "StochasticWeightAveraging"}], accumulate_grad_batches={0: 8})
    expected = {"model", "optimizer", "trainer.accumulate_grad_batches", "trainer.callbacks.StochasticWeightAveraging"}
    assert expected <= keys(setup)
    assert "give --gpus" in setup.line
    assert {"micro_batch", "seq_len"} == set(read_setup({"trainer": {"devices": 1}}).open)


@pytest.mark.parametrize(
    ("trainer", "model", "said"),
    [
        ({"accelerator": "tpu", "devices": 8}, {}, "tpu is no GPU"),
        ({"accelerator": "gpu", "devices": 8}, {"micro_batch_size": 1}, "is a file of NeMo"),
    ],
)
def test_what_no_engine_plans_is_refused(trainer: dict[str, Any], model: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_setup({"trainer": trainer, "model": model})


@pytest.mark.parametrize("started", [False, True])
def test_a_module_of_ones_own_is_captured(started: bool, tmp_path: Path) -> None:
    script, shell = tmp_path / "train.py", tmp_path / "run.sh"
    script.write_text("import lightning as L\nclass Mine(L.LightningModule):\n    pass\nL.Trainer(devices=2).fit(Mine())\n")
    shell.write_text("python train.py\n")
    says = "no text tells what that allocates" if started else r"trains Mine by Lightning \(line 2\)"
    with pytest.raises(BadInput, match=says) as refused:
        read_setup(str(shell if started else script))
    assert "zeroplan capture -- " in (refused.value.remedy or "")
