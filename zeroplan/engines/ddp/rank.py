"""One rank under DDP: everything whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroplan.engines.torch_rank import TorchRank


@dataclass(frozen=True, kw_only=True)
class DdpRank(TorchRank):
    """One rank under DDP. All ranks hold the same."""

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """This rank's elements of each parameter: all of them, since DDP shards nothing."""
        return self.numel
