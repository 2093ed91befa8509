"""One timed case: an engine, a stage and how gradients are reduced, on a model shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeroplan.core.float8 import RUNTIME_RECIPES
from zeroplan.models.catalog import find

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0


def _shape(name: str) -> dict[str, Any]:
    entry = find(name)
    assert entry is not None
    return {key: value for key, value in entry.config.items() if key not in ("model_type", "architectures")}


#: The model type of a shape, where it is no Llama.
MODEL_TYPES = {"qwen3-moe-small": "qwen3_moe", "toy-moe": "qwen3_moe"}
#: Shapes by name, as values of transformers' configs: two of the catalog's, each also with a few of its blocks, a mixture of
#: experts with fewer blocks and experts than the catalog's (3.1 B parameters), and toys for CPUs.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": _shape("meta-llama/Llama-3.2-1B"),
    "llama-8b": _shape("meta-llama/Llama-3.1-8B"),
    "llama-1b-4": _shape("meta-llama/Llama-3.2-1B") | {"num_hidden_layers": 4},
    "llama-8b-4": _shape("meta-llama/Llama-3.1-8B") | {"num_hidden_layers": 4},
    "llama-8b-8": _shape("meta-llama/Llama-3.1-8B") | {"num_hidden_layers": 8},
    "toy": _shape("meta-llama/Llama-3.2-1B")
    | {
        "vocab_size": 512,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    },
    "qwen3-moe-small": _shape("Qwen/Qwen3-30B-A3B") | {"num_hidden_layers": 8, "num_experts": 64, "max_window_layers": 8},
    "toy-moe": _shape("Qwen/Qwen3-30B-A3B")
    | {
        "vocab_size": 512,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "max_window_layers": 2,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """``ENGINE:STAGE[+r32][+ckpt][+RECIPE[+gathers][+ends]][+copies][+compile|+within]``, as in ``zeroplan:3+r32``.

    `engine` is zeroplan, deepspeed, fsdp2 (stage 3 reshards after the forward, stage 2 does not), torchtitan (its own trainer),
    megatron (its distributed optimizer, stage 1) or ddp (stage 0; stage 1 with ZeroRedundancyOptimizer). `fp32_reduce`:
    gradients are reduced in fp32, else in bf16. `compiled`: each block is compiled by ``torch.compile``, under DeepSpeed the
    model by DeepCompile; `within`: with its checkpoint inside the graph, as torchtitan does. `float8`: how blocks' linear
    layers multiply in 8 bits, FSDP2's and torchtitan's by torchao; `gathers`: their weights are gathered in 8 bits, too;
    `ends`: but for the first and last two blocks. `copies`: this runtime gathers by NCCL's copy engines, for which
    NCCL_CTA_POLICY is to be 2 here.
    """

    engine: str
    stage: int
    fp32_reduce: bool
    checkpointing: bool
    compiled: bool = False
    within: bool = False
    float8: str = ""
    gathers: bool = False
    ends: bool = False
    copies: bool = False

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case that `text` names."""
        head, *options = text.split("+")
        engine, _, stage = head.partition(":")
        return cls(
            engine,
            int(stage),
            "r32" in options,
            "ckpt" in options,
            bool({"compile", "within"} & {*options}),
            "within" in options,
            next((option for option in options if option in RUNTIME_RECIPES), ""),
            "gathers" in options,
            "ends" in options,
            "copies" in options,
        )

    def __str__(self) -> str:
        return (
            f"{self.engine}:{self.group}{'+copies' * self.copies}{('+within' if self.within else '+compile') * self.compiled}"
        )

    @property
    def group(self) -> str:
        """Cases with equal groups do the same work and are compared, compiled or not."""
        narrow = f"+{self.float8}{'+gathers' * self.gathers}{'+ends' * self.ends}" if self.float8 else ""
        return f"{self.stage}{'+r32' * self.fp32_reduce}{'+ckpt' * self.checkpointing}{narrow}"

    @property
    def label(self) -> str:
        """The engine, and how its blocks are compiled."""
        return f"{self.engine}{', compiled' * self.compiled}{', checkpoints within' * self.within}"

    def is_beside(self, other: Case) -> bool:
        """Return whether `other` is another engine that does the same work."""
        return other.engine != self.engine and other.group == self.group

    def ds_config(self, micro: int, ranks: int) -> dict[str, Any]:
        """Return the ds_config of this case, for DeepSpeed and the included runtime alike."""
        own: dict[str, Any] = {"float8": self.float8, "float8_gathers": self.gathers} if self.float8 else {}
        own |= {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2} if self.ends else {}
        own |= {"copy_engine_gathers": True} if self.copies else {}
        return {
            "train_micro_batch_size_per_gpu": micro,
            "train_batch_size": micro * ranks,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": ADAMW},
            "zero_optimization": {"stage": self.stage, "overlap_comm": True, "contiguous_gradients": True},
            "communication_data_type": "fp32" if self.fp32_reduce else "bf16",
            **({"zeroplan": own} if own else {}),
        }
