"""Partial checkpointing: some operators' outputs are kept, or some blocks are not checkpointed.

Note [Selective checkpointing]
    torch keeps the outputs that the policy names in a cache beside the graph. The recomputation takes them from there and does
    not run the operator (``torch.utils.checkpoint.create_selective_checkpoint_contexts``). The same two contexts run here,
    above the recorder, so the recorder does not see the operators that are left out. CUDA's fused attention is one operator
    there and several allocations here; all of its allocations are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zeroplan.core.errors import BadInput
from zeroplan.trace import attention
from zeroplan.trace.functions import CudaFunctions

_aten = torch.ops.aten
_ATTENTION = frozenset(
    getattr(_aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
)
#: Operators whose outputs are kept: the products, whole or batched, and attention in one kernel.
#: Source: ``op_sac_save_list`` of torchtitan and ``compute_intensive_ops`` of ``torch/_functorch/partitioners.py``.
SAVED = _ATTENTION | frozenset(
    getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
)


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is costly to compute again. For ``create_selective_checkpoint_contexts``."""
    keep = operator in SAVED or attention.inside_kernel()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Alternate:
    """Keep every second product without a bias of one block, beginning with the first, and attention.

    Source: torchtitan, distributed/activation_checkpoint.py (_apply_op_sac), which counts ``mm`` and has no ``addmm`` in its
    list. Products of experts are in no block that it was read for; they are kept.
    """

    def __init__(self) -> None:
        self._seen = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator is _aten._grouped_mm.default or attention.inside_kernel() or operator in _ATTENTION
        if operator is _aten.mm.default:
            self._seen[context.is_recompute] += 1
            keep = self._seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(functions: CudaFunctions, *, alternate: bool = False) -> tuple[Any, Any]:
    """Contexts for a checkpointed block's forward and its recomputation, as ``checkpoint(context_fn=…)`` takes them."""
    first, again = functions.recomputation()
    caching, cached = create_selective_checkpoint_contexts(_Alternate() if alternate else policy)
    return _Both(first, caching), _Both(again, cached)


class _Both:
    """Two contexts in one. The block's graph holds it, so cached outputs that nothing asks for are freed with the graph."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)
        self._outer.__exit__(*exc)


def checkpoint_every(model: nn.Module, every: int) -> None:
    """Leave checkpointing on in blocks k, 2k, … of each stack alone, counted from 1 as torchtitan counts them.

    Raises:
        BadInput: when the model's blocks have no switch of their own.
    """
    switched = 0
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for number, block in enumerate(module, 1):
            if getattr(block, "gradient_checkpointing", None) is True:
                block.gradient_checkpointing = number % every == 0  # type: ignore[assignment]
                switched += 1
    if not switched:
        raise BadInput(
            f"{type(model).__name__}'s blocks cannot be checkpointed one by one",
            where="--checkpoint-policy",
            remedy="use full or selective",
        )


def checkpoint_trained(model: Any) -> None:
    """Take the checkpoints of blocks that train nothing away; the others' first input gets a gradient, the embedding's output
    none for their sake.

    Source: LLaMA-Factory 0.9.6, model/model_utils/checkpointing.py (``get_custom_gradient_checkpointing_func``)
    """
    model.disable_input_require_grads()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", None) is True:
            module.gradient_checkpointing = any(parameter.requires_grad for parameter in module.parameters())
            module._gradient_checkpointing_func = partial(_from_its_input, module._gradient_checkpointing_func)


def _from_its_input(checkpoint: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a checkpoint whose first input gets a gradient."""
    first = next((one for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()), None)
    if first is not None:
        first.requires_grad_(True)
    return checkpoint(block, *args, **kwargs)


def checkpoint_groups(model: nn.Module, size: int, begin: int, end: int) -> None:
    """Recompute blocks `begin` to before `end` in groups of `size`, the last of which may have fewer, and no others.

    Raises:
        BadInput: when the model's blocks cannot be run together.
    """
    stacks = [list(one) for one in model.modules() if isinstance(one, nn.ModuleList) and _switched(one)]
    if len(stacks) != 1 or len(set(getattr(model.config, "layer_types", None) or ())) > 1:
        raise BadInput("blocks that differ are not recomputed together here", where="activation_checkpoint_interval")
    (blocks,) = stacks
    for block in blocks:
        block.gradient_checkpointing = False  # type: ignore[assignment]
    for first in range(begin, end, size):
        _join(blocks[first : min(first + size, end)])


def _switched(blocks: nn.ModuleList) -> bool:
    return all(getattr(block, "gradient_checkpointing", None) is True for block in blocks)


def _join(blocks: Sequence[Any]) -> None:
    """Let the first block's checkpoint run all of these, and the others pass on what they are given."""
    head, rest = blocks[0], blocks[1:]
    checkpoint = head._gradient_checkpointing_func

    def together(run: Any, hidden: torch.Tensor, *args: Any) -> Any:
        def every(states: Any, *others: Any) -> Any:
            states = run(states, *others)
            for block in rest:
                states = nn.Module.__call__(block, states, *others, **run.keywords)
            return states

        return checkpoint(every, hidden, *args)

    for block in blocks:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = _pass_on
    head._gradient_checkpointing_func = together


def _pass_on(_: Any, hidden: torch.Tensor, *__: Any) -> torch.Tensor:
    return hidden
