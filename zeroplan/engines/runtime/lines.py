"""The runtime's ledger: the buffers that its Arena allocates, counted by `core.layout.runtime_buffers`, and little else.

Counts are elements of one rank and hold all padding, so that the items of owned buffers equal the Arena's rows to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.layout import OPTIMIZER_STATES, Layout, OwnedBuffer, UnitKind, runtime_buffers
from zeroplan.ledger.line import LedgerBuilder

_lines = LedgerBuilder()
_add = _lines.add

_FP32_BYTES = 4

#: What the names in the formulas mean. Flats are padded: parameters begin on multiples of 64 elements, shards are equal.
GLOSSARY = {
    "ranks": "data-parallel ranks",
    "params_kept": "elements of trained parameters that this rank keeps beside masters: whole flats, at stage 3 shards or none",
    "frozen_kept": "the same of parameters without gradient",
    "params_gathered": "elements of the slots that gathered units share: two blocks, the widest layer, the root",
    "grads_kept": "elements of gradients that this rank keeps: whole flats, from stage 2 on its shards of them",
    "grads_in_ring": "elements of the slots in which blocks' whole gradients wait for their reduction",
    "grads_in_slots": "elements of the slots for those of embeddings, heads and the root",
    "grads_staged": "elements of gradients that are cast and reduced at once",
    "stepped": "elements that this rank's optimizer steps: whole flats at stage 0, else its shards of them",
    "largest_param": "elements of the largest parameter",
    "step_scalars": "fp32 scalars of a step (norm, clip factor, overflow flag) and the norm's workspace",
    "param_bytes": "bytes of one parameter",
    "grad_bytes": "bytes of one element of a kept gradient",
    "reduce_bytes": "bytes of one element of a gradient as it is reduced",
    "slot_bytes": "bytes of one element of a gradient in the slot of an embedding, head or the root",
    "master_bytes": "bytes of one master, moment or scalar",
    "cublas_workspace": "bytes of one cuBLAS workspace on this GPU",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's elements and widths; the names are those of :data:`GLOSSARY`."""

    ranks: int
    stage: int
    params_kept: int
    frozen_kept: int
    params_gathered: int
    grads_kept: int
    grads_in_ring: int
    grads_in_slots: int
    grads_staged: int
    stepped: int
    largest_param: int
    step_scalars: int
    param_bytes: int
    grad_bytes: int
    reduce_bytes: int
    slot_bytes: int
    master_bytes: int
    cublas_workspace: int
    masters: bool
    states: tuple[Buffer, ...]


def facts(layout: Layout, *, cublas_workspace: int) -> Facts:
    """Sums over the rows that the Arena allocates."""
    setup, rows = layout.setup, runtime_buffers(layout)
    ring = {unit.grad_slot for unit in layout.units if unit.shape.kind is UnitKind.BLOCK}
    masters = _count(rows, Buffer.PARAM_MASTER)
    states = OPTIMIZER_STATES[setup.optimizer]
    own_param = Buffer.PARAM_SHARD if setup.stage >= 3 else Buffer.PARAM_FULL
    own_grad = Buffer.GRAD_SHARD if setup.stage >= 2 else Buffer.GRAD_FULL
    share = "shard" if setup.shards_states else "full"
    return Facts(
        ranks=setup.ranks,
        stage=setup.stage,
        params_kept=_count(rows, own_param),
        frozen_kept=_count(rows, Buffer.PARAM_FROZEN),
        params_gathered=sum(layout.param_slots.values()),
        grads_kept=_count(rows, own_grad),
        grads_in_ring=sum(numel for slot, numel in layout.grad_slots.items() if slot in ring),
        grads_in_slots=sum(numel for slot, numel in layout.grad_slots.items() if slot not in ring),
        grads_staged=_count(rows, Buffer.COMM_REDUCE_SCATTER),
        stepped=masters or sum(getattr(unit.trainable, share) for unit in layout.units if unit.trainable),
        largest_param=max((p.numel for unit in layout.units for p in unit.shape.params), default=0),
        step_scalars=_count(rows, Buffer.OPTIM_NORM),
        param_bytes=setup.param_dtype.bytes,
        grad_bytes=(setup.accum_dtype if setup.shards_grads else setup.whole_grad_dtype).bytes,
        reduce_bytes=setup.reduce_dtype.bytes,
        slot_bytes=setup.wide_grad_dtype.bytes,
        master_bytes=_FP32_BYTES,
        cublas_workspace=cublas_workspace,
        masters=bool(masters),
        states=states,
    )


