"""One rank of a case under its engine: a function that runs one training step, calling `mark` on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel

import zeroplan_runtime
from benchmarks.mesh import experts
from benchmarks.mesh.cases import Case
from zeroplan.core.pipeline import Stage, chunks_of
from zeroplan.core.pipeline_order import schedule_of
from zeroplan.engines.runtime.trainer_mesh import balance
from zeroplan.engines.torch_stages import StageModel, StepShape, loss_of, metadata_of, run_schedule, schedule_on, stages_on
from zeroplan.trace.tensor_parallel import parallelize
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


def _mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh whose dimensions of one rank communicate with nobody, as torchtitan makes it.

    A group of one rank has a communicator of NCCL like any other: about 300 MiB of the GPU for each.
    """
    alone: dict[int | str, Any] = {name: "fake" for name, size in zip(names, shape, strict=True) if size == 1}
    return init_device_mesh(device.type, shape, mesh_dim_names=names, backend_override=alone)


def fsdp2(case: Case, device: torch.device, rank: int, mark: Mark, *, fake: bool) -> Callable[[int], None]:
    """FSDP2 over a mesh as torchtitan lays it out. Returns the step; it takes its number, for the marks."""
    shape = (case.pp, case.dp_replicate, case.dp // case.dp_replicate // case.ep, case.ep, case.cp, case.tp)
    mesh = _mesh(device, shape, ("pp", "replicate", "efsdp", "ep", "cp", "tp"))
    stage = rank // (case.ranks // case.pp)
    models: list[Any] = stages_on(lambda: _split(case, mesh), _chunks(case, stage)) if case.pp > 1 else [_split(case, mesh)]
    shared = [experts.share_balanced(model, mesh["ep"], device, fake=fake) if case.ep > 1 else [] for model in models]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": _sharding(mesh, case), "reshard_after_forward": case.stage == 3, "mp_policy": policy}
    for model, own in zip(models, shared, strict=True):
        if own:
            experts.shard_blocks(model, own, options, mesh["efsdp"])
        for block in () if own else _blocks(model, apart=case.apart):
            fully_shard(block, **options)
        fully_shard(model, **options)
        model.to_empty(device=device)
    parameters = [parameter for model in models for parameter in model.parameters()]
    of_experts = {parameter for own in shared for module in own for parameter in module.parameters()}
    _fill(parameters)
    groups = [[p for p in parameters if p not in of_experts], [p for p in parameters if p in of_experts]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-6, fused=True)
    ids = _tokens(case, device)
    mark("init")
    pipeline = None
    if case.pp > 1:
        pipeline = schedule_on(models, _shape(case), mesh["pp"].get_group(), device, fake=fake)
    split_loss: Callable[[], AbstractContextManager[Any]] = loss_parallel if case.tp > 1 else nullcontext

    def step(number: int) -> None:
        if pipeline is not None:
            with split_loss():
                pipeline(ids)
            mark(f"bwd{number}")
        for micro in range(case.grad_accum if pipeline is None else 0):
            models[0].set_requires_gradient_sync(micro + 1 == case.grad_accum)
            inputs, shared_tokens = _inputs(case, ids, mesh)
            with shared_tokens, split_loss():
                loss = models[0](**inputs).loss
                mark(f"fwd{number}.{micro}")
                loss.backward()
            mark(f"bwd{number}.{micro}")
        if of_experts:
            experts.clip(parameters, of_experts, 1.0)
        else:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark(f"step{number}")

    return step


def _blocks(model: Any, *, apart: bool) -> list[nn.Module]:
    """The blocks that are groups of FSDP2's own, the only one of a stage where they are `apart`."""
    found = list(find_blocks(model).values())
    return found or (list(model.model.layers) if apart and isinstance(model, StageModel) else [])


def _chunks(case: Case, rank: int) -> tuple[Stage, ...]:
    return chunks_of(case.model["num_hidden_layers"], case.pp, case.vpp, rank, schedule_of(case.schedule))


def _shape(case: Case) -> StepShape:
    return StepShape(case.micro_batch, case.seq_len, case.grad_accum, case.schedule)


def _fill(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).normal_(0, 0.02)


def _split(case: Case, mesh: DeviceMesh) -> Any:
    model = _on_meta(case)
    if case.tp > 1:
        parallelize(model, mesh["tp"], sequence=case.sp)
    if case.cp > 1:
        _without_masks(model)
    return model


def _without_masks(model: Any) -> None:
    blocks: list[Any] = list(find_blocks(model).values())
    for block in blocks:
        block.self_attn.register_forward_pre_hook(_causal, with_kwargs=True)


def _causal(_: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    """Ring attention takes no mask. Source: accelerate, ``big_modeling.py`` (``_attach_context_parallel_hooks``)."""
    return given, {**named, "attention_mask": None, "is_causal": True}


def _sharding(mesh: DeviceMesh, case: Case) -> DeviceMesh:
    """The ranks that share the shards, and, as a dimension before them, their replicas."""
    names = tuple(name for name, size in (("efsdp", 2), ("ep", case.ep), ("cp", case.cp)) if size > 1)
    shards = mesh[names]._flatten("fsdp") if len(names) > 1 else mesh["efsdp"]
    if case.dp_replicate == 1:
        return shards
    return mesh["replicate", names[0]] if len(names) == 1 else mesh["replicate", "fsdp"]


def _tokens(case: Case, device: torch.device) -> torch.Tensor:
    samples = case.micro_batch * (case.grad_accum if case.pp > 1 else 1)
    return torch.randint(3, case.model["vocab_size"], (samples, case.seq_len), device=device)


def _inputs(case: Case, ids: torch.Tensor, mesh: DeviceMesh | None) -> tuple[dict[str, Any], AbstractContextManager[Any]]:
    """What the model is given, and the context it runs in: with context parallelism what transformers' Trainer prepares."""
    if case.cp == 1 or mesh is None:
        return {"input_ids": ids, "labels": ids}, nullcontext()
    whole = ids.clone()
    shifted = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    inputs = {
        "input_ids": whole,
        "labels": whole,
        "shift_labels": shifted,
        "position_ids": torch.arange(case.seq_len, device=ids.device)[None],
    }
    buffers = [inputs["input_ids"], inputs["shift_labels"], inputs["position_ids"]]
    context = context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers))
    return inputs, context


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
    return partial(_engine_step, engine, partial(_inputs, case, ids, None), case, mark, nullcontext)


