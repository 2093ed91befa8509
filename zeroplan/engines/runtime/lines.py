"""The runtime's ledger: the rows that its Arena allocates (:func:`~zeroplan.core.arena.owned_buffers.runtime_buffers`), summed
up by kind, and little else.

Counts are elements of one rank and hold all padding, so that the items of owned buffers equal the Arena's rows to the byte.
"""

from __future__ import annotations

from collections.abc import Callable

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.optimizers import OPTIMIZERS, RUNTIME_NAMES
from zeroplan.engines.runtime.rank import RuntimeRank
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import STATE_DOCS, add_workspace_line

_lines = LedgerBuilder()
_add = _lines.add


def _row(
    name: str,
    buffer: Buffer,
    place: Place | Callable[[RuntimeRank], Place],
    count: str,
    width: str,
    *,
    phases: tuple[Phase, ...] = ALWAYS,
    state: bool = False,
    when: Callable[[RuntimeRank], bool] | None = None,
) -> Callable[[str], None]:
    """Add the line of one kind of row, `count` elements of `width` bytes, in the memory and phases of its rows."""

    def formula(c: RuntimeRank) -> int:
        product: int = getattr(c, count) * getattr(c, width)
        return product if when is None or when(c) else 0

    def documented(doc: str) -> None:
        formula.__name__, formula.__doc__ = name, doc
        _add(buffer, place, phases, state=state)(formula)

    return documented


_row("param_full", Buffer.PARAM_FULL, Place.HBM, "params_kept", "param_bytes", state=True, when=lambda c: c.stage < 3)(
    "Whole flats of every unit, of which the parameters are views."
)
_row(
    "param_shard",
    Buffer.PARAM_SHARD,
    lambda c: c.param_place,
    "params_kept",
    "param_bytes",
    state=True,
    when=lambda c: c.stage >= 3,
)("This rank's shard of every unit's flat, in the model's dtype, where no master stands for it.")
_row("param_frozen", Buffer.PARAM_FROZEN, lambda c: c.param_place, "frozen_kept", "param_bytes", state=True)(
    "Parameters without gradient, in flats of their own."
)
_row("param_files", Buffer.PARAM_SHARD, Place.NVME, "params_in_files", "param_bytes", state=True)(
    "This rank's shard of trained parameters in a file, which the update writes and every gather reads."
)
_row("frozen_files", Buffer.PARAM_FROZEN, Place.NVME, "frozen_in_files", "param_bytes", state=True)(
    "This rank's shard of frozen parameters in a file, which every gather reads."
)
_row("param_slots", Buffer.PARAM_FULL, Place.HBM, "params_gathered", "param_bytes")(
    "Slots that gathered units take turns in, allocated once."
)
_row(
    "grad_full",
    Buffer.GRAD_FULL,
    Place.HBM,
    "grads_kept",
    "grad_bytes",
    phases=(Phase.BACKWARD, Phase.STEP),
    state=True,
    when=lambda c: c.setup.kept_grad is not Buffer.GRAD_SHARD,
)("Whole gradients, where the backward writes them and the reduction leaves the mean; they go in the step.")
_row(
    "grad_shard",
    Buffer.GRAD_SHARD,
    Place.HBM,
    "grads_kept",
    "grad_bytes",
    phases=(Phase.BACKWARD, Phase.STEP),
    state=True,
    when=lambda c: c.setup.kept_grad is Buffer.GRAD_SHARD,
)("This rank's averaged share of the gradients, from a unit's reduction to its update.")


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD,))
def grad_slots(c: RuntimeRank) -> int:
    """Slots in which the backward writes a unit's whole gradients until they are reduced; they go at its end."""
    return c.grads_in_ring * c.reduce_bytes + c.grads_in_slots * c.slot_bytes


