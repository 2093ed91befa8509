"""One rank under DDP: everything whole."""

from __future__ import annotations

from functools import cached_property

from zeroplan.engines.torch_rank import TorchRank
from zeroplan.ledger.line import glossary_of


class DdpRank(TorchRank):
    """Any rank: all are alike. The first sentence of a docstring is what `explain` says of the name."""

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """By parameter, the elements that this rank's optimizer holds: all of them, since DDP shards nothing."""
        return self.numel

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of one trained parameter, gradient and state element."""
        return self.original_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of an optimizer state."""
        return self.param_bytes

    @cached_property
    def params(self) -> int:
        """Elements of the whole model."""
        return self.parameters.total

    @cached_property
    def trainable(self) -> int:
        """Elements that receive a gradient."""
        return self.parameters.trained_total

    @cached_property
    def frozen(self) -> int:
        """Elements that receive no gradient."""
        return self.params - self.trainable

    @cached_property
    def matrix(self) -> int:
        """Elements that Muon updates: the blocks' matrices."""
        return sum(self.numel[p] for p in self.matrices)

    @cached_property
    def rest(self) -> int:
        """Elements that Muon leaves to AdamW: embeddings, head, vectors."""
        return self.trainable - self.matrix


#: What the names in the ledger's formulas mean.
GLOSSARY = glossary_of(DdpRank) | {"cublas_workspace": "bytes of one cuBLAS workspace on this GPU"}
