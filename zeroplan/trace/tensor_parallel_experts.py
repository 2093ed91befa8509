"""Tensor parallelism of a mixture's experts and routers, by transformers' own styles (``transformers/distributed``)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from transformers.distributed.tensor_parallel import (
    MoeExpertsParallel,
    PackedColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from zeroplan.core.tensor_parallel import TensorPlan
from zeroplan_runtime.expert_parallel import exchange_parts


class ExpertMatricesParallel(ParallelStyle):
    """The experts of a mixture, whose matrices the ranks share.

    Args:
        plan: the parameters.
        partial: leave each rank its part of the sum, for whoever scatters it.
    """

    def __init__(self, plan: TensorPlan, *, partial: bool) -> None:
        super().__init__()
        self._columns, self._partial = {name.rpartition(".")[2] for name in plan.expert_columns}, partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            style: Any = PackedColwiseParallel() if name in self._columns else RowwiseParallel()
            style.shard_param(module, name, device_mesh)
        experts: Any = MoeExpertsParallel()
        if self._partial:
            experts.transform_output_post_forward = _as_it_is
        installed: nn.Module = experts.install_forward(module, device_mesh)
        return installed


class ExpertsAcross(ParallelStyle):
    """Experts that ranks of ``ep`` share, those of ``tp`` among them.

    See Note [Experts' matrices] in zeroplan_runtime/expert_parallel.py.

    Args:
        partial: leave each rank its part of the sum, for whoever scatters it.
    """

    def __init__(self, *, partial: bool) -> None:
        super().__init__()
        self._partial = partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return exchange_parts(module, device_mesh, partial=self._partial)


class RouterParallel(ParallelStyle):
    """A router, which every rank runs whole on plain tensors: its operators have no rules for DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(param, device_mesh, [Replicate()])))
        layer: Any = TensorParallelLayer()
        layer.should_use_local_tensors = _always
        installed: nn.Module = layer.install_forward(module, device_mesh)
        return installed


def _as_it_is(_module: nn.Module, output: Any, _mesh: DeviceMesh, source: Any = None) -> Any:
    return output


def _always(_module: nn.Module) -> bool:
    return True
