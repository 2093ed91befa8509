"""The workload: everything that decides activations, dtypes and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizer_row import DEFAULT_OPTIMIZER
from zeroplan.core.preferences import PairLoss
from zeroplan.core.quantization import Base

_Named = TypeVar("_Named", bound=StrEnum)
_Technique = TypeVar("_Technique")


class DType(StrEnum):
    """Element types by the names users write; torch's names are understood as well."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        return _named(cls, value, _TORCH_DTYPES)

    @property
    def bytes(self) -> int:
        """Bytes an element."""
        return 4 if self is DType.FP32 else 2


class Precision(StrEnum):
    """Division of dtypes between model, masters and arithmetic."""

    FP32 = "fp32"  # everything fp32
    MIXED = "mixed"  # 16-bit model, fp32 masters
    AUTOCAST = "autocast"  # fp32 model, 16-bit arithmetic
    HALF_AUTOCAST = "half-autocast"  # 16-bit model and fp32 adapters, 16-bit arithmetic by autocast
    PURE = "pure"  # 16-bit model, masters, gradients and states


class Attention(StrEnum):
    """The attention implementation; transformers' names for ``attn_implementation`` are understood as well."""

    SDPA = "sdpa"
    FLASH = "flash"
    EAGER = "eager"

    @classmethod
    def _missing_(cls, value: object) -> Attention | None:
        return _named(cls, value, _ATTN_IMPLEMENTATIONS)


_TORCH_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_ATTN_IMPLEMENTATIONS = dict.fromkeys(("flash_attention_2", "flash_attn_2", "flash_attn", "flash_attention", "fa2"), "flash")


