"""The runtime's ledger: the buffers that its Arena allocates, counted by `core.layout.runtime_buffers`, and little else.

Counts are elements of one rank and hold all padding, so that the items of owned buffers equal the Arena's rows to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.layout import PAGE, Layout
from zeroplan.core.optimizers import OPTIMIZERS, RUNTIME_NAMES
from zeroplan.core.owned_buffers import OwnedBuffer, runtime_buffers
from zeroplan.engines.runtime.checkpoints import OffloadedInputSizes
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import LedgerBuilder, means
from zeroplan.ledger.optimizer_lines import STATE_DOCS
from zeroplan.ledger.workspace_line import add_workspace_line

_lines = LedgerBuilder()
_add = _lines.add

_FP32_BYTES = 4
_NO_INPUTS = OffloadedInputSizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRank:
    """One rank's elements and bytes an element. Flats are padded: parameters begin on multiples of 64 elements."""

    ranks: int = means("data-parallel ranks")
    stage: int
    params_kept: int = means(
        "elements of trained parameters that this rank keeps beside masters: whole flats, at stage 3 shards or none"
    )
    frozen_kept: int = means("elements of frozen parameters that this rank keeps: whole flats, at stage 3 shards")
    params_in_files: int = means(
        "the same of trained parameters that rest in a file, beyond those that max_in_cpu keeps in host memory"
    )
    frozen_in_files: int = means(
        "elements of frozen parameters that rest in a file, beyond those that max_in_cpu keeps in host memory"
    )
    params_swapped: int = means(
        "elements of the pinned buffers between that file and the GPU: buffer_count of up to buffer_size"
    )
    params_gathered: int = means("elements of the slots that gathered units share: two blocks, the widest layer, the root")
    grads_kept: int = means("elements of gradients that this rank keeps: whole flats, from stage 2 on its shards of them")
    grads_in_ring: int = means("elements of the slots in which blocks' whole gradients wait for their reduction")
    grads_in_slots: int = means("elements of the slots for those of embeddings, heads and the root")
    grads_staged: int = means("elements of gradients that are cast and reduced at once")
    stepped: int = means("elements that this rank's optimizer steps: whole flats at stage 0, else its shards of them")
    stepped_offloaded: int = means("elements that this rank's optimizer steps on the host")
    exchanged: int = means("elements of gradients that come down to pinned memory: this rank's shards, alone whole flats")
    exchanges: int = means("pinned places of each: two with the delayed update")
    uploaded: int = means("elements of 16-bit parameters that go up from memory of their own, as gradients there are wider")
    summed: int = means("elements of the slots in which offloaded gradients are summed over micro batches, or cast")
    swapped: int = means("elements of the pinned buffers between files and the update")
    exchanged_momentum: int = means("elements whose momentum every rank keeps whole, to exchange it in one bit: whole flats")
    anchored: int = means("elements whose masters of the last common step are kept: whole flats (local steps)")
    averaged: int = means("elements of the ranks' mean that this rank compresses: its shards of those flats")
    message_words: int = means("words of the largest flat's messages, one a rank: a bit an element, and the scales")
    largest_param: int = means("elements of the largest parameter")
    step_scalars: int = means("fp32 scalars of a step (norm, clip factor, overflow flag) and the norm's workspace")
    file_padding: int = means(
        "bytes that fill the last page of 4,096 of each unit's share of masters, moments and parameters in files"
    )
    inputs_offloaded: int = means(
        "inputs of checkpointed blocks that leave for the host: all but the last block's (cpu_checkpointing)"
    )
    input_parts: int = means("tensor-parallel ranks that divide each of these inputs (partition_activations)")
    micro_batch: int = means("samples a rank and pass")
    seq_len: int = means("tokens a sample")
    hidden: int = means("elements of one token's hidden state")
    rounded: int = means("fp32 words in which weights are rounded (quantize_training)")
    trust_words: int = means("words of LAMB's tables: two sums a tensor and a tile, and where each tile begins and ends")
    map_words: int = means("words of the tables by which 8- and 4-bit states are quantised: levels, and bins to find them by")
    update_temp: int = means("elements of the temporaries of an update without a kernel: two of up to 1 Mi")
    update_temp_offloaded: int = means("elements of the temporaries of an update on the host without a kernel")
    param_bytes: int = means("bytes of one parameter")
    grad_bytes: int = means("bytes of one element of a kept gradient")
    reduce_bytes: int = means("bytes of one element of a gradient as it is reduced")
    exchange_bytes: int = means("bytes of one element of a gradient on the host")
    slot_bytes: int = means("bytes of one element of a gradient in the slot of an embedding, head or the root")
    swap_bytes: int = means(
        "bytes of one element between files and the update: a master's, or, where no states are there, a parameter's"
    )
    master_bytes: int = means("bytes of one master, moment, scalar or word")
    cublas_workspace: int = means("bytes of one cuBLAS workspace on this GPU")
    received: int = means("bytes of what a pipeline stage receives in a step: inputs, and gradients of outputs")
    masters: bool
    masters_offloaded: bool
    keeps_shards: bool
    optimizer: str
    block: int
    states: tuple[Buffer, ...]
    offload_place: Place
    master_place: Place
    param_place: Place


