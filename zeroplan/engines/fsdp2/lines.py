"""FSDP2's ledger: `fully_shard` on each block and the root, mixed precision, fused AdamW.

Each parameter is split along its first dimension in equal, padded chunks; the sharded fp32 parameter is the master.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py and _fsdp_collectives.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.workload import DType, Workload
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_state_lines
from zeroplan.ledger.optimizers import Optimizer, find_optimizer
from zeroplan.models.spec import ModelSpec

_lines = LedgerBuilder()
_add = _lines.add


#: What the names in the formulas mean.
GLOSSARY = {
    "ranks": "data-parallel ranks",
    "sharded": "elements of this rank's chunks, each parameter padded along its first dimension",
    "sharded_trainable": "of those, the ones that receive a gradient",
    "whole": "elements of the whole model",
    "largest_unit": "elements of the largest block",
    "root_unit": "elements of the root: embedding, final norm, head",
    "original_bytes": "bytes of one parameter as the optimizer sees it",
    "param_bytes": "bytes of one gathered parameter",
    "reduce_bytes": "bytes of one gradient element in the reduction",
    "state_bytes": "bytes of one element of an optimizer state",
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
    reshard: bool
    optimizer: Optimizer
    matrix: int = 0  # Muon's split is DeepSpeed's; torch's optimizers treat all parameters alike
    rest: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state element: torch's optimizers follow the parameter's dtype."""
        return self.original_bytes


def facts(spec: ModelSpec, workload: Workload, *, ranks: int, reshard: bool, cublas_workspace: int) -> Facts:
    """The facts of rank 0, which holds the largest chunks."""
    sharded = trainable = largest = root = 0
    for unit in spec.units:
        for t in unit.tensors:
            if t.tied_to is not None:
                continue
            rows = t.shape[0] if t.shape else 1
            part = -(-rows // ranks) * (t.numel // rows if rows else 0)
            sharded += part * unit.count
            trainable += part * unit.count if t.trainable else 0
        if unit.block:
            largest = max(largest, unit.numel)
        else:
            root += unit.numel * unit.count
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
        reshard=reshard,
        optimizer=find_optimizer(workload.optimizer),
    )


@_add(Buffer.PARAM_SHARD, Place.HBM, ALWAYS, state=True)
def param_shard(c: Facts) -> int:
    """This rank's fp32 chunks: the master itself."""
    return c.original_bytes * c.sharded


@_add(Buffer.GRAD_SHARD, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_shard(c: Facts) -> int:
    """Reduced gradients in the original dtype, until zero_grad."""
    return c.original_bytes * c.sharded_trainable


add_state_lines(_lines, Place.HBM, lambda c: c.sharded_trainable)


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
