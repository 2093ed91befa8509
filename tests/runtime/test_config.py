"""What of a ds_config the runtime takes, refuses by name, or lists as without effect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroplan_runtime
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import Aio, ZeroConfig
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan_runtime.config import read_config

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_defaults_are_deepspeeds() -> None:
    config = read_config({}, 4)
    assert (config.zero, config.micro_batch, config.grad_accum, config.dtype) == (ZeroConfig(), 1, 1, DType.FP32)
    plain = read_config({"fp16": {"enabled": True}}, 1).loss_scaler()  # DeepSpeed's own at stage 0
    assert (plain.hysteresis, plain.stays_at_least) == (1, True)
    scaler = read_config({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, 1).loss_scaler()
    assert not scaler.stays_at_least
    assert (scaler.scale, scaler.dynamic, scaler.window, scaler.hysteresis, scaler.min_scale) == (65536, True, 1000, 2, 1)
    assert read_config({"bf16": {"enabled": True}}, 1).check_overflow


def test_auto_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    text = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "overlap_comm": True}}
    path.write_text(json.dumps(text))
    config = read_config(path, 2)
    assert (config.zero.stage, config.zero.step.gradient_clipping) == (2, 1.0)
    assert config.without_effect == ("zero_optimization.overlap_comm",)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ({"train_batch_size": 24}, 4, (6, 1)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, 4, (2, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 4, (2, 3)),
        ({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 3}, 4, (5, 3)),
    ],
)
def test_batch_sizes(given: dict[str, Any], ranks: int, expected: tuple[int, int]) -> None:
    config = read_config(given, ranks)
    assert (config.micro_batch, config.grad_accum) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_optimization": {"stge": 2}}, "'stge' is not supported; did you mean 'stage'"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "optimizer offload needs stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, "offload_optimizer.device: 'gpu' is not"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"ration": 1}}}, "did you mean 'ratio'"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}}, "not between 0 and 1"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, 'add "nvme_path"'),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "add offload_optimizer with ratio 1"),
        ({"zeroplan": {"delayed_update": True}}, "zeroplan.delayed_update: true is not a whole number"),
        ({"zeroplan": {"delayed_update": 4}}, "is for an optimizer in host memory"),
        ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, "'zero_quantized_weights' is not supported"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"train_batch_size": 7}, "7 does not divide by accumulation 1 × 2 ranks; use a multiple of 2"),
        ({"communication_data_type": "fp8"}, "communication_data_type: 'fp8' is not a dtype"),
        ({"optimizer": {"params": {}}}, "optimizer: 'type' is missing"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps: -1 is not above zero"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu: 0 is not above zero"),
        ({"gradient_clipping": -1}, "gradient_clipping: -1 is not a number of zero or more"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping: '1.0' is not a number"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr: 'auto' is for the HF Trainer"),
        ({"zeroplan": {"ring": "2"}}, "zeroplan.ring: '2' is not a whole number"),
        ({"zeroplan": {"ring": 1}}, "zeroplan.ring: 1 is too small; use 2 or more"),
        ({"zeroplan": {"delayed_update": -1}}, "zeroplan.delayed_update: -1 is too small; use 0 or more"),
        ({"zeroplan": {"nvme_in_memory": "no"}}, "zeroplan.nvme_in_memory: 'no' is not true or false"),
        ({"zeroplan": [1]}, "zeroplan: [1] is not an object"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"buffer_size": 0.5}}}, "buffer_size: 0.5 is not a whole number"),
        ({"aio": {"block_size": "1M"}}, "aio.block_size: '1M' is not a whole number"),
        ({"activation_checkpointing": {"cpu_checkpointing": "yes"}}, "cpu_checkpointing: 'yes' is not true or false"),
        ({"zeroplan": {"timeout": 0}}, "zeroplan.timeout: 0 is too small"),
        ({"zeroplan": {"fused_loss": "yes"}}, "zeroplan.fused_loss: 'yes' is not true or false"),
        ({"zeroplan": {"rings": 2}}, "did you mean 'ring'"),
        ({"zero_optimization": 3}, "zero_optimization: 3 is not an object"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as fault:
        read_config(given, 2)
    assert said in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("aio", "said"),
    [
        ({"block_size": 5000}, "aio.block_size: 5000 is not a block size; give a multiple of 4096"),
        ({"use_gds": True}, "aio.use_gds: GPUDirect Storage is not supported"),
        ({"queue_depth": 0}, "aio.queue_depth: 0 is out of range; give 1 to 4096"),
    ],
)
def test_aio_matters_for_files(aio: dict[str, Any], said: str) -> None:
    def config(device: str) -> dict[str, Any]:
        return {"aio": aio, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": "."}}}

    with pytest.raises(BadInput, match=said):
        read_config(config("nvme"), 1)
    assert read_config(config("cpu"), 1).zero.aio != Aio()


@pytest.mark.parametrize(
    "given",
    [
        {"aio": {"block_size": 5000}},
        {"aio": {"blocksize": 4096}},
        {"activation_checkpointing": {"cpu_checkpointing": "yes"}},
        {"activation_checkpointing": {"cpu_checkpoint": True}},
        {"zeroplan": {"ring": 1}},
        {"zeroplan": {"delay": 2}},
        {"zeroplan": {"nvme_in_memory": "no"}},
        {"zeroplan": [1]},
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": ""}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 0, "cpu_offload": True}},
    ],
    ids=str,
)
def test_a_plan_refuses_what_a_run_refuses(given: dict[str, Any]) -> None:
    disk = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": disk, **given}
    with pytest.raises(BadInput) as run:
        read_config(config, 1)
    with pytest.raises(BadInput) as plan:
        estimate_report(Ask(model=LLAMA, engine="zeroplan", ds_config=config, depth="formula"))
    assert plan.value.what == run.value.what


def test_offload_is_read_as_deepspeed_reads_it() -> None:
    """Integral floats and digits are counts, as pydantic takes them; `thread_count` is an older name of aio's."""
    optimizer = {"device": "nvme", "nvme_path": ".", "buffer_count": "5", "pin_memory": "true"}
    param = {"device": "nvme", "nvme_path": ".", "buffer_size": 1e8, "max_in_cpu": 1e9}
    given = {"stage": 3, "offload_optimizer": optimizer, "offload_param": param}
    zero = read_config({"zero_optimization": given, "aio": {"thread_count": 3}}, 1).zero
    assert (zero.offload_optimizer.buffer_count, zero.aio.intra_op_parallelism) == (5, 3)
    assert (zero.offload_param.buffer_size, zero.offload_param.max_in_cpu) == (100_000_000, 1_000_000_000)
    assert type(zero.offload_param.buffer_size) is int
    both = read_config({"aio": {"intra_op_parallelism": 2, "thread_count": 3}}, 1)
    assert both.zero.aio.intra_op_parallelism == 2


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"type": "AdamV"}, "did you mean 'adam' or"),
        ({"type": "AdamW", "params": {"beta": 1}}, "unknown key 'beta' for adamw; did you mean 'betas'"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1}}, "use gradient_clipping"),
        ({"type": "AdamW", "params": {"lr": "1e-5"}}, "optimizer.params.lr: '1e-5' is not a number"),
        ({"type": "SGD", "params": {"lr": -0.1}}, "optimizer.params.lr: -0.1 is not a number of zero or more"),
        ({"type": "Lion", "params": {"betas": [0.9]}}, "optimizer.params.betas: [0.9] is not 2 numbers"),
        ({"type": "Adam", "params": {"betas": [0.9, 1.0]}}, "not from 0 to below 1"),
        ({"type": "SGD", "params": {"nesterov": "no"}}, "'no' is not true or false"),
    ],
)
def test_which_optimizers_are_refused(optimizer: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as fault:
        zeroplan_runtime.initialize(model=torch.nn.Linear(2, 2), config={"optimizer": optimizer}, device="cpu")
    assert said in str(fault.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.Adafactor, "an optimizer of type Adafactor is not supported"),
        (lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]), "an optimizer of type Muon is not supported"),
        (torch.optim.LBFGS, "an optimizer of type LBFGS is not supported"),
    ],
)
def test_which_optimizers_of_torchs_are_refused(make: Any, said: str) -> None:
    with pytest.raises(BadInput) as fault:
        zeroplan_runtime.initialize(model=torch.nn.Linear(2, 2), config={}, optimizer=make, device="cpu")
    assert said in str(fault.value)


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(BadInput, match="no such file"):
        zeroplan_runtime.initialize(model=model, config=tmp_path / "none.json", device="cpu")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        zeroplan_runtime.initialize(model=model, config=tmp_path / "bad.json", device="cpu")
    with pytest.raises(BadInput, match="a str is no optimizer"):
        zeroplan_runtime.initialize(model=model, config={}, optimizer="adamw", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="'weight' has no values"):
        zeroplan_runtime.initialize(model=torch.nn.Linear(2, 2, device="meta"), config={}, device="cpu")
    nested = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(BadInput, match="units may not nest"):
        zeroplan_runtime.initialize(model=nested, config={}, policy=lambda name, module: True, device="cpu")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "gpt2"}, "model: a str is no nn.Module"),
        ({"model": torch.nn.Linear}, "model: the class Linear is no nn.Module"),
        ({"config": None}, "config: a NoneType is no ds_config"),
        ({"device": "gpu"}, "device: 'gpu' is no device"),
        ({"policy": 3}, "policy: cannot be called"),
        ({"lr_scheduler": 3}, "lr_scheduler: a int is no schedule"),
        ({"training_data": iter([])}, "training_data: has no length"),
    ],
)
def test_arguments_of_another_kind_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as fault:
        zeroplan_runtime.initialize(**{"model": torch.nn.Linear(2, 2), "config": {}, "device": "cpu", **given})
    assert said in str(fault.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda out: 3.0, "a float is no loss"),
        (lambda out: out, "the loss has shape (4, 2)"),
        (lambda out: out.sum().detach(), "the loss has no gradients"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Callable[[torch.Tensor], Any], said: str) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroplan_runtime.initialize(model=torch.nn.Linear(2, 2), config=config, device="cpu")
    with pytest.raises(BadInput, match=re.escape(said)):
        engine.backward(loss(engine(torch.ones(4, 2))))
    engine.backward(engine(torch.ones(4, 2)).sum())  # nothing was harmed
    engine.step()
    engine.destroy()
    engine.destroy()  # as in a finally clause
    with pytest.raises(BadInput, match="destroyed"):
        engine(torch.ones(4, 2))


def test_a_cut_checkpoint_and_an_empty_folder_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = zeroplan_runtime.initialize(model=torch.nn.Linear(2, 2), config=config, device="cpu")
    assert engine.load_checkpoint(str(tmp_path / "none")) == (None, {})
    assert "holds no checkpoint" in caplog.text
    engine.save_checkpoint(str(tmp_path))
    for data in tmp_path.rglob("*.distcp"):
        data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(BadInput, match="is cut off") as fault:
        engine.load_checkpoint(str(tmp_path))
    assert "\n" not in str(fault.value)


def test_the_loader_gives_micro_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12).float().unsqueeze(1))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = torch.nn.Linear(1, 1)
    engine, optimizer, loader, schedule = zeroplan_runtime.initialize(
        model=model,
        config=config,
        training_data=data,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        device="cpu",
    )
    assert loader is not None
    assert [len(x) for (x,) in loader] == [4, 4, 4]
    engine.backward(engine(torch.ones(4, 1)).mean())
    optimizer.step()  # as loops written for plain torch do
    assert engine.global_steps == 1
    assert engine.get_lr() == pytest.approx([0.01])
    assert schedule.last_epoch == 1
