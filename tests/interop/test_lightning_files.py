"""LightningCLI's YAML and scripts that make Lightning's Trainer: read as Lightning 2.6 does, or said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

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


MODULE = """
import torch, lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", dtype=torch.float32)
    def training_step(self, batch, at):
        return {loss}
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
    def train_dataloader(self):
        return DataLoader(data, batch_size=4)
    def val_dataloader(self):
        return DataLoader(data, batch_size=16)
def cut(text):
    return tokenizer(text, truncation=True, max_length=256)
{trainer}
trainer.fit(Module())
"""


def of_script(folder: Path, trainer: str, loss: str = "self.model(**batch).loss") -> Setup:
    (folder / "train.py").write_text(MODULE.replace("{trainer}", trainer).replace("{loss}", loss))
    return read_setup(str(folder / "train.py"))


def test_a_script_is_read_with_its_module(tmp_path: Path) -> None:
    trainer = (
        "n = 2\ntrainer = L.Trainer(devices=n, strategy='deepspeed_stage_2', precision='bf16-mixed', accumulate_grad_batches=8)"
    )
    setup = of_script(tmp_path, trainer)
    assert (setup.program, setup.ask.model, setup.ask.micro_batch, setup.ask.value("eval_batch")) == (
        "lightning",
        "openai-community/gpt2",
        4,
        16,
    )
    assert (setup.ask.seq_len, setup.ask.grad_accum, setup.value("gpus"), setup.ask.dtype) == (256, 8, 2, "bf16")
    assert (setup.ask.optimizer, setup.ask.optimizer_kind, setup.ask.model_dtype, keys(setup)) == (
        "adamw",
        "foreach",
        "fp32",
        set(),
    )
    report = estimate_report(Ask(model=None, files=(str(tmp_path / "train.py"),), gpu="H100"))
    assert [plan.stage for plan in report.plans] == [2]
    assert report.plans[0].fits is True


def test_a_strategy_that_a_script_makes(tmp_path: Path) -> None:
    lines = "s = DeepSpeedStrategy(stage=3, offload_optimizer=True)\ntrainer = L.Trainer(strategy=s, devices=1)"
    setup = of_script(tmp_path, lines)
    assert (setup.ds_config or {})["zero_optimization"]["stage"] == 3
    assert setup.ask.zero_init is False  # no configure_model: the model is whole before it is sharded
    lines = "s = FSDPStrategy(auto_wrap_policy={Block}, cpu_offload=False)\ntrainer = L.Trainer(strategy=s, devices=1)"
    assert of_script(tmp_path, lines).ask.one_unit is False


def test_what_a_script_leaves_open_is_said_by_its_line(tmp_path: Path) -> None:
    setup = of_script(tmp_path, "trainer = L.Trainer(strategy=pick(), devices=count(), precision=p)")
    assert {"trainer.strategy", "trainer.devices", "trainer.precision"} <= keys(setup)
    assert "training_step" in keys(of_script(tmp_path, "trainer = L.Trainer(devices=1)", loss="my_loss(batch)"))
    with pytest.raises(BadInput, match=r"makes 2 Trainers of Lightning \(lines 20, 21\)"):
        of_script(tmp_path, "trainer = L.Trainer(devices=1)\ntrainer = L.Trainer(devices=2)")
