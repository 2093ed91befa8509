"""Compiles the blocks of a model one by one, each with its checkpoint inside its graph.

Note [Checkpoints within graphs]
    ``block.compile()`` leaves transformers' gradient checkpointing around the compiled block: the backward first runs the
    whole forward graph again, its last product and all, and then the backward graph. With the checkpoint inside, the
    recomputation is part of the backward graph: what the backward does not read is not computed again (in a Llama block the
    down projection, a quarter of its products), and the rest is fused with the backward's own kernels. torchtitan compiles its
    blocks so. The hooks of the runtime, of FSDP2 and of others run around the graph, since the forward alone is compiled.

Note [Dropout within graphs]
    A checkpoint in a graph leaves the generator's state alone: AOTAutograd is to see to it that the recomputation drops what
    the forward dropped (torch, ``_higher_order_ops/wrap.py``). A backend without AOTAutograd, such as ``eager``, runs the graph
    as it is; it would drop other elements, and gradients would be wrong. There the checkpoint stays around the graph.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroplan.core.errors import BadInput
from zeroplan_runtime.compiled import require_whole
from zeroplan_runtime.units import Policy, find_blocks


def compile_blocks(model: nn.Module, *, policy: Policy | None = None, **options: Any) -> None:
    """Compiles the forward of each block in place; blocks that checkpoint do so within their graphs from then on.

    Call it after ``model.gradient_checkpointing_enable()`` and before ``initialize``. Blocks of the same classes and shapes
    share one graph. With a `backend` that has no AOTAutograd, checkpoints stay around the graphs: see
    Note [Dropout within graphs].

    Args:
        model: the model; its blocks are those that become units (:func:`zeroplan_runtime.units.find_blocks`).
        policy: as of ``initialize``, where the blocks stand in no list.
        options: arguments of ``torch.compile``, such as `backend`.

    Raises:
        BadInput: when the model has no blocks, or ranks have parts of its parameters, which torch.compile does not take.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"a {type(model).__name__} is no nn.Module", where="compile_blocks", remedy="give a built model")
    require_whole(model)
    blocks: list[Any] = list(find_blocks(model, policy).values())
    if not blocks:
        raise BadInput(
            f"{type(model).__name__} has no list of blocks to compile",
            where="compile_blocks",
            remedy="give a policy that takes them, or use model.compile()",
        )
    within = _has_autograd(options.get("backend", "inductor"))
    for block in blocks:
        forward = block.forward
        if within and getattr(block, "gradient_checkpointing", False):
            block.gradient_checkpointing = False  # transformers' own is around the whole call
            if "forward" in vars(block):
                block.forward_within = forward  # replaced on this block alone
            forward = MethodType(_checkpointed_forward, block)  # a method, so that all blocks of a class share its code
        block.forward = torch.compile(forward, **options)


def _has_autograd(backend: Any) -> bool:
    """Returns whether this backend of ``torch.compile`` is known to have AOTAutograd."""
    if isinstance(backend, str):
        return backend in ("inductor", "cudagraphs", "openxla") or backend.startswith("aot_")
    from torch._dynamo.backends.common import AotAutograd  # takes more than a second, as torch.compile does later

    return isinstance(backend, AotAutograd)


def _checkpointed_forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The block's forward, its class's or its own, with a checkpoint around it where there is a backward."""
    own = vars(block).get("forward_within")
    forward, given = (type(block).forward, (block, *args)) if own is None else (own, args)
    if not (block.training and torch.is_grad_enabled()):
        return forward(*given, **kwargs)
    return checkpoint(forward, *given, use_reentrant=False, **kwargs)
