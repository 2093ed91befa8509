"""Tensor parallelism as torch builds it, on rank 0 of a mesh of fake ranks.

Note [Fake ranks]
    The tensor-parallel ranks are those of a ``FakeProcessGroup``: collectives return at once, with outputs of the right shapes.
    Data-parallel ranks are left out, since what they do is an engine's and lies over the tape. Layouts are applied by
    torch's ``parallelize_module``, as programs do on real ranks (:func:`parallelize`), so operators on this rank's parts, and
    the collectives between them, are recorded as they are on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import _disable_current_modes

from zeroplan.core.errors import BadInput
from zeroplan.core.tensor_parallel import TensorPlan, tensor_plan
from zeroplan.trace.ranks import Ranks


class ReplicateParallel(ParallelStyle):
    """A module that every rank runs whole, with parameters that are DTensors like the others'.

    An optimizer's multi-tensor step takes DTensors of one mesh alone. Source: torchtitan, ``NoParallel``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: str, owner: nn.Module, mesh: DeviceMesh) -> None:
            for name, param in owner.named_parameters(recurse=False):
                owner.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh, [Replicate()])))

        def before(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            first, *rest = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, mesh, [Replicate()], run_check=False)
            return (first, *rest)

        def after(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, whole, before, after)


def parallelize(model: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Lay a causal language model of transformers out over a tensor-parallel mesh. The logits stay split, for `loss_parallel`.

    Args:
        model: the model, on the meta device or with weights.
        mesh: one dimension of ranks.
        sequence: split the tokens between the matrices, too (sequence parallelism). The tokens are split behind the embedding,
            because transformers makes its masks of the embedding's output.

    Raises:
        BadInput: an architecture without a known plan.
    """
    plan = tensor_plan(model.config.model_type)
    base, head = model.model, model.lm_head
    tied = head.weight is base.embed_tokens.weight
    inside = Shard(1) if sequence else Replicate()
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sequence else ReplicateParallel()
    top = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=inside, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, top)
    if tied:
        head.weight = base.embed_tokens.weight
    for number, block in enumerate(base.layers):
        if sequence and not number:
            whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
            parallelize_module(block, mesh, whole)
        parallelize_module(block, mesh, _styles(block, plan, sequence))


def _styles(block: nn.Module, plan: TensorPlan, sequence: bool) -> dict[str, ParallelStyle]:
    """The style of each module of a block that has parameters of its own."""
    outputs = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {}
    if sequence:
        styles["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        styles["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for name, module in block.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if name in plan.columns:
            styles[name] = ColwiseParallel()
        elif name in plan.rows:
            styles[name] = RowwiseParallel(output_layouts=outputs)
        elif name in plan.head_norms:  # tensors of [B, S, H, D], whose heads are split
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
        elif sequence:
            styles[name] = SequenceParallel(use_local_output=True)
        else:
            styles[name] = ReplicateParallel()
    return styles


@contextlib.contextmanager
def fake_mesh(size: int) -> Iterator[DeviceMesh]:
    """Make a tensor-parallel mesh of `size` fake ranks of which this process is the first.

    Raises:
        BadInput: when the process already is a rank of something.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise BadInput(
            "a rank of a run cannot trace tensor parallelism", where="--tp", remedy="estimate in a process of its own"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


class TensorRanks(Ranks):
    """The first of a mesh's tensor-parallel ranks."""

    unwrapped = (DTensor,)

    def __init__(self, mesh: DeviceMesh, *, sequence: bool) -> None:
        self._mesh, self._sequence = mesh, sequence

    def lay_out(self, model: nn.Module) -> None:
        """See :func:`parallelize`."""
        parallelize(model, self._mesh, sequence=self._sequence)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a DTensor; any other tensor itself."""
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Compute the loss over split logits, let no collective wait, and record nothing of how DTensor plans its layouts.

        On the meta device the wrapper that waits for a collective would make another tensor; on a GPU it makes none. DTensor
        runs each new operator on fake tensors of the whole shapes first, which the recorder would take for the rank's own.
        """
        wrap, propagate = collectives._maybe_wrap_tensor, ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*args: Any) -> Any:
            with _disable_current_modes():
                return propagate(*args)

        collectives._maybe_wrap_tensor = lambda tensor: tensor  # type: ignore[assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign,assignment]
        try:
            with loss_parallel():
                yield
        finally:
            collectives._maybe_wrap_tensor = wrap
            ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign]