def _named(kind: type[_Named], value: object, names: Mapping[str, str]) -> _Named | None:
    """Return the member that another program's name stands for."""
    own = names.get(str(value).strip().lower().removeprefix("torch.").replace("-", "_"))
    return None if own is None else kind(own)


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The part of the forward that gradient checkpointing recomputes: whole blocks, every k-th block, or all but the costly
    operators' outputs.

    torchtitan's ``activation_checkpoint`` calls the first two mode ``full`` and mode ``selective`` with option k. `every` is 1
    but for the second. `selective` means the third: outputs of matrix products and of attention are kept
    (``torch.utils.checkpoint.create_selective_checkpoint_contexts``); with `alternate` of every second product of a block
    alone, the first, the third and so on, which is torchtitan's mode ``selective`` with option ``op``.
    """

    every: int = 1
    selective: bool = False
    alternate: bool = False

    @classmethod
    def parse(cls, text: str, where: str = "--checkpoint-policy") -> CheckpointPolicy:
        """Read a policy from ``full``, ``selective``, ``op`` or ``every:K``. Raises BadInput: any other text."""
        name, _, number = text.strip().lower().partition(":")
        if name in ("full", "selective", "op") and not number:
            return cls(selective=name != "full", alternate=name == "op")
        if name == "every" and number.isascii() and number.isdigit() and 1 <= int(number) <= 10_000:
            return cls(int(number))
        raise BadInput(
            f"unknown policy {text[:60]!r}", where=where, remedy="use full, selective, op or every:K, such as every:2"
        )

    def __str__(self) -> str:
        if self.selective:
            return "op" if self.alternate else "selective"
        return f"every:{self.every}" if self.every > 1 else "full"


class OptimizerKind(StrEnum):
    """Ways in which an optimizer walks its tensors; the way decides its temporaries."""

    FUSED = "fused"  # one kernel, no temporaries
    FOREACH = "foreach"  # torch's multi-tensor loops
    LOOP = "loop"  # one tensor after another


class Reference(StrEnum):
    """The model that answers beside the trained one in each pass, without gradients."""

    MODEL = "model"  # a second, frozen model of the same size
    BASE = "base"  # the trained model without its adapters


class Compilation(StrEnum):
    """What ``torch.compile`` is called on."""

    BLOCKS = "blocks"  # each block by itself, within its checkpoint
    CHECKPOINTED = "checkpointed-blocks"  # each block with its checkpoint, as torchtitan does
    MODEL = "model"  # the model as a whole, as the HF Trainer does


@dataclass(frozen=True, slots=True)
class GradientCheckpointing:
    """Gradient checkpointing: the backward computes a part of the forward again.

    `reentrant` is the way in which blocks are checkpointed, as transformers before 5 did by default. `interval` layers of a
    pipeline stage are recomputed together (DeepSpeed's ``activation_checkpoint_interval``). `on_host`: checkpointed inputs
    wait on the host, as DeepSpeed's ``CheckpointHiddenStatesOffload`` lets them, or `by_function` of autograd, one a block.
    """

    policy: CheckpointPolicy = CheckpointPolicy()
    reentrant: bool = False
    interval: int = 1
    on_host: bool = False
    by_function: bool = False


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of a rank beside a frozen base. Without `targets` all linear layers of the blocks have one; with `dropout`
    adapters drop some of their input.
    """

    rank: int
    targets: tuple[str, ...] = ()
    dropout: bool = False


@dataclass(frozen=True, slots=True)
class QuantizedBase:
    """A frozen base whose linear layers are quantised.

    `kept` is how they are kept, `named_by` the flag or key that says so. `adapter_dtype` is that of adapters beside it; None
    for what the precision says, which is fp32 under autocast, as peft makes them. `whole` means that the base is stored in
    bytes or in buffers, which FSDP 2's units leave out. Before transformers 5 `linear_experts` were layers of their own,
    which bitsandbytes quantises, and `on_host` was where FSDP 1 found quantised weights.
    """

    kept: Base
    named_by: str = field(default="--quantize", compare=False)
    adapter_dtype: DType | None = None
    whole: bool = False
    linear_experts: bool = False
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """Head and loss are computed together, in tiles: by TRL (:mod:`zeroplan.tape.chunked_head`), or by the engine's own key.

    Attributes:
        tokens: of one tile of an engine whose own key it is; 0 for TRL's tiles.
    """

    tokens: int = 0


@dataclass(frozen=True, slots=True)
class TiledMlp:
    """MLPs run in so many tiles of tokens, as DeepSpeed's ``TiledMLP`` does."""

    tiles: int


@dataclass(frozen=True, slots=True)
class TiledLoss:
    """Head and loss run in so many tiles of tokens, as DeepSpeed's ``TiledFusedLogitsLoss`` does."""

    tiles: int


@dataclass(frozen=True, slots=True)
class Media:
    """What comes with each sample beside its text.

    `images` of `image_size` pixels a side, None for the size of the model's config; with `video_frames` each of them is a video
    of so many. One recording of `audio_seconds`; 0 for none.
    """

    images: int = 0
    image_size: int | None = None
    video_frames: int = 0
    audio_seconds: int = 0

    @property
    def key(self) -> str:
        """A short name for tapes."""
        said = {"images": self.images, "x": self.image_size, "f": self.video_frames, "audio": self.audio_seconds}
        return "".join(f"{name}{number}" for name, number in said.items() if number)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimizer step is fed on one rank, in samples and tokens.

    `seq_len` None means 2048, or the model's maximum if that is less. `target_len` is the length of an encoder-decoder's
    targets; None where it is `seq_len`, that of its sources. `lengths` are those of samples that a batch is padded to the
    longest of, cut at `seq_len`; empty where all have that length. `dynamic_padding`: each batch is padded to its longest
    sample, of which nothing but the most, `seq_len`, is known; `longest_first`: the first micro batch holds the longest of
    samples that differ in length, and no later one. `pairs` means that a sample is a chosen and a rejected one, which pass
    together. `media` come with each sample of a model that takes more than text. `labelled_share` of the tokens have a label,
    where the head sees those alone; None where it sees all.
    """

    micro_batch: int = 1
    seq_len: int | None = None
    grad_accum: int = 1
    target_len: int | None = None
    lengths: tuple[int, ...] = ()
    dynamic_padding: bool = False
    longest_first: bool = False
    pairs: bool = False
    media: Media | None = None
    labelled_share: float | None = None

    @property
    def rows(self) -> int:
        """Sequences of one pass."""
        return self.micro_batch * (2 if self.pairs else 1)


@dataclass(frozen=True, slots=True)
class Numerics:
    """Element types, and the optimizer and the attention that compute with them.

    `optimizer` is a row's name in :data:`zeroplan.core.optimizers.OPTIMIZERS`. `torch_adam`: it is a class of torch's where
    DeepSpeed would build one of its own. `decays`: a class of torch's adds its weight decay to the gradients, in tensors of
    their own. `whole_embedding_states` means that an 8-bit optimizer keeps the states of embeddings in fp32, which the HF
    Trainer asks of it. `local_steps` are the most that 0/1 Adam lets ranks step alone. `reduce_dtype` is that in which FSDP2
    reduces gradients (``MixedPrecisionPolicy``); None for fp32, and without a policy for the parameters' own.
    """

    dtype: DType = DType.BF16
    precision: Precision = Precision.MIXED
    optimizer: str = DEFAULT_OPTIMIZER
    optimizer_kind: OptimizerKind = OptimizerKind.FUSED
    torch_adam: bool = False
    decays: bool = False
    whole_embedding_states: bool = False
    local_steps: int = 0
    attn: Attention = Attention.SDPA
    reduce_dtype: DType | None = None

    @property
    def param_bytes(self) -> int:
        """Bytes of one model parameter."""
        return 4 if self.precision in (Precision.FP32, Precision.AUTOCAST) else self.dtype.bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of one master parameter."""
        return self.dtype.bytes if self.precision is Precision.PURE else 4


@dataclass(frozen=True, slots=True)
class Loop:
    """How the program makes the model, wraps it and loops over it.

    `from_scratch` means that weights are initialised and not read from pretrained ones, which pass through host memory. `moved`
    means that the model is made on the host and then moved to the GPU, where a tied weight is one from the beginning; made on
    the GPU, its second owner's goes when the tie is made. `set_to_none` is what ``zero_grad`` does: without it gradients stay
    between steps (torch's default before 2.0). `detached_loss` that the loop keeps the loss without its graph, as the HF
    Trainer does; `own_loop` that it is none of the Trainer's even so. `accelerate_units` means that accelerate applies
    ``fully_shard``: to the embedding, and to the final norm with the head, too. `one_unit` means that FSDP wraps the model as a
    whole, without units in it, and `mixed_units` that FSDP 1 wraps blocks with the adapters in them.
    """

    from_scratch: bool = False
    moved: bool = False
    set_to_none: bool = True
    detached_loss: bool = False
    own_loop: bool = False
    accelerate_units: bool = False
    one_unit: bool = False
    mixed_units: bool = False

    @property
    def in_trainer(self) -> bool:
        """Whether transformers' Trainer runs the loop: one that keeps losses without their graph, unless it is the script's."""
        return self.detached_loss and not self.own_loop


@dataclass(frozen=True, slots=True)
class Objective:
    """What a loss needs beyond the logits of one batch.

    `reference` answers beside the trained model. `kl_batch` means that a second batch of the same size passes through both
    without gradients, KTO's for its KL term; `pair_loss` that pairs meet in a loss over all their logits, which `wide_logits`
    says are fp32 there.
    """

    reference: Reference | None = None
    kl_batch: bool = False
    pair_loss: PairLoss | None = None
    wide_logits: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """One training job's computation on one rank, in parts.

    `techniques` holds a value of each technique that is on, in the order of their classes' names; one that is off is absent.
    """

    batch: Batch = Batch()
    numerics: Numerics = Numerics()
    loop: Loop = Loop()
    objective: Objective = Objective()
    techniques: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        names = [type(one).__name__ for one in self.techniques]
        if names != sorted(set(names)):
            raise ValueError(f"techniques {', '.join(names)} are not one of each, in the order of their names")

    @classmethod
    def of(cls, *techniques: object, **leaves: Any) -> Workload:
        """Make a workload from techniques in any order and fields of its parts: ``Workload.of(Lora(16), micro_batch=4)``.

        Raises:
            TypeError: a field of no part.
        """
        return cls().with_techniques(*techniques).but(**leaves)

    def but(self, **leaves: Any) -> Workload:
        """Return the workload with other values of its parts' fields, each of which one part alone has.

        Raises:
            TypeError: a field of no part.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name, value in leaves.items():
            if name not in _PART_OF:
                raise TypeError(f"a workload has no {name!r}")
            changed.setdefault(_PART_OF[name], {})[name] = value
        return replace(self, **{part: replace(getattr(self, part), **values) for part, values in changed.items()})

    @staticmethod
    def has_leaf(name: str) -> bool:
        """Return whether a part has a field of this name."""
        return name in _PART_OF

    def leaf(self, name: str) -> Any:
        """Return a field of one of the parts, by its name."""
        return getattr(getattr(self, _PART_OF[name]), name)

    def technique(self, kind: type[_Technique]) -> _Technique | None:
        """Return the technique of one class; None where it is off."""
        for one in self.techniques:
            if isinstance(one, kind):
                return one
        return None

    def has(self, kind: type[object]) -> bool:
        """Return whether a technique is on."""
        return self.technique(kind) is not None

    def with_techniques(self, *techniques: object) -> Workload:
        """Return the workload with these techniques, each in place of an earlier one of its class."""
        kinds = {type(one) for one in techniques}
        kept = [one for one in self.techniques if type(one) not in kinds]
        return replace(self, techniques=tuple(sorted((*kept, *techniques), key=lambda one: type(one).__name__)))

    def without(self, *kinds: type[object]) -> Workload:
        """Return the workload with techniques of these classes off."""
        return replace(self, techniques=tuple(one for one in self.techniques if type(one) not in kinds))

    def checkpointed(self, on: bool = True) -> Workload:
        """Return the workload with checkpointing on, in the way that it had, else of whole blocks; or with it off."""
        if on is self.gradient_checkpointing:
            return self
        return self.with_techniques(GradientCheckpointing()) if on else self.without(GradientCheckpointing)

    def compiled(self, what: Compilation | None) -> Workload:
        """Return the workload with ``torch.compile`` called on this, or on nothing."""
        return self.without(Compilation) if what is None else self.with_techniques(what)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the backward recomputes."""
        return self.has(GradientCheckpointing)

    @property
    def recomputation(self) -> CheckpointPolicy | None:
        """The policy by which the backward recomputes; None without checkpointing."""
        found = self.technique(GradientCheckpointing)
        return None if found is None else found.policy

    @property
    def reentrant(self) -> bool:
        """Whether checkpoints are reentrant."""
        found = self.technique(GradientCheckpointing)
        return found is not None and found.reentrant

    @property
    def checkpoints_on_host(self) -> bool:
        """Whether checkpointed inputs wait on the host."""
        found = self.technique(GradientCheckpointing)
        return found is not None and found.on_host

    @property
    def lora_rank(self) -> int | None:
        """The adapters' rank; None where the model itself is trained."""
        found = self.technique(Lora)
        return None if found is None else found.rank

    @property
    def quantize(self) -> Base | None:
        """How the linear layers of a frozen base are kept; None where nothing is quantised."""
        found = self.technique(QuantizedBase)
        return None if found is None else found.kept

    @property
    def quantized_by(self) -> str:
        """The flag or key that names the quantised base; empty where nothing is quantised."""
        found = self.technique(QuantizedBase)
        return "" if found is None else found.named_by

    @property
    def base_on_host(self) -> bool:
        """Whether FSDP 1 found quantised weights on the host."""
        found = self.technique(QuantizedBase)
        return found is not None and found.on_host

    @property
    def whole_base(self) -> bool:
        """Whether a quantised base is stored in bytes or in buffers."""
        found = self.technique(QuantizedBase)
        return found is not None and found.whole

    @property
    def adapter_bytes(self) -> int | None:
        """Bytes of one element of adapters beside a quantised base, where their dtype is named."""
        found = self.technique(QuantizedBase)
        return None if found is None or found.adapter_dtype is None else found.adapter_dtype.bytes

    @property
    def compile(self) -> Compilation | None:
        """What ``torch.compile`` is called on; None for nothing."""
        return self.technique(Compilation)


#: The part that has a field, by the field's name.
_PART_OF = {
    field.name: part
    for part, kind in (("batch", Batch), ("numerics", Numerics), ("loop", Loop), ("objective", Objective))
    for field in fields(kind)
}
