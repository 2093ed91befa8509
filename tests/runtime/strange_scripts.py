"""Uses of a model that nobody has tried yet: each a function of its trainer, in :data:`tests.runtime.odd_scripts.SCRIPTS`."""

from __future__ import annotations

import functools
import gc
import os
import signal
import types
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.runtime.odd_modules import WIDTH, Blocks, blocks, linear
from tests.runtime.odd_scripts import script, steps
from tests.runtime.test_strangers import Seen, data
from zeroplan.core.errors import BadInput


def is_engine(t: Any) -> bool:
    return hasattr(t, "gathered")


@script(blocks(linear))
def checkpoints_without_early_stop(t: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        model = t.module
        x = model.enter(x)
        for block in model.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        found: torch.Tensor = model.leave(x)
        return found

    t.module.forward = forward
    with set_checkpoint_early_stop(False):
        return steps(t)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh(), linear())))
def checkpoints_by_choice(t: Any) -> Any:
    """Selective checkpointing: products are kept, the rest is computed again."""

    def choose(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)

    def forward(x: torch.Tensor) -> torch.Tensor:
        model = t.module
        x = model.enter(x)
        for block in model.blocks:
            x = x + checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        found: torch.Tensor = model.leave(x)
        return found

    t.module.forward = forward
    return steps(t)


@script(blocks(linear))
def two_batches_at_a_time(t: Any) -> Any:
    """The next batch's forward runs before the backward of the one before."""
    seen: Seen = []
    for number in range(0, 6, 2):
        first = t(data(number)).square().mean()
        second = t(data(number + 1)).square().mean()
        t.backward(first)
        t.backward(second)
        t.step()
        seen += [first.detach(), second.detach()]
    return seen


@script(blocks(linear))
def backwards_in_turned_order(t: Any) -> Any:
    seen: Seen = []
    for number in range(0, 6, 2):
        first = t(data(number)).square().mean()
        second = t(data(number + 1)).square().mean()
        t.backward(second)
        t.backward(first)
        t.step()
        seen += [first.detach(), second.detach()]
    return seen


class Cached(nn.Module):
    """Keeps a value made of its weight, and makes it anew when the weight's version has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.known: Any = None
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        if self.known != weight._version:
            self.known, self.kept = weight._version, weight.detach().abs().mean()
        assert self.kept is not None
        found: torch.Tensor = self.inner(x) / self.kept
        return found


@script(blocks(Cached))
def values_kept_by_version(t: Any) -> Any:
    return steps(t, 5)


class Untrained(nn.Module):
    """A buffer that asks for gradients."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("scale", torch.ones(WIDTH, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.scale
        return found


@script(blocks(Untrained))
def buffers_with_gradients(t: Any) -> Any:
    seen = steps(t)
    return [*seen, *(block.scale.grad.clone() for block in t.module.blocks)]


@script(blocks(linear))
def numbers_at_random_after(t: Any) -> Any:
    """The generator is where plain torch leaves it."""
    torch.manual_seed(7)
    seen: Seen = []
    for number in range(3):
        value = t(data(number) + 0.1 * torch.rand(())).square().mean()
        t.backward(value)
        t.step()
        seen += [value.detach(), torch.rand(())]
    return seen


class Interrupted(Exception):
    pass


@script(blocks(linear))
def signals_in_the_forward(t: Any) -> Any:
    """A handler raises in the midst of a forward; the loop goes on with the next batch."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, interrupt)
    handle = t.module.blocks[1].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGUSR2))
    try:
        with suppress(Interrupted):
            t(data(99))
        handle.remove()
        return steps(t)
    finally:
        signal.signal(signal.SIGUSR2, before)


@script(blocks(linear))
def exceptions_in_the_backward(t: Any) -> Any:
    """What a backward has left is dropped, and the loop goes on."""

    def fail(grad: torch.Tensor) -> None:
        raise Interrupted

    seen = steps(t, 2)
    y = t(data(50))
    handle = t.module.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    y = t(data(50))
    with suppress(Interrupted):
        t.backward(y.square().mean())
    handle.remove()
    (t if is_engine(t) else t.optimizer).zero_grad()
    return seen + steps(t, 2)


@script(blocks(linear))
def processes_forked_in_between(t: Any) -> Any:
    """A child that has everything of its parent's ends between two steps."""
    seen: Seen = []
    for _ in range(3):
        seen += steps(t, 1)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    return seen


