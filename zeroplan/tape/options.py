"""Options that a tape depends on besides the model, and how a Workload sets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from zeroplan.core.float8 import Bf16Layers, Float8Recipe
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.preferences import PairLoss
from zeroplan.core.quantization import Products
from zeroplan.core.sparse_attention import SparseAttention, SparseTables
from zeroplan.core.workload import Attention, Compilation, Lora, Media, Precision, QuantizedBase, TiledLoss, TiledMlp, Workload


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
class TracedMesh:
    """How ranks share the model that is traced on one of them.

    `tp` ranks share each matrix, and with `sp` the tokens between matrices; `cp` ranks share each sample's tokens by rings,
    `ulysses` ranks by exchanging heads, and `ep` ranks the experts, those of `tp` among them with `across`, or by DeepSpeed's
    layers with `auto_ep` (:mod:`zeroplan.trace.auto_ep`). `whole_vocabulary`: tensor-parallel ranks gather the logits.
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    across: bool = False
    auto_ep: bool = False
    ulysses: int = 1
    whole_vocabulary: bool = False

    @classmethod
    def of(cls, layout: ParallelLayout | None) -> TracedMesh:
        """Return how the ranks of a layout share the model; None for data parallelism alone."""
        if layout is None:
            return cls()
        across, whole = layout.experts_across, layout.whole_vocabulary
        return cls(layout.tp, layout.sp, layout.cp, layout.ep, across, layout.auto_ep, layout.ulysses, whole)

    @property
    def key(self) -> Iterator[str]:
        """Short names of the degrees above 1."""
        if self.tp > 1:
            yield f"tp{self.tp}" + ("+sp" if self.sp else "") + ("+whole" if self.whole_vocabulary else "")
        if self.cp > 1:
            yield f"cp{self.cp}"
        if self.ep > 1 or self.auto_ep:
            yield ("auto" if self.auto_ep else "") + f"ep{self.ep}" + ("+across" if self.across else "")
        if self.ulysses > 1:
            yield f"ulysses{self.ulysses}"


@dataclass(frozen=True, slots=True)
class TracedBase:
    """How linear layers multiply by a quantised weight (:mod:`zeroplan.trace.quantized`), with `half_adapters` the adapters
    beside them in 16 bits, with `linear_experts` experts as layers of their own.
    """

    products: Products
    half_adapters: bool = False
    linear_experts: bool = False

    @property
    def key(self) -> str:
        """A short name."""
        return self.products + ("-half" if self.half_adapters else "") + ("-experts" if self.linear_experts else "")


@dataclass(frozen=True, slots=True)
class TracedTiles:
    """Tiles in which MLPs run (:mod:`zeroplan.trace.tiled`), and head and loss (:mod:`zeroplan.trace.tiled_loss`); 0: none."""

    mlp: int = 0
    loss: int = 0


@dataclass(frozen=True, slots=True)
class TracedGraphs:
    """Blocks are compiled (:mod:`zeroplan.trace.compiled`); with `between` the rest is, too. `at`: the only sequences, tokens
    and LoRA rank that the tape holds for, since compiled graphs are made for one shape; None for any. `float8`: their linear
    layers multiply in 8-bit floats as the included runtime's do, but for those of `bf16_layers`.
    """

    between: bool = False
    at: tuple[int, int, int] | None = None
    float8: Float8Recipe | None = None
    bf16_layers: Bf16Layers | None = None


@dataclass(frozen=True, slots=True)
class TracedPairs:
    """A micro batch holds pairs, and the loss is computed over all their logits (:mod:`zeroplan.trace.pair_loss`), in fp32 with
    `wide_logits`.
    """

    loss: PairLoss
    wide_logits: bool = False


@runtime_checkable
class TracedTechnique(Protocol):
    """What a technique of one file does to the model that is traced."""

    @property
    def key(self) -> str:
        """A short name, unique for what it does."""