def runtime_rank(
    layout: Layout, *, cublas_workspace: int, inputs: OffloadedInputSizes = _NO_INPUTS, received: int = 0
) -> RuntimeRank:
    """Sum up the rows that the Arena allocates on one rank; `received` is bytes of what a pipeline stage receives in a step."""
    setup, rows = layout.setup, runtime_buffers(layout)
    kept = [unit for unit in layout.units if not unit.offloaded]
    ring = {unit.grad_slot for unit in layout.units if unit.shape.in_ring}
    here = [row for row in rows if row.place is Place.HBM]
    in_memory = [row for row in rows if row.place is not Place.NVME]
    in_files = [row for row in rows if row.place is Place.NVME]
    masters = _count(here, Buffer.PARAM_MASTER)
    stepping = [
        (unit, getattr(unit.trainable, "shard" if setup.shards_states else "full")) for unit in layout.units if unit.trainable
    ]
    master_offloaded = next((row for row in rows if row.buffer is Buffer.PARAM_MASTER and row.place is not Place.HBM), None)
    states = setup.states
    own_param = Buffer.PARAM_SHARD if setup.stage >= 3 else Buffer.PARAM_FULL
    return RuntimeRank(
        ranks=setup.ranks,
        stage=setup.stage,
        params_kept=_count(in_memory, own_param),
        frozen_kept=_count(in_memory, Buffer.PARAM_FROZEN),
        params_in_files=_count(in_files, own_param),
        frozen_in_files=_count(in_files, Buffer.PARAM_FROZEN),
        params_swapped=setup.param_buffers * layout.param_buffer,
        params_gathered=sum(layout.param_slots.values()),
        grads_kept=sum((u.trainable.shard if setup.shards_grads else u.trainable.full) for u in kept if u.trainable),
        grads_in_ring=sum(numel for slot, numel in layout.grad_slots.items() if slot in ring),
        grads_in_slots=sum(numel for slot, numel in layout.grad_slots.items() if slot not in ring),
        grads_staged=_count(rows, Buffer.COMM_REDUCE_SCATTER),
        stepped=sum(numel for unit, numel in stepping if not unit.offloaded),
        stepped_offloaded=sum(numel for unit, numel in stepping if unit.offloaded),
        exchanged=sum(numel for unit, numel in stepping if unit.offloaded),
        exchanges=2 if setup.delayed_update else 1,
        uploaded=_count(rows, Buffer.STAGE_H2D),
        summed=_count(here, Buffer.STAGE_D2H),
        swapped=_count([row for row in rows if row.unit == "optimizer"], Buffer.SWAP_BUFFER),
        exchanged_momentum=_count(rows, Buffer.OPTIM_ERROR_FEEDBACK),
        anchored=_count(rows, Buffer.OPTIM_ANCHOR),
        averaged=_count(rows, Buffer.OPTIM_SERVER_ERROR),
        message_words=layout.message_words,
        largest_param=max((p.numel for unit in layout.units for p in unit.shape.params), default=0),
        step_scalars=_count(rows, Buffer.OPTIM_NORM),
        file_padding=sum(-row.bytes % PAGE for row in rows if row.place is Place.NVME),
        inputs_offloaded=inputs.count,
        input_parts=inputs.parts,
        micro_batch=inputs.micro_batch,
        seq_len=inputs.seq_len,
        hidden=inputs.hidden,
        trust_words=_count(rows, Buffer.OPTIM_TRUST),
        map_words=_count([row for row in rows if row.unit == "maps"], Buffer.OPTIM_SCALE),
        rounded=_count(rows, Buffer.PARAM_TEMP),
        update_temp=_count(here, Buffer.OPTIM_TEMP),
        update_temp_offloaded=_count(rows, Buffer.OPTIM_TEMP) - _count(here, Buffer.OPTIM_TEMP),
        param_bytes=setup.param_dtype.bytes,
        grad_bytes=(setup.accum_dtype if setup.shards_grads else setup.whole_grad_dtype).bytes,
        exchange_bytes=setup.accum_dtype.bytes,
        reduce_bytes=setup.reduce_dtype.bytes,
        slot_bytes=setup.wide_grad_dtype.bytes,
        swap_bytes=layout.swap_dtype.bytes,
        master_bytes=_FP32_BYTES,
        cublas_workspace=cublas_workspace,
        received=received,
        masters=bool(masters),
        masters_offloaded=master_offloaded is not None,
        keeps_shards=setup.kept_grad is Buffer.GRAD_SHARD,
        optimizer=setup.optimizer,
        block=setup.block,
        states=states,
        offload_place=next((unit.place for unit, _ in stepping if unit.offloaded), Place.DRAM),
        master_place=master_offloaded.place if master_offloaded is not None else Place.DRAM,
        param_place=Place.PINNED if setup.offloads_params else Place.HBM,
    )


