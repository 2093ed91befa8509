"""The line of cuBLAS's workspaces, which all engines share."""

from __future__ import annotations

from typing import Protocol

from zeroplan.core.buffers import FROM_FIRST_STEP, Buffer, Phase, Place
from zeroplan.ledger.line import LedgerBuilder


class MultiplyingRank(Protocol):
    """The fact that the line reads."""

    @property
    def cublas_workspace(self) -> int:
        """Bytes of one cuBLAS workspace on this GPU."""
        ...


def add_workspace_line(lines: LedgerBuilder, phases: tuple[Phase, ...] = FROM_FIRST_STEP) -> None:
    """Register it; `phases` are those in which an engine's process has them."""

    @lines.add(Buffer.WORKSPACE, Place.HBM, phases)
    def cublas_workspace(c: MultiplyingRank) -> int:
        """cuBLAS's workspaces: one for the forward's thread, one for the backward's.

        Source: aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize
        """
        return 2 * c.cublas_workspace
