"""One tensor-parallel rank as DeepSpeed's AutoTP makes it: linear layers over this rank's parts, with a whole vocabulary.

Column-wise layers sum their input's gradient over the ranks, and row-wise ones their output, in place, so that no collective of
a block allocates. The head gathers the parts of the logits in one buffer, and joins them in another. Embedding and norms are
whole. What transformers' ``base_model_tp_plan`` names is divided, as DeepSpeed does where a model has such a plan.

Source: DeepSpeed 0.19.8, module_inject/layers.py (LinearLayer, LinearAllreduce, GatherFromTensorParallelRegion),
module_inject/tp_plan_converter.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zeroplan.core.tensor_parallel import HEAD, tensor_plan
from zeroplan.trace.ranks import Ranks


class _Passed(torch.autograd.Function):
    """A tensor on its way through a collective that works in place: on other ranks' sums nothing is allocated."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


class _Gathered(torch.autograd.Function):
    """The last dimension's parts of all ranks, joined; backward this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.width = part.shape[-1]
        buffer = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        parts = buffer.view(ranks, *part.shape)
        return torch.cat([parts[i] for i in range(ranks)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].narrow(-1, 0, ctx.width).contiguous(), None


class Part(nn.Module):
    """This rank's part of a linear layer.

    Args:
        whole: the layer.
        dimension: of the weight that is divided: 0 column-wise, 1 row-wise, whose bias is whole.
        ranks: by which it is divided.
        gathered: whether the outputs of all ranks are joined.
    """

    def __init__(self, whole: nn.Linear, dimension: int, ranks: int, *, gathered: bool = False) -> None:
        super().__init__()
        self.dimension, self.ranks, self.gathered = dimension, ranks, gathered
        self.weight = _part(whole.weight, dimension, ranks)
        self.bias = whole.bias if whole.bias is None or dimension else _part(whole.bias, 0, ranks)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Multiply: [B, S, in] or its part to [B, S, out] or its part. The bias is added out of place."""
        columns = self.dimension == 0
        output = torch.matmul(_Passed.apply(tensor) if columns else tensor, self.weight.transpose(-1, -2))
        output = output if columns else _Passed.apply(output)
        output = output if self.bias is None else output + self.bias
        return _Gathered.apply(output, self.ranks) if self.gathered else output


def _part(param: torch.Tensor, dimension: int, ranks: int) -> nn.Parameter:
    return nn.Parameter(param.detach().chunk(ranks, dimension)[0].clone(), requires_grad=param.requires_grad)


class AutoTpRank(Ranks):
    """The first of `ranks` tensor-parallel ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def lay_out(self, model: nn.Module) -> None:
        """Put this rank's parts in the place of the linear layers that the model's plan divides, and of its head."""
        whole: Any = model
        plan = tensor_plan(whole.config.model_type, auto_tp=True)
        for block in whole.model.layers:
            layers = {name for name, _ in block.named_modules()}
            for dimension, names in enumerate((plan.columns, plan.rows)):
                for name in names:
                    if name in layers:  # else the MLP is a mixture
                        _replace(block, name, dimension, self._ranks)
        _replace(whole, HEAD, 0, self._ranks, gathered=True)


def _replace(owner: nn.Module, name: str, dimension: int, ranks: int, *, gathered: bool = False) -> None:
    parent, _, leaf = name.rpartition(".")
    home = owner.get_submodule(parent)
    layer = home.get_submodule(leaf)
    assert isinstance(layer, nn.Linear)
    setattr(home, leaf, Part(layer, dimension, ranks, gathered=gathered))
