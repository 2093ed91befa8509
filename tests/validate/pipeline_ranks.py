"""What ranks of a pipeline run in tests: trainers as ``verify`` builds them, with weights that one process has, too."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Workload
from zeroplan.engines.verification import LEARNING_RATE, TrainingRun, optimizer_section
from zeroplan.trace.run import loss_of

#: Six blocks, of widths that two ranks divide.
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1008,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
STEPS, MICRO_BATCHES, BATCH, LENGTH = 3, 4, 2, 24


def model_of(dtype: torch.dtype = torch.float32, *, cheap: bool = False, config: dict[str, Any] = MODEL) -> Any:
    """The model with its own initialisation, the same at every call."""
    import transformers

    del cheap
    values = dict(config)
    full = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(full, dtype=dtype, attn_implementation="sdpa").train()


def prepared(model: Any) -> Any:
    """The model without its cache."""
    model.config.use_cache = False
    return model


def batch() -> dict[str, torch.Tensor]:
    """One micro batch, the same at every call."""
    ids = torch.randint(0, MODEL["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


@cache
def trained_by_one() -> list[float]:
    """The losses of one process."""
    torch.manual_seed(0)
    model, given = prepared(model_of()), batch()
    kind = OPTIMIZERS["adamw"].torch
    assert kind is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **kind.params)
    losses = []
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            loss = model(**given).loss
            (loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def losses_of(_group: Any, runs: list[tuple[str, str, dict[str, int]]]) -> list[list[float | None]]:
    """The losses of pipelines, each by engine, schedule and degrees; None on ranks without the last stage."""
    return [_losses(*one) for one in runs]


def _losses(engine: str, schedule: str, degrees: dict[str, int]) -> list[float | None]:
    from zeroplan.engines.fsdp2 import trainer as fsdp2
    from zeroplan.engines.runtime import trainer as runtime

    run = TrainingRun(
        stage=2,
        workload=Workload.of(dtype=DType.FP32, grad_accum=MICRO_BATCHES),
        ds_config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
            "optimizer": optimizer_section("adamw"),
        },
        device=torch.device("cpu"),
        mark=lambda *_: None,
        make_model=model_of,
        prepare=prepared,
        loss_of=loss_of,
        layout=ParallelLayout(gpus=dist.get_world_size(), pp=2, **degrees),
        schedule=schedule,
        partition="",
    )
    with mock.patch.object(fsdp2.trainer_mesh, "fill", partial(_as_one, model_of())):
        trained = (fsdp2 if engine == "fsdp2" else runtime).build(run)
    losses = [trained.step(batch()) for _ in range(STEPS)]
    trained.close()
    return [None if loss is None else float(loss) for loss in losses]


@torch.no_grad()
def _as_one(whole: nn.Module, stage: Any) -> None:
    """Give a stage the whole model's weights and buffers."""
    known = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    for name, held in (*stage.named_parameters(), *stage.named_buffers()):
        value = known[stage.whole_name(name)]
        (held.to_local() if isinstance(held, DTensor) else held).copy_(value)
