"""What users of FSDP2 and DDP give to Muon, and what to AdamW.

``torch.optim.Muon`` takes 2-D parameters alone and is meant for hidden layers, so a program makes two optimizers: Muon for the
matrices of the blocks, AdamW for the embeddings, the head and all vectors. Which parameter goes where is the program's choice;
planned is the usual one, of the example in torch's and in the original's documentation.
Source: torch/optim/_muon.py; Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from zeroplan.models.spec import ModelSpec, Tensor

_IN_A_BLOCK = re.compile(r"(^|\.)\d+\.")


def muon_takes(name: str, dimensions: int) -> bool:
    """Whether Muon updates a parameter: a matrix of a block (a numbered module) that is no embedding.

    Args:
        name: in full, such as ``model.layers.0.mlp.up_proj.weight``.
        dimensions: of its shape.
    """
    return dimensions == 2 and _IN_A_BLOCK.search(name) is not None and "embed" not in name.lower()


@dataclass(frozen=True, slots=True)
class Split:
    """Trainable elements that Muon updates, and those that it leaves to AdamW."""

    matrix: int
    rest: int

    @property
    def share(self) -> float:
        """Part of all that Muon updates, from 0 to 1."""
        return self.matrix / max(1, self.matrix + self.rest)


def split_of(spec: ModelSpec, elements: Callable[[Tensor], int]) -> Split:
    """The split of a model of which this rank holds ``elements(tensor)`` elements of each parameter."""
    matrix = rest = 0
    for unit in spec.units:
        prefix = unit.name.replace("{}", str(unit.first))
        for tensor in unit.tensors:
            if tensor.tied_to is not None or not tensor.trainable:
                continue
            count = elements(tensor) * unit.count
            if muon_takes(f"{prefix}.{tensor.name}", len(tensor.shape)):
                matrix += count
            else:
                rest += count
    return Split(matrix, rest)
