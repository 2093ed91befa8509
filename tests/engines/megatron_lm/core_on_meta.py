"""The real Megatron-Core on the meta device: rank 0 of fake ranks runs one micro batch, and what it allocates is recorded.

``python -m tests.engines.megatron_lm.core_on_meta`` prints real and described events side by side for every case.

Kernels that only a GPU has are stood in for by functions that allocate what the kernel does: the norm (Apex's or torch's fused
one), and SwiGLU, which Megatron compiles. All else is Megatron's own code and torch's own autograd.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.engines.megatron_lm.mixtures_on_meta import balance
from zeroplan.engines.megatron.chunk import ChunkLayers, ChunkTape, chunk_tape
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.models.megatron import MegatronModel
from zeroplan.tape.expanded import ExpandedTape, Mark, Op

#: Events: A for an allocation, F for a free, with bytes.
Event = tuple[str, int]


@dataclass(frozen=True)
class Run:
    """One micro batch of a small model on one of `tp` ranks; `pp_rank` of two pipeline stages, or None for one."""

    tp: int = 1
    sp: bool = False
    micro_batch: int = 2
    seq: int = 128
    llama: bool = True
    recompute: str = ""
    pp_rank: int | None = None
    ep: int = 1
    etp: int = 1
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def passes(self) -> int:
        """Micro batches that are run: with experts two, since dispatchers hold tensors until the next one."""
        return 2 if "num_experts" in dict(self.more) else 1

    @property
    def model(self) -> MegatronModel:
        """Its arguments: Llama's form with grouped queries, or GPT's without."""
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return MegatronModel.of(
            {
                "num_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 8,
                "num_query_groups": 4 if self.llama else 8,
                "ffn_hidden_size": 512,
                "vocab_size": 1024,
                "max_position_embeddings": self.seq,
                "position_embedding_type": "rope" if self.llama else "learned_absolute",
                "swiglu": self.llama,
                "normalization": "RMSNorm" if self.llama else "LayerNorm",
                "add_bias_linear": False,
                "untie_embeddings_and_output_weights": True,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "transformer_impl": "local",
                "masked_softmax_fusion": False,
                "gradient_accumulation_fusion": False,
                **({"recompute_granularity": "selective"} if self.recompute == "selective" else {}),
                **(full if self.recompute == "full" else {}),
                **dict(self.more),
            }
        )

    @property
    def part(self) -> ChunkLayers:
        """The layers of its stage."""
        if self.pp_rank is None:
            return ChunkLayers(tuple(range(4)), True, True)
        first = 2 * self.pp_rank
        return ChunkLayers((first, first + 1), self.pp_rank == 0, self.pp_rank == 1)

    def described(self) -> ChunkTape:
        """Return the tape that the engine writes."""
        shapes = Shapes(
            model=self.model,
            micro_batch=self.micro_batch,
            seq=self.seq,
            tp=self.tp,
            sequence=self.sp,
            flash=False,
            ep=self.ep,
            etp=self.etp,
        )
        return chunk_tape(shapes, self.part)

    def real(self) -> list[Event]:
        """Return what Megatron-Core allocates and frees in the forward and the backward."""
        with _fake_ranks(self):
            return _record(self, _model(self))


#: Below this a tensor is a mask, an index or a number of a loss, which the description has too but a stand-in may not.
LEAST = 5000


def described_events(chunk: ChunkTape) -> list[Event]:
    """Return the allocations and frees of a chunk, scalars and small vectors left out. What is sent goes with the forward."""
    tape: ExpandedTape = chunk.tape
    sizes: dict[int, int] = {}
    found: list[Event] = []
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC:
            sizes[arg] = aux
        if op == Op.MARK and arg == Mark.BACKWARD_BEGIN and chunk.output >= 0:
            found.append(("F", sizes[chunk.output]))
        if op in (Op.ALLOC, Op.FREE) and sizes.get(arg, 0) >= LEAST:
            found.append(("A" if op == Op.ALLOC else "F", sizes[arg]))
    return found


def peak(events: list[Event]) -> int:
    """Return the most bytes that are there at once."""
    now = most = 0
    for what, size in events:
        now += size if what == "A" else -size
        most = max(most, now)
    return most


@contextlib.contextmanager
def _fake_ranks(run: Run) -> Iterator[None]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stages = 1 if run.pp_rank is None else 2
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    rank = 0 if run.pp_rank is None else run.pp_rank * run.tp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.tp * stages * run.ep * run.etp)
    from megatron.core import parallel_state

    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=run.tp,
            pipeline_model_parallel_size=stages,
            expert_model_parallel_size=run.ep,
            expert_tensor_parallel_size=run.etp,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        dist.destroy_process_group()
        torch.cuda.current_device = current


class _Tracker:
    """Random states stay as they are: on the meta device nothing is drawn."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _stand_ins() -> Any:
    """Return the class of a norm with a fused kernel's tensors, and put stand-ins for compiled functions in place."""
    import torch
    from torch import nn

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            out = torch.empty_like(x)
            rows = x.numel() // x.shape[-1]
            stats = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 if bias is None else 2)]
            ctx.save_for_backward(x, *stats)
            ctx.weight, ctx.biased = weight.shape, bias is not None
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x = ctx.saved_tensors[0]
            made = torch.empty_like(x)
            weights = [torch.empty(ctx.weight, dtype=x.dtype, device=x.device) for _ in range(1 + ctx.biased)]
            return made, weights[0], weights[1] if ctx.biased else None

    class Norm(nn.Module):
        def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
            super().__init__()
            made = torch.empty(hidden_size, dtype=torch.bfloat16, device="meta")
            self.weight = nn.Parameter(made)
            self.bias = nn.Parameter(torch.empty_like(made)) if config.normalization == "LayerNorm" else None

        def forward(self, x: Any) -> Any:
            return Kernel.apply(x, self.weight, self.bias)

    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.tensor_parallel import random

    fused_bias_swiglu.swiglu = lambda y: y.new_empty((*y.shape[:-1], y.shape[-1] // 2))
    fused_bias_swiglu.swiglu_back = lambda g, y: torch.empty_like(y)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = _Tracker  # type: ignore[attr-defined]
    random._get_all_rng_states = lambda: ()
    random._set_all_rng_states = lambda *_: None
    random._fork_rng = contextlib.nullcontext
    return Norm


def _latent_attention() -> None:
    """Let Megatron's own attention take other channels of values than of keys, as TransformerEngine's does.

    Latent attention's projections are then Megatron's own code, too; 0.16.1 runs them with TransformerEngine alone.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(self, *given: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
            super().__init__(*given, **named)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    multi_latent_attention.HAVE_TE = False
    LocalSpecProvider.core_attention = lambda self: Attention  # type: ignore[method-assign]


def _model(run: Run) -> Any:
    import torch

    from benchmarks.megatron.core import gpt_model, transformer_config, use_norm

    use_norm(_stand_ins())
    if run.model.num_experts:
        balance()
    if run.model.multi_latent_attention:
        _latent_attention()
    config = transformer_config(
        run.model,
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=1 if run.pp_rank is None else 2,
        sequence_parallel=run.sp,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.etp,
        perform_initialization=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=run.model.swiglu,
    )
    model = gpt_model(run.model, config, run.seq, embeds=run.part.embeds, ends=run.part.ends)
    return model.to(device="meta", dtype=torch.bfloat16)


def _record(run: Run, model: Any) -> list[Event]:
    import torch

    from zeroplan.trace.recorder import StorageRecorder

    batch, seq, hidden = run.micro_batch, run.seq, run.model.hidden_size
    rows = seq // run.tp if run.sp else seq
    outside = [torch.empty(rows, batch, hidden, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    recorder = StorageRecorder([*model.parameters(), *model.buffers(), *outside])
    accumulators = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]
    for parameter, accumulator in zip(model.parameters(), accumulators, strict=True):

        def forget(*_: Any, parameter: Any = parameter) -> None:
            parameter.grad = None  # as the hook of Megatron's DDP does, once it is added to the buffer

        accumulator.register_hook(forget)
    if not run.part.embeds:
        received = outside[0].requires_grad_()
        model.set_input_tensor(received)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with recorder:
            for _ in range(run.passes):
                _pass(run, model, recorder, outside[1])
    finally:
        if collecting:
            gc.enable()
    found: list[Event] = []
    for op, arg in zip(recorder.out.op, recorder.out.arg, strict=True):
        if op in (Op.ALLOC, Op.FREE):
            size = recorder.out.allocs[arg].size
            if isinstance(size, int) and size >= LEAST:
                found.append(("A" if op == Op.ALLOC else "F", size))
    return found


def _pass(run: Run, model: Any, recorder: Any, arriving: Any) -> None:
    """Run a micro batch forward and backward."""
    import torch

    recorder.mark(Mark.FORWARD_BEGIN)
    out = _forward(run, model)
    recorder.mark(Mark.FORWARD_END)
    recorder.mark(Mark.BACKWARD_BEGIN)
    gradient = torch.ones_like(out) if run.part.ends else arriving
    if not run.part.ends:
        out.data = torch.empty((1,), device="meta", dtype=out.dtype)  # deallocate_output_tensor
    torch.autograd.Variable._execution_engine.run_backward(
        (out,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    recorder.mark(Mark.BACKWARD_END)


def _forward(run: Run, model: Any) -> Any:
    """Run a batch as ``pretrain_gpt.py`` does, with the first rank's tensors; the batch goes when this returns."""
    import torch

    def empty(*shape: int, dtype: Any = torch.int64) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch, seq = run.micro_batch, run.seq
    words, labels, weights, positions = (empty(batch, seq, dtype=dtype) for dtype in (None, None, torch.float32, None))
    mask = empty(batch, 1, seq, seq, dtype=torch.bool)
    out = model(words.long(), positions.long(), mask, labels=labels.long())
    if not run.part.ends:
        return out
    return torch.sum(out.view(-1).float() * weights.view(-1))


#: Enough experts that a probability of each token and expert is more than a small tensor.
MIXTURE = {
    "num_experts": 32,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 4,
    "moe_token_dispatcher_type": "alltoall",
}
SHARED = {**MIXTURE, "moe_shared_expert_intermediate_size": 256, "moe_layer_freq": [0, 1, 1, 1], "moe_router_dtype": "fp32"}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 8,
    "qk_layernorm": True,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "rope_type": "rope",
}
CASES = {
    "llama": Run(),
    "llama tp 2": Run(tp=2),
    "llama tp 2 sp": Run(tp=2, sp=True),
    "llama one sample tp 4": Run(tp=4, micro_batch=1),
    "gpt": Run(llama=False),
    "gpt tp 2 sp": Run(llama=False, tp=2, sp=True),
    "llama full": Run(tp=2, recompute="full"),
    "llama selective": Run(tp=2, recompute="selective"),
    "gpt selective sp": Run(llama=False, tp=2, sp=True, recompute="selective"),
    "first stage": Run(tp=2, pp_rank=0),
    "last stage sp": Run(tp=2, sp=True, pp_rank=1),
    "mixture": Run(more=tuple(MIXTURE.items())),
    "mixture ep 4": Run(ep=4, more=tuple(MIXTURE.items())),
    "mixture ep 2 tp 2 sp shared": Run(ep=2, tp=2, sp=True, micro_batch=4, more=tuple(SHARED.items())),
    "mixture etp 2": Run(ep=2, tp=2, sp=True, etp=2, micro_batch=4, more=tuple(SHARED.items())),
    "mixture tp 2 etp 4": Run(ep=2, tp=2, sp=True, etp=4, micro_batch=4, more=tuple(SHARED.items())),
    "mixture etp 2 alone": Run(ep=2, etp=2, micro_batch=4, more=tuple(SHARED.items())),
    "mixture gpt fp32": Run(ep=8, llama=False, more=tuple(SHARED.items())),
    "mixture pre aux": Run(ep=8, more=(*MIXTURE.items(), ("moe_router_pre_softmax", True), ("moe_aux_loss_coeff", 0.01))),
    "mixture z": Run(ep=8, more=(*MIXTURE.items(), ("moe_z_loss_coeff", 0.001))),
    "mixture z fp32": Run(ep=8, more=(*SHARED.items(), ("moe_z_loss_coeff", 0.001), ("moe_aux_loss_coeff", 0.01))),
    "mixture drops": Run(ep=8, more=(*MIXTURE.items(), ("moe_expert_capacity_factor", 0.5))),
    "mixture drops by position": Run(
        ep=4, more=(*SHARED.items(), ("moe_expert_capacity_factor", 1.5), ("moe_token_drop_policy", "position"))
    ),
    "mixture has room": Run(ep=8, more=(*MIXTURE.items(), ("moe_expert_capacity_factor", 16.0))),
    "mixture sigmoid": Run(ep=32, more=(*SHARED.items(), *SIGMOID.items())),
    "latent": Run(more=tuple(LATENT.items())),
    "latent without q_lora": Run(more=(*LATENT.items(), ("q_lora_rank", 0))),
    "latent full": Run(recompute="full", more=tuple(LATENT.items())),
    "latent mixture": Run(ep=8, more=(*LATENT.items(), *SHARED.items(), *SIGMOID.items())),
    "llama mlp": Run(tp=2, recompute="selective", more=(("recompute_modules", ["core_attn", "mlp"]),)),
    "gathered": Run(more=(*MIXTURE.items(), ("moe_token_dispatcher_type", "allgather"))),
    "gathered ep 4": Run(ep=4, more=(*MIXTURE.items(), ("moe_token_dispatcher_type", "allgather"))),
    "gathered tp 2 etp 2": Run(
        ep=2, tp=2, sp=True, etp=2, micro_batch=4, more=(*SHARED.items(), ("moe_token_dispatcher_type", "allgather"))
    ),
    "gathered tp 4 etp 2": Run(
        ep=2, tp=4, sp=True, etp=2, micro_batch=4, more=(*SHARED.items(), ("moe_token_dispatcher_type", "allgather"))
    ),
    "mixture moe": Run(ep=4, recompute="selective", more=(*MIXTURE.items(), ("recompute_modules", ["moe"]))),
    "mixture shared": Run(
        ep=4, recompute="selective", more=(*SHARED.items(), ("recompute_modules", ["shared_experts", "mlp"]))
    ),
    "mixture full": Run(ep=4, recompute="full", more=tuple(MIXTURE.items())),
}


def kept_events(tape: ChunkTape) -> list[Event]:
    """Return the allocations of the buffers that the description has apart, since they live on."""
    return [("A", size) for size in tape.kept.values() if size >= LEAST]


def main() -> None:
    """Print both sides of every case, and where they differ."""
    import difflib

    for name, run in CASES.items():
        real, described = run.real(), run.described()
        own = described_events(described)
        kept = sum(size for _, size in kept_events(described))
        print(f"{name:24} real {peak(real):>10,}  described {peak(own) + kept:>10,}  events {len(real)} {len(own)}")
        for tag, a, b, c, d in difflib.SequenceMatcher(None, real, own, autojunk=False).get_opcodes():
            if tag != "equal":
                print("   ", tag, a, real[a:b][:6], own[c:d][:6])


if __name__ == "__main__":
    main()
