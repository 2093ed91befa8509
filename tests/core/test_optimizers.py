"""The optimizer table: what it says of torch's classes, and that nothing else says anything of an optimizer's name."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import zeroplan
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizer_row import Domain, Optimizer
from zeroplan.core.optimizers import OPTIMIZERS, find_optimizer, known_optimizer, optimizer_of_type
from zeroplan.core.unmodelled_optimizers import UNMODELLED

_PACKAGES = [Path(zeroplan.__file__).parent, Path(zeroplan.__file__).parent.parent / "zeroplan_runtime"]
#: The table itself, and the kernels, which are named by what they compute.
_HOME = (
    "zeroplan/core/unmodelled_optimizers.py",
    # What other programs call theirs by default, and DeepSpeed's names as its users' code imports them: no facts.
    "zeroplan/interop/programs/",
    "zeroplan/interop/training.py",
    "zeroplan/capturing/kernels/",
    "zeroplan_runtime/compat/",
    "zeroplan/core/optimizers.py",
    "zeroplan/core/optimizer_row.py",
    "zeroplan_runtime/kernels/",
)
#: Rows whose class torch.optim has and that take parameters of any shape.
_OF_TORCH = [row for row in OPTIMIZERS.values() if row.torch is not None and not row.rest]
#: Elements of the parameters that are stepped: flat ones, as ZeRO's parts are.
_SIZES = (10_000, 20_000, 30_000, 40_000)


def test_every_name_means_one_row() -> None:
    names = Counter(name for row in OPTIMIZERS.values() for name in (row.name, *row.aliases))
    names += Counter(name for group in UNMODELLED for name in group.names)
    assert [name for name, count in names.items() if count > 1] == []
    for row in OPTIMIZERS.values():
        for name in (row.name, *row.aliases):
            assert find_optimizer(f" {name.upper()} ") is row
        for other in (row.rest, *row.variants.values(), row.eight_bit, *(one.becomes for one in row.deepspeed)):
            assert not other or other in OPTIMIZERS
        if row.written is not None:  # a file that zeroplan writes reads back to the row, or to what that type means
            back = optimizer_of_type(row.written.type, row.written.params)
            assert back is OPTIMIZERS[row.written.becomes or row.name]


def test_what_is_not_modelled_is_refused_with_the_reason() -> None:
    for group in UNMODELLED:
        for name in group.names:
            with pytest.raises(BadInput, match="is not modelled: "):
                find_optimizer(name)
            assert known_optimizer(name.upper()) == name


@pytest.mark.torch
def test_transformers_names_are_known() -> None:
    from transformers.training_args import OptimizerNames

    said = {name for group in UNMODELLED for name in group.names}
    unknown = [one.value for one in OptimizerNames if known_optimizer(one.value) not in OPTIMIZERS and one.value not in said]
    assert unknown == []


def test_no_other_module_names_an_optimizer() -> None:
    """A table or a branch needs an optimizer's name as a string; docstrings and messages are longer."""
    names = {name for row in OPTIMIZERS.values() for name in (row.name, *row.aliases)}
    names |= {one.type.lower() for row in OPTIMIZERS.values() for one in row.deepspeed}
    names |= {name for group in UNMODELLED for name in group.names}
    found = []
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            relative = path.relative_to(package.parent).as_posix()
            if relative.startswith(_HOME):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lower() in names:
                    found.append(f"{relative}:{node.lineno}: {node.value!r}")
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _torch_names():
                    found.append(f"{relative}:{node.lineno}: {node.value!r}")
    assert found == []


def _torch_names() -> set[str]:
    return {row.torch.name for row in OPTIMIZERS.values() if row.torch is not None}


@pytest.mark.torch
@pytest.mark.parametrize("decays", [False, True], ids=["plain", "decay"])
@pytest.mark.parametrize("row", _OF_TORCH, ids=lambda row: row.name)
def test_torch_keeps_and_needs_what_the_row_says(row: Optimizer, decays: bool) -> None:
    import inspect

    import torch
    from allocations import Allocations

    assert row.torch is not None
    made = getattr(torch.optim, row.torch.name)
    decay = {"weight_decay": 0.1 * decays} if "weight_decay" in inspect.signature(made).parameters else {}
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in _SIZES]
    optimizer = made(parameters, lr=1e-3, foreach=True, **decay, **row.torch.params)
    keys = [state.state_key for state in row.states]
    assert all(bool(set(keys) & set(optimizer.state[p])) == bool(keys and row.torch.states_when_built) for p in parameters)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn_like(p)
        known = [t for p in parameters for t in (p, p.grad, *_tensors(optimizer.state[p])) if t is not None]
        with Allocations(known) as step:
            optimizer.step()
    total = 4 * sum(_SIZES)
    scalars = 8 * len(_SIZES) * 4  # step counts as tensors, one at a time
    chosen = 5 * max(_SIZES) if row.torch.selects else 0
    assert step.peak == pytest.approx((row.torch.foreach_lists + decays * row.torch.decay_lists) * total + chosen, abs=scalars)
    assert step.now == 0
    for p in parameters:
        kept = {key: t.numel() * t.element_size() for key, t in optimizer.state[p].items() if t.numel() > 1}
        assert kept == {state.state_key: state.bytes_of(p.numel(), 4) for state in row.states}
        assert ("step" in optimizer.state[p]) is row.torch.counts_steps


@pytest.mark.torch
def test_torch_fuses_what_the_row_says() -> None:
    """On a CPU torch also fuses Adagrad, which has no CUDA kernel."""
    import inspect

    import torch

    for row in OPTIMIZERS.values():
        if row.torch is None:
            continue
        takes = "fused" in inspect.signature(getattr(torch.optim, row.torch.name)).parameters
        assert takes is row.torch.fused or row.torch.name == "Adagrad"


def test_states_by_domain() -> None:
    for row in OPTIMIZERS.values():
        assert {state.domain for state in row.states} <= ({Domain.MATRIX, Domain.REST} if row.rest else {Domain.ALL})
        if row.rest:  # its share of the states is that row's
            left = [(state.buffer, state.per_master) for state in row.states if state.domain is Domain.REST]
            assert left == [(state.buffer, state.per_master) for state in OPTIMIZERS[row.rest].states]
    muon = OPTIMIZERS["muon"]
    assert [muon.bytes_per_element(share) for share in (0.0, 0.5, 1.0)] == [8, 6, 4]
    assert OPTIMIZERS["adamw8bit"].bytes_per_element() == 2


def _tensors(state: dict) -> list:
    return [value for value in state.values() if hasattr(value, "untyped_storage")]
