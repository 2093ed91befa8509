"""What tensor-parallel ranks hold alike: parameters that no layout distributes, their gradients, and the inputs.

Each of these ranks computes a replica's gradient on its own and updates its own copy. That is right where every rank computes
the same. Where it does not, as with a norm that only sees the rank's own heads or tokens and is not distributed itself, the
copies would part, and the model would be trained wrong without an error. So values are compared when the engine is made, inputs
in the first forward and gradients in the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroplan.core.arena.layout import align
from zeroplan.core.arena.layout_setup import RuntimeSetup
from zeroplan.core.errors import BadInput
from zeroplan.core.one_bit import NOT_EXPERTS, NOT_SPLIT
from zeroplan.core.zero_config import OffloadDevice
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.expert_parallel import has_grouped_experts
from zeroplan_runtime.gradient_reduction import GradientReduction
from zeroplan_runtime.local_tensors import dimensions_of, is_distributed, is_split, local_of, placed_plainly
from zeroplan_runtime.mesh import ACROSS, MeshRanks
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.unit_state import UnitState

#: Norms of one gradient, computed by several ranks, that differ by more than this are not those of one gradient: operators
#: that add in no fixed order differ by far less, sums over other heads or tokens by far more.
TOLERANCE = 1e-2


def require_distributed(model: nn.Module, ranks: MeshRanks) -> None:
    """Checks that what is distributed in `model` is so over the mesh's tensor-parallel ranks, or over those that share experts.

    Raises:
        BadInput: with the name of a parameter or buffer, and for models that transformers has split.
    """
    split = getattr(model, "_tp_size", None)
    if isinstance(split, int) and split > 1 and not any(map(is_distributed, model.parameters())):
        raise BadInput(
            f"transformers has split the model over {split} ranks as plain tensors, which look like whole ones",
            where="model",
            remedy="load it without tp_plan, and split it by torch's parallelize_module",
        )
    known = _dividing_meshes(ranks)
    shares = any(map(is_shared, model.parameters()))
    if ranks.ep is not None and not shares and (ranks.pp is None or has_grouped_experts(model)):
        raise BadInput(
            "no experts are distributed over mesh['ep']",
            where="model",
            remedy="call zeroplan_runtime.share_experts(model, mesh['ep']) before, or leave ep out of the mesh",
        )
    for name, param in model.named_parameters():
        if not is_distributed(param):
            continue
        if not _is_among(param.device_mesh, known):
            raise BadInput(
                f"{name!r} is distributed over {param.device_mesh}",
                where="model",
                remedy="distribute it over mesh['tp'], or experts over mesh['ep'], and leave other sharding to the engine",
            )
        if not placed_plainly(param):
            raise BadInput(
                f"{name!r} is placed as {param.placements}",
                where="model",
                remedy="use torch's parallel styles, which place parameters as Shard or Replicate, and Shard(0) for experts",
            )
        if not local_of(param).numel():
            raise BadInput(
                f"{name!r}, of shape {tuple(param.shape)}, leaves nothing for rank {_place(param.device_mesh)}",
                where="model",
                remedy="leave it whole, or use fewer of these ranks",
            )
    for name, buffer in model.named_buffers():
        if is_distributed(buffer):
            raise BadInput(f"buffer {name!r} is a DTensor", where="model", remedy="keep buffers whole on every rank")


def _dividing_meshes(ranks: MeshRanks) -> dict[str, DeviceMesh]:
    """The meshes of one dimension over which parameters may be distributed, by name."""
    found = {} if ranks.expert_mesh is None else {ACROSS if ranks.across > 1 else "ep": ranks.expert_mesh}
    if ranks.mesh is not None and "tp" in (ranks.mesh.mesh_dim_names or ()):
        found["tp"] = ranks.mesh["tp"]
    return found


def _is_among(mesh: DeviceMesh, known: Mapping[str, DeviceMesh]) -> bool:
    """Returns whether each dimension of `mesh` is one of the `known`."""
    if mesh.ndim == 1:
        return mesh in known.values()
    return all(known.get(name) == mesh[name] for name in mesh.mesh_dim_names or ("",))


def _place(mesh: DeviceMesh) -> str:
    return ", ".join(map(str, mesh.get_coordinate() or ()))


def is_shared(param: torch.Tensor) -> bool:
    """Returns whether a parameter is one of experts that the ranks of ``ep``, or of ``ep_tp``, share."""
    return is_distributed(param) and not {"ep", ACROSS}.isdisjoint(dimensions_of(param))


def require_divisible(setup: RuntimeSetup, degrees: Mapping[str, int]) -> None:
    """Refuses what is not done by ranks that hold parts of the model: `degrees`, by dimension of the mesh.

    Raises:
        BadInput: optimizers that step by whole tensors' norms or exchange signs, and with experts states in files.
    """
    where, divided = f"optimizer {setup.optimizer}", next((name for name in ("tp", "ep") if name in degrees), None)
    if setup.takes_norms and divided is not None:
        raise BadInput(
            f"it steps by the norms of whole tensors, of which ranks of {divided} have parts",
            where=where,
            remedy=f"use AdamW, or a mesh without {divided}",
        )
    if setup.compresses and degrees:
        refusal = NOT_EXPERTS if "ep" in degrees else NOT_SPLIT
        raise BadInput(refusal.what, where=where, remedy=refusal.remedy)
    if setup.ep > 1 and OffloadDevice.NVME in (setup.offload_optimizer, setup.offload_param):
        raise BadInput("files are not supported with ep", where="device nvme", remedy="use cpu, or a mesh without ep")


def replicated_runs(model_states: ModelStates, unit: UnitState) -> list[tuple[int, int]]:
    """Returns ``(begin, end)`` of the parts of this rank's share of `unit` that other tensor-parallel ranks hold as well.

    Neighbours are one part, with the zeros between them.
    """
    flat = unit.trainable
    if flat is None:
        return []
    first, last = model_states.owned_range(flat.layout)
    runs: list[tuple[int, int]] = []
    for param, offset, numel in zip(flat.params, flat.layout.offsets, flat.layout.numels, strict=True):
        begin, end = max(offset, first) - first, min(offset + numel, last) - first
        if is_split(param) or begin >= end:
            continue
        if runs and align(runs[-1][1]) == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return runs


def require_equal_values(model: nn.Module, ranks: MeshRanks) -> None:
    """Compares the values that tensor-parallel ranks give to parameters that no layout distributes.

    Those of the first of the ranks that hold the same part count: the engine gives them to the others.

    Raises:
        BadInput: on every rank, naming a parameter whose values differ.
    """
    if ranks.tp is None:
        return
    name = None
    if ranks.shard.rank == 0:
        values = ((name, param) for name, param in model.named_parameters() if not is_split(param) and not param.is_meta)
        name = _first_difference(ranks.tp, [(name, *_digest(local_of(param))) for name, param in values])
    name = next((one for one in ranks.shard.all_gather_object(name) if one is not None), None)
    if name is not None:
        raise BadInput(
            f"{name!r} is not distributed, and has other values or another shape on each rank of tp",
            where="model",
            remedy="distribute it, or give it the same values on all of them: seed them alike before the model is built",
        )


class Replicas:
    """Compares what the tensor-parallel ranks of `model_states` should have alike; does nothing where there is one.

    Raises:
        BadInput: on every one of them, for generators that differ where the model has dropout.
    """

    def __init__(self, model: nn.Module, model_states: ModelStates) -> None:
        self._model_states, self._tp = model_states, model_states.ranks.tp
        self._has_compared_inputs = self._has_compared_gradients = self._tp is None
        if self._tp is not None:
            self._require_equal_generators(model)

    def _require_equal_generators(self, model: nn.Module) -> None:
        dropout = [name for name, one in model.named_modules() if isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0]
        assert self._tp is not None
        if dropout and _first_difference(self._tp, [("", *_digest(torch.get_rng_state()))]) is not None:
            raise BadInput(
                f"{dropout[0]!r} would drop other elements on each rank of tp, whose generators differ",
                where="model",
                remedy="seed the ranks of tp alike, for example by torch.manual_seed(seed + mesh.get_local_rank('dp'))",
            )

    def compare_inputs(self, args: Any, kwargs: Any) -> None:
        """Compares integer inputs, such as tokens and labels, in the first forward.

        Raises:
            BadInput: when they differ.
        """
        if self._has_compared_inputs:
            return
        self._has_compared_inputs = True
        whole = [one for one in tensors_of((args, kwargs)) if not one.is_floating_point() and not is_distributed(one)]
        assert self._tp is not None
        if _first_difference(self._tp, [("", *_digest(one)) for one in whole]) is not None:
            raise BadInput(
                "the ranks of tp were given other inputs",
                where="engine",
                remedy="give them the same batch: let its place in the data depend on mesh.get_local_rank('dp') alone",
            )

    def compare_gradients(self, grads: GradientReduction) -> None:
        """Compares the gradients of parameters that are not distributed, in the first step.

        Raises:
            BadInput: with the name of one whose gradients differ.
        """
        if self._has_compared_gradients:
            return
        self._has_compared_gradients = True
        grads.wait()
        names = [name for name, _ in self._gradients()]
        sums = torch.zeros(2, max(len(names), 1), dtype=torch.float64, device=self._model_states.arena.device)
        for i, (_, part) in enumerate(self._gradients()):
            if part is not None:
                sums[:, i] = torch.stack((part.double().square().sum(), part.double().sum()))
        if self._model_states.setup.shards_states:
            self._model_states.comm.all_reduce_sum(sums)
        assert self._tp is not None
        mine = sums.cpu()
        for other in self._tp.all_gather_object(mine):
            norm = torch.maximum(mine[0], other[0]).sqrt()
            far = ((mine[0].sqrt() - other[0].sqrt()).abs() > TOLERANCE * norm) | ((mine[1] - other[1]).abs() > norm)
            if bool((far & norm.isfinite()).any()):
                raise BadInput(
                    f"{names[int(far.nonzero()[0])]!r} is not distributed, but its gradient differs between the ranks of tp: "
                    "each sees a part of what it is used for",
                    where="model",
                    remedy="give its module a parallel style, such as SequenceParallel() for norms of single heads or of split "
                    "tokens, so that its gradients are added",
                )

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields the replicas' names and this rank's part of each gradient."""
        for unit in self._model_states.units:
            if unit.trainable is None:
                continue
            layout = unit.trainable.layout
            first, last = self._model_states.owned_range(layout)
            grad = unit.grad
            if unit.offloaded is not None:
                unit.offloaded.current.grad_ready.synchronize()
                grad = unit.offloaded.current.grad
            for i, (param, offset, numel) in enumerate(zip(unit.trainable.params, layout.offsets, layout.numels, strict=True)):
                if not is_split(param):
                    begin, end = max(offset, first) - first, min(offset + numel, last) - first
                    yield unit.name_of(i), grad[begin:end] if grad is not None and begin < end else None


def _first_difference(tp: Communicator, found: list[tuple[Any, ...]]) -> str | None:
    """Returns the name of the first entry that is not the same on all ranks of `tp`; None if all are.

    Every one of these ranks must call it, and all of them find a difference.
    """
    everyone = tp.all_gather_object(found)
    for rows in zip(*everyone, strict=False):
        if any(row != rows[0] for row in rows):
            return str(rows[0][0])
    return None if all(len(one) == len(everyone[0]) for one in everyone) else "a parameter"


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], float, float]:
    """Shape, sum and sum of squares of a tensor."""
    values = tensor.detach().double()
    return tuple(tensor.shape), float(values.sum()), float(values.square().sum())