@runtime_checkable
class AdaptingTechnique(Protocol):
    """A traced technique that changes the adapters."""

    def adapted(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of peft's ``LoraConfig`` with the technique's own."""


@runtime_checkable
class KernelTechnique(Protocol):
    """A traced technique that runs other kernels than the model's own."""

    def running(self, model: Any) -> AbstractContextManager[None]:
        """Let a built model run with them while the context lasts."""


@runtime_checkable
class FreezingTechnique(Protocol):
    """A traced technique that freezes parts of the model."""

    @property
    def by_block(self) -> bool:
        """Whether it freezes single blocks, so that those of one stack are not alike."""

    def freeze(self, model: Any, *, autocast: bool = False) -> None:
        """Freeze them, under `autocast` over a 16-bit model or not."""

    def checkpoint(self, model: Any) -> None:
        """Change which blocks of a model with checkpoints have them."""


@runtime_checkable
class LossTechnique(Protocol):
    """A traced technique that makes the loss of what a model returns, in place of the model."""

    def loss(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Run a model on the keyword arguments of its forward, and return the loss."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """One way to run a model.

    `zero3`: as ZeRO stage 3 changes the graph (identity nodes around modules, its own linear function). `lora` None means no
    LoRA, empty all linear layers of the blocks, else names of the layers; `lora_dropout`: adapters drop some of their input.
    `every` is k where only each k-th block is checkpointed: blocks k, 2k, … counted from 1. `grouped`: so many blocks are
    recomputed together, from one block on to before another; others are not recomputed. `halves`: the backward makes the
    gradients of activations first, and those of weights behind all of them (:mod:`zeroplan.trace.run`). `evaluation`: the
    forward alone, in evaluation mode and without gradients. `target_len` is the length of an encoder-decoder's targets,
    whatever the sources'; 0 where it is theirs. `fp8`: how linear layers multiply in 8-bit floats
    (:mod:`zeroplan.trace.float8`). `sparse`: block-sparse attention, whatever `attn` says
    (:mod:`zeroplan.trace.sparse_attention`). `techniques` are those of files of their own (:mod:`zeroplan.techniques`).
    """

    attn: Attention = Attention.SDPA
    checkpointing: Checkpointing = Checkpointing.NONE
    arithmetic: Arithmetic = Arithmetic.HALF
    zero3: bool = False
    lora: tuple[str, ...] | None = None
    lora_dropout: bool = False
    every: int = 1
    grouped: tuple[int, int, int] | None = None
    halves: bool = False
    evaluation: bool = False
    target_len: int = 0
    mesh: TracedMesh = TracedMesh()
    base: TracedBase | None = None
    media: Media | None = None
    fp8: Float8Recipe | None = None
    sparse: SparseTables | None = None
    tiles: TracedTiles = TracedTiles()
    graphs: TracedGraphs | None = None
    pairs: TracedPairs | None = None
    techniques: tuple[TracedTechnique, ...] = ()

    @property
    def at(self) -> tuple[int, int, int] | None:
        """The only sequences, tokens and LoRA rank that the tape holds for; None for any."""
        return None if self.graphs is None else self.graphs.at

    @property
    def by_block(self) -> bool:
        """Whether single blocks are frozen, so that few of a stack don't tell of the others."""
        return any(isinstance(one, FreezingTechnique) and one.by_block for one in self.techniques)

    @property
    def ends(self) -> tuple[int, int]:
        """How many of the first and of the last blocks are of another kind than those between them."""
        kept = None if self.graphs is None else self.graphs.bf16_layers
        return (0, 0) if kept is None else (kept.at_start, kept.at_end)

    def on_ranks(self, **degrees: Any) -> TraceOptions:
        """Return the options on other degrees of parallelism, by fields of :class:`TracedMesh`."""
        return replace(self, mesh=replace(self.mesh, **degrees))

    @property
    def split_tokens(self) -> int:
        """Ranks that share the tokens of a sample. A tape's sequence length is what one of them has."""
        return self.mesh.cp * self.mesh.ulysses * (self.mesh.tp if self.mesh.sp else 1)

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
        if self.base is not None:
            parts.append(self.base.key)
        if self.lora is not None:
            parts.append("lora" + "".join(f"+{name}" for name in sorted(self.lora)))
        if self.lora_dropout:
            parts.append("dropout")
        parts += self.mesh.key
        if self.media is not None:
            parts.append(self.media.key)
        if self.evaluation:
            parts.append("eval")
        if self.target_len:
            parts.append(f"target{self.target_len}")
        if self.fp8 is not None:
            parts.append(f"fp8-{self.fp8}")
        if self.sparse is not None:
            parts.append(self.sparse.key)
        parts += [f"{name}{tiles}" for name, tiles in (("mlp", self.tiles.mlp), ("loss", self.tiles.loss)) if tiles]
        if self.graphs is not None:
            parts.append("compile" + ("-between" if self.graphs.between else ""))
            parts += [] if self.graphs.at is None else ["at" + "x".join(map(str, self.graphs.at))]
            parts += [] if self.graphs.float8 is None else [f"float8-{self.graphs.float8}"]
            kept = self.graphs.bf16_layers
            parts += [] if kept is None else [f"bf16-{kept.at_start}-{kept.at_end}"]
        if self.pairs is not None:
            parts.append(f"pairs-{self.pairs.loss}" + ("-fp32" if self.pairs.wide_logits else ""))
        if self.halves:
            parts.append("halves")
        if self.grouped is not None:
            parts.append("groups" + "-".join(map(str, self.grouped)))
        parts += [one.key for one in self.techniques]
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
    batch, objective, compiled = workload.batch, workload.objective, workload.compile
    mlp, loss = workload.technique(TiledMlp), workload.technique(TiledLoss)
    half_adapters = workload.adapter_bytes == 2 and arithmetic is not Arithmetic.HALF
    float8, at = workload.technique(Float8Recipe), (batch.rows, batch.seq_len or 1, workload.lora_rank or 0)
    in_bf16 = workload.technique(Bf16Layers)
    return TraceOptions(
        attn=workload.numerics.attn,
        checkpointing=checkpointing,
        arithmetic=arithmetic,
        zero3=zero3,
        lora=None if lora is None else lora.targets,
        lora_dropout=lora is not None and lora.dropout,
        every=policy.every if policy is not None else 1,
        target_len=batch.target_len or 0,
        mesh=TracedMesh.of(layout),
        base=None if base is None else TracedBase(base.kept.products, half_adapters, base.linear_experts),
        media=batch.media,
        fp8=float8 if compiled is None else None,
        sparse=None if sparse is None else sparse.tables,
        tiles=TracedTiles(0 if mlp is None else mlp.tiles, 0 if loss is None else loss.tiles),
        graphs=None if compiled is None else TracedGraphs(compiled is Compilation.MODEL, at, float8, in_bf16),
        pairs=None if objective.pair_loss is None else TracedPairs(objective.pair_loss, objective.wide_logits),
        techniques=tuple(one for one in workload.techniques if isinstance(one, TracedTechnique)),
    )


def evaluation_options(workload: Workload, layout: ParallelLayout | None = None) -> TraceOptions:
    """Return the options of an evaluation's forward, which keeps nothing for a backward: whatever the training recomputes or
    drops, and whatever hooks an engine has on its graph, it runs alike. It is the eager one of a compiled model, too.
    """
    options = options_for(workload, layout=layout)
    plain = replace(options, checkpointing=Checkpointing.NONE, every=1, lora_dropout=False, graphs=None)
    return replace(plain, evaluation=True, pairs=None)