def _count(rows: list[OwnedBuffer], buffer: Buffer) -> int:
    return sum(row.numel for row in rows if row.buffer is buffer)


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def param_full(c: RuntimeRank) -> int:
    """Whole flats of every unit, of which the parameters are views."""
    return c.params_kept * c.param_bytes if c.stage < 3 else 0


@_add(Buffer.PARAM_SHARD, lambda c: c.param_place, ALWAYS, state=True)
def param_shard(c: RuntimeRank) -> int:
    """This rank's shard of every unit's flat, in the model's dtype, where no master stands for it."""
    return c.params_kept * c.param_bytes if c.stage >= 3 else 0


@_add(Buffer.PARAM_FROZEN, lambda c: c.param_place, ALWAYS, state=True)
def param_frozen(c: RuntimeRank) -> int:
    """Parameters without gradient, in flats of their own."""
    return c.frozen_kept * c.param_bytes


@_add(Buffer.PARAM_SHARD, Place.NVME, ALWAYS, state=True)
def param_files(c: RuntimeRank) -> int:
    """This rank's shard of trained parameters in a file, which the update writes and every gather reads."""
    return c.params_in_files * c.param_bytes


@_add(Buffer.PARAM_FROZEN, Place.NVME, ALWAYS, state=True)
def frozen_files(c: RuntimeRank) -> int:
    """This rank's shard of frozen parameters in a file, which every gather reads."""
    return c.frozen_in_files * c.param_bytes


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS)
def param_slots(c: RuntimeRank) -> int:
    """Slots that gathered units take turns in, allocated once."""
    return c.params_gathered * c.param_bytes


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_full(c: RuntimeRank) -> int:
    """Whole gradients, where the backward writes them and the reduction leaves the mean; they go in the step."""
    return 0 if c.keeps_shards else c.grads_kept * c.grad_bytes


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_shard(c: RuntimeRank) -> int:
    """This rank's averaged share of the gradients, from a unit's reduction to its update."""
    return c.grads_kept * c.grad_bytes if c.keeps_shards else 0


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD,))
def grad_slots(c: RuntimeRank) -> int:
    """Slots in which the backward writes a unit's whole gradients until they are reduced; they go at its end."""
    return c.grads_in_ring * c.reduce_bytes + c.grads_in_slots * c.slot_bytes


