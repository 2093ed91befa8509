"""Options that a tape depends on besides the model, and how a Workload sets them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.preferences import PairLoss
from zeroplan.core.quantization import Products
from zeroplan.core.sparse_attention import SparseAttention, SparseTables
from zeroplan.core.workload import Attention, Compilation, Lora, Precision, QuantizedBase, TiledLoss, TiledMlp, Workload


class Arithmetic(StrEnum):
    """Dtypes of a trace: fp16 and bf16 allocate alike.

    AUTOCAST is over an fp32 model, HALF_AUTOCAST over a 16-bit one, whose adapters are fp32.
    """

    @property
    def half_model(self) -> bool:
        """Whether the model itself is in 16 bits."""
        return self in (Arithmetic.HALF, Arithmetic.HALF_AUTOCAST)

    @property
    def autocasts(self) -> bool:
        """Whether the model runs under autocast."""
        return self in (Arithmetic.AUTOCAST, Arithmetic.HALF_AUTOCAST)

    HALF = "half"
    FP32 = "fp32"
    AUTOCAST = "autocast"
    HALF_AUTOCAST = "half-autocast"


class Checkpointing(StrEnum):
    """The activations that the backward recomputes, and the way of torch that does it.

    IN_GRAPH recomputes within the backward graphs of compiled blocks (:mod:`zeroplan.trace.compiled`).
    SELECTIVE keeps the outputs of matrix products and attention within blocks, ALTERNATE those of every second product
    (:mod:`zeroplan.trace.selective`).
    """

    NONE = "none"
    NON_REENTRANT = "ckpt"
    REENTRANT = "ckpt-reentrant"
    IN_GRAPH = "ckpt-graph"
    SELECTIVE = "ckpt-selective"
    ALTERNATE = "ckpt-op"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """One way to run a model.

    `zero3`: as ZeRO stage 3 changes the graph (identity nodes around modules, its own linear function). `lora` None means no
    LoRA, empty all linear layers of the blocks, else names of the layers. `every` is k where only each k-th block is
    checkpointed: blocks k, 2k, … counted from 1. `tp` ranks share each matrix, and with `sp` the tokens between matrices; `cp`
    ranks share each sample's tokens by rings, `ulysses` ranks by exchanging heads, and `ep` ranks the experts,
    those of `tp` among them with `across`, or by DeepSpeed's layers with `auto_ep` (:mod:`zeroplan.trace.auto_ep`).
    `whole_vocabulary`: tensor-parallel ranks gather the logits. `lora_dropout`: adapters drop some of their input. `quantized`:
    how linear layers multiply by a quantised weight (:mod:`zeroplan.trace.quantized`), with `half_adapters` the adapters
    beside them in 16 bits, with `linear_experts` experts as layers of their own. `images` of `image_size` pixels a side come
    with each sample. `evaluation`: the forward alone, in
    evaluation mode and without gradients. `target_len` is the length of an encoder-decoder's targets, whatever the sources'; 0
    where it is theirs. `fp8`: how linear layers multiply in 8-bit floats (:mod:`zeroplan.trace.float8`). `tiled_mlp`: tiles
    in which MLPs run (:mod:`zeroplan.trace.tiled`), and `tiled_loss` head and loss (:mod:`zeroplan.trace.tiled_loss`); 0 for
    none. `compile`: blocks are compiled (:mod:`zeroplan.trace.compiled`); with `between` the rest is, too. `at`: the only
    sequences, tokens and LoRA rank that the tape holds for, since compiled graphs are made for one shape; None for any.
    `sparse`: block-sparse attention, whatever `attn` says (:mod:`zeroplan.trace.sparse_attention`). With a `pair_loss` a micro
    batch holds pairs, and the loss is computed over all their logits (:mod:`zeroplan.trace.pair_loss`), in fp32 with
    `wide_logits`. `halves`: the backward makes the gradients of activations first, and those of weights behind all of them
    (:mod:`zeroplan.trace.halves`). `grouped`: so many blocks are recomputed together, from one block on to before another;
    others are not recomputed.
    """

    attn: Attention = Attention.SDPA
    checkpointing: Checkpointing = Checkpointing.NONE
    arithmetic: Arithmetic = Arithmetic.HALF
    zero3: bool = False
    lora: tuple[str, ...] | None = None
    every: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    across: bool = False
    auto_ep: bool = False
    ulysses: int = 1
    whole_vocabulary: bool = False
    quantized: Products | None = None
    lora_dropout: bool = False
    half_adapters: bool = False
    linear_experts: bool = False
    images: int = 0
    image_size: int | None = None
    evaluation: bool = False
    target_len: int = 0
    fp8: Float8Recipe | None = None
    sparse: SparseTables | None = None
    tiled_mlp: int = 0
    tiled_loss: int = 0
    compile: bool = False
    between: bool = False
    at: tuple[int, int, int] | None = None
    pair_loss: PairLoss | None = None
    wide_logits: bool = False
    halves: bool = False
    grouped: tuple[int, int, int] | None = None

    @property
    def split_tokens(self) -> int:
        """Ranks that share the tokens of a sample. A tape's sequence length is what one of them has."""
        return self.cp * self.ulysses * (self.tp if self.sp else 1)

    @property
    def reentrant(self) -> TraceOptions:
        """The options with checkpoints that are reentrant, where whole blocks are recomputed."""
        plain = self.checkpointing is Checkpointing.NON_REENTRANT
        return replace(self, checkpointing=Checkpointing.REENTRANT) if plain else self

    @property
    def key(self) -> str:
        """A short name, unique for the options."""
        checkpointing = self.checkpointing.value + (f"-every{self.every}" if self.every > 1 else "")
        parts = [self.attn.value, checkpointing, self.arithmetic.value]
        if self.zero3:
            parts.append("zero3")
        if self.quantized is not None:
            experts = "-experts" if self.linear_experts else ""
            parts.append(self.quantized + ("-half" if self.half_adapters else "") + experts)
        if self.lora is not None:
            parts.append("lora" + "".join(f"+{name}" for name in sorted(self.lora)))
        if self.lora_dropout:
            parts.append("dropout")
        if self.tp > 1:
            parts.append(f"tp{self.tp}" + ("+sp" if self.sp else "") + ("+whole" if self.whole_vocabulary else ""))
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        if self.ep > 1 or self.auto_ep:
            parts.append(("auto" if self.auto_ep else "") + f"ep{self.ep}" + ("+across" if self.across else ""))
        if self.ulysses > 1:
            parts.append(f"ulysses{self.ulysses}")
        if self.images:
            parts.append(f"images{self.images}" + (f"x{self.image_size}" if self.image_size else ""))
        if self.evaluation:
            parts.append("eval")
        if self.target_len:
            parts.append(f"target{self.target_len}")
        if self.fp8 is not None:
            parts.append(f"fp8-{self.fp8}")
        if self.sparse is not None:
            parts.append(self.sparse.key)
        if self.tiled_mlp:
            parts.append(f"mlp{self.tiled_mlp}")
        if self.tiled_loss:
            parts.append(f"loss{self.tiled_loss}")
        if self.compile:
            parts.append("compile" + ("-between" if self.between else ""))
        if self.at is not None:
            parts.append("at" + "x".join(map(str, self.at)))
        if self.pair_loss is not None:
            parts.append(f"pairs-{self.pair_loss}" + ("-fp32" if self.wide_logits else ""))
        if self.halves:
            parts.append("halves")
        if self.grouped is not None:
            parts.append("groups" + "-".join(map(str, self.grouped)))
        return "_".join(parts)


