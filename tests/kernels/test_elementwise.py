"""Updates by torch's operations against ``torch.optim``, element by element."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from zeroplan.core.optimizers import OPTIMIZERS
from zeroplan_runtime import kernels

CASES: list[tuple[str, dict[str, Any]]] = [
    ("adadelta", {"lr": 0.3, "rho": 0.8, "eps": 1e-4}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.5}),
    ("adamax", {"lr": 0.1, "betas": (0.7, 0.9)}),
    ("nadam", {"lr": 0.1, "betas": (0.7, 0.9), "momentum_decay": 0.5}),
    ("nadam", {"lr": 0.1, "decoupled_weight_decay": True}),
    ("radam", {"lr": 0.1, "betas": (0.7, 0.9), "decoupled_weight_decay": True}),
    ("radam", {"lr": 0.1, "betas": (0.7, 0.99)}),
    ("rmsprop", {"lr": 0.1, "alpha": 0.8}),
    ("rmsprop_momentum", {"lr": 0.1, "alpha": 0.8, "momentum": 0.7}),
    ("rmsprop_centered", {"lr": 0.1, "alpha": 0.8, "centered": True}),
    ("rmsprop_centered_momentum", {"lr": 0.1, "alpha": 0.8, "centered": True, "momentum": 0.7}),
    ("adam_amsgrad", {"lr": 0.1, "betas": (0.7, 0.9), "amsgrad": True}),
    ("adamw_amsgrad", {"lr": 0.1, "betas": (0.7, 0.9), "amsgrad": True}),
    ("asgd", {"lr": 0.1, "lambd": 0.2, "alpha": 0.5, "t0": 5.0}),
    ("rprop", {"lr": 0.1, "etas": (0.4, 1.5), "step_sizes": (1e-2, 0.3)}),
]


@pytest.mark.parametrize(("name", "hyper"), CASES)
@pytest.mark.parametrize("scratch", [2 * 8, 2 * 1000])
def test_equals_torch(name: str, hyper: dict[str, Any], scratch: int) -> None:
    row = OPTIMIZERS[name]
    assert row.runtime is not None
    assert row.torch is not None
    kernel = row.runtime
    hyper = {**kernel.defaults, **({"weight_decay": 0.05} if "weight_decay" in kernel.defaults else {}), **hyper}
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(100))
    taken = inspect.signature(getattr(torch.optim, row.torch.name)).parameters
    optimizer = getattr(torch.optim, row.torch.name)([param], **{key: hyper[key] for key in hyper if key in taken})
    del hyper["maximize"]  # the runtime turns the gradients' sign before it calls the kernel
    if kernel.decoupled:
        hyper["decoupled"] = row.name.startswith(kernel.decoupled)
    if kernel.carried:
        hyper[kernel.carried] = None
    master = param.detach().clone()
    states = [torch.zeros(100) for _ in row.states]
    out, scalars, workspace = torch.empty(100, dtype=torch.bfloat16), torch.zeros(8), torch.empty(scratch)
    scalars[kernels.FACTOR] = 0.5
    for step in range(1, 13):
        grad = torch.randn(100)
        param.grad = grad / 2
        optimizer.step()
        more: dict[str, Any] = {"param_out": out, "scalars": scalars, "workspace": workspace}
        kernels.UPDATES[kernel.kernel](master, grad, states, None, None, step=step, **hyper, **more)
        if kernel.carried and step % 2:  # what the step before leaves, and what the kernel makes of its absence, are equal
            hyper[kernel.carried] = kernels.CARRIED[kernel.carried](step, hyper)
        elif kernel.carried:
            hyper[kernel.carried] = None
        torch.testing.assert_close(master, param.detach(), rtol=2e-5, atol=2e-6)
        assert torch.equal(out, master.bfloat16())
    torch.testing.assert_close(states[-1], optimizer.state[param][row.states[-1].state_key], rtol=2e-5, atol=1e-7)
    before = master.clone()
    scalars[kernels.SKIP] = 1
    more = {"param_out": None, "scalars": scalars, "workspace": workspace}
    kernels.UPDATES[kernel.kernel](master, grad * float("nan"), states, None, None, step=13, **hyper, **more)
    assert torch.equal(master, before)
