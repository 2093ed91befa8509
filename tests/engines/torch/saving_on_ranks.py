"""What torch's own state dicts keep on gloo ranks: bytes of storages that operators make, while they live."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: The first has a first dimension that two ranks cannot share evenly; the others are larger and alike.
SHAPES = {"odd": (33, 64)} | {f"even{at}": (64, 256) for at in range(12)}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of new storages while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def know(self, tensors: Any) -> None:
        """Leave these tensors' storages out."""
        self._known |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor and leaf.numel() > 1:
                self._follow(leaf.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        at, count = storage.data_ptr(), storage.nbytes()
        if at in self._known:
            return
        self._known.add(at)
        self.live += count
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, at, count)

    def _gone(self, at: int, count: int) -> None:
        self._known.discard(at)
        self.live -= count


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(param.sum() for param in self.parameters())


def full_state_dicts(group: dist.ProcessGroup) -> dict[str, tuple[int, int, int]]:
    """FSDP2's full state dicts of the model and of AdamW: peak bytes, those that the result keeps, and its tensors."""
    torch.manual_seed(0)
    model = Layer()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = {}
    calls = {
        "weights": lambda: get_model_state_dict(model, options=options),
        "states": lambda: get_optimizer_state_dict(model, optimizer, options=options),
    }
    for name, call in calls.items():
        tracker = LiveBytes()
        held = [*model.parameters(), *tree_leaves(optimizer.state_dict()["state"])]
        tracker.know(one.to_local() for one in held if isinstance(one, DTensor))
        with tracker:
            kept = call()
        found[name] = (
            tracker.peak,
            tracker.live,
            sum(isinstance(one, torch.Tensor) and one.dim() > 0 for one in tree_leaves(kept)),
        )
        del kept
    return found