@_add(Buffer.COMM_REDUCE_SCATTER, Place.HBM, (Phase.BACKWARD,))
def staging(c: RuntimeRank) -> int:
    """Where 16-bit gradients of embeddings, heads and the root are cast, piece by piece, to be reduced in fp32."""
    return c.grads_staged * c.reduce_bytes


@_add(Buffer.PARAM_MASTER, Place.HBM, ALWAYS, state=True)
def param_master(c: RuntimeRank) -> int:
    """The optimizer's fp32 parameters; fp32 parameters are their own masters."""
    return c.stepped * c.master_bytes if c.masters else 0


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
            if buffer not in c.states:
                return 0
            if c.block > 1:
                state = next(one for one in OPTIMIZERS[c.optimizer].states if one.buffer is buffer)
                size = fraction(count(c, buffer), state.numerator, state.denominator)
                tables = buffer is Buffer.OPTIM_SCALE and place is Place.HBM
                return size + c.map_words * c.master_bytes if tables else size
            return count(c, buffer) * c.master_bytes

        formula.__name__ = buffer.value.replace(".", "_") + suffix
        formula.__doc__ = STATE_DOCS[buffer]
        _add(buffer, place, ALWAYS, state=True)(formula)


_add_state_lines(Place.HBM, _stepped_here, "")


@_add(Buffer.OPTIM_ERROR_FEEDBACK, Place.HBM, ALWAYS, state=True)
def worker_error(c: RuntimeRank) -> int:
    """What this rank's compressed momentum left out, kept for the next step (1-bit Adam)."""
    return c.exchanged_momentum * c.master_bytes


@_add(Buffer.OPTIM_SERVER_ERROR, Place.HBM, ALWAYS, state=True)
def server_error(c: RuntimeRank) -> int:
    """What the compressed mean of this rank's shards left out, kept for the next step (1-bit Adam)."""
    return c.averaged * c.master_bytes


@_add(Buffer.OPTIM_ANCHOR, Place.HBM, ALWAYS, state=True)
def anchor(c: RuntimeRank) -> int:
    """The masters of the last step after which all ranks had the same, from which local steps are averaged (0/1 Adam)."""
    return c.anchored * c.master_bytes


@_add(Buffer.COMM_ALL_REDUCE, Place.HBM, ALWAYS)
def messages(c: RuntimeRank) -> int:
    """The messages of one unit's momentum: those that this rank sends, and those that it receives."""
    return 2 * c.message_words * c.master_bytes


@_add(Buffer.STAGE_D2H, Place.HBM, (Phase.BACKWARD,))
def sum_slots(c: RuntimeRank) -> int:
    """Slots in which an offloaded unit's sum over micro batches is brought up, added to and taken down again."""
    return c.summed * c.exchange_bytes


@_add(Buffer.GRAD_SHARD, Place.PINNED, ALWAYS, state=True)
def exchange(c: RuntimeRank) -> int:
    """Where gradients come down to and, if equally wide, 16-bit parameters go up from."""
    return c.exchanged * c.exchange_bytes


@_add(Buffer.STAGE_D2H, Place.PINNED, ALWAYS)
def second_exchange(c: RuntimeRank) -> int:
    """The delayed update's other exchange: one is read by the update while the next gradients come to the other."""
    return c.exchanged * (c.exchanges - 1) * c.exchange_bytes


@_add(Buffer.STAGE_H2D, Place.PINNED, ALWAYS)
def updated_params(c: RuntimeRank) -> int:
    """16-bit parameters on their way up, where gradients on the host are wider than they."""
    return c.uploaded * c.param_bytes


