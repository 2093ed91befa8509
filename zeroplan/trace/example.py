"""A live module with an example batch, as a trace needs both: on the meta device, in the dtypes of the run.

The layers' own code runs. Its exchange with other ranks writes into a tensor that is as large as what is sent. Where tokens are
dropped, the capacity decides all sizes. Where they are not, the fullest expert of all ranks does: the trace has every expert
take the same.

Sources: DeepSpeed 0.19.8, moe/sharded_moe.py (_AllToAll, MOELayer.forward, top1gating, top2gating, topkgating)
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map

from zeroplan.core.errors import BadInput
from zeroplan.tape.format import Tape
from zeroplan.tape.options import TraceOptions
from zeroplan.trace.api import trace_module
from zeroplan.trace.build import keep_layers

_WHERE = "inputs"


def arguments(module: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return the keyword arguments of one forward: from a mapping, a tuple of positional ones, or the first alone.

    Raises:
        BadInput: inputs that the module's forward does not take, or without a tensor.
    """
    if isinstance(inputs, Mapping):
        batch = {str(name): value for name, value in inputs.items()}
    else:
        given = inputs if isinstance(inputs, tuple | list) else (inputs,)
        try:
            batch = dict(inspect.signature(module.forward).bind(*given).arguments)
        except TypeError as fault:
            raise BadInput(str(fault), where=_WHERE, remedy="give the keyword arguments of one forward as a dict") from None
    if not _tensors(batch):
        raise BadInput("there is no tensor in the batch", where=_WHERE, remedy="give one micro batch")
    return batch


def shape_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return a batch's samples and positions: the first tensors' first and second dimensions."""
    sizes = [tensor.shape for tensor in _tensors(batch) if tensor.dim()]
    samples = sizes[0][0] if sizes else 1
    return max(1, samples), max(1, next((shape[1] for shape in sizes if len(shape) > 1), 1))


def trace_example(module: nn.Module, inputs: Any, options: TraceOptions, graded: frozenset[str] = frozenset()) -> Tape:
    """Return the tape of the module for this batch. The module itself is left as it is.

    Args:
        inputs: one micro batch.
        options: how it runs.
        graded: frozen parameters for which the engine has gradients made all the same.

    Raises:
        BadInput: inputs that the module's forward does not take.
    """
    batch = arguments(module, inputs)
    half = torch.bfloat16 if options.arithmetic.half_model else None

    def empty(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = half if half is not None and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=dtype, device="meta", requires_grad=value.requires_grad)

    made = _on_meta(module, half, graded)
    with alone(made):
        return trace_module(made, lambda: tree_map(empty, batch), options)


def buffer_bytes(module: nn.Module, *, half: bool, persistent: bool) -> tuple[int, ...]:
    """Return the bytes of each registered buffer, one that several modules hold once.

    Args:
        half: floats are cast to 16 bits; if `persistent`, those alone that a state_dict holds.
    """
    left = {id(owner._buffers[name]) for owner in module.modules() for name in owner._non_persistent_buffers_set}
    found: dict[int, int] = {}
    for tensor in module.buffers():
        cast = half and tensor.is_floating_point() and not (persistent and id(tensor) in left)
        found.setdefault(tensor.untyped_storage()._cdata, tensor.numel() * (2 if cast else tensor.element_size()))
    return tuple(size for size in found.values() if size)


def _on_meta(module: nn.Module, half: torch.dtype | None, graded: frozenset[str]) -> nn.Module:
    """Return a copy in training mode without weights, floating parameters and buffers in `half` where that is given."""
    memo: dict[int, Any] = groups_of(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        dtype = half if half is not None and tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
        trained = tensor.requires_grad or name in graded
        memo[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
    made = copy.deepcopy(module, memo)
    config: Any = getattr(made, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    keep_layers(made)
    return made.train()


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


_LAYERS = "deepspeed.moe.sharded_moe"


def groups_of(module: nn.Module) -> dict[int, Any]:
    """Return the process groups that a module's MoE layers hold, by their id: a copy of the module keeps them."""
    held = [getattr(one, "ep_group", None) for one in module.modules()]
    return {id(group): group for group in held if group is not None}


@contextlib.contextmanager
def alone(module: nn.Module) -> Iterator[None]:
    """Let a copy of a module run without the other ranks of its MoE layers.

    Distributions of noise are made without a look at their bounds, which the meta device does not have.
    """
    code: Any = sys.modules.get(_LAYERS)
    gates = [one for one in module.modules() if code is not None and isinstance(one, code.TopKGate)]
    if not gates:
        yield
        return
    checks, comm = Distribution._validate_args, code.dist
    for gate in gates:
        gate.ep_group = None
        if not gate.drop_tokens:
            gate.drop_tokens, gate.capacity_factor, gate.min_capacity = True, 1.0, 1
    Distribution.set_default_validate_args(False)
    code.dist = SimpleNamespace(all_to_all_single=_arrives)
    try:
        yield
    finally:
        code.dist = comm
        Distribution.set_default_validate_args(checks)


def _arrives(output: Any, sent: Any, group: Any = None) -> None:
    """Leave the output as it is."""
