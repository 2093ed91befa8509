"""A model laid out on the mesh that ``verify`` runs the included runtime on."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.engines.torch_mesh import Passes, balance, mesh_on, passes_of, without_masks
from zeroplan.trace.tensor_parallel import parallelize
from zeroplan_runtime.expert_parallel import has_grouped_experts, share_experts


def lay_out(model: nn.Module, layout: ParallelLayout, device: torch.device) -> tuple[DeviceMesh | None, Passes]:
    """Give each rank its part of a model, and return the mesh for ``initialize`` and what a micro batch runs in.

    Args:
        model: a causal language model of transformers.
        layout: the degrees; data parallelism alone needs no mesh.
        device: where the ranks compute.

    Raises:
        BadInput: ranks of experts that are no dimension of a mesh.
    """
    if layout.tp == layout.cp == layout.pp == layout.ep == 1:
        return None, nullcontext
    mesh = mesh_of(layout, device)
    divide(model, mesh, layout, device)
    return mesh, passes_on(mesh, layout)


def divide(model: nn.Module, mesh: DeviceMesh, layout: ParallelLayout, device: torch.device) -> None:
    """Leave this rank its part of a model's matrices and experts, and its attention what a ring takes.

    Args:
        model: a causal language model of transformers.
        mesh: of the layout (:func:`mesh_of`).
        layout: the degrees.
        device: where the ranks compute.
    """
    if layout.cp > 1:
        without_masks(model)
    if layout.ep > 1:
        share_experts(model, _over(mesh, layout), partial=layout.sp, across=mesh["tp"] if layout.experts_across else None)
    if layout.tp > 1:
        parallelize(model, mesh["tp"], sequence=layout.sp)
    if has_grouped_experts(model):
        balance(model, device)


def passes_on(mesh: DeviceMesh, layout: ParallelLayout) -> Passes:
    """Return what a micro batch runs in."""
    return passes_of(layout, mesh["cp"] if layout.cp > 1 else None)


def mesh_of(layout: ParallelLayout, device: torch.device) -> DeviceMesh:
    """Return the mesh of a layout, without dimensions of one rank. ``ep`` is one of them, or a name for ``dp`` and ``cp``;
    where ranks of ``tp`` have different experts, ``ep_tp`` is the name of both.

    Raises:
        BadInput: where it is neither.
    """
    shared = layout.ep // layout.tp if layout.experts_across else layout.ep  # by ranks that see other samples
    divided = layout.dp % shared == 0
    if not divided and (layout.experts_across or shared != layout.dp * layout.cp):
        told = f"ep {layout.ep} / tp {layout.tp}" if layout.experts_across else f"ep {layout.ep}"
        beside = "" if layout.experts_across else f", nor is it all {layout.dp * layout.cp} of dp and cp"
        raise BadInput(
            f"{told} does not divide the {layout.dp} ranks of dp{beside}",
            where="--ep",
            remedy="use another --ep, or --engine fsdp2",
        )
    sizes = {"pp": layout.pp, "dp": layout.dp // shared if divided else layout.dp, "ep": shared if divided else 1}
    sizes |= {"cp": layout.cp, "tp": layout.tp}
    mesh = mesh_on(device, {name: size for name, size in sizes.items() if size > 1})
    if layout.experts_across:
        mesh[("ep", "tp") if shared > 1 else ("tp",)]._flatten("ep_tp")
    elif not divided:
        mesh["dp", "cp"]._flatten("ep")
    return mesh


def _over(mesh: DeviceMesh, layout: ParallelLayout) -> DeviceMesh:
    """Return the ranks that share experts, and their matrices."""
    if layout.experts_across:
        return mesh["ep_tp"]
    return mesh["ep", "tp"] if layout.tp > 1 else mesh["ep"]
