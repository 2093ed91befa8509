"""The workload: everything that decides activations, dtypes and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from zeroplan.core.curriculum import Curriculum
from zeroplan.core.errors import BadInput
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.layer_drop import ProgressiveLayerDrop
from zeroplan.core.optimizer_row import DEFAULT_OPTIMIZER
from zeroplan.core.preferences import PairLoss
from zeroplan.core.quantization import Base
from zeroplan.core.quantize_training import QuantizeTraining
from zeroplan.core.saving import Saving
from zeroplan.core.sparse_attention import SparseAttention

_Named = TypeVar("_Named", bound=StrEnum)


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
        """Read a policy from ``full``, ``selective``, ``op`` or ``every:K``.

        Raises:
            BadInput: any other text.
        """
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
class Workload:
    """One training job's computation on one rank.

    `optimizer` is a row's name in :data:`zeroplan.core.optimizers.OPTIMIZERS`. `checkpoint_policy` is ``full``, ``selective``,
    ``op`` or ``every:K`` (:class:`CheckpointPolicy`) and takes effect with `gradient_checkpointing`. `lora_targets` empty means
    all linear layers of the blocks. `seq_len` None means 2048, or the model's maximum if that is less. `from_scratch` means
    that weights are initialised and not read from pretrained ones, which pass through host memory. `quantize` is how the linear
    layers of a frozen base are kept, `quantized_by` the flag or key that says so.
    `set_to_none` is what ``zero_grad`` does: without it gradients stay between steps (torch's default before 2.0).
    `chunked_head` means that TRL computes head and loss together in tiles (:mod:`zeroplan.tape.chunked_head`),
    `lora_dropout` that adapters drop some of their input, `detached_loss` that the loop
    keeps the loss without its graph, as the HF Trainer does. `adapter_dtype` is that of adapters beside a quantised base; None
    for what the precision says, which is fp32 under autocast, as peft makes them. `whole_base` means that a quantised base is
    stored in bytes or in buffers, which FSDP 2's units leave out. `whole_embedding_states` means that an 8-bit
    optimizer keeps the states of embeddings in fp32, which the HF Trainer asks of it. `accelerate_units` means that accelerate
    applies ``fully_shard``: to the embedding, and to the final norm with the head, too. `one_unit` means that FSDP 1 wraps the
    model as a whole, without units in it. `pairs` means that a sample is a chosen and a rejected one, which pass together;
    `reference` what is asked beside the trained model. `kl_batch` means that a second batch of the same size passes through
    both without gradients, KTO's for its KL term; `pair_loss` that pairs meet in a loss over all their logits, which
    `wide_logits` says are fp32 there. `images` of `image_size` pixels a side come with each sample of a
    vision-language model; None is the size of its config. `labelled_share` of the tokens have a label, where the head sees
    those alone; None where it sees all. `evaluation` runs between two steps, and `saving` is done there; None for none.
    `lengths` are those of samples that a batch is padded to the longest of, cut at `seq_len`; empty where all have that length.
    `pads` means that each batch is padded to its longest sample, of which nothing but the most, `seq_len`, is known.
    `target_len` is the length of an encoder-decoder's targets; None where it is `seq_len`, that of its sources.
    `fp8` is how linear layers multiply in 8-bit floats. `tiled_mlp` is the number of tiles of tokens in which MLPs run, as
    DeepSpeed's ``TiledMLP`` does, and `tiled_loss` that of head and loss (``TiledFusedLogitsLoss``); 0 for none.
    `checkpoint_interval` layers of a pipeline stage are recomputed together (DeepSpeed's ``activation_checkpoint_interval``).
    `torch_adam`: the optimizer is a class of torch's where DeepSpeed would build one of its own.
    `decays`: a class of torch's adds its weight decay to the gradients, in tensors of their own.
    `offload_checkpoints`: checkpointed inputs wait on the host, as DeepSpeed's ``CheckpointHiddenStatesOffload`` lets them.
    `sparse_attention` is the attention's sparsity, whatever `attn` says. `curriculum` cuts samples to fewer than `seq_len`
    tokens in the first steps. `layer_drop` leaves blocks out of later steps.
    `quantize_training` rounds weights to fewer bits. `local_steps` are the most that 0/1 Adam lets ranks step alone.
    `compile` is what ``torch.compile`` is called on; None for nothing. `generation` is what the model generates before each
    step, on the GPUs that train; None for nothing. `colocated` is vLLM where it does so.
    `moved` means that the model is made on the host and then moved to the GPU,
    where a tied weight is one from the beginning; made on the GPU, its second owner's goes when the tie is made. `mixed_units`
    means that FSDP 1 wraps blocks with the adapters in them, `longest_first` that the first micro batch holds the longest of
    samples that differ in length, and no later one. Before transformers 5 `linear_experts` were layers of their own, which
    bitsandbytes quantises, and `base_on_host` was where FSDP 1 found quantised weights. `reentrant` is the way in which blocks
    are checkpointed, as that version did unless told otherwise.
    `reduce_dtype` is that in which FSDP2 reduces gradients (``MixedPrecisionPolicy``); None for fp32, and without a policy for
    the parameters' own.
    """

    micro_batch: int = 1
    seq_len: int | None = None
    grad_accum: int = 1
    dtype: DType = DType.BF16
    precision: Precision = Precision.MIXED
    optimizer: str = DEFAULT_OPTIMIZER
    optimizer_kind: OptimizerKind = OptimizerKind.FUSED
    torch_adam: bool = False
    decays: bool = False
    attn: Attention = Attention.SDPA
    gradient_checkpointing: bool = False
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    checkpoint_policy: str = "full"
    from_scratch: bool = False
    quantize: Base | None = None
    quantized_by: str = field(default="--quantize", compare=False)
    set_to_none: bool = True
    chunked_head: bool = False
    lora_dropout: bool = False
    detached_loss: bool = False
    adapter_dtype: DType | None = None
    whole_base: bool = False
    whole_embedding_states: bool = False
    accelerate_units: bool = False
    one_unit: bool = False
    pairs: bool = False
    reference: Reference | None = None
    kl_batch: bool = False
    pair_loss: PairLoss | None = None
    wide_logits: bool = False
    images: int = 0
    image_size: int | None = None
    labelled_share: float | None = None
    evaluation: Evaluation | None = None
    saving: Saving | None = None
    lengths: tuple[int, ...] = ()
    pads: bool = False
    target_len: int | None = None
    fp8: Float8Recipe | None = None
    tiled_mlp: int = 0
    tiled_loss: int = 0
    offload_checkpoints: bool = False
    checkpoint_interval: int = 1
    sparse_attention: SparseAttention | None = None
    curriculum: Curriculum | None = None
    layer_drop: ProgressiveLayerDrop | None = None
    quantize_training: QuantizeTraining | None = None
    local_steps: int = 0
    compile: Compilation | None = None
    generation: Generation | None = None
    colocated: Colocated | None = None
    moved: bool = False
    mixed_units: bool = False
    longest_first: bool = False
    linear_experts: bool = False
    base_on_host: bool = False
    reentrant: bool = False
    reduce_dtype: DType | None = None

    @property
    def in_trainer(self) -> bool:
        """Whether transformers' Trainer runs the loop, which alone keeps losses without their graph."""
        return self.detached_loss

    @property
    def rows(self) -> int:
        """Sequences of one pass."""
        return self.micro_batch * (2 if self.pairs else 1)

    @property
    def recomputation(self) -> CheckpointPolicy | None:
        """The policy by which the backward recomputes; None without checkpointing."""
        return CheckpointPolicy.parse(self.checkpoint_policy) if self.gradient_checkpointing else None

    @property
    def param_bytes(self) -> int:
        """Bytes of one model parameter."""
        return 4 if self.precision in (Precision.FP32, Precision.AUTOCAST) else self.dtype.bytes

    @property
    def adapter_bytes(self) -> int | None:
        """Bytes of one adapter's element, where the workload names their dtype."""
        return None if self.adapter_dtype is None else self.adapter_dtype.bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of one master parameter."""
        return self.dtype.bytes if self.precision is Precision.PURE else 4
