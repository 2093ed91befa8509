"""The settings that decide the included runtime's own buffers, beside the shapes: ranks, stage, dtypes, optimizer, offload."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import Bf16Layers
from zeroplan.core.one_bit import LOCAL_ALONE, NOT_OFFLOADED, NOT_SHARDED
from zeroplan.core.optimizer_row import DEFAULT_OPTIMIZER
from zeroplan.core.optimizers import OPTIMIZERS, RUNTIME_NAMES
from zeroplan.core.quantize_training import QUANTIZE_TRAINING, QuantizeTraining
from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice


class StateDType(StrEnum):
    """Element types that optimizer states have beside those of parameters."""

    UINT8 = "uint8"  # a quantised state: one element of 8 bits, or two of 4

    @property
    def bytes(self) -> int:
        """Bytes an element."""
        return 1


class Feature(StrEnum):
    """What is on or off, and needs buffers."""

    LOCAL_STEPS = "local_steps"  # ranks may step alone (0/1 Adam)
    FLOAT8_GATHERS = "float8_gathers"  # blocks' matrices are gathered in 8 bits
    COPY_ENGINES = "copy_engine_gathers"  # NCCL's copy engines gather, into memory that ranks share
    ASYNC_CHECKPOINTS = "async_checkpoints"  # a checkpoint is copied to pinned memory first
    DELAYED_UPDATE = "delayed_update"  # updates on the host run beside the next forward and backward


@dataclass(frozen=True, slots=True)
class RuntimeSetup:
    """Settings that decide the runtime's own buffers, beside the shapes.

    `reduce_dtype` is that of the gradients' reduction (and of whole gradients, but for :attr:`wide_grad_dtype`),
    `accum_dtype` that of the reduced shard.
    `optimizer` is one of :data:`~zeroplan.core.optimizers.RUNTIME_NAMES`.
    `params_in_host` are the elements of parameters in files that stay in host memory.
    `quantize_training` rounds the unsharded weights; `bf16_layers` are gathered in 16 bits; `features` are what else is on.
    `ep` ranks share a block's experts, and an expert's parameters have :attr:`expert_ranks`; `across` of the `ep` see the same
    tokens, as tensor-parallel ranks that have different experts do, and are one of the `ranks` each time.
    """

    ranks: int = 1
    stage: int = 0
    param_dtype: DType = DType.BF16
    reduce_dtype: DType = DType.BF16
    accum_dtype: DType = DType.BF16
    optimizer: str = DEFAULT_OPTIMIZER
    grad_accum: int = 1
    block_slots: int = 2
    offload_optimizer: OffloadDevice = OffloadDevice.NONE
    offload_ratio: float = 1.0
    swap_buffers: int = 4
    offload_param: OffloadDevice = OffloadDevice.NONE
    param_buffers: int = 5
    param_buffer_numel: int = 100_000_000
    params_in_host: int = 0
    quantize_training: QuantizeTraining | None = None
    bf16_layers: Bf16Layers | None = None
    features: frozenset[Feature] = frozenset()
    ep: int = 1
    across: int = 1

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise BadInput(f"stage {self.stage} does not exist", remedy="use 0, 1, 2 or 3")
        if self.ranks < 1 or self.grad_accum < 1 or self.block_slots < 2:
            raise BadInput(f"ranks {self.ranks}, accumulation {self.grad_accum} and ring {self.block_slots} are too small")
        if self.ep % self.across or self.ranks * self.across % self.ep:
            raise BadInput(f"ep {self.ep} does not divide the {self.ranks} data-parallel ranks")
        if self.optimizer not in RUNTIME_NAMES:
            raise BadInput(f"unknown optimizer {self.optimizer!r}", remedy=f"use one of {', '.join(RUNTIME_NAMES)}")

    @property
    def expert_ranks(self) -> int:
        """The ranks that hold the same experts."""
        return self.ranks * self.across // self.ep

    @property
    def states(self) -> tuple[Buffer, ...]:
        """The optimizer's states, but for the errors of compression; see :meth:`state_elements` for their sizes."""
        row = OPTIMIZERS[self.optimizer]
        left_out = (Buffer.OPTIM_ERROR_FEEDBACK, *(row.runtime.leaves_out if row.runtime is not None else ()))
        return tuple(one for one in row.buffers if one not in left_out)

    @property
    def compresses(self) -> bool:
        """The ranks exchange momentum in one bit an element: see Note [Momentum in one bit] in layout."""
        return OPTIMIZERS[self.optimizer].compresses and self.ranks > 1

    @property
    def block(self) -> int:
        """Elements that share one scale of a quantised state; 1 where states are fp32."""
        kernel = OPTIMIZERS[self.optimizer].runtime
        return 1 if kernel is None else kernel.block

    @property
    def map_words(self) -> int:
        """Words of the tables by which states are quantised; 0 where they are fp32."""
        kernel = OPTIMIZERS[self.optimizer].runtime
        return 0 if kernel is None else kernel.map_words

    def state_elements(self, buffer: Buffer, count: int) -> tuple[int, DType | StateDType]:
        """Return how many elements a state has for `count` masters, the last block whole, and their dtype.

        States are fp32 and as long as the masters. Quantised ones are packed in bytes, with the scales of both moments of a
        block, fp32, side by side.
        """
        state = next(one for one in OPTIMIZERS[self.optimizer].states if one.buffer is buffer)
        size = state.bytes_of(-(-count // self.block) * self.block, DType.FP32.bytes)
        if self.block == 1 or buffer is Buffer.OPTIM_SCALE:
            return size // DType.FP32.bytes, DType.FP32
        return size, StateDType.UINT8

    @property
    def takes_norms(self) -> bool:
        """The optimizer needs the norm of each whole tensor."""
        kernel = OPTIMIZERS[self.optimizer].runtime
        return kernel is not None and kernel.takes_norms

    @property
    def coefficients(self) -> int:
        """fp32 numbers that the optimizer keeps for each tensor, beside its states."""
        kernel = OPTIMIZERS[self.optimizer].runtime
        return kernel.coefficients if kernel is not None else 0

    @property
    def update_temporaries(self) -> int:
        """Tensors, each as long as the part of the masters that is updated at once, in which the update works."""
        kernel = OPTIMIZERS[self.optimizer].runtime
        return kernel.temporaries if kernel is not None else 0

    @property
    def shards_states(self) -> bool:
        """Whether each rank updates only its own shard."""
        return self.stage >= 1 and self.ranks > 1

    @property
    def shards_grads(self) -> bool:
        """Whole gradients pass through slots; a shard stays.

        Stage 1 keeps whole gradients only so that an accumulation is reduced once, or none is where momentum is exchanged;
        else they need not stay.
        """
        once = self.stage == 1 and self.grad_accum == 1 and not self.compresses
        return self.ranks > 1 and (self.stage >= 2 or once)

    @property
    def kept_grad(self) -> Buffer:
        """The part of a unit's gradients that is kept until the step."""
        return Buffer.GRAD_SHARD if self.stage >= 2 or self.shards_grads else Buffer.GRAD_FULL

    @property
    def shards_params(self) -> bool:
        """Parameters are gathered into slots; a shard stays (alone and offloaded, the whole)."""
        return self.stage >= 3 and (self.ranks > 1 or self.offloads_params)

    @property
    def offloads_params(self) -> bool:
        """Parameters rest outside the device."""
        return self.offload_param is not OffloadDevice.NONE

    @property
    def params_in_files(self) -> bool:
        """Parameters rest in files, but for the first :attr:`params_in_host`."""
        return self.offload_param is OffloadDevice.NVME

    @property
    def has_masters(self) -> bool:
        """16-bit parameters have fp32 masters, and so have those in files; other fp32 parameters are their own."""
        return self.param_dtype is not DType.FP32 or self.params_in_files

    @property
    def separate_masters(self) -> bool:
        """An offloaded unit has masters of its own: all but fp32 parameters that are themselves on the host."""
        return self.has_masters or not self.offloads_params

    @property
    def separate_upload(self) -> bool:
        """Updated 16-bit parameters go up from memory of their own: gradients on the host have another width."""
        return self.has_masters and not self.offloads_params and self.accum_dtype.bytes != self.param_dtype.bytes

    @property
    def casts_masters(self) -> bool:
        """Gathers begin with the masters; no 16-bit shard stands."""
        offloads = self.offload_optimizer is not OffloadDevice.NONE or self.offloads_params
        return self.shards_params and self.has_masters and not offloads

    @property
    def delayed_update(self) -> bool:
        """Whether updates on the host run beside the next forward and backward."""
        return Feature.DELAYED_UPDATE in self.features

    @property
    def gathers_float8(self) -> bool:
        """Blocks' matrices pass between ranks in 8 bits: see Note [Gathers in 8 bits] in layout."""
        return Feature.FLOAT8_GATHERS in self.features and self.casts_masters and self.ranks > 1

    @property
    def gathers_by_copy_engines(self) -> bool:
        """Units are gathered into memory that NCCL's copy engines reach."""
        return Feature.COPY_ENGINES in self.features and self.shards_params and self.ranks > 1

    @property
    def wide_grad_dtype(self) -> DType:
        """Dtype of whole gradients in the slots of embeddings, heads and the root, until they are cast for the reduction."""
        staged = self.reduce_dtype is DType.FP32 and self.offload_optimizer is OffloadDevice.NONE
        return self.param_dtype if staged else self.reduce_dtype

    @property
    def whole_grad_dtype(self) -> DType:
        """Dtype of gradients kept whole, which are accumulated and reduced in one buffer.

        One micro batch of one rank is neither accumulated nor reduced, so nothing asks for more than the parameters' width.
        """
        if DType.FP32 not in (self.reduce_dtype, self.accum_dtype):
            return self.reduce_dtype
        return self.param_dtype if self.ranks == 1 and self.grad_accum == 1 else DType.FP32


def require_exchange(stage: int, offload: OffloadDevice, *, local_steps: bool = False) -> None:
    """Refuse what a 1-bit optimizer cannot be combined with.

    Args:
        stage: ZeRO's.
        local_steps: it lets ranks step alone.

    Raises:
        BadInput: from stage 2 on, with local steps from stage 1 on, and for an optimizer on the host.
    """
    if stage >= 2:
        raise BadInput(NOT_SHARDED.what, where="optimizer", remedy=NOT_SHARDED.remedy)
    if stage and local_steps:
        raise BadInput(LOCAL_ALONE.what, where="local_step_clipper", remedy=LOCAL_ALONE.remedy)
    if offload is not OffloadDevice.NONE:
        raise BadInput(NOT_OFFLOADED.what, where="offload_optimizer", remedy=NOT_OFFLOADED.remedy)


def require_masters(dtype: DType, stage: int, offload: OffloadDevice) -> None:
    """Refuse what keeps no masters beside the weights on the device, from which these are rounded anew after each step.

    Raises:
        BadInput: fp32, and an optimizer that is offloaded below stage 3.
    """
    if dtype is DType.FP32:
        what = "weights in fp32 are their own masters, which rounding would lose"
        raise BadInput(what, where=QUANTIZE_TRAINING, remedy="use bf16 or fp16")
    if stage < 3 and offload is not OffloadDevice.NONE:
        what = "below stage 3 the masters of an offloaded optimizer are not where weights are rounded"
        raise BadInput(what, where=QUANTIZE_TRAINING, remedy="use stage 3, or keep the optimizer on the device")
