"""Tensor parallelism of a mixture's experts and routers, by transformers' own styles (``transformers/distributed``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from transformers.distributed.tensor_parallel import (
    MoeExpertsParallel,
    PackedColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
    _AllReduceForward,
)

from zeroplan.core.tensor_parallel import TensorPlan


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
    """Experts that ranks of ``ep`` share, those of ``tp`` among them: each exchanges its part of the tokens, and the results,
    of which it has zeros elsewhere, are added up.

    Source: torchtitan v0.2.2, ``distributed/expert_parallel.py`` (``ReordererSequenceParallel``), ``models/moe/moe.py``

    Args:
        partial: leave each rank its part of the sum, for whoever scatters it.
    """

    def __init__(self, *, partial: bool) -> None:
        super().__init__()
        self._partial = partial

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        exchange: Any = module.forward

        def part(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            count = hidden.shape[0] // device_mesh.size()
            mine = slice(device_mesh.get_local_rank() * count, (device_mesh.get_local_rank() + 1) * count)
            found = torch.zeros_like(hidden)
            found[mine] = exchange(hidden[mine], index[mine], weights[mine])
            return found

        module.forward = part
        experts: Any = MoeExpertsParallel()
        experts.transform_output_post_forward = _as_it_is if self._partial else _added
        installed: nn.Module = experts.install_forward(module, device_mesh)
        return installed


class RouterParallel(ParallelStyle):
    """A router, which every rank runs whole on plain tensors: its operators have no rules for DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(param, device_mesh, [Replicate()])))
        layer: Any = TensorParallelLayer()
        layer.should_use_local_tensors = _always
        installed: nn.Module = layer.install_forward(module, device_mesh)
        return installed


def _added(_module: nn.Module, output: Any, mesh: DeviceMesh, source: Any = None) -> Any:
    """Add up the ranks' results, as transformers does where a parameter is a DTensor that says so."""
    return _AllReduceForward.apply(output, mesh.get_group())


def _as_it_is(_module: nn.Module, output: Any, _mesh: DeviceMesh, source: Any = None) -> Any:
    return output


def _always(_module: nn.Module) -> bool:
    return True
