"""One rank under the included runtime: its layout, and the rows of :mod:`zeroplan.core.arena.owned_buffers` summed up.

The ledger's lines and the traffic's facts read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from zeroplan.core.arena.layout import PAGE, ArenaLayout, Flat, UnitLayout
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.arena.owned_buffers import OwnedBuffer, runtime_buffers
from zeroplan.core.buffers import Buffer, Place
from zeroplan.engines.runtime.checkpoints import OffloadedInputSizes
from zeroplan.ledger.line import fact, means

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class RuntimeRank:
    """One rank: its layout, and the layout's rows summed up, in elements, and bytes an element. All ranks are alike.

    Flats are padded: parameters begin on multiples of 64 elements.

    Attributes:
        layout: of the buffers that the Arena allocates.
        inputs: the checkpointed inputs that leave for the host.
    """

    layout: ArenaLayout
    cublas_workspace: int = means("bytes of one cuBLAS workspace on this GPU", default=0)
    inputs: OffloadedInputSizes = field(default_factory=OffloadedInputSizes)
    received: int = means("bytes of what a pipeline stage receives in a step: inputs, and gradients of outputs", default=0)

    @property
    def setup(self) -> RuntimeSetup:
        """The configuration and the group of ranks that the layout is derived from."""
        return self.layout.setup

    @cached_property
    def rows(self) -> list[OwnedBuffer]:
        """Every buffer of the Arena."""
        return runtime_buffers(self.layout)

    @cached_property
    def stepping(self) -> list[tuple[UnitLayout, int]]:
        """The units that this rank steps, with its elements of each."""
        return [(unit, self.layout.share(unit)) for unit in self.layout.units if unit.trainable]

    def count(self, buffer: Buffer, *, here: bool | None = None, files: bool | None = None, unit: str = "") -> int:
        """Sum up the elements of a buffer's rows: on the GPU or elsewhere, in files or not, of one unit, or of all."""
        own = [row for row in self.rows if row.buffer is buffer and unit in ("", row.unit)]
        own = [row for row in own if here in (None, row.place is Place.HBM) and files in (None, row.place is Place.NVME)]
        return sum(row.numel for row in own)

    @property
    def flats(self) -> list[Flat]:
        """The trained flats, unit by unit."""
        return [unit.trainable for unit in self.layout.units if unit.trainable is not None]

    @property
    def keeps_masters_alone(self) -> bool:
        """Whether no parameters stand beside the masters, which are cast where they are gathered, or are the parameters."""
        return self.setup.casts_masters or not self.setup.has_masters

    def params_at(self, place: Place) -> int:
        """Sum up the elements of this rank's parameters that rest in a memory."""
        params = (Buffer.PARAM_SHARD, Buffer.PARAM_FROZEN)
        return sum(row.numel for row in self.rows if row.buffer in params and row.place is place)

    def grad_slots(self, *, ring: bool) -> int:
        """Sum up the slots for whole gradients that blocks take turns in, or the others."""
        turns = {unit.grad_slot for unit in self.layout.units if unit.shape.in_ring}
        return sum(numel for slot, numel in self.layout.grad_slots.items() if (slot in turns) is ring)

    def grads_of(self, unit: UnitLayout) -> int:
        """Return the elements of a unit's gradients that this rank keeps."""
        if unit.trainable is None or unit.offloaded:
            return 0
        return unit.trainable.shard if self.setup.shards_grads else unit.trainable.full

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return self.setup.stage

    @property
    def own_param(self) -> Buffer:
        """The buffer of trained parameters."""
        return Buffer.PARAM_SHARD if self.setup.stage >= 3 else Buffer.PARAM_FULL

    @property
    def param_place(self) -> Place:
        """The memory of parameters that rest in no file."""
        return Place.PINNED if self.setup.offloads_params else Place.HBM

    @cached_property
    def offload_place(self) -> Place:
        """The memory of offloaded states."""
        return next((unit.place for unit, _ in self.stepping if unit.offloaded), Place.DRAM)

    @property
    def masters(self) -> bool:
        """Whether the GPU has masters beside the parameters."""
        return any(row.buffer is Buffer.PARAM_MASTER and row.place is Place.HBM for row in self.rows)

    @cached_property
    def master_place(self) -> Place | None:
        """The memory of masters off the GPU; None without any."""
        rows = (row for row in self.rows if row.buffer is Buffer.PARAM_MASTER and row.place is not Place.HBM)
        return next((row.place for row in rows), None)

    ranks = fact("data-parallel ranks", lambda r: r.setup.ranks)
    params_kept = fact(
        "elements of trained parameters that this rank keeps beside masters: whole flats, at stage 3 shards or none",
        lambda r: r.count(r.own_param, files=False),
    )
    frozen_kept = fact(
        "elements of frozen parameters that this rank keeps: whole flats, at stage 3 shards",
        lambda r: r.count(Buffer.PARAM_FROZEN, files=False),
    )
    params_in_files = fact(
        "the same of trained parameters that rest in a file, beyond those that max_in_cpu keeps in host memory",
        lambda r: r.count(r.own_param, files=True),
    )
    frozen_in_files = fact(
        "elements of frozen parameters that rest in a file, beyond those that max_in_cpu keeps in host memory",
        lambda r: r.count(Buffer.PARAM_FROZEN, files=True),
    )
    params_swapped = fact(
        "elements of the pinned buffers between that file and the GPU: buffer_count of up to buffer_size",
        lambda r: r.setup.param_buffers * r.layout.param_buffer,
    )
    params_gathered = fact(
        "elements of the slots that gathered units share: two blocks, the widest layer, the root",
        lambda r: sum(r.layout.param_slots.values()),
    )
    snapshot_bytes = fact(
        "bytes of pinned memory to which masters and states are copied for a checkpoint", lambda r: r.layout.snapshot
    )
    float8_gathered = fact(
        "bytes of the messages, one a rank, that the largest unit is gathered by in 8 bits", lambda r: r.layout.float8_gather
    )
    grads_kept = fact(
        "elements of gradients that this rank keeps: whole flats, from stage 2 on its shards of them",
        lambda r: sum(map(r.grads_of, r.layout.units)),
    )
    grads_in_ring = fact(
        "elements of the slots in which blocks' whole gradients wait for their reduction", lambda r: r.grad_slots(ring=True)
    )
    grads_in_slots = fact(
        "elements of the slots for those of embeddings, heads and the root", lambda r: r.grad_slots(ring=False)
    )
    grads_staged = fact(
        "elements of gradients that are cast and reduced at once", lambda r: r.count(Buffer.COMM_REDUCE_SCATTER)
    )
    stepped = fact(
        "elements that this rank's optimizer steps: whole flats at stage 0, else its shards of them",
        lambda r: sum(n for unit, n in r.stepping if not unit.offloaded),
    )
    stepped_offloaded = fact(
        "elements that this rank's optimizer steps on the host", lambda r: sum(n for unit, n in r.stepping if unit.offloaded)
    )
    exchanged = fact(
        "elements of gradients that come down to pinned memory: this rank's shards, alone whole flats",
        lambda r: r.stepped_offloaded,
    )
    exchanges = fact("pinned places of each: two with the delayed update", lambda r: 2 if r.setup.delayed_update else 1)
    uploaded = fact(
        "elements of 16-bit parameters that go up from memory of their own, as gradients there are wider",
        lambda r: r.count(Buffer.STAGE_H2D),
    )
    summed = fact(
        "elements of the slots in which offloaded gradients are summed over micro batches, or cast",
        lambda r: r.count(Buffer.STAGE_D2H, here=True),
    )
    swapped = fact(
        "elements of the pinned buffers between files and the update", lambda r: r.count(Buffer.SWAP_BUFFER, unit="optimizer")
    )
    exchanged_momentum = fact(
        "elements whose momentum every rank keeps whole, to exchange it in one bit: whole flats",
        lambda r: r.count(Buffer.OPTIM_ERROR_FEEDBACK),
    )
    anchored = fact(
        "elements whose masters of the last common step are kept: whole flats (local steps)",
        lambda r: r.count(Buffer.OPTIM_ANCHOR),
    )
    averaged = fact(
        "elements of the ranks' mean that this rank compresses: its shards of those flats",
        lambda r: r.count(Buffer.OPTIM_SERVER_ERROR),
    )
    message_words = fact(
        "words of the largest flat's messages, one a rank: a bit an element, and the scales", lambda r: r.layout.message_words
    )
    largest_param = fact(
        "elements of the largest parameter",
        lambda r: max((p.numel for unit in r.layout.units for p in unit.shape.params), default=0),
    )
    step_scalars = fact(
        "fp32 scalars of a step (norm, clip factor, overflow flag) and the norm's workspace",
        lambda r: r.count(Buffer.OPTIM_NORM),
    )
    file_padding = fact(
        "bytes that fill the last page of 4,096 of each unit's share of masters, moments and parameters in files",
        lambda r: sum(-row.bytes % PAGE for row in r.rows if row.place is Place.NVME),
    )
    inputs_offloaded = fact(
        "inputs of checkpointed blocks that leave for the host: all but the last block's (cpu_checkpointing)",
        lambda r: r.inputs.count,
    )
    input_parts = fact(
        "tensor-parallel ranks that divide each of these inputs (partition_activations)", lambda r: r.inputs.parts
    )
    micro_batch = fact("samples a rank and pass", lambda r: r.inputs.micro_batch)
    seq_len = fact("tokens a sample", lambda r: r.inputs.seq_len)
    hidden = fact("elements of one token's hidden state", lambda r: r.inputs.hidden)
    rounded = fact("fp32 words in which weights are rounded (quantize_training)", lambda r: r.count(Buffer.PARAM_TEMP))
    trust_words = fact(
        "words of LAMB's tables: two sums a tensor and a tile, and where each tile begins and ends",
        lambda r: r.count(Buffer.OPTIM_TRUST),
    )
    map_words = fact(
        "words of the tables by which 8- and 4-bit states are quantised: levels, and bins to find them by",
        lambda r: r.count(Buffer.OPTIM_SCALE, unit="maps"),
    )
    update_temp = fact(
        "elements of the temporaries of an update without a kernel: two of up to 1 Mi",
        lambda r: r.count(Buffer.OPTIM_TEMP, here=True),
    )
    update_temp_offloaded = fact(
        "elements of the temporaries of an update on the host without a kernel",
        lambda r: r.count(Buffer.OPTIM_TEMP, here=False),
    )
    param_bytes = fact("bytes of one parameter", lambda r: r.setup.param_dtype.bytes)
    grad_bytes = fact(
        "bytes of one element of a kept gradient",
        lambda r: (r.setup.accum_dtype if r.setup.shards_grads else r.setup.whole_grad_dtype).bytes,
    )
    reduce_bytes = fact("bytes of one element of a gradient as it is reduced", lambda r: r.setup.reduce_dtype.bytes)
    exchange_bytes = fact("bytes of one element of a gradient on the host", lambda r: r.setup.accum_dtype.bytes)
    slot_bytes = fact(
        "bytes of one element of a gradient in the slot of an embedding, head or the root",
        lambda r: r.setup.wide_grad_dtype.bytes,
    )
    swap_bytes = fact(
        "bytes of one element between files and the update: a master's, or, where no states are there, a parameter's",
        lambda r: r.layout.swap_dtype.bytes,
    )
    master_bytes = fact("bytes of one master, moment, scalar or word", lambda _: _FP32_BYTES)