@_add(Buffer.PARAM_MASTER, lambda c: c.master_place, ALWAYS, state=True)
def param_master_offloaded(c: RuntimeRank) -> int:
    """The fp32 parameters of offloaded units; fp32 parameters that are themselves on the host are their own masters."""
    return c.stepped_offloaded * c.master_bytes if c.masters_offloaded else 0


_add_state_lines(lambda c: c.offload_place, lambda c, _: c.stepped_offloaded, "_offloaded")


@_add(Buffer.SWAP_BUFFER, Place.PINNED, ALWAYS)
def swap_ring(c: RuntimeRank) -> int:
    """Pinned buffers that the update streams through: states read ahead, updated, written behind; parameters written."""
    return c.swapped * c.swap_bytes


@_add(Buffer.SWAP_BUFFER, Place.PINNED, ALWAYS)
def param_ring(c: RuntimeRank) -> int:
    """Pinned buffers through which parameters in files come to the GPU, read ahead."""
    return c.params_swapped * c.param_bytes


@_add(Buffer.ACTIVATION_CHECKPOINT, Place.PINNED, FROM_FIRST_STEP)
def checkpointed_inputs(c: RuntimeRank) -> int:
    """Inputs of checkpointed blocks, on the host from the forward to the backward; two are on the GPU at a time."""
    whole = c.inputs_offloaded * c.micro_batch * c.seq_len * c.hidden * c.param_bytes
    return whole if c.input_parts == 1 else fraction(whole, 1, c.input_parts)


@_add(Buffer.OPTIM_NORM, Place.HBM, ALWAYS)
def optim_norm(c: RuntimeRank) -> int:
    """The step's scalars, which the update kernels read on the device, and the norm's partial sums."""
    return c.step_scalars * c.master_bytes


@_add(Buffer.PARAM_TEMP, Place.HBM, ALWAYS)
def rounded_weights(c: RuntimeRank) -> int:
    """Where weights are rounded to fewer bits: a part of one, noise of stochastic rounding, and bounds of groups."""
    return c.rounded * c.master_bytes


@_add(Buffer.OPTIM_TEMP, Place.HBM, ALWAYS)
def update_temp(c: RuntimeRank) -> int:
    """Where an update without a kernel works: a part of the gradients, scaled, and a scratch tensor."""
    return c.update_temp * c.master_bytes


@_add(Buffer.OPTIM_TEMP, Place.DRAM, ALWAYS)
def update_temp_offloaded(c: RuntimeRank) -> int:
    """Where the update of offloaded units works on the host, without a kernel."""
    return c.update_temp_offloaded * c.master_bytes


@_add(Buffer.OPTIM_TRUST, Place.HBM, ALWAYS)
def optim_trust(c: RuntimeRank) -> int:
    """LAMB's norms of whole tensors and of their directions, and the tiles of 16 Ki elements that they are summed over."""
    return c.trust_words * c.master_bytes


@_add(Buffer.FRAGMENTATION, Place.NVME, ALWAYS)
def file_padding(c: RuntimeRank) -> int:
    """What fills the last page of each tensor in a file."""
    return c.file_padding


@_add(Buffer.INIT_TEMP, Place.HBM, (Phase.INIT,))
def init_copy(c: RuntimeRank) -> int:
    """One parameter at a time on its way from the host into its flat."""
    return c.largest_param * c.param_bytes


@_add(Buffer.INIT_TEMP, Place.HBM, (Phase.INIT,))
def init_room(c: RuntimeRank) -> int:
    """A block of the kept gradients' size, given back at once, so that the allocator has a segment in which they fit."""
    return c.grads_kept * c.grad_bytes


@_add(Buffer.COMM_PIPELINE, Place.HBM, FROM_FIRST_STEP)
def pipeline_buffers(c: RuntimeRank) -> int:
    """A pipeline stage's buffers for inputs and for gradients of outputs, of every micro batch of a step.

    Source: torch/distributed/pipelining/stage.py, _RecvInfo
    """
    return c.received


add_workspace_line(_lines, ALWAYS)  # taken at the start


LEDGER = _lines.ledger()