def _engine_step(engine: Any, inputs_of: Any, case: Case, mark: Mark, context: Any, number: int) -> None:
    for micro in range(case.grad_accum):
        inputs, shared_tokens = inputs_of()
        with shared_tokens, context():
            loss = engine(**inputs).loss
            mark(f"fwd{number}.{micro}")
            engine.backward(loss)
        del loss
        mark(f"bwd{number}.{micro}")
        engine.step()
    mark(f"step{number}")


def runtime(case: Case, device: torch.device, rank: int, mark: Mark, **_: Any) -> Callable[[int], None]:
    """The included runtime on a mesh. The step's attribute ``arena`` is the engine's."""
    mesh = _mesh(device, (case.pp, case.dp // case.ep, case.ep, case.cp, case.tp), ("pp", "dp", "ep", "cp", "tp"))
    model = _on_meta(case)
    if case.cp > 1:
        _without_masks(model)
    if case.ep > 1:
        zeroplan_runtime.share_experts(model, mesh["ep"])
    if case.tp > 1:
        parallelize(model, mesh["tp"], sequence=case.sp)
    if "num_experts" in case.model:
        balance(model, device)
    if case.pp > 1:
        (model,) = stages_on(partial(_on_meta, case), _chunks(case, rank // (case.ranks // case.pp)))
    model.to_empty(device=device)
    _fill(list(model.parameters()))  # what tensor-parallel ranks hold alike is the same on both, by the seed
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.micro_batch,
        "gradient_accumulation_steps": case.grad_accum,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": case.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
    }
    engine = zeroplan_runtime.initialize(model=model, config=config, mesh=mesh, device=device)[0]
    ids = _tokens(case, device)
    mark("init")
    if case.pp == 1:
        inputs_of = partial(_inputs, case, ids, mesh)
        step: Any = partial(_engine_step, engine, inputs_of, case, mark, loss_parallel if case.tp > 1 else nullcontext)
    else:
        schedule = engine.pipeline_schedule(
            "GPipe" if case.schedule == "gpipe" else "1F1B", partial(loss_of, model), **metadata_of(model, _shape(case))
        )
        step = partial(_stage_step, engine, partial(run_schedule, schedule, [model], ids), mark)
    step.arena = engine.arena
    found: Callable[[int], None] = step
    return found


def _stage_step(engine: Any, schedule: Callable[[], Any], mark: Mark, number: int) -> None:
    schedule()
    mark(f"bwd{number}")
    engine.step()
    mark(f"step{number}")


ENGINES: dict[str, Callable[..., Callable[[int], None]]] = {"fsdp2": fsdp2, "deepspeed": deepspeed, "zeroplan": runtime}