def options_for(workload: Workload, *, zero3: bool = False, layout: ParallelLayout | None = None) -> TraceOptions:
    """Return the options that a workload runs with on the ranks of `layout`; `zero3` is for DeepSpeed's stage 3."""
    if workload.numerics.precision is Precision.AUTOCAST:
        arithmetic = Arithmetic.AUTOCAST
    elif workload.numerics.precision is Precision.HALF_AUTOCAST:
        arithmetic = Arithmetic.HALF_AUTOCAST
    elif workload.numerics.param_bytes == 4:
        arithmetic = Arithmetic.FP32
    else:
        arithmetic = Arithmetic.HALF
    policy = workload.recomputation
    checkpointing = Checkpointing.NONE
    if policy is not None:
        kept = Checkpointing.ALTERNATE if policy.alternate else Checkpointing.SELECTIVE
        whole = Checkpointing.IN_GRAPH if workload.compile is Compilation.CHECKPOINTED else Checkpointing.NON_REENTRANT
        checkpointing = kept if policy.selective else whole
    lora, base, sparse = workload.technique(Lora), workload.technique(QuantizedBase), workload.technique(SparseAttention)
    tiled_mlp, tiled_loss = workload.technique(TiledMlp), workload.technique(TiledLoss)
    return TraceOptions(
        attn=workload.numerics.attn,
        checkpointing=checkpointing,
        arithmetic=arithmetic,
        zero3=zero3,
        lora=None if lora is None else lora.targets,
        every=policy.every if policy is not None else 1,
        tp=layout.tp if layout is not None else 1,
        sp=layout is not None and layout.sp,
        cp=layout.cp if layout is not None else 1,
        ep=layout.ep if layout is not None else 1,
        across=layout is not None and layout.experts_across,
        auto_ep=layout is not None and layout.auto_ep,
        ulysses=layout.ulysses if layout is not None else 1,
        whole_vocabulary=layout is not None and layout.whole_vocabulary,
        quantized=None if base is None else base.kept.products,
        lora_dropout=lora is not None and lora.dropout,
        half_adapters=workload.adapter_bytes == 2 and arithmetic is not Arithmetic.HALF,
        linear_experts=base is not None and base.linear_experts,
        images=workload.batch.images,
        image_size=workload.batch.image_size,
        target_len=workload.batch.target_len or 0,
        fp8=workload.technique(Float8Recipe),
        sparse=None if sparse is None else sparse.tables,
        tiled_mlp=0 if tiled_mlp is None else tiled_mlp.tiles,
        tiled_loss=0 if tiled_loss is None else tiled_loss.tiles,
        compile=workload.compile is not None,
        between=workload.compile is Compilation.MODEL,
        at=None if workload.compile is None else (workload.batch.rows, workload.batch.seq_len or 1, workload.lora_rank or 0),
        pair_loss=workload.objective.pair_loss,
        wide_logits=workload.objective.wide_logits,
    )


def evaluation_options(workload: Workload, layout: ParallelLayout | None = None) -> TraceOptions:
    """Return the options of an evaluation's forward, which keeps nothing for a backward: whatever the training recomputes or
    drops, and whatever hooks an engine has on its graph, it runs alike. It is the eager one of a compiled model, too.
    """
    options = options_for(workload, layout=layout)
    plain = replace(
        options, checkpointing=Checkpointing.NONE, every=1, lora_dropout=False, compile=False, between=False, at=None
    )
    return replace(plain, evaluation=True, pair_loss=None)
