"""The split of parameters between Muon and AdamW that users of FSDP2 and DDP make.

``torch.optim.Muon`` takes 2-D parameters alone and is meant for hidden layers, so a program makes two optimizers: Muon for the
matrices of the blocks, AdamW for the embeddings, the head and all vectors. Which parameter goes where is the program's choice;
planned is the usual one, of the example in torch's and in the original's documentation.
Source: torch/optim/_muon.py; Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
"""

from __future__ import annotations

import re

_IN_A_BLOCK = re.compile(r"(^|\.)\d+\.")


def muon_takes(name: str, dimensions: int) -> bool:
    """Return whether Muon updates a parameter: a matrix of a block (a numbered module) that is no embedding.

    Args:
        name: in full, such as ``model.layers.0.mlp.up_proj.weight``.
        dimensions: of its shape.
    """
    return dimensions == 2 and _IN_A_BLOCK.search(name) is not None and "embed" not in name.lower()
