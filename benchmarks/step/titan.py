"""One training step of torchtitan's own trainer: its Llama, its FSDP2, its compiled blocks and loss, its float8.

torchtitan 0.2 reads its text by packages that are not needed here, so those modules are stood in for; batches are those of the
other engines. Its Llama ties no weights, and its FSDP2 reduces in fp32 alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step.case import ADAMW, CLIP, SHAPES, Case
from benchmarks.step.model import model_of

_IGNORED = -100


def _stood_in(name: str, **attributes: Any) -> None:
    module: Any = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


class _Labels:
    """The labels of tokens [micro, seq], which are on the device already: the trainer counts them on the host first."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def __ne__(self, ignored: object) -> torch.Tensor:  # type: ignore[override]
        """Return which are not ignored, on the host: all but the last of each row."""
        micro, seq = self._tokens.shape
        return torch.ones(micro, seq - 1, dtype=torch.bool)

    def to(self, device: torch.device) -> torch.Tensor:
        """Return the labels on the device: each token's is the next one."""
        return torch.cat([self._tokens[:, 1:], torch.full_like(self._tokens[:, :1], _IGNORED)], 1)


def _llama(shape: str) -> Any:
    from torchtitan.models.llama3 import TransformerModelArgs

    config = SHAPES[shape]
    return TransformerModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        multiple_of=config["intermediate_size"],  # to which it rounds up
        ffn_dim_multiplier=1e-2,
        rope_theta=config.get("rope_theta", 5e5),
    )


def _load_weights(model: Any, model_args: Any, shape: str) -> None:
    """Give the trainer's model the weights of the other engines' by its own reader of transformers' names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    device = next(model.parameters()).device
    weights = model_of(shape, torch.float32, device).state_dict()
    state = Llama3StateDictAdapter(model_args, None).from_hf(weights)
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    del weights, state
    if device.type == "cuda":
        torch.cuda.empty_cache()


def build(case: Case, shape: str, micro: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], Any]:
    """Build one step on this rank's token ids [micro, seq], giving the loss; and the trainer.

    Raises:
        ValueError: a case that its trainer has not: without fp32 reduction, or resharding.
    """
    if not case.fp32_reduce or case.stage != 3:
        raise ValueError("torchtitan shards as stage 3 and reduces in fp32: name its cases torchtitan:3+r32")
    _stood_in("torch.utils.tensorboard", SummaryWriter=object)
    _stood_in("torchtitan.hf_datasets.text_datasets", build_text_dataloader=None, build_text_validation_dataloader=None)
    if case.float8:
        sys.path.insert(0, os.environ["TORCHAO"])
    from torchtitan.config import JobConfig
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    spec = llama3.get_train_spec()
    spec.model_args = {shape: _llama(shape)}
    spec.build_dataloader_fn = lambda **_: None
    spec.build_tokenizer_fn = spec.build_validator_fn = spec.state_dict_adapter = None
    register_train_spec("benchmark", spec)
    config = JobConfig()
    config.model.name, config.model.flavor = "benchmark", shape
    config.training.local_batch_size, config.training.max_norm = micro, CLIP
    config.compile.enable = case.compiled
    config.activation_checkpoint.mode = "full" if case.checkpointing else "none"
    options = config.optimizer
    options.lr, (options.beta1, options.beta2) = ADAMW["lr"], ADAMW["betas"]
    options.eps, options.weight_decay = ADAMW["eps"], ADAMW["weight_decay"]
    config.lr_scheduler.warmup_steps, config.metrics.log_freq = 0, sys.maxsize
    if case.float8:
        config.model.converters = ["quantize.linear.float8"]
        float8 = config.quantize.linear.float8
        float8.filter_fqns = ["output"]
        float8.recipe_name = None if case.float8 == "tensorwise" else case.float8
        float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = case.gathers
    dist.destroy_process_group()  # it makes its own, with a store of its own
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    trainer = Trainer(config)
    _load_weights(trainer.model_parts[0], spec.model_args[shape], shape)
    trainer.step = 2  # the first is logged
    losses: list[torch.Tensor] = []
    own = trainer.loss_fn

    def loss_of(pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = own(pred, labels)
        losses.append(loss.detach() / (labels != _IGNORED).sum())
        return loss

    trainer.loss_fn = loss_of

    def step(tokens: torch.Tensor) -> torch.Tensor:
        trainer.train_step(iter([({"input": tokens}, _Labels(tokens))]))
        return losses.pop()

    return step, trainer