@script(blocks(linear))
def groups_with_a_rate_of_nothing(t: Any) -> Any:
    for group in t.optimizer.param_groups:
        group["weight_decay"] = 0.1
    seen = steps(t, 2)
    for group in t.optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.5
    seen += steps(t, 2)
    for group in t.optimizer.param_groups:
        group["lr"], group["momentum"] = 0.02, 0.5
    return seen + steps(t, 2)


class Toggling(nn.Module):
    """Freezes its layer in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.first(x) if self.calls % 2 else self.first(x).detach()
        found: torch.Tensor = self.second(y)
        return found


@script(blocks(Toggling))
def layers_detached_in_turns(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def a_state_dict_within_an_accumulation(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        t.backward(t(data(number)).square().mean())
        state = t.module_state_dict() if is_engine(t) else t.module.state_dict()
        if not dist.get_rank():
            seen += [value.clone() for value in state.values()]
        t.backward(t(data(number + 10)).square().mean())
        t.step()
    return seen


class Called(Blocks):
    """A model whose call does more than its forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = super().__call__(*args, **kwargs)
        return found * 2 + 1


@script(lambda: Called(linear))
def a_call_of_its_own(t: Any) -> Any:
    return steps(t)


class Renamed(Blocks):
    """Finds its layers by other names, in ``__getattr__``."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("leave" if name == "head" else name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.head(x)
        return found


@script(lambda: Renamed(linear))
def attributes_by_other_names(t: Any) -> Any:
    return steps(t)


class Noted(torch.Tensor):
    """A subclass that counts the functions that see it."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@script(blocks(linear))
def inputs_of_a_subclass(t: Any) -> Any:
    return steps(t, loss=lambda t, number: t(data(number).as_subclass(Noted)).as_subclass(torch.Tensor).square().mean())


@script(blocks(linear))
def a_traced_module(t: Any) -> Any:
    """A graph of the model, made after the engine, with its parameters."""
    graph = torch.fx.symbolic_trace(t.module)
    return steps(t, loss=lambda t, number: t(data(number)).square().mean() + 0 * graph(data(number)).sum())


class Observed(nn.Module):
    """Rounds its weight as 8 bits would, straight through, with a range that follows."""

    top: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("top", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        with torch.no_grad():
            self.top.lerp_(weight.abs().max(), 0.5)
        rounded = torch.fake_quantize_per_tensor_affine(weight, self.top.item() / 127, 0, -128, 127)
        return functional.linear(x, rounded, self.inner.bias)


@script(blocks(Observed))
def weights_that_are_rounded(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def hooks_with_keywords_and_always(t: Any) -> Any:
    called: list[str] = []
    for block in t.module.blocks:
        block.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 1.1,), kwargs), with_kwargs=True)
        block.register_forward_hook(lambda *_: called.append("after"), always_call=True, prepend=True)
        block.register_full_backward_pre_hook(lambda m, grads: tuple(0.5 * grad for grad in grads))
    seen = steps(t)
    return [*seen, torch.tensor(float(len(called)))]