_row("staging", Buffer.COMM_REDUCE_SCATTER, Place.HBM, "grads_staged", "reduce_bytes", phases=(Phase.BACKWARD,))(
    "Where 16-bit gradients of embeddings, heads and the root are cast, piece by piece, to be reduced in fp32."
)
_row("param_master", Buffer.PARAM_MASTER, Place.HBM, "stepped", "master_bytes", state=True, when=lambda c: c.masters)(
    "The optimizer's fp32 parameters; fp32 parameters are their own masters."
)


#: Every state of an optimizer that the runtime steps, but for the errors of compression, which have lines of their own.
_STATES = tuple(
    one
    for one in STATE_DOCS
    if one is not Buffer.OPTIM_ERROR_FEEDBACK and any(one in OPTIMIZERS[name].buffers for name in RUNTIME_NAMES)
)


def _stepped_here(c: RuntimeRank, buffer: Buffer) -> int:
    return c.exchanged_momentum if buffer is Buffer.OPTIM_EXP_AVG and c.exchanged_momentum else c.stepped


def _add_state_lines(
    place: Place | Callable[[RuntimeRank], Place], count: Callable[[RuntimeRank, Buffer], int], suffix: str
) -> None:
    for buffer in _STATES:

        def formula(c: RuntimeRank, buffer: Buffer = buffer) -> int:
            if buffer not in c.setup.states:
                return 0
            if c.setup.block > 1:
                state = next(one for one in OPTIMIZERS[c.setup.optimizer].states if one.buffer is buffer)
                size = fraction(count(c, buffer), state.numerator, state.denominator)
                tables = buffer is Buffer.OPTIM_SCALE and place is Place.HBM
                return size + c.map_words * c.master_bytes if tables else size
            return count(c, buffer) * c.master_bytes

        formula.__name__ = buffer.value.replace(".", "_") + suffix
        formula.__doc__ = STATE_DOCS[buffer]
        _add(buffer, place, ALWAYS, state=True)(formula)


_add_state_lines(Place.HBM, _stepped_here, "")
_row("worker_error", Buffer.OPTIM_ERROR_FEEDBACK, Place.HBM, "exchanged_momentum", "master_bytes", state=True)(
    "What this rank's compressed momentum left out, kept for the next step (1-bit Adam)."
)
_row("server_error", Buffer.OPTIM_SERVER_ERROR, Place.HBM, "averaged", "master_bytes", state=True)(
    "What the compressed mean of this rank's shards left out, kept for the next step (1-bit Adam)."
)
_row("anchor", Buffer.OPTIM_ANCHOR, Place.HBM, "anchored", "master_bytes", state=True)(
    "The masters of the last step after which all ranks had the same, from which local steps are averaged (0/1 Adam)."
)


@_add(Buffer.HOST_CHECKPOINT, Place.PINNED, ALWAYS)
def checkpoint_snapshot(c: RuntimeRank) -> int:
    """Masters and states as a checkpoint that is being written has them (``async_checkpoints``)."""
    return c.snapshot_bytes


@_add(Buffer.COMM_ALL_GATHER, Place.HBM, ALWAYS)
def float8_messages(c: RuntimeRank) -> int:
    """The messages of all ranks by which one unit's matrices are gathered in 8 bits."""
    return c.float8_gathered


@_add(Buffer.COMM_ALL_REDUCE, Place.HBM, ALWAYS)
def messages(c: RuntimeRank) -> int:
    """The messages of one unit's momentum: those that this rank sends, and those that it receives."""
    return 2 * c.message_words * c.master_bytes


_row("sum_slots", Buffer.STAGE_D2H, Place.HBM, "summed", "exchange_bytes", phases=(Phase.BACKWARD,))(
    "Slots in which an offloaded unit's sum over micro batches is brought up, added to and taken down again."
)
_row("exchange", Buffer.GRAD_SHARD, Place.PINNED, "exchanged", "exchange_bytes", state=True)(
    "Where gradients come down to and, if equally wide, 16-bit parameters go up from."
)


