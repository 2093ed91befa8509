"""One rank of the toy: all are alike. The ledger and the schedule read it."""

from __future__ import annotations

from functools import cached_property

from zeroplan.engines.torch_rank import TorchRank
from zeroplan.ledger.line import glossary_of


class ToyRank(TorchRank):
    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """By parameter, the elements that this rank's optimizer holds: all of them."""
        return self.numel

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of an optimizer state."""
        return self.original_bytes

    @cached_property
    def params(self) -> int:
        """Elements of the model."""
        return self.parameters.total

    @cached_property
    def trainable(self) -> int:
        """Elements that receive a gradient."""
        return self.parameters.trained_total

    @cached_property
    def matrix(self) -> int:
        """Elements that Muon updates."""
        return sum(self.numel[p] for p in self.matrices)

    @cached_property
    def rest(self) -> int:
        """Elements that Muon leaves to AdamW."""
        return self.trainable - self.matrix


GLOSSARY = glossary_of(ToyRank) | {"cublas_workspace": "bytes of one cuBLAS workspace on this GPU"}
