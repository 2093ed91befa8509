"""What the fused optimizers of packages share: states that the first step makes, and steps that change tensors in place."""

from __future__ import annotations

from typing import Any

import torch


class InPlace(torch.optim.Optimizer):
    """An optimizer whose kernels allocate nothing but its states.

    Attributes:
        states: their names.
        state_dtype: their dtype; None for the parameter's.
    """

    states: tuple[str, ...] = ()
    state_dtype: torch.dtype | None = torch.float32

    def __init__(self, params: Any, lr: float = 1e-3, *_: Any, **kwargs: Any) -> None:
        super().__init__(params, {"lr": lr, **kwargs})

    def wanted(self, group: dict[str, Any]) -> bool:
        """Whether a group's parameters get states."""
        return True

    def begin(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Make a parameter's states."""
        dtype = self.state_dtype or param.dtype
        return {name: torch.zeros_like(param, dtype=dtype) for name in self.states}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the states of parameters that have a gradient for the first time."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and self.wanted(group) and not self.state[param]:
                    self.state[param].update(self.begin(param, group))
        return loss
