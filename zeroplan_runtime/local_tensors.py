"""This rank's part of a parameter that tensor or expert parallelism distributes: the local tensor of a DTensor.

The engine shards local tensors: what it lays out, gathers, reduces and updates of a DTensor is the tensor within. A parameter
that is no DTensor is its own local tensor.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

#: The slot itself: a guarded parameter's attribute of that name waits or refuses (Note [Guarded parameters]).
_LOCAL: Any = vars(DTensor)["_local_tensor"]


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Returns whether `tensor` is a DTensor."""
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a DTensor, guarded or not; any other tensor itself."""
    found: torch.Tensor = _LOCAL.__get__(tensor) if isinstance(tensor, DTensor) else tensor
    return found


def is_split(param: torch.Tensor) -> bool:
    """Returns whether ranks of ``tp`` hold different parts of `param`, so that they are no replicas.

    Ranks that share experts (``ep``) hold other experts, but each of them is one among ranks of ``tp`` that hold the same; of
    those that share them as ``ep_tp``, ranks of ``tp`` hold different ones.
    """
    if not isinstance(param, DTensor):
        return False
    names = dimensions_of(param)
    return any(not isinstance(one, Replicate) for name, one in zip(names, param.placements, strict=True) if name != "ep")


def dimensions_of(param: DTensor) -> tuple[str, ...]:
    """Returns the names of the dimensions over which `param` is distributed; empty ones where they have none."""
    return param.device_mesh.mesh_dim_names or ("",) * param.device_mesh.ndim


def placed_plainly(param: DTensor) -> bool:
    """Returns whether `param` is placed as parallel styles place parameters: sharded along one dimension or replicated over
    ``tp``, where matrices that are packed side by side (gate and up) may each give a part, and by rows over ``ep``.
    """
    kinds = {"ep": (Shard,)}
    return all(
        type(one) in kinds.get(name, (Shard, _StridedShard, Replicate)) and (name != "ep" or one == Shard(0))
        for name, one in zip(dimensions_of(param), param.placements, strict=True)
    )


@torch.no_grad()
def put_values(param: nn.Parameter, values: torch.Tensor) -> None:
    """Makes `values`, in the shape of the local tensor, the memory of `param`. Its dtype and device become theirs."""
    if not isinstance(param, DTensor):
        param.data = values
        return
    if param.dtype != values.dtype or param.device != values.device:
        trained = param.requires_grad
        made = nn.Parameter(whole_view(param, values), requires_grad=trained)
        torch.utils.swap_tensors(param, made)  # `param` stays the object that the module and the optimizer hold
    _LOCAL.__set__(param, values.data)  # with a version counter of its own, as a parameter's `data`


def whole_view(param: DTensor, values: torch.Tensor) -> DTensor:
    """Returns a DTensor placed as `param` whose local tensor is `values`."""
    return DTensor.from_local(
        values, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def gather_whole(param: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Returns `values`, those of the local tensor of `param`, whole: gathered where ranks hold parts. A collective there."""
    return whole_view(param, values.view(local_of(param).shape)).full_tensor() if isinstance(param, DTensor) else values


def local_grad(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a gradient of `param`, placed as the parameter: partial sums are added over the ranks.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _get_grad_inner_tensor.
    """
    if not isinstance(grad, DTensor):
        return grad
    if isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_part(grad)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a result, once the collective that makes it is done; a plain tensor itself."""
    local = local_of(tensor)
    wait = getattr(local, "wait", None)  # of a collective that is under way
    return wait() if wait is not None else local


def is_local_product(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether this rank's part of a linear layer's weight gradient, gradᵀ · x, is the product of its parts of both.

    Args:
        grad: [..., out], the gradient of the layer's output.
        x: [..., in], the layer's input.
        weight: [out, in].
    """
    if not isinstance(weight, DTensor):
        return not isinstance(grad, DTensor) and not isinstance(x, DTensor)
    if not isinstance(grad, DTensor) or not isinstance(x, DTensor):
        return False
    whole = Replicate()
    needed = {
        Shard(0): (Shard(grad.ndim - 1), whole),  # column-wise
        Shard(1): (whole, Shard(x.ndim - 1)),  # row-wise
        whole: (whole, whole),
    }
    return (grad.placements[0], x.placements[0]) == needed.get(weight.placements[0])


def version_of(param: torch.Tensor) -> int:
    """Returns a number that rises with each write to `param` or to its local tensor."""
    return param._version + (local_of(param)._version if isinstance(param, DTensor) else 0)
