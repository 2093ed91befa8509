"""Expert parallelism: each rank has some of a block's experts, and tokens travel to those that they are routed to.

Note [Exchange of tokens]
    A rank sorts its tokens, once for each expert that a token takes, by expert, which is by rank. Ranks tell each other the
    numbers of tokens, then exchange the tokens (all-to-all). What arrives is in order of the ranks it comes from; it is put in
    order of this rank's experts, runs through grouped matrix products, is put back, and returns the same way.

    The router, the products and the sum of a token's results are transformers' own (``integrations/moe.py``); the exchange
    and its order follow torchtitan, ``models/common/token_dispatcher.py`` (``AllToAllTokenDispatcher``). The collectives are
    torch's, with gradients of their own.

Note [Experts' matrices]
    Ranks of ``tp`` may have parts of each expert's matrices: of gate and up, which lie side by side, the same rows of both, and
    of down the columns. All of them have the same tokens and the same routing; each exchanges them with the ranks that have its
    part, and the results are added over ``tp``, as the gradients of tokens and weights are in the backward. This is what
    transformers' tensor parallelism does with experts (``distributed/tensor_parallel.py``, ``MoeExpertsParallel``), whose
    functions run here.

    Or they have different experts, whole ones: of the tokens that all of them have, each exchanges its part, and the results,
    of which it has zeros elsewhere, are added over ``tp``. Source: torchtitan v0.2.2, ``distributed/expert_parallel.py``
    (``ReordererSequenceParallel``), ``models/moe/moe.py``
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from zeroplan.core.errors import BadInput

#: See :func:`counted`.
Splits = Callable[[int, torch.Tensor, torch.Tensor], tuple[list[int], list[int]]]


def share_experts(model: nn.Module, mesh: DeviceMesh, *, partial: bool = False, across: DeviceMesh | None = None) -> nn.Module:
    """Distributes the experts of a model of transformers over the ranks of `mesh`, which exchange tokens in its forward.

    Every rank keeps its part of the values that it has. Give each rank of ``ep`` samples of its own, and those of ``tp`` the
    same.

    Args:
        model: the model, the same on every rank.
        mesh: ``ep`` of the mesh for :func:`zeroplan_runtime.initialize`, whose ranks have some of the experts; ``tp``, whose
            ranks have parts of every matrix (see Note [Experts' matrices]); both, as ``mesh["ep", "tp"]``; or ``ep_tp``.
        partial: leave each rank of ``tp`` its part of the experts' results, for whoever adds them as the tokens are split
            (sequence parallelism).
        across: with ``ep_tp``, ``tp`` of the mesh: its ranks have the same tokens, and different experts.

    Returns:
        The model, whose experts' parameters are now DTensors.

    Raises:
        BadInput: for a model without experts that transformers runs by grouped products, or that the ranks do not divide.
    """
    if not isinstance(model, nn.Module) or not isinstance(mesh, DeviceMesh):
        raise BadInput(
            f"a {type(model).__name__} and a {type(mesh).__name__} are no model and no mesh",
            where=_WHERE,
            remedy="give the model, and mesh['ep'] of the mesh for initialize()",
        )
    names = mesh.mesh_dim_names or ("ep",)
    if (across is not None) is not (names == (_ACROSS,)):
        what = f"the ranks of {', '.join(names)} {'have' if across is None else 'do not have'} different experts on those of tp"
        raise BadInput(what, where=_WHERE, remedy=f'give across=mesh["tp"] with mesh["{_ACROSS}"], and with no other')
    if mesh.ndim > 1 and set(names) != {"ep", "tp"}:
        raise BadInput(f"it has the dimensions {', '.join(names)}", where=_WHERE, remedy="give mesh['ep'], mesh['tp'] or both")
    meshes = {name if name == "tp" else "ep": mesh[name] if mesh.ndim > 1 else mesh for name in names}
    for module in grouped_experts(model):
        _require_divided(module, {name: one.size() for name, one in meshes.items()})
        for name, param in list(module.named_parameters(recurse=False)):
            part, placements = param.detach(), [_placement(name, dimension) for dimension in meshes]
            for one, placement in zip(meshes.values(), placements, strict=True):
                part = distribute_tensor(part, one, [placement], src_data_rank=None).to_local()
            shared = DTensor.from_local(part, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
            module.register_parameter(name, nn.Parameter(shared, requires_grad=param.requires_grad))
        if "ep" in meshes:
            module.forward = functools.partial(run_experts, module, meshes["ep"].get_group())
        if across is not None:
            exchange_parts(module, across, partial=partial)
        elif "tp" in meshes:
            from transformers.distributed.tensor_parallel import MoeExpertsParallel

            parallel: Any = MoeExpertsParallel()
            if partial:
                parallel.transform_output_post_forward = _as_it_is
            parallel.install_forward(module, meshes["tp"])
    return model


_WHERE = "share_experts"
_ACROSS = "ep_tp"  # mesh.ACROSS, which this file does not import: the tracer reads it, too


def exchange_parts(module: nn.Module, tp: DeviceMesh, *, partial: bool) -> nn.Module:
    """Lets each rank of `tp`, all of which have the same tokens, run the forward of `module` on its part of them, and adds the
    results.

    Args:
        module: experts, whose forward exchanges the tokens that it is given.
        tp: one dimension of ranks.
        partial: leave each rank its part of the sum, for whoever scatters it.
    """
    from transformers.distributed.tensor_parallel import MoeExpertsParallel, _AllReduceForward

    exchange, count, rank = module.forward, tp.size(), tp.get_local_rank()

    def part(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        mine = slice(hidden.shape[0] * rank // count, hidden.shape[0] * (rank + 1) // count)
        found = torch.zeros_like(hidden)
        found[mine] = exchange(hidden[mine], index[mine], weights[mine])
        return found

    def added(_module: nn.Module, output: Any, mesh: DeviceMesh, source: Any = None) -> Any:
        return _AllReduceForward.apply(output, mesh.get_group())

    module.forward = part
    parallel: Any = MoeExpertsParallel()
    parallel.transform_output_post_forward = _as_it_is if partial else added
    installed: nn.Module = parallel.install_forward(module, tp)
    return installed


def _as_it_is(_module: nn.Module, output: Any, _mesh: DeviceMesh, source: Any = None) -> Any:
    return output


def _require_divided(module: Any, degrees: dict[str, int]) -> None:
    """Refuses experts that `degrees` do not divide, and matrices of a kind that transformers does not divide.

    Raises:
        BadInput: naming what is not divided.
    """
    if any(isinstance(param, DTensor) for param in module.parameters(recurse=False)):
        remedy = 'call it once, with mesh["ep", "tp"] for both'
        raise BadInput("these experts are distributed already", where=_WHERE, remedy=remedy)
    experts, ep, tp = module.num_experts, degrees.get("ep", 1), degrees.get("tp", 1)
    if experts % ep:
        what, remedy = f"{ep} ranks do not divide {experts} experts", f"use a divisor of {experts}"
    elif tp > 1 and (module.is_transposed or module.has_bias or not module.has_gate):
        what = f"the matrices of {type(module).__name__} have biases, no gate, or lie the other way, and are not shared by tp"
        remedy = "share the experts by ep alone"
    elif (width := module.down_proj.shape[-1]) % tp:
        what, remedy = f"{tp} ranks of tp do not divide the {width} channels of an expert", f"use a divisor of {width}"
    else:
        return
    raise BadInput(what, where=_WHERE, remedy=remedy)


def _placement(name: str, dimension: str) -> Placement:
    """How a parameter of the experts lies over a dimension of the mesh."""
    if dimension == "ep":
        return Shard(0)
    if name == "gate_up_proj":
        return _StridedShard(1, split_factor=2)
    return Shard(2) if name == "down_proj" else Replicate()


def has_grouped_experts(model: nn.Module) -> bool:
    """Returns whether there are experts that transformers runs by grouped matrix products."""
    return any(map(_is_grouped, model.modules()))


def _is_grouped(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def grouped_experts(model: nn.Module) -> list[Any]:
    """Returns the modules of experts that transformers runs by grouped matrix products (``use_experts_implementation``).

    Raises:
        BadInput: where there are none.
    """
    found = [module for module in model.modules() if _is_grouped(module)]
    if not found:
        raise BadInput("no experts of grouped products are in this model", where="--ep", remedy="leave it at 1")
    return found


def counted(_rows: int, sent: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns how many rows this rank sends to each rank, and receives from each. The host waits for the numbers.

    Args:
        sent: ``(ranks, experts of each)``, the rows for each expert.
        received: ``(ranks, this rank's experts)``, likewise.
    """
    mine, others = torch.stack((sent.sum(1), received.sum(1))).long().tolist()
    return mine, others


def balanced(rows: int, sent: torch.Tensor, _received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns numbers as equal as whole ones are, whatever the router says: `rows` to the ranks, and from them."""
    ranks = sent.shape[0]
    least, more = divmod(rows, ranks)
    equal = [least + (rank < more) for rank in range(ranks)]
    return equal, equal


def run_experts(
    module: Any,
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    splits: Splits = counted,
) -> torch.Tensor:
    """Runs the experts on this rank's tokens, wherever the experts are. See Note [Exchange of tokens].

    Args:
        module: the experts' module, with this rank's experts.
        group: the ranks that share the experts.
        hidden_states: ``(tokens, hidden)``.
        top_k_index: ``(tokens, k)``, the experts of each token.
        top_k_weights: ``(tokens, k)``, the weight of each.
        splits: how many rows go to each rank and come from each.

    Returns:
        ``(tokens, hidden)``.
    """
    tokens, k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1))
    rows = hidden_states[order // k]
    weights = top_k_weights.reshape(-1)[order]
    numbers = expert.float() if expert.device.type == "cpu" else expert.int()  # what its histogram takes
    counts = torch.histc(numbers, bins=module.num_experts, min=0, max=module.num_experts - 1).view(group.size(), -1)
    del expert, numbers
    with torch.no_grad():
        told = collectives.all_to_all_single(counts, None, None, group).reshape(-1).view(group.size(), -1)
    sent, arrive = splits(tokens * k, counts, told)
    received = collectives.all_to_all_single_autograd(rows, arrive, sent, group)
    del rows
    local = told.sum(0)
    place = _by_expert(told, received.shape[0])
    out = _products(module, received[place], local)
    back = torch.empty_like(out)
    back[place] = out
    del received, out
    returned = collectives.all_to_all_single_autograd(back, sent, arrive, group)
    del back
    weighted = returned * weights.unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return weighted[inverse].view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)


def _by_expert(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns where each row that the experts read lies among those that arrived, from the counts ``(ranks, experts)``."""
    flat = counts.reshape(-1).long()
    begins = (flat.cumsum(0) - flat).view_as(counts).t().reshape(-1)
    lengths = counts.t().reshape(-1).long()
    piece = torch.arange(lengths.shape[0], device=counts.device).repeat_interleave(lengths, output_size=rows)
    own = lengths.cumsum(0) - lengths
    return begins[piece] + torch.arange(rows, device=counts.device) - own[piece]


def _products(module: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Runs the local experts on rows in their order: up, gate, down."""
    from transformers.integrations.moe import _grouped_linear

    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up = _grouped_linear(rows, _own(module, first), offsets, _bias(module, first, rows, counts), module.is_transposed)
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    del up
    down = _bias(module, "down_proj", rows, counts)
    out: torch.Tensor = _grouped_linear(inner, _own(module, "down_proj"), offsets, down, module.is_transposed)
    return out


def _own(module: Any, name: str) -> torch.Tensor:
    """Returns this rank's part of a parameter of the experts."""
    param: torch.Tensor = getattr(module, name)
    return param.to_local() if isinstance(param, DTensor) else param


def _bias(module: Any, name: str, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    if not module.has_bias:
        return None
    return _own(module, f"{name}_bias").repeat_interleave(counts.long(), dim=0, output_size=rows.shape[0])
