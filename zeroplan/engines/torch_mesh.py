"""Meshes of torch's on a rank of ``verify``: who shares what, and what one rank runs of a micro batch.

Imports torch: only trainers import this module, and only a rank's process imports those.

Note [Forced balance]
    An untrained router sends each rank another number of tokens at each step. A measurement that can be held against a plan
    wants the plan's case, so each token takes the experts that follow one another: all experts get as many tokens. The
    router itself runs, and its weights and their gradients are kept. torchtitan has the same as ``moe_force_load_balance``.

Note [Parts of a sample]
    Context-parallel ranks have the same samples, and of each a part of the tokens. What is split, and how, is torch's
    ``context_parallel``; labels are shifted before it, and positions told, as transformers' Trainer does it. Each rank takes
    the mean over its own tokens, and the step is the mean over ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel

from zeroplan.core.losses import IGNORED_LABEL
from zeroplan.core.parallel import ParallelLayout
from zeroplan.trace.context_parallel import RingAttention
from zeroplan_runtime.expert_parallel import grouped_experts
from zeroplan_runtime.units import find_blocks

Batch = dict[str, torch.Tensor]
#: Given a micro batch, the context of its forward and backward, which yields what the model is called with.
Passes = Callable[[Batch], contextlib.AbstractContextManager[Batch]]


def mesh_on(device: torch.device, sizes: Mapping[str, int], *, silent: Iterable[str] = ()) -> DeviceMesh:
    """Return a mesh of all ranks. On a GPU, dimensions of one rank and those of `silent` communicate with nobody.

    A group has a communicator of NCCL even where it is of one rank: about 300 MiB of the GPU for each. torchtitan does so, too.
    """
    alone: dict[int | str, Any] = {name: "fake" for name, size in sizes.items() if size == 1 or name in silent}
    override = alone if device.type == "cuda" else None
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=override)


def context_mesh(layout: ParallelLayout, device: torch.device) -> DeviceMesh | None:
    """Return the ranks that share each sample with this one; None where there is one. See Note [Parts of a sample]."""
    if layout.cp == 1:
        return None
    sizes = {"beside": layout.world_size // (layout.cp * layout.tp), "cp": layout.cp, "tp": layout.tp}
    return mesh_on(device, sizes, silent=("beside", "tp"))["cp"]


def passes_of(layout: ParallelLayout, context: DeviceMesh | None) -> Passes:
    """Return what a micro batch's forward and backward run in where ranks share samples or matrices.

    Args:
        layout: the degrees.
    """

    @contextlib.contextmanager
    def passes(batch: Batch) -> Iterator[Batch]:
        with contextlib.ExitStack() as inside:
            if context is not None:
                batch, shared = part_of(batch, context)
                inside.enter_context(shared)
            if layout.tp > 1:
                inside.enter_context(loss_parallel())
            yield batch

    return passes


def part_of(batch: Batch, context: DeviceMesh) -> tuple[Batch, contextlib.AbstractContextManager[Any]]:
    """Return a micro batch with what its parts need, and the context in which this rank has its part of it."""
    ids, labels = batch["input_ids"], batch["labels"]
    whole = ids.clone()
    given = {
        **batch,
        "input_ids": whole,
        "labels": whole if labels is ids else labels,
        "shift_labels": nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:].contiguous(),
        "position_ids": torch.arange(ids.shape[1], device=ids.device)[None],
    }
    split = [given["input_ids"], given["shift_labels"], given["position_ids"]]
    return given, _on_ring(context, split)


@contextlib.contextmanager
def _on_ring(context: DeviceMesh, split: list[torch.Tensor]) -> Iterator[None]:
    torchs = context_parallel(context, buffers=split, buffer_seq_dims=[1] * len(split), no_restore_buffers=set(split))
    with torchs:
        if context.device_type != "cpu":
            yield
            return

        with ring_on_cpu(context.get_group()):
            yield


def without_masks(model: nn.Module) -> None:
    """Let attention be causal without a mask, as a ring's is.

    Source: accelerate, ``big_modeling.py`` (``_attach_context_parallel_hooks``).
    """
    blocks: list[Any] = list(find_blocks(model).values())
    for block in blocks:
        block.self_attn.register_forward_pre_hook(_causal, with_kwargs=True)


def _causal(_: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    return given, {**named, "attention_mask": None, "is_causal": True}


def whole_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that ranks of ``tp`` have computed together as a plain tensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in groups that lie over the same ranks, in the order in which they first come."""
    found: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(found.values())


def clip(parameters: list[nn.Parameter], limit: float, pipeline: ProcessGroup | None = None) -> None:
    """Clip the gradients by the norm of all, also where some lie over other ranks than the rest, as those of experts.

    Args:
        pipeline: the ranks that have the model's other parameters; None where there are no others.
    """
    groups = by_mesh(parameters)
    if len(groups) == 1 and pipeline is None:
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm = torch.linalg.vector_norm(torch.stack([whole_loss(norm) for norm in norms]))
    if pipeline is not None:
        squares = norm**2
        dist.all_reduce(squares, group=pipeline)
        norm = squares.sqrt()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, norm)


def balance(model: nn.Module, device: torch.device) -> None:
    """Let every expert get as many tokens as the others. See Note [Forced balance]."""
    for module in grouped_experts(model):
        module.forward = _balanced(module.forward, module.num_experts, device)


def _balanced(forward: Callable[..., torch.Tensor], experts: int, device: torch.device) -> Callable[..., torch.Tensor]:
    kept: dict[torch.Size, torch.Tensor] = {}

    def balanced(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        shape = top_k_index.shape
        if shape not in kept:
            kept[shape] = (torch.arange(shape.numel(), device=device) % experts).view(shape)
        return forward(hidden_states, kept[shape], top_k_weights)

    return balanced


_aten = torch.ops.aten


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    return found


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )
    return found


@contextlib.contextmanager
def ring_on_cpu(group: dist.ProcessGroup) -> Iterator[None]:
    """Run attention as a ring over the group, within torch's ``context_parallel``."""

    def ring(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        assert attn_mask is None  # the plan refuses what a ring has not
        assert is_causal
        assert not dropout_p
        kernels = partial(_forward, scale=scale), partial(_backward, scale=scale)
        found: torch.Tensor = RingAttention.apply(group, *kernels, query, key, value)
        return found

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", ring):
        yield
