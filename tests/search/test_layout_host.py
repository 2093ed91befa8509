"""What the host does for layouts: operations on DTensors are counted on torch, and the modelled step waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.buffers import Phase
from zeroplan.core.rates import rates_of
from zeroplan.engines.fsdp2.engine import Fsdp2
from zeroplan.engines.traffic import Hooks
from zeroplan.planner.resolve import resolve
from zeroplan.report.layouts import host_text
from zeroplan.run.ask import Ask
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_host import (
    LINEAR,
    NORM,
    call_seconds,
    dispatch_seconds,
    hook_seconds,
    input_sums,
    step_seconds,
    with_ring,
)
from zeroplan.search.layout_time import LayoutCost
from zeroplan.search.policy import HOST_DECIDES

SMALL = Ask(model="meta-llama/Llama-3.2-1B", gpus=2, gpu="H100", seq_len=1024, micro_batch=1, engine="fsdp2", stage=3)


def test_operations_on_dtensors_are_as_many_as_torch_dispatches() -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from zeroplan.trace.tensor_parallel import ReplicateParallel

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                self.seen += 1
                return NotImplemented
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        parts = ((torch.nn.Linear(8, 8, bias=False), ColwiseParallel(), LINEAR), (LlamaRMSNorm(8), ReplicateParallel(), NORM))
        for module, style, counted in parts:
            shared = parallelize_module(module.bfloat16(), mesh, style)
            with Count() as forward:
                out = shared(torch.randn(2, 4, 8, dtype=torch.bfloat16, requires_grad=True))
            with Count() as backward:
                out.sum().backward()
            assert forward.seen == counted[0]
            assert backward.seen - counted[1] in (0, 1)  # one is of the sum
    finally:
        dist.destroy_process_group()


def test_a_block_dispatches_its_linear_layers_and_norms() -> None:
    """Seven linear layers and two norms a block: 46 operations in the forward and 94 in the backward."""
    case = resolve(SMALL.replace(tp=2)).cases[0]
    rates = rates_of(case.cluster.gpu)
    assert dispatch_seconds(case, Phase.FORWARD, rates, 0) * 1e6 == pytest.approx(46 * rates.dispatch_us)
    assert dispatch_seconds(case, Phase.BACKWARD, rates, 1) * 1e6 == pytest.approx((94 + 46) * rates.dispatch_us)
    assert input_sums(case) == 5


def test_hooks_run_for_what_an_engine_has_them_on() -> None:
    """FSDP2's for nine parameters a block, DeepSpeed's for as many gradients, or for each module that a pass goes through."""
    case = resolve(SMALL).cases[0]
    rates, counts = rates_of(case.cluster.gpu), rank_counts(resolve(SMALL), {})
    blocks = case.spec.config["num_hidden_layers"]

    def micros(hooks: Hooks, phase: Phase) -> float:
        return hook_seconds(case, counts, phase, rates, hooks) * 1e6

    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert micros(Hooks.PARAMETERS, phase) == pytest.approx(9 * rates.unit_hook_us)
        assert micros(Hooks.NONE, phase) == 0
    assert micros(Hooks.GRADIENTS, Phase.FORWARD) == 0
    assert micros(Hooks.GRADIENTS, Phase.BACKWARD) == pytest.approx(9 * rates.gradient_hook_us)
    assert micros(Hooks.MODULES, Phase.FORWARD) * blocks == pytest.approx(counts.forward_modules * rates.gather_hook_us)
    assert micros(Hooks.MODULES, Phase.BACKWARD) * blocks == pytest.approx(counts.backward_modules * rates.release_hook_us)


def test_a_small_models_tensor_parallelism_waits_for_the_host() -> None:
    resolved = resolve(SMALL.replace(tp=2))
    case, counts = resolved.cases[0], rank_counts(resolved, {})
    rates = rates_of(case.cluster.gpu)
    slow = LayoutCost(case, counts, rates, Fsdp2()).time()
    fast = LayoutCost(
        case, counts, rates.with_profile({"launch_us": 0.3, "autograd_us": 0.3, "dispatch_us": 1.0}, "test"), Fsdp2()
    ).time()
    assert slow.compute > 2 * fast.compute


def test_a_slow_host_makes_longer_what_waits_for_it_and_nothing_that_was_measured() -> None:
    """Answers name the slowest host's time by :func:`zeroplan.report.layouts.host_text` where it decides, and only there."""
    seconds = []
    for asked in (SMALL.replace(tp=2), SMALL.replace(model="meta-llama/Llama-3.1-8B", seq_len=32768, tp=2)):
        resolved = resolve(asked)
        rates = rates_of(resolved.cluster.gpu)
        costs = (
            LayoutCost(resolved.cases[0], rank_counts(resolved, {}), one, Fsdp2()) for one in (rates, rates.on_slow_host())
        )
        seconds.append([cost.time().total for cost in costs])
    (small, slow), (large, no_slower) = seconds
    assert slow > HOST_DECIDES * small
    assert no_slower == pytest.approx(large)
    assert f"a step takes {slow:.2f} s" in host_text(small, slow)
    assert host_text(large, no_slower) == ""
    measured = rates.with_profile({"launch_us": 30.0}, "test").on_slow_host()
    assert (measured.launch_us, measured.dispatch_us > rates.dispatch_us) == (30.0, True)


def test_a_slow_launch_slows_no_dispatch_that_was_measured_by_itself() -> None:
    """A profile's launches were once taken for its dispatch, too, and a host-bound step for twice as long as it was."""
    case = resolve(SMALL.replace(tp=2)).cases[0]
    rates = rates_of(case.cluster.gpu)
    slow = rates.with_profile({"launch_us": 2 * rates.launch_us}, "test")
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert dispatch_seconds(case, phase, slow, 0) == dispatch_seconds(case, phase, rates, 0)
        assert call_seconds(case, phase, slow, 0) == 2 * call_seconds(case, phase, rates, 0) > 0
        assert call_seconds(resolve(SMALL).cases[0], phase, rates, 0) == 0


def test_the_host_steps_each_parameter_of_dtensors() -> None:
    case = resolve(SMALL).cases[0]
    rates = rates_of(case.cluster.gpu)
    assert step_seconds(case, rates, Hooks.PARAMETERS) * 1e6 == pytest.approx(5 * rates.launch_us * (9 * 16 + 2))
    assert step_seconds(case, rates, Hooks.MODULES) == 0


def test_a_ring_adds_kernels_and_bytes_for_each_further_rank() -> None:
    two, four = (resolve(SMALL.replace(gpus=4, cp=cp)) for cp in (2, 4))
    counts = rank_counts(resolve(SMALL), {})
    first, second = (with_ring(counts, one.cases[0]) for one in (two, four))
    assert first.forward_kernels - counts.forward_kernels == 16 * 21
    assert second.forward_kernels - first.forward_kernels == 16 * 2 * 16
    assert second.backward_written > counts.backward_written
