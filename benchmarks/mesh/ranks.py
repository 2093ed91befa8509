"""One rank of a case under its engine: a function that runs one training step, calling `mark` on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import loss_parallel

import zeroplan_runtime
from benchmarks.mesh import experts
from benchmarks.mesh.cases import Case
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.pipeline import Stage, chunks_of
from zeroplan.core.pipeline_order import schedule_of
from zeroplan.engines.fsdp2 import trainer_mesh
from zeroplan.engines.runtime.trainer import lay_out
from zeroplan.engines.torch_mesh import Passes, by_mesh, clip, passes_of
from zeroplan.engines.torch_stages import (
    RankModel,
    StageModel,
    StepShape,
    is_block,
    schedule_of_engine,
    schedule_on,
    stages_on,
)
from zeroplan_runtime.expert_parallel import balanced, counted
from zeroplan_runtime.units import find_blocks

#: Called between the parts of a step.
Mark = Callable[[str], None]


def model_of(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model, in the current default device, ready to train."""
    values = dict(case.model)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    model.config.use_cache = False
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _on_meta(case: Case) -> Any:
    with torch.device("meta"):
        return model_of(case)


def fsdp2(case: Case, device: torch.device, rank: int, mark: Mark, *, fake: bool) -> Callable[[int], None]:
    """FSDP2 over a mesh as torchtitan lays it out. Returns the step; it takes its number, for the marks."""
    layout = _layout(case)
    mesh = trainer_mesh.Fsdp2Mesh.of(layout, device)
    if fake and case.ep > 1:
        experts.answer_for_fake_ranks()

    def part() -> Any:
        model = _on_meta(case)
        trainer_mesh.split(model, mesh, device, splits=balanced if fake else counted)
        return model

    models: list[Any] = stages_on(part, _chunks(case, rank)) if case.pp > 1 else [part()]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for model in models:
        blocks = _blocks(model, apart=case.apart)
        trainer_mesh.shard(model, mesh, {"reshard_after_forward": case.stage == 3, "mp_policy": policy}, blocks)
        model.to_empty(device=device)
        trainer_mesh.fill(model)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh(parameters)], lr=1e-6, fused=True)
    ids = _tokens(case, device)
    mark("init")
    pipeline = schedule_on(models, _shape(case), mesh.dense["pp"].get_group(), device, fake=fake) if case.pp > 1 else None
    passes = passes_of(layout, mesh.context)

    def step(number: int) -> None:
        if pipeline is not None:
            with loss_parallel() if case.tp > 1 else nullcontext():
                pipeline(ids)
            mark(f"bwd{number}")
        for micro in range(case.grad_accum if pipeline is None else 0):
            models[0].set_requires_gradient_sync(micro + 1 == case.grad_accum)
            with passes({"input_ids": ids, "labels": ids}) as inputs:
                loss = models[0](**inputs).loss
                mark(f"fwd{number}.{micro}")
                loss.backward()
            mark(f"bwd{number}.{micro}")
        for model in models:
            trainer_mesh.scale_experts(model, layout)
        clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark(f"step{number}")

    return step


def _blocks(model: Any, *, apart: bool) -> list[nn.Module]:
    """The blocks that are groups of FSDP2's own, the only one of a stage where they are `apart`."""
    found = list(find_blocks(model).values())
    return found or (list(model.model.layers) if apart and isinstance(model, StageModel) else [])


def _chunks(case: Case, rank: int) -> tuple[Stage, ...]:
    place = rank // (case.ranks // case.pp)
    return chunks_of(case.model["num_hidden_layers"], case.pp, case.vpp, place, schedule_of(case.schedule))


def _shape(case: Case) -> StepShape:
    return StepShape(case.micro_batch, case.seq_len, case.grad_accum, case.schedule)


def _layout(case: Case) -> ParallelLayout:
    return ParallelLayout(
        case.ranks, tp=case.tp, sp=case.sp, cp=case.cp, pp=case.pp, ep=case.ep, dp_replicate=case.dp_replicate
    )


def _tokens(case: Case, device: torch.device) -> torch.Tensor:
    samples = case.micro_batch * (case.grad_accum if case.pp > 1 else 1)
    return torch.randint(3, case.model["vocab_size"], (samples, case.seq_len), device=device)


def deepspeed(case: Case, device: torch.device, rank: int, mark: Mark, **_: Any) -> Callable[[int], None]:
    """DeepSpeed's AutoTP, as its config asks for it."""
    import deepspeed as library

    model = model_of(case, torch.bfloat16)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.grad_accum,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case.stage},
        "tensor_parallel": {"autotp_size": case.tp},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
    }
    engine, *_ = library.initialize(model=model, config=config)
    del model
    ids = _tokens(case, device)
    return partial(_engine_step, engine, ids, case, mark, nullcontext)


def _engine_step(engine: Any, ids: torch.Tensor, case: Case, mark: Mark, passes: Passes, number: int) -> None:
    for micro in range(case.grad_accum):
        with passes({"input_ids": ids, "labels": ids}) as inputs:
            loss = engine(**inputs).loss
            mark(f"fwd{number}.{micro}")
            engine.backward(loss)
        del loss
        mark(f"bwd{number}.{micro}")
        engine.step()
    mark(f"step{number}")


def runtime(case: Case, device: torch.device, rank: int, mark: Mark, **_: Any) -> Callable[[int], None]:
    """The included runtime on a mesh. The step's attribute ``arena`` is the engine's."""
    model = _on_meta(case)
    mesh, passes = lay_out(model, _layout(case), device)
    stages = stages_on(partial(_on_meta, case), _chunks(case, rank)) if case.pp > 1 else []
    if stages:
        model = RankModel(stages) if len(stages) > 1 else stages[0]
    model.to_empty(device=device)
    trainer_mesh.fill(model)  # what tensor-parallel ranks hold alike is the same on both, by the seed
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.grad_accum,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
    }
    policy = is_block if len(stages) > 1 else None
    engine = zeroplan_runtime.initialize(model=model, config=config, mesh=mesh, device=device, policy=policy)[0]
    ids = _tokens(case, device)
    mark("init")
    if case.pp == 1:
        step: Any = partial(_engine_step, engine, ids, case, mark, passes)
    else:
        schedule = schedule_of_engine(engine, stages, _shape(case))
        step = partial(_stage_step, engine, partial(schedule, ids), mark)
    step.arena = engine.arena
    found: Callable[[int], None] = step
    return found


def _stage_step(engine: Any, schedule: Callable[[], Any], mark: Mark, number: int) -> None:
    schedule()
    mark(f"bwd{number}")
    engine.step()
    mark(f"step{number}")


ENGINES: dict[str, Callable[..., Callable[[int], None]]] = {"fsdp2": fsdp2, "deepspeed": deepspeed, "zeroplan": runtime}
