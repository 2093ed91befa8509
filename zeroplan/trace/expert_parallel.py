"""One expert-parallel rank to be traced: its experts, and the runtime's exchange of tokens with a balanced routing.

What the exchange is, and in which order it computes: Note [Exchange of tokens] in zeroplan_runtime/expert_parallel.py.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import nn

from zeroplan_runtime.expert_parallel import balanced, grouped_experts, run_experts


def share_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leave one rank's experts in a model, and let its forward exchange tokens with the ranks of `group`.

    Routing is taken to be balanced: a rank receives as many tokens as it sends.

    Raises:
        BadInput: a model without experts that transformers runs by grouped products.
    """
    for module in grouped_experts(model):
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(param[: param.shape[0] // group.size()].detach().clone()))
        module.forward = partial(run_experts, module, group, splits=balanced)