@_add(Buffer.STAGE_D2H, Place.PINNED, ALWAYS)
def second_exchange(c: RuntimeRank) -> int:
    """The delayed update's other exchange: one is read by the update while the next gradients come to the other."""
    return c.exchanged * (c.exchanges - 1) * c.exchange_bytes


_row("updated_params", Buffer.STAGE_H2D, Place.PINNED, "uploaded", "param_bytes")(
    "16-bit parameters on their way up, where gradients on the host are wider than they."
)
_row(
    "param_master_offloaded",
    Buffer.PARAM_MASTER,
    lambda c: c.master_place or Place.DRAM,
    "stepped_offloaded",
    "master_bytes",
    state=True,
    when=lambda c: c.master_place is not None,
)("The fp32 parameters of offloaded units; fp32 parameters that are themselves on the host are their own masters.")


_add_state_lines(lambda c: c.offload_place, lambda c, _: c.stepped_offloaded, "_offloaded")
_row("swap_ring", Buffer.SWAP_BUFFER, Place.PINNED, "swapped", "swap_bytes")(
    "Pinned buffers that the update streams through: states read ahead, updated, written behind; parameters written."
)
_row("param_ring", Buffer.SWAP_BUFFER, Place.PINNED, "params_swapped", "param_bytes")(
    "Pinned buffers through which parameters in files come to the GPU, read ahead."
)


@_add(Buffer.ACTIVATION_CHECKPOINT, Place.PINNED, FROM_FIRST_STEP)
def checkpointed_inputs(c: RuntimeRank) -> int:
    """Inputs of checkpointed blocks, on the host from the forward to the backward; two are on the GPU at a time."""
    whole = c.inputs_offloaded * c.micro_batch * c.seq_len * c.hidden * c.param_bytes
    return whole if c.input_parts == 1 else fraction(whole, 1, c.input_parts)


_row("optim_norm", Buffer.OPTIM_NORM, Place.HBM, "step_scalars", "master_bytes")(
    "The step's scalars, which the update kernels read on the device, and the norm's partial sums."
)
_row("rounded_weights", Buffer.PARAM_TEMP, Place.HBM, "rounded", "master_bytes")(
    "Where weights are rounded to fewer bits: a part of one, noise of stochastic rounding, and bounds of groups."
)
_row("update_temp", Buffer.OPTIM_TEMP, Place.HBM, "update_temp", "master_bytes")(
    "Where an update without a kernel works: a part of the gradients, scaled, and a scratch tensor."
)
_row("update_temp_offloaded", Buffer.OPTIM_TEMP, Place.DRAM, "update_temp_offloaded", "master_bytes")(
    "Where the update of offloaded units works on the host, without a kernel."
)
_row("optim_trust", Buffer.OPTIM_TRUST, Place.HBM, "trust_words", "master_bytes")(
    "LAMB's norms of whole tensors and of their directions, and the tiles of 16 Ki elements that they are summed over."
)


@_add(Buffer.FRAGMENTATION, Place.NVME, ALWAYS)
def file_padding(c: RuntimeRank) -> int:
    """What fills the last page of each tensor in a file."""
    return c.file_padding


_row("init_copy", Buffer.INIT_TEMP, Place.HBM, "largest_param", "param_bytes", phases=(Phase.INIT,))(
    "One parameter at a time on its way from the host into its flat."
)
_row("init_room", Buffer.INIT_TEMP, Place.HBM, "grads_kept", "grad_bytes", phases=(Phase.INIT,))(
    "A block of the kept gradients' size, given back at once, so that the allocator has a segment in which they fit."
)


@_add(Buffer.COMM_PIPELINE, Place.HBM, FROM_FIRST_STEP)
def pipeline_buffers(c: RuntimeRank) -> int:
    """A pipeline stage's buffers for inputs and for gradients of outputs, of every micro batch of a step.

    Source: torch/distributed/pipelining/stage.py, _RecvInfo
    """
    return c.received


add_workspace_line(_lines, ALWAYS)  # taken at the start


LEDGER = _lines.ledger()
