"""What a rank's Muon and AdamW keep and need, in plain torch: on 1 rank as under DDP, on more as FSDP2's DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: Name and shape of each parameter, in order. Rows divide by the ranks; the matrices of the block are wide, tall and square.
SHAPES = {
    "embed_tokens.weight": (96, 64),
    "layers.0.down.weight": (64, 256),
    "layers.0.up.weight": (256, 64),
    "layers.0.proj.weight": (64, 64),
    "layers.0.norm.weight": (64,),
    "head.weight": (96, 64),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            *path, leaf = name.split(".")
            owner: Any = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            setattr(owner, leaf, nn.Parameter(torch.randn(shape)))


def step(group: Any, ranks: int, optimizer: str) -> tuple[dict[str, int], list[int]]:
    """Bytes of each kind of state on this rank, and the peak of each later step beside them."""
    from tests.core.allocations import Allocations
    from zeroplan.engines.torch_trainer import make_optimizers

    torch.manual_seed(0)
    model = Model()
    if ranks > 1:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizers = make_optimizers(optimizer, model.named_parameters())
    peaks = []
    for _ in range(6):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        known = [_local(t) for p in model.parameters() for t in (p, p.grad)]
        known += [_local(t) for one in optimizers for t in _states(one) if isinstance(t, torch.Tensor)]
        with Allocations(known) as made:
            for one in optimizers:
                one.step()
        peaks.append(made.peak)
    kept: dict[str, int] = {}
    for one in optimizers:
        for state in one.state.values():
            for key, tensor in state.items():
                kept[key] = kept.get(key, 0) + _local(tensor).numel() * _local(tensor).element_size()
    return kept, peaks[1:]


def _states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
