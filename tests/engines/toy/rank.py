"""One rank of the toy: all are alike. The ledger and the schedule read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroplan.engines.torch_rank import TorchRank


@dataclass(frozen=True, kw_only=True)
class ToyRank(TorchRank):
    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """This rank's elements of each parameter: all of them."""
        return self.numel
