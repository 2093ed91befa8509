"""DDP's ledger: everything whole on every rank, and the reduction's buckets.

Source: torch/csrc/distributed/c10d/reducer.cpp (buckets hold all gradients; gradient_as_bucket_view is off by default).
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import ALWAYS, FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.core.optimizer_row import Optimizer
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Workload
from zeroplan.engines.torch_optimizer import split_of
from zeroplan.ledger.line import LedgerBuilder
from zeroplan.ledger.optimizer_lines import add_state_lines
from zeroplan.models.spec import ModelSpec

_lines = LedgerBuilder()
_add = _lines.add


#: What the names in the formulas mean.
GLOSSARY = {
    "ranks": "data-parallel ranks",
    "params": "elements of the whole model",
    "trainable": "elements that receive a gradient",
    "matrix": "elements that Muon updates: the blocks' matrices",
    "rest": "elements that Muon leaves to AdamW: embeddings, head, vectors",
    "param_bytes": "bytes of one parameter, gradient and state element",
    "state_bytes": "bytes of one element of an optimizer state",
    "cublas_workspace": "bytes of one cuBLAS workspace on this GPU",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Elements and widths of one rank."""

    ranks: int
    params: int
    trainable: int
    param_bytes: int
    cublas_workspace: int
    optimizer: Optimizer
    matrix: int  # of `trainable`: what Muon would update
    rest: int

    @property
    def state_bytes(self) -> int:
        """Bytes of one state element: torch's optimizers follow the parameter's dtype."""
        return self.param_bytes


def facts(spec: ModelSpec, workload: Workload, layout: ParallelLayout, *, cublas_workspace: int) -> Facts:
    """The facts of any rank: all are alike."""
    split = split_of(spec, lambda tensor: tensor.numel)
    return Facts(
        ranks=layout.dp,
        params=spec.params,
        trainable=spec.trainable,
        param_bytes=DType.FP32.bytes,
        cublas_workspace=cublas_workspace,
        optimizer=find_optimizer(workload.optimizer),
        matrix=split.matrix,
        rest=split.rest,
    )


@_add(Buffer.PARAM_FULL, Place.HBM, ALWAYS, state=True)
def param_full(c: Facts) -> int:
    """The whole model in fp32."""
    return c.param_bytes * c.params


@_add(Buffer.GRAD_FULL, Place.HBM, (Phase.BACKWARD, Phase.STEP), state=True)
def grad_full(c: Facts) -> int:
    """Gradients, until zero_grad."""
    return c.param_bytes * c.trainable


@_add(Buffer.COMM_ALL_REDUCE, Place.HBM, ALWAYS)
def buckets(c: Facts) -> int:
    """The reducer's buckets: a second copy of all gradients, where there is more than one rank."""
    return c.param_bytes * c.trainable if c.ranks > 1 else 0


add_state_lines(_lines, Place.HBM, lambda c: c.trainable)


@_add(Buffer.WORKSPACE, Place.HBM, FROM_FIRST_STEP)
def cublas_workspace(c: Facts) -> int:
    """cuBLAS's workspaces: one for the forward's thread, one for the backward's."""
    return 2 * c.cublas_workspace


LEDGER = _lines.ledger()
