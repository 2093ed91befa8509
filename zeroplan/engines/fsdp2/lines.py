"""FSDP2's ledger: `fully_shard` on each block and the root, mixed precision, fused AdamW.

Each parameter is split along its first dimension in equal, padded chunks; the sharded fp32 parameter is the master.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py and _fsdp_collectives.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.optimizer_row import Optimizer
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Workload
from zeroplan.engines.torch_optimizer import split_of
from zeroplan.ledger.derive import pow2
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_state_lines
from zeroplan.models.spec import ModelSpec, Tensor

_lines = LedgerBuilder()
_add = _lines.add


#: What the names in the formulas mean.
GLOSSARY = {
    "ranks": "data-parallel ranks",
    "sharded": "elements of this rank's chunks, each parameter padded along its first dimension",
    "sharded_trainable": "of those, the ones that receive a gradient",
    "matrix": "of those, the ones that Muon updates: the blocks' matrices",
    "rest": "of those, the ones that Muon leaves to AdamW: embeddings, head, vectors",
    "whole": "elements of the whole model",
    "largest_unit": "elements of the largest block",
    "root_unit": "elements of the root: embedding, final norm, head",
    "original_bytes": "bytes of one parameter as the optimizer sees it",
    "param_bytes": "bytes of one gathered parameter",
    "reduce_bytes": "bytes of one gradient element in the reduction",
    "state_bytes": "bytes of one element of an optimizer state",
    "param_blocks": "bytes of the pinned blocks that hold this rank's chunks, each rounded to a power of two",
    "grad_blocks": "the same for the chunks' gradients",
    "largest_chunk": "elements of this rank's chunk of the largest parameter",
    "cublas_workspace": "bytes of one cuBLAS workspace on this GPU",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's elements and widths."""

    ranks: int
    sharded: int  # this rank's chunks of all parameters, padded
    sharded_trainable: int
    whole: int  # all parameters
    largest_unit: int
    root_unit: int
    original_bytes: int
    param_bytes: int  # as gathered
    reduce_bytes: int
    cublas_workspace: int
    param_blocks: int  # pinned blocks of the chunks, each a power of two; 0 where nothing is offloaded
    grad_blocks: int
    largest_chunk: int
    reshard: bool
    offload: bool
    optimizer: Optimizer
    matrix: int  # of `sharded_trainable`: what Muon would update
    rest: int

    @property
    def state_bytes(self) -> int:
        """Bytes of one state element: torch's optimizers follow the parameter's dtype."""
        return self.original_bytes


def facts(
    spec: ModelSpec, workload: Workload, layout: ParallelLayout, *, reshard: bool, cublas_workspace: int, offload: bool = False
) -> Facts:
    """The facts of rank 0, which holds the largest chunks."""
    ranks = layout.shard_group
    sharded = trainable = largest = root = param_blocks = grad_blocks = largest_chunk = 0
    width = 4
    for unit in spec.units:
        for t in unit.tensors:
            if t.tied_to is not None:
                continue
            part = _chunk(t, ranks)
            sharded += part * unit.count
            trainable += part * unit.count if t.trainable else 0
            largest_chunk = max(largest_chunk, part)
            block = pow2(width * part) * unit.count if offload else 0
            param_blocks += block
            grad_blocks += block if t.trainable else 0
        if unit.block:
            largest = max(largest, unit.numel)
        else:
            root += unit.numel * unit.count
    split = split_of(spec, lambda tensor: _chunk(tensor, ranks))
    return Facts(
        ranks=ranks,
        sharded=sharded,
        sharded_trainable=trainable,
        whole=spec.params,
        largest_unit=largest,
        root_unit=root,
        original_bytes=DType.FP32.bytes,
        param_bytes=workload.dtype.bytes,
        reduce_bytes=DType.FP32.bytes,
        cublas_workspace=cublas_workspace,
        param_blocks=param_blocks,
        grad_blocks=grad_blocks,
        largest_chunk=largest_chunk,
        reshard=reshard,
        offload=offload,
        optimizer=find_optimizer(workload.optimizer),
        matrix=split.matrix,
        rest=split.rest,
    )


def _chunk(tensor: Tensor, ranks: int) -> int:
    """Elements of the largest chunk of a parameter, whose first dimension is split."""
    rows = tensor.shape[0] if tensor.shape else 1
    return -(-rows // ranks) * (tensor.numel // rows if rows else 0)


@_add(Buffer.PARAM_SHARD, Place.HBM, ALWAYS, state=True)
def param_shard(c: Facts) -> int:
    """This rank's fp32 chunks: the master itself."""
    return 0 if c.offload else c.original_bytes * c.sharded


@_add(Buffer.PARAM_SHARD, Place.PINNED, ALWAYS, state=True)
def param_shard_host(c: Facts) -> int:
    """The same on the host (CPUOffloadPolicy), each chunk in a pinned block of its own.

    Source: _fsdp_param.py, reset_sharded_param
    """
    return c.param_blocks


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_shard(c: Facts) -> int:
    """Reduced gradients in the original dtype, until zero_grad."""
    return 0 if c.offload else c.original_bytes * c.sharded_trainable


@_add(Buffer.GRAD_SHARD, Place.PINNED, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_shard_host(c: Facts) -> int:
    """Reduced gradients copied to the host as they are made: a copy that does not block gets pinned memory.

    Source: _fsdp_collectives.py, foreach_reduce
    """
    return c.grad_blocks


add_state_lines(_lines, Place.HBM, lambda c: 0 if c.offload else c.sharded_trainable)
add_state_lines(_lines, Place.DRAM, lambda c: c.sharded_trainable if c.offload else 0, suffix="_host")


@_add(Buffer.STAGE_H2D, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def chunk_from_host(c: Facts) -> int:
    """A chunk's copy from the host before it is cast: of the largest parameter.

    Source: _fsdp_param.py, all_gather_inputs
    """
    return c.original_bytes * c.largest_chunk if c.offload else 0


@_add(Buffer.PARAM_FULL, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def root_full(c: Facts) -> int:
    """The root's parameters (embedding, final norm, head), gathered from the forward to the end of the backward."""
    return c.param_bytes * c.root_unit if c.ranks > 1 or c.param_bytes != c.original_bytes else 0


@_add(Buffer.PARAM_FULL, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def blocks_full(c: Facts) -> int:
    """Every block's gathered parameters, where they are not resharded after the forward."""
    return 0 if c.reshard else c.param_bytes * (c.whole - c.root_unit)


@_add(Buffer.COMM_ALL_GATHER, Place.HBM, (Phase.FORWARD, Phase.BACKWARD))
def gathers(c: Facts) -> int:
    """Three blocks in flight: the previous gather's output, the current one and the unsharded parameters."""
    return 3 * c.param_bytes * c.largest_unit if c.reshard else 2 * c.param_bytes * c.largest_unit


@_add(Buffer.COMM_REDUCE_SCATTER, Place.HBM, (Phase.BACKWARD,))
def reduce_input(c: Facts) -> int:
    """The reduce-scatter's input for one block, in the reduction's dtype."""
    return c.reduce_bytes * c.largest_unit


@_add(Buffer.WORKSPACE, Place.HBM, FROM_FIRST_STEP)
def cublas_workspace(c: Facts) -> int:
    """cuBLAS's workspaces: one for the forward's thread, one for the backward's."""
    return 2 * c.cublas_workspace


LEDGER = _lines.ledger()
