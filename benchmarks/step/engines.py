"""Builds a model under each engine and gives one training step of it.

All are given the same model with the same random weights, bf16 parameters in the forward and fp32 masters, fused AdamW and
clipping by the global norm. FSDP2 shards every block and the root; DDP holds fp32 parameters under autocast, and its bf16
reduction is torch's compression hook. DeepSpeed and the runtime read the same ds_config; what is compiled of DeepSpeed's is the
whole model by DeepCompile, of the others' each block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step import megatron, titan
from benchmarks.step.case import ADAMW, CLIP, Case
from benchmarks.step.model import model_of
from zeroplan_runtime.regional_compilation import compile_blocks

Step = Callable[[torch.Tensor], torch.Tensor]


def build(case: Case, shape: str, micro: int, device: torch.device, **keys: Any) -> tuple[Step, Any]:
    """Build one training step on this rank's token ids [micro, seq], giving the loss; and what keeps the engine alive.

    `keys` are further ones of the runtime's section of the ds_config.
    """
    if case.engine == "torchtitan":
        return titan.build(case, shape, micro)
    if case.engine == "megatron":
        return megatron.build(case, shape, micro)
    dtype = torch.bfloat16 if case.engine in ("zeroplan", "deepspeed") else torch.float32
    model = model_of(shape, dtype, device, checkpointing=case.checkpointing)
    if case.within:
        compile_blocks(model)
    elif case.compiled and case.engine != "deepspeed":
        for block in model.model.layers:
            block.compile()
    if case.engine == "zeroplan":
        return _zeroplan(case, model, micro, device, keys)
    return {"deepspeed": _deepspeed, "fsdp2": _fsdp2, "ddp": _ddp}[case.engine](case, model, micro, device)


def _zeroplan(case: Case, model: Any, micro: int, device: torch.device, keys: dict[str, Any]) -> tuple[Step, Any]:
    import zeroplan_runtime

    config = case.ds_config(micro, dist.get_world_size())
    config["zeroplan"] = {"audit_steps": 0, **config.get("zeroplan", {}), **keys}
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, device=device)
    return _engine_step(engine), engine


def _deepspeed(case: Case, model: Any, micro: int, device: torch.device) -> tuple[Step, Any]:
    import deepspeed

    config = case.ds_config(micro, dist.get_world_size())
    if case.compiled:
        config["compile"] = {"deepcompile": True}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    if case.compiled:
        engine.compile()
    return _engine_step(engine), engine


def _engine_step(engine: Any) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _fsdp2(case: Case, model: Any, micro: int, device: torch.device) -> tuple[Step, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32 if case.fp32_reduce else torch.bfloat16),
        "reshard_after_forward": case.stage == 3,
    }
    finish = _float8(model, case) if case.float8 else None
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return _torch_step(model, optimizer, finish=finish), (model, optimizer)


def _float8(model: Any, case: Case) -> Callable[[], None] | None:
    """Let torchao's float8 layers take the place of the blocks' linear layers; returns what its gathers need after each step.

    torchao is found in the folder TORCHAO: beside other packages transformers would import it, and it initialises CUDA.
    """
    import os
    import sys

    sys.path.insert(0, os.environ["TORCHAO"])
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    gathers = {"enable_fsdp_float8_all_gather": True} if case.gathers else {}
    config = Float8LinearConfig(**gathers) if case.float8 == "tensorwise" else Float8LinearConfig.from_recipe_name(case.float8)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    return (lambda: precompute_float8_dynamic_scale_for_fsdp(model)) if case.gathers else None


def _ddp(case: Case, model: Any, micro: int, device: torch.device) -> tuple[Step, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if not case.fp32_reduce:
        wrapped.register_comm_hook(None, bf16_compress_hook)
    adamw = torch.optim.AdamW
    optimizer: Any
    if case.stage:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), adamw, fused=True, **ADAMW)
    else:
        optimizer = adamw(model.parameters(), fused=True, **ADAMW)
    return _torch_step(wrapped, optimizer, autocast=device.type), (wrapped, optimizer)


def _torch_step(model: Any, optimizer: Any, autocast: str | None = None, *, finish: Callable[[], None] | None = None) -> Step:
    mixed = torch.autocast(autocast or "cpu", torch.bfloat16, enabled=autocast is not None)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with mixed:
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if finish is not None:
            finish()
        return loss.detach()

    return step
