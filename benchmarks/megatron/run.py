"""One rank of a case: Megatron-Core's model, buffers, optimizer and schedule for some steps, with marks of memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure.probe import Device, Probe
from benchmarks.megatron.cases import Case
from benchmarks.megatron.core import gpt_model, transformer_config, use_norm
from zeroplan.engines.torch_step import STEPS_UNTIL_STEADY
from zeroplan.models.megatron import MegatronModel

#: A gradient's norm that no step reaches, so that no gradient is scaled: without fused kernels, scaling copies them.
_NO_CLIPPING = 1e9


class _LayerNorm(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        _mark_shared(self, config)


class _RmsNorm(nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        _mark_shared(self, config)


def _mark_shared(norm: nn.Module, config: Any) -> None:
    """Say that tensor-parallel ranks add up its gradients, as Megatron-Core's wrapper of Apex's norm does."""
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def run_case(case: Case, rank: int, *, fake: bool) -> dict[str, Any]:
    """Run some steps of a case on one of its ranks; returns the peaks and the state after each part of a step, in bytes.

    Args:
        case: the case.
        rank: this process' number among the real ones.
        fake: whether this is the measured rank among fake ones.
    """
    gpu = Device(rank)
    before = gpu.used()
    if gpu.cuda:
        torch.cuda.set_device(rank)
    else:
        _without_cuda()
    if fake:
        dist.init_process_group("fake", store=FakeStore(), rank=case.place, world_size=case.ranks)
    else:
        dist.init_process_group("nccl")  # as Megatron-LM does: communicators are made when they are first used
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        expert_model_parallel_size=case.ep,
        create_gloo_process_groups=False,
    )
    if gpu.cuda:
        random.model_parallel_cuda_manual_seed(1)
    probe = Probe(gpu)
    step = training(case, probe)
    for number in range(STEPS_UNTIL_STEADY):
        step()
        probe.mark(f"step{number}")
    if gpu.cuda:
        torch.cuda.synchronize()
    return {
        "allocated": max(mark.get("peak", 0) for mark in probe.marks),
        "reserved": max(mark.get("reserved_peak", 0) for mark in probe.marks),
        "total": gpu.used() - before,
        "marks": probe.marks,
        "gpu": torch.cuda.get_device_name() if gpu.cuda else "cpu",
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def training(case: Case, probe: Probe, **options: float) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs one step, on the words [micro, seq] that it is given or on random ones, and returns what the
    last stage says of each micro batch. `options` are the optimizer's, in place of those here.
    """
    model = MegatronModel.of(case.model)
    use_norm(_LayerNorm if model.normalization == "LayerNorm" else _RmsNorm)
    moe_utils.te_general_gemm = None  # 0.16.1 leaves the name undefined without TransformerEngine
    optimizers.Adam = partial(torch.optim.AdamW, fused=True)
    config = transformer_config(
        model,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        sequence_parallel=case.sp,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=case.vpp > 1,
        batch_p2p_comm=case.vpp == 1,
        expert_model_parallel_size=case.ep,
        moe_router_force_load_balancing=bool(model.num_experts),
    )
    first, last = case.pp_rank == 0, case.pp_rank == case.pp - 1
    if dist.get_backend() != "fake":
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    chunks = []
    for chunk in range(case.vpp):
        part = gpt_model(
            model,
            config,
            case.seq_len,
            embeds=first and chunk == 0,
            ends=last and chunk == case.vpp - 1,
            vp_stage=chunk if case.vpp > 1 else None,
        )
        chunks.append(Float16Module(config, part.to(torch.cuda.current_device())))
    probe.mark("model")
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not model.grad_reduce_in_bf16,
        use_distributed_optimizer=case.stage == 1,
        overlap_grad_reduce=model.overlap_grad_reduce,
        bucket_size=max(40_000_000, 1_000_000 * case.dp) if model.overlap_grad_reduce else None,
    )
    models = [
        DistributedDataParallel(config, buffers, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]
    wanted = OptimizerConfig(
        optimizer="adam",
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=case.stage == 1,
        **({"lr": 1e-6, "clip_grad": _NO_CLIPPING} | options),
    )
    optimizer = get_megatron_optimizer(wanted, models, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if model.overlap_grad_reduce:
        config.no_sync_func = models[0].no_sync
    probe.mark("init")
    run = get_forward_backward_func()

    def step(words: Any = None) -> list[dict[str, Any]]:
        for one in models:
            one.zero_grad_buffer()
        optimizer.zero_grad()
        said: list[dict[str, Any]] = run(
            forward_step_func=partial(_forward, case, ends_here=first or last),
            data_iterator=[words] * case.vpp,
            model=models,
            num_microbatches=case.grad_accum,
            seq_length=case.seq_len,
            micro_batch_size=case.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        return said

    return step


def _forward(case: Case, given: Any, model: Any, *, ends_here: bool) -> tuple[Any, Any]:
    """Load a batch and run the model's forward, as ``pretrain_gpt.py`` does; middle stages load none."""
    if not ends_here:
        return model(None, None, None, labels=None), partial(_loss, None)
    words, labels, weights, positions, mask = _batch(case, given)
    return model(words, positions, mask, labels=labels), partial(_loss, weights)


def _batch(case: Case, given: Any) -> tuple[Any, ...]:
    """Words, labels, weights, positions and the mask, brought to the GPU as the first tensor-parallel rank does."""
    shape, device = (case.micro_batch, case.seq_len), torch.cuda.current_device()
    words = torch.randint(0, case.model["vocab_size"], shape) if given is None else given
    mask = torch.ones((case.micro_batch, 1, case.seq_len, case.seq_len), dtype=torch.bool).triu(1)
    positions = torch.arange(case.seq_len)[None].repeat(case.micro_batch, 1)
    made = (words, words.roll(-1, 1), torch.ones(shape), positions, mask)
    return tuple(one.to(device) for one in made)


def _loss(weights: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the sum of the labelled tokens' losses, and their number."""
    weights = weights.view(-1).float()
    loss = torch.sum(output.view(-1).float() * weights)
    return loss, weights.sum().clone().detach().to(torch.int), {"loss": loss.clone().detach().view(1)}


def _without_cuda() -> None:
    """Let Megatron-Core run on a CPU, to try this program: what it asks of CUDA goes there."""

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            if "cuda" in str(given.get("device", "")):
                given["device"] = "cpu"
            if function is torch.Tensor.cuda:
                return args[0]
            if function is torch.Tensor.type and len(args) == 1:  # by which the optimizers tell dtypes
                return function(*args).replace("torch.", "torch.cuda.")
            return function(*args, **given)

    class Tracker:
        def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    OnCpu().__enter__()  # for the whole process
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch._dynamo.config.disable = True
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = Tracker  # type: ignore[attr-defined]
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = lambda _, __, tokens_per_expert=None: tokens_per_expert
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda *_: None
    random._fork_rng = contextlib.nullcontext