def _count(rows: list[OwnedBuffer], buffer: Buffer) -> int:
    return sum(row.numel for row in rows if row.buffer is buffer)


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def param_full(c: Facts) -> int:
    """Whole flats of every unit, of which the parameters are views."""
    return c.params_kept * c.param_bytes if c.stage < 3 else 0


@_add(Buffer.PARAM_SHARD, Place.HBM, ALWAYS, state=True)
def param_shard(c: Facts) -> int:
    """This rank's shard of every unit's flat, in the model's dtype, where no master stands for it."""
    return c.params_kept * c.param_bytes if c.stage >= 3 else 0


@_add(Buffer.PARAM_FROZEN, Place.HBM, ALWAYS, state=True)
def param_frozen(c: Facts) -> int:
    """Parameters without gradient, in flats of their own."""
    return c.frozen_kept * c.param_bytes


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS)
def param_slots(c: Facts) -> int:
    """Slots that gathered units take turns in, allocated once."""
    return c.params_gathered * c.param_bytes


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_full(c: Facts) -> int:
    """Whole gradients, where the backward writes them and the reduction leaves the mean; they go in the step."""
    return c.grads_kept * c.grad_bytes if c.stage < 2 else 0


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_shard(c: Facts) -> int:
    """This rank's averaged share of the gradients, from a unit's reduction to its update."""
    return c.grads_kept * c.grad_bytes if c.stage >= 2 else 0


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD,))
def grad_slots(c: Facts) -> int:
    """Slots in which the backward writes a unit's whole gradients until they are reduced; they go at its end."""
    return c.grads_in_ring * c.reduce_bytes + c.grads_in_slots * c.slot_bytes


@_add(Buffer.COMM_REDUCE_SCATTER, Place.HBM, (Phase.BACKWARD,))
def staging(c: Facts) -> int:
    """Where 16-bit gradients of embeddings, heads and the root are cast, piece by piece, to be reduced in fp32."""
    return c.grads_staged * c.reduce_bytes


@_add(Buffer.PARAM_MASTER, Place.HBM, ALWAYS, state=True)
def param_master(c: Facts) -> int:
    """The optimizer's fp32 parameters; fp32 parameters are their own masters."""
    return c.stepped * c.master_bytes if c.masters else 0


@_add(Buffer.OPTIM_EXP_AVG, Place.HBM, ALWAYS, state=True)
def optim_exp_avg(c: Facts) -> int:
    """Running mean of the gradients (Adam's and Lion's first moment)."""
    return c.stepped * c.master_bytes if Buffer.OPTIM_EXP_AVG in c.states else 0


@_add(Buffer.OPTIM_EXP_AVG_SQ, Place.HBM, ALWAYS, state=True)
def optim_exp_avg_sq(c: Facts) -> int:
    """Running mean of the squared gradients (Adam's second moment)."""
    return c.stepped * c.master_bytes if Buffer.OPTIM_EXP_AVG_SQ in c.states else 0


@_add(Buffer.OPTIM_MOMENTUM, Place.HBM, ALWAYS, state=True)
def optim_momentum(c: Facts) -> int:
    """SGD's momentum."""
    return c.stepped * c.master_bytes if Buffer.OPTIM_MOMENTUM in c.states else 0


@_add(Buffer.OPTIM_NORM, Place.HBM, ALWAYS)
def optim_norm(c: Facts) -> int:
    """The step's scalars, which the update kernels read on the device, and the norm's partial sums."""
    return c.step_scalars * c.master_bytes


@_add(Buffer.INIT_TEMP, Place.HBM, (Phase.INIT,))
def init_copy(c: Facts) -> int:
    """One parameter at a time on its way from the host into its flat."""
    return c.largest_param * c.param_bytes


@_add(Buffer.WORKSPACE, Place.HBM, FROM_FIRST_STEP)
def cublas_workspace(c: Facts) -> int:
    """cuBLAS's workspaces: one for the forward's thread, one for the backward's."""
    return 2 * c.cublas_workspace


LEDGER = _lines.ledger()
#: Names of the lines that the Arena's rows are held against.
OWNED = frozenset(line.name for line in LEDGER if line.name not in ("init_copy", "cublas_workspace"))
