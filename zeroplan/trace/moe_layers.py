"""DeepSpeed's MoE layers (``deepspeed.moe``) while they are traced: without other ranks, and with evenly filled experts.

The layers' own code runs. Its exchange with other ranks writes into a tensor that is as large as what is sent. Where tokens are
dropped, the capacity decides all sizes. Where they are not, the fullest expert of all ranks does: the trace has every expert
take the same.

Sources: DeepSpeed 0.19.8, moe/sharded_moe.py (_AllToAll, MOELayer.forward, top1gating, top2gating, topkgating)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributions import Distribution

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