class Drawn(nn.Module):
    """Uses one of its two layers by what comes in, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.left if x.sum() > 0 else self.right)(x)
        return found


@script(blocks(Drawn))
def paths_by_the_data(t: Any) -> Any:
    return steps(t, 6)


@script(blocks(linear))
def a_loss_that_is_stopped(t: Any) -> Any:
    """Every second loss depends on no parameter that is trained: its backward raises, and the loop goes on."""
    seen: Seen = []
    for number in range(4):
        y = t(data(number))
        if number % 2:
            with torch.no_grad():
                seen.append(t(data(number)).mean())
            del y
            continue
        value = y.square().mean()
        t.backward(value)
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def the_same_loss_twice(t: Any) -> Any:
    """The second backward raises torch's error, and the loop goes on."""
    seen: Seen = []
    for number in range(3):
        value = t(data(number)).square().mean()
        t.backward(value)
        try:
            t.backward(value)
        except (RuntimeError, BadInput) as fault:
            assert "second time" in str(fault) or "freed by an earlier backward" in str(fault), fault
            (t if is_engine(t) else t.optimizer).zero_grad()
            t.backward(t(data(number)).square().mean())
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear), refused="0123")
def a_step_of_the_optimizer_that_is_wrapped(t: Any) -> Any:
    """A profiler's wrapper around ``optimizer.step``, as an instance's attribute."""
    calls: list[int] = []
    step = t.optimizer.step

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs)

    t.optimizer.step = wrapped
    seen = steps(t, 3)
    return [*seen, torch.tensor(float(len(calls)))]


@script(blocks(linear))
def an_engine_in_a_module(t: Any) -> Any:
    """A user's module that has the engine, or model, as an attribute and calls it."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.engine = t

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.engine(x) * 0.5
            return found

    wrapper = Wrapper()
    return steps(t, loss=lambda t, number: wrapper(data(number)).square().mean())


@script(blocks(linear))
def a_whole_step_compiled(t: Any) -> Any:
    """``torch.compile`` around forward, backward and step together."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        value = t(x).square().mean()
        t.backward(value)
        t.step()
        found: torch.Tensor = value.detach()
        return found

    return [step(data(number)).clone() for number in range(4)]


@script(blocks(linear))
def a_module_that_wraps_the_engines(t: Any) -> Any:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x) * 2
            return found

    t.module = Doubled(t.module)
    return steps(t)


@script(blocks(linear), refused="0123")
def another_module_in_the_engine(t: Any) -> Any:
    seen = steps(t, 1)
    t.module = Blocks(linear)
    return seen + steps(t, 1)


@script(blocks(linear))
def rubbish_collected_in_between(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        y = t(data(number))
        cycle: list[Any] = [y]
        cycle.append(cycle)
        known = weakref.ref(y)
        value = y.square().mean()
        t.backward(value)
        del y, cycle
        gc.collect()
        assert known() is None
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def the_same_weights_under_a_parametrization(t: Any) -> Any:
    """A weight is made symmetric after the engine, and trained so."""

    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

    for block in t.module.blocks:
        parametrize.register_parametrization(block, "weight", Symmetric(), unsafe=True)
    return steps(t)


@script(blocks(linear))
def gradients_of_chosen_inputs(t: Any) -> Any:
    """An input's gradient by ``torch.autograd.backward(inputs=…)``, beside the step's."""
    seen: Seen = []
    for number in range(3):
        x = data(number).requires_grad_()
        value = t(x).square().mean()
        torch.autograd.backward(value, inputs=[x], retain_graph=True)
        assert x.grad is not None
        seen += [value.detach(), x.grad.clone()]
        t.backward(value)
        t.step()
    return seen


class Dirty(torch.autograd.Function):
    """Writes into its input, and gives no gradient for None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> Any:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x.mul_(2), other.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, other: torch.Tensor | None) -> Any:
        return (None if grad is None else 2 * grad), None


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Dirty.apply(self.inner(x), x)[0]
        return found


@script(blocks(Writing))
def functions_that_write_into_inputs(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def methods_bound_anew(t: Any) -> Any:
    """Each block gets a forward of the user's as a bound method (kernels of others do so)."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight * 1.5, self.bias)

    for block in t.module.blocks:
        block.forward = types.MethodType(forward, block)
    return steps(t)


@script(blocks(linear), refused="0123")
def steps_without_a_backward(t: Any) -> Any:
    seen = steps(t, 2)
    t.step()
    return seen + steps(t, 2)
