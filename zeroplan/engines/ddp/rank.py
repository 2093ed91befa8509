"""One rank under DDP: everything whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.workload import Reference
from zeroplan.engines.torch_rank import TorchRank


@dataclass(frozen=True, kw_only=True)
class DdpRank(TorchRank):
    """One rank under DDP. All ranks hold the same."""

    @cached_property
    def kept_gradients(self) -> int:
        """Elements of gradients that stay between steps: all, where ``zero_grad`` only fills them with zeros."""
        return 0 if self.workload.loop.set_to_none else self.graded

    @cached_property
    def reference(self) -> int:
        """Elements of a reference model beside the trained one."""
        return self.params if self.workload.objective.reference is Reference.MODEL else 0

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """This rank's elements of each parameter: all of them, since DDP shards nothing."""
        return self.numel
