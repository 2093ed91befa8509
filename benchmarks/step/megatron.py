"""One training step of Megatron-Core: its GPT model of its own layers, its DDP and its distributed optimizer.

Its fastest form takes TransformerEngine's layers, fused attention and Adam; here attention is its own unfused one, and torch's
norm and fused AdamW stand in (:mod:`benchmarks.megatron.run`). Its weights are its own random ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step.case import ADAMW, CLIP, SHAPES, Case

_SEQ = 2048


class _NoMarks:
    """Takes the marks of memory that nobody reads."""

    def mark(self, at: str) -> None:
        """Pass over one."""


def build(case: Case, shape: str, micro: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], Any]:
    """Build one step on this rank's token ids [micro, 2048], giving the loss; and nothing to keep.

    Raises:
        ValueError: another case than stage 1 as it is.
    """
    if case.stage != 1 or case.checkpointing or case.compiled or case.float8:
        raise ValueError("Megatron-Core shards the optimizer: name its cases megatron:1 or megatron:1+r32")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    from benchmarks.megatron import cases, run

    config = SHAPES[shape]
    same = ("hidden_size", "num_attention_heads", "vocab_size")
    model = cases.LLAMA | {name: config[name] for name in same}
    model |= {
        "num_layers": config["num_hidden_layers"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "max_position_embeddings": _SEQ,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "grad_reduce_in_bf16": not case.fp32_reduce,
        "overlap_grad_reduce": True,
    }
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if torch.cuda.is_available():
        random.model_parallel_cuda_manual_seed(1)
    one = cases.Case("", model=model, dp=dist.get_world_size(), micro_batch=micro, seq_len=_SEQ)
    options = {"lr": ADAMW["lr"], "weight_decay": ADAMW["weight_decay"], "clip_grad": CLIP}
    train: Any = run.training(one, _NoMarks(), **options)  # type: ignore[arg-type]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = train(tokens)[0]["loss"]
        return loss.reshape(()) / tokens.numel()

    return step, None
