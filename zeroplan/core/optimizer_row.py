"""The parts of one row of the optimizer table (:mod:`zeroplan.core.optimizers`): states, names, and who can run it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.core.versions import Version

#: The row of a run that names no optimizer.
DEFAULT_OPTIMIZER = "adamw"


class Domain(StrEnum):
    """The elements that an optimizer keeps a state for: all, those of matrices, or the rest."""

    ALL = "all"
    MATRIX = "matrix"  # the parameters that Muon updates
    REST = "rest"  # those that Muon leaves to AdamW


@dataclass(frozen=True, slots=True)
class State:
    """One optimizer state: `per_master` elements as wide as the master, or ``numerator / denominator`` bytes, a parameter.

    `key` is its name in the ``state`` of torch's and DeepSpeed's classes; empty where that is the buffer's last word.
    `factored` says that of a matrix only one number a row and one a column are kept, `element` how many bytes an element has,
    0 for the master's width.
    """

    buffer: Buffer
    per_master: int = 0
    numerator: int = 0
    denominator: int = 1
    domain: Domain = Domain.ALL
    key: str = ""
    factored: bool = False
    element: int = 0

    @property
    def state_key(self) -> str:
        """Its name in a torch optimizer's ``state``."""
        return self.key or self.buffer.value.rpartition(".")[2]

    def bytes_of(self, count: int, width: int) -> int:
        """Bytes of the state for `count` elements, where one element of the master has `width` bytes."""
        return self.per_master * (self.element or width) * count + self.numerator * count // self.denominator

    def tensors_of(self, shape: Sequence[int], width: int) -> tuple[int, ...]:
        """Bytes of each tensor in which the state of one parameter is kept.

        Args:
            shape: of the parameter as the optimizer sees it.
            width: bytes of one of its elements.
        """
        if self.factored:
            return tuple((self.element or width) * count for count in factors_of(shape))
        count = math.prod(shape)
        if self.buffer is Buffer.OPTIM_SCALE:  # a tensor for each of the two moments, one scale for every begun block
            return (4 * -(-count // self.denominator),) * 2
        return (self.bytes_of(count, width),)


#: Bytes of the table of the fp32 values that 8-bit numbers stand for.
LEVELS = 256 * 4
#: Bins of the table by which the runtime finds the level of a number in [2^-24, 1]: 128 an octave, and one for 1.
MAP_BINS = 24 * 128 + 1
#: Elements that share one scale of an 8-bit state.
SCALED_BLOCK = 256
#: The same of a 4-bit state.
SCALED_BLOCK_4BIT = 128


def factors_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements of a factored second moment: of its rows and its columns, or all of a vector's."""
    if len(shape) < 2:
        return (math.prod(shape),)
    return (math.prod(shape[:-1]), math.prod(shape[:-2]) * shape[-1])


@dataclass(frozen=True, slots=True)
class DeepSpeedType:
    """One value of ``optimizer.type`` in a ds_config.

    Sources are paths under ``deepspeed/`` at the version of :data:`zeroplan.core.zero_config.DEEPSPEED_VERSION`.

    Attributes:
        type: the name as users write it.
        own: DeepSpeed matches the name itself, in any case (runtime/config.py, DEEPSPEED_OPTIMIZERS); else it is a class of
            ``torch.optim``, matched with case (runtime/engine.py, _configure_basic_optimizer).
        becomes: the row that a ds_config with this type means, if it is another than the row that holds this type.
        fused: one kernel steps all tensors, or the host's counterpart of it.
        adam: DeepSpeed builds its FusedAdam, on the host its DeepSpeedCPUAdam, or torch's Adam if `torch_adam` asks for it
            (runtime/engine.py, get_optimizer_configuration).
        torch_adam: the key ``optimizer.params.torch_adam`` has an effect.
        tested: runs with ZeRO without ``zero_allow_untested_optimizer`` (runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS).
        until: the first version without it; None while DeepSpeed has it. None that had it combined it with ZeRO.
        dynamic_scale: needs a dynamic loss scale.
        splits: updates matrices and the rest in different ways, so needs whole gradients at stage 3.
        host_states: states that only the class for the host keeps.
        takes: the ``optimizer.params`` that its classes take, on the device or on the host; empty where they were not listed.
        params: ``optimizer.params`` without which it would keep other states than the row's. A learning rate is never among
            them: it is the user's to choose.
    """

    type: str
    own: bool = False
    becomes: str = ""
    fused: bool = False
    adam: bool = False
    torch_adam: bool = False
    tested: bool = False
    until: Version | None = None
    dynamic_scale: bool = False
    splits: bool = False
    host_states: tuple[Buffer, ...] = ()
    takes: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def matches(self, type_: str) -> bool:
        """Return whether DeepSpeed takes `type_` as this type."""
        return type_.lower() == self.type.lower() if self.own or self.until else type_ == self.type


@dataclass(frozen=True, slots=True)
class TorchClass:
    """A class of ``torch.optim``.

    Attributes:
        name: the class.
        fused: it takes ``fused=True`` on a GPU.
        counts_steps: it keeps a step count for each tensor: where the tensor is if fused, else on the host.
        states_when_built: its constructor makes the states; all others make them at the first step.
        foreach_lists: temporaries as large as all parameters together that its multi-tensor loops, torch's choice on a GPU
            where nothing is fused, hold at once.
        selects: beside those lists it chooses between two values by a mask, one tensor at a time: a temporary as large as that
            tensor, and one byte for each of its elements.
        decay_lists: one more such list where its weight decay is added to the gradients, which leaves them as they are: 0 where
            the decay is another kind, or the list takes the place of one of `foreach_lists` or is gone before it.
        clones_gradients: its states are clones of the first gradients, made once the weight decay is added.
        params: arguments that make the class keep the row's states.
    """

    name: str
    fused: bool = False
    counts_steps: bool = True
    states_when_built: bool = False
    foreach_lists: int = 1
    selects: bool = False
    decay_lists: int = 0
    clones_gradients: bool = False
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class RuntimeKernel:
    """The kernel by which the included runtime steps an optimizer. Every state is fp32 and as long as the rank's part of the
    masters, but where it is quantised in blocks, or exchanged by the ranks: see Note [Momentum in one bit] in core/layout.

    Attributes:
        kernel: the function of ``zeroplan_runtime.kernels``.
        defaults: the hyperparameters with their defaults.
        kernel_names: the kernel's argument for a hyperparameter of another name.
        decoupled: the row whose weight decay is decoupled, if that and L2 regularisation are both this kernel's: it takes the
            argument ``decoupled`` then.
        carried: a number that follows from the hyperparameters of earlier steps, which the kernel takes by this name. It is
            kept in the parameter group.
        temporaries: fp32 tensors, as long as the part of the masters that is updated at once, that the update works in.
        takes_norms: the kernel needs the norm of each whole tensor, which the ranks add up between two passes. So the
            optimizer cannot run on the host, where each rank steps alone.
        coefficients: fp32 numbers that it keeps for each tensor beside the states, the same on every rank.
        bits: of one element of a state.
        block: elements that share one scale of a quantised state; 1 where the states are fp32. Parameters and shards begin on
            multiples of it, so a block's elements are the same at any number of ranks.
        type: its value of ``optimizer.type``, for an optimizer that today's DeepSpeed builds from no config.
        exchange: hyperparameters that say when the ranks exchange signs, for an optimizer that compresses. All parameter groups
            must have them and ``betas`` alike, and the kernel takes none of them.
        leaves_out: states of the row that only DeepSpeed's class keeps.
    """

    kernel: str
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    kernel_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    decoupled: str = ""
    carried: str = ""
    temporaries: int = 0
    takes_norms: bool = False
    coefficients: int = 0
    bits: int = 32
    block: int = 1
    type: str = ""

    @property
    def quantised(self) -> bool:
        """Whether its states are kept in fewer bits than fp32, with a scale for every block."""
        return self.block > 1

    @property
    def map_words(self) -> int:
        """Words of 4 bytes of the tables by which the two moments are quantised: levels, and bins to find them by."""
        return 2 * (2**self.bits + MAP_BINS) if self.quantised else 0

    exchange: tuple[str, ...] = ()
    leaves_out: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One row: everything that zeroplan knows of one optimizer.

    Attributes:
        name: its name on the command line.
        states: what it keeps between steps, in the order in which it makes them.
        source: the paper, or the file that allocates the states.
        aliases: its other names on the command line, in lower case. Those of transformers' ``OptimizerNames`` are among them.
        deepspeed: the values of ``optimizer.type`` that mean it; the first is the one that zeroplan writes. None: DeepSpeed
            builds it from no config, so the program must bring it.
        torch: its class in ``torch.optim``; None where torch has none.
        runtime: how the included runtime steps it; None where it cannot.
        rest: the row that steps the elements of :attr:`Domain.REST`, for an optimizer that takes matrices alone.
        variants: by hyperparameter, the row that holds where it is neither 0 nor false.
        eight_bit: the row with the same update and 8-bit states.
        least_8bit: elements from which on a parameter has 8-bit states; one of fewer has them in fp32. 0 where none has.
        steps_one_by_one: it updates one parameter after another in fp32, with temporaries as long as the parameter.
        optim: TrainingArguments' name for it, if DeepSpeed builds it from no config and the Trainer does.
    """

    name: str
    states: tuple[State, ...]
    source: str
    aliases: tuple[str, ...] = ()
    deepspeed: tuple[DeepSpeedType, ...] = ()
    torch: TorchClass | None = None
    runtime: RuntimeKernel | None = None
    rest: str = ""
    variants: Mapping[str, str] = field(default_factory=dict, hash=False)
    eight_bit: str = ""
    least_8bit: int = 0
    steps_one_by_one: bool = False
    optim: str = ""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The states' buffers, in order."""
        return tuple(state.buffer for state in self.states)

    @property
    def runtime_only(self) -> bool:
        """Whether nothing but the included runtime makes it from its name: neither DeepSpeed, torch nor the Trainer."""
        return self.runtime is not None and not (self.deepspeed or self.torch or self.optim)

    @property
    def compresses(self) -> bool:
        """Whether it compresses what the ranks exchange: each also keeps the error of the part that it averages."""
        return Buffer.OPTIM_ERROR_FEEDBACK in self.buffers

    @property
    def written(self) -> DeepSpeedType | None:
        """The ``optimizer.type`` that zeroplan writes for it; None where the program must bring the optimizer."""
        return next((one for one in self.deepspeed if one.until is None), None)

    def written_for(self, version: Version) -> DeepSpeedType | None:
        """Return :attr:`written` for this version of DeepSpeed, which may have had more."""
        return next((one for one in self.deepspeed if one.until is None or version < one.until), None)

    @property
    def until(self) -> Version | None:
        """The first DeepSpeed without it, for an optimizer that only older ones built; None for any other."""
        return self.deepspeed[0].until if self.deepspeed and self.written is None else None

    @property
    def host_states(self) -> tuple[Buffer, ...]:
        """States that only DeepSpeed's class for the host keeps."""
        return () if self.written is None else self.written.host_states

    @property
    def fused(self) -> bool:
        """Whether one kernel steps all tensors where nobody asks for another implementation."""
        built = self.written is not None and self.written.fused
        return built or self.torch is None or self.torch.fused

    @property
    def foreach_lists(self) -> int:
        """Temporaries as large as all parameters together that multi-tensor loops hold at once."""
        return 1 if self.torch is None else self.torch.foreach_lists

    @property
    def decay_lists(self) -> int:
        """Lists of gradients with weight decay that multi-tensor loops hold beside those (:attr:`TorchClass.decay_lists`)."""
        return 0 if self.torch is None else self.torch.decay_lists

    @property
    def clones_gradients(self) -> bool:
        """Whether the first step makes its states once the weight decay is added (:attr:`TorchClass.clones_gradients`)."""
        return self.torch is not None and self.torch.clones_gradients

    @property
    def selects(self) -> bool:
        """Whether multi-tensor loops choose by a mask, one tensor at a time (:attr:`TorchClass.selects`)."""
        return self.torch is not None and self.torch.selects

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed combines it with ZeRO; what the program brings, it does."""
        return not self.deepspeed or self.written is not None

    def bytes_per_element(self, matrices: float = 0.0) -> int:
        """Return the bytes that all states of one element take beside fp32 masters, rounded.

        Args:
            matrices: part of the elements, from 0 to 1, that are of :attr:`Domain.MATRIX`.
        """
        share = {Domain.ALL: 1.0, Domain.MATRIX: matrices, Domain.REST: 1 - matrices}
        widths = ((4 * state.per_master + state.numerator / state.denominator, share[state.domain]) for state in self.states)
        return round(sum(width * part for width, part in widths))
