"""One expert-parallel rank to be traced: its experts, and the runtime's exchange of tokens with a balanced routing.

What the exchange is, and in which order it computes: Note [Exchange of tokens] in zeroplan_runtime/expert_parallel.py.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import nn

from zeroplan_runtime.expert_parallel import Splits, balanced, grouped_experts, run_experts


def share_experts(model: nn.Module, group: dist.ProcessGroup, *, splits: Splits = balanced) -> None:
    """Leave one rank's experts in a model, and let its forward exchange tokens with the ranks of `group`.

    Among fake ranks routing is taken to be balanced: a rank receives as many tokens as it sends. Real ones are `counted`.

    Raises:
        BadInput: a model without experts that transformers runs by grouped products.
    """
    for module in grouped_experts(model):
        for name, param in list(module.named_parameters(recurse=False)):
            part = param.detach().chunk(group.size())[group.rank()].clone()
            module.register_parameter(name, nn.Parameter(part, requires_grad=param.requires_grad))
        module.forward = partial(run_experts, module, group, splits=splits)
