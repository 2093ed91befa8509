"""More of what nobody has tried: each a function of its trainer, in :data:`tests.runtime.odd_scripts.SCRIPTS`."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.runtime.odd_modules import WIDTH, Blocks, blocks, linear
from tests.runtime.odd_scripts import script, steps
from tests.runtime.test_strangers import Seen, data
from zeroplan_runtime.parameter_states import ParameterStates


def each_unit(t: Any, act: Callable[[str, nn.Parameter], object]) -> None:
    """Calls `act` with each parameter, readable and writable."""
    names = {param: name for name, param in t.module.named_parameters()}
    with torch.no_grad():
        if not hasattr(t, "gathered"):
            for param, name in names.items():
                act(name, param)
            return
        for unit in t.model_states.units:
            with t.gathered(unit.name):
                for flat in unit.flats():
                    for param in flat.params:
                        act(names[param], param)


class Depth(Blocks):
    """Leaves out blocks at random, the same on every rank (LayerDrop)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if torch.rand(()) > 0.4:
                x = x + block(x)
        return self.leave(x)


@script(lambda: Depth(linear))
def layers_left_out_at_random(t: Any) -> Any:
    return steps(t, 6)


class Scaled(torch.autograd.Function):
    """x, whose gradient is scaled by what a module's weight is in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * (1 + ctx.module.weight.mean()), None


class Taking(Blocks):
    """Calls the last block every other time, and only its backward reads it else."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.blocks[0](self.enter(x))
        return self.leave(self.blocks[2](x) if self.calls % 2 else Scaled.apply(x, self.blocks[2]))


@script(lambda: Taking(linear), refused="3")
def a_layer_left_out_is_read_in_the_backward(t: Any) -> Any:
    return steps(t, 6)


@script(blocks(lambda: nn.Sequential(linear(), nn.Dropout(0.3))))
def samples_that_pass_a_block_by(t: Any) -> Any:
    def passes(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (torch.rand(len(output), 1) > 0.3)

    for block in t.module.blocks:
        block.register_forward_hook(passes)
    return steps(t)


@script(blocks(linear), refused="0123")
def gradients_projected_by_hand(t: Any) -> Any:
    seen: Seen = []
    params = list(t.module.parameters())
    for number in range(3):
        y = t(data(number))
        first = torch.autograd.grad(y.square().mean(), params, retain_graph=True)
        second = torch.autograd.grad(y.abs().mean(), params, retain_graph=True)
        t.backward(y.sum() * 0)
        for param, a, b in zip(params, first, second, strict=True):
            param.grad = a + b - (a * b).sum().clamp(max=0) / b.square().sum() * b
        t.step()
        seen.append(y.detach())
    return seen


@script(blocks(linear))
def sharpness_aware(t: Any) -> Any:
    """SAM: the gradients of a first backward, seen by hooks, move the weights for the second."""
    seen: Seen = []
    grads: dict[str, torch.Tensor] = {}
    for name, param in t.module.named_parameters():
        param.register_hook(lambda grad, name=name: grads.update({name: grad.clone()}) and None)
    for number in range(3):
        t.backward(t(data(number)).square().mean())
        up = {name: 0.05 * grad / grad.norm() for name, grad in grads.items()}
        (t if hasattr(t, "gathered") else t.optimizer).zero_grad()
        each_unit(t, lambda name, param, up=up: param.add_(up[name]))
        value = t(data(number)).square().mean()
        t.backward(value)
        each_unit(t, lambda name, param, up=up: param.sub_(up[name]))
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def lookahead(t: Any) -> Any:
    slow: dict[str, torch.Tensor] = {}
    each_unit(t, lambda name, param: slow.update({name: param.detach().clone()}))
    seen: Seen = []
    for _ in range(3):
        seen += steps(t, 2)
        each_unit(t, lambda name, param: param.copy_(slow[name].lerp_(param, 0.5)))
    return seen


@script(blocks(linear))
def gradients_changed_in_place_by_hooks(t: Any) -> Any:
    for param in t.module.parameters():
        param.register_hook(lambda grad: grad.mul_(0.5) and None if grad.numel() == 1 else grad.mul_(0.5))
    return steps(t)


@script(blocks(linear))
def momenta_reset(t: Any) -> Any:
    """ReLoRA's: some weights begin anew, with their momenta."""
    seen = steps(t, 3)
    each_unit(t, lambda name, param: param.mul_(0.5) if name.startswith("blocks.1") else None)
    if hasattr(t, "gathered"):
        states = ParameterStates(t)
        for param in t.module.blocks[1].parameters():
            states.set_whole(param, torch.zeros(param.shape), states.keys()[-1])
    else:
        for param in t.module.blocks[1].parameters():
            t.optimizer.state[param]["momentum_buffer"].zero_()
    return seen + steps(t, 3)


@script(blocks(linear), refused="3")
def a_search_for_a_rate(t: Any) -> Any:
    """An LR finder: rates rise, then weights are those of before."""
    kept = copy.deepcopy(t.module.state_dict())
    seen: Seen = []
    for rate in (1e-4, 1e-3, 1e-2):
        t.optimizer.param_groups[0]["lr"] = rate
        seen += steps(t, 1)
    t.module.load_state_dict(kept)
    t.optimizer.param_groups[0]["lr"] = 0.05
    return seen + steps(t, 2)


@script(blocks(linear))
def another_number_of_backwards_in_each_step(t: Any) -> Any:
    seen: Seen = []
    for number, count in enumerate((1, 3, 2)):
        for i in range(count):
            value = t(data(10 * number + i)).square().mean() / count
            t.backward(value)
            seen.append(value.detach())
        t.step()
    return seen


@script(blocks(linear))
def losses_that_are_left(t: Any) -> Any:
    """Batches whose loss is not finite are passed over after the forward."""
    seen: Seen = []
    for number in range(5):
        value = t(data(number) * (float("inf") if number == 2 else 1.0)).square().mean()
        if value.isfinite():
            t.backward(value)
            t.step()
            seen.append(value.detach())
    return seen


@script(blocks(linear))
def gradients_that_are_dropped(t: Any) -> Any:
    seen: Seen = []
    for number in range(5):
        value = t(data(number)).square().mean()
        t.backward(value)
        if number % 2:
            (t if hasattr(t, "gathered") else t.optimizer).zero_grad()
        else:
            t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def a_rate_of_nothing(t: Any) -> Any:
    seen = steps(t, 2)
    t.optimizer.param_groups[0]["lr"] = 0.0
    seen += steps(t, 2)
    t.optimizer.param_groups[0]["lr"] = 0.05
    return seen + steps(t, 2)


@script(blocks(linear), refused="0123")
def an_optimizer_saved(t: Any) -> Any:
    torch.save(t.optimizer.state_dict(), io.BytesIO())
    return steps(t)


@script(blocks(linear), refused="0123")
def an_optimizer_pickled(t: Any) -> Any:
    seen = steps(t, 2)
    other = pickle.loads(pickle.dumps(t.optimizer))
    return [*seen, torch.tensor(float(len(other.state)))]


@script(blocks(linear))
def in_data_parallel(t: Any) -> Any:
    wrapped = nn.DataParallel(t.module)
    return steps(t, loss=lambda t, number: wrapped(data(number)).square().mean())


@script(blocks(linear))
def by_keywords_alone(t: Any) -> Any:
    if not hasattr(t, "gathered"):
        return steps(t, loss=lambda t, number: t.module(x=data(number)).square().mean())
    return steps(t, loss=lambda t, number: t(x=data(number)).square().mean())


class Viewed(nn.Module):
    """Complex numbers made of a real parameter, beside empty and single ones."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(WIDTH, 2))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.fft.fft(x) * torch.view_as_complex(self.pairs)
        return torch.fft.ifft(turned).real * self.one + self.nothing.sum()


@script(blocks(Viewed))
def complex_views(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.weight_norm(linear())), refused="3")
def parametrizations_removed(t: Any) -> Any:
    seen = steps(t, 2)
    for block in t.module.blocks:
        parametrize.remove_parametrizations(block, "weight")
    return seen + steps(t, 2)


class Tokens(nn.Module):
    """Rows of an embedding, and bags of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(12, WIDTH)
        self.bags = nn.EmbeddingBag(12, WIDTH, mode="max")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 7).long() % 12
        return self.rows(tokens[:, 0]) + self.bags(tokens)


@script(blocks(Tokens))
def new_rows_alone(t: Any) -> Any:
    mask = (torch.arange(12) >= 6).float()[:, None]
    for block in t.module.blocks:
        block.rows.weight.register_hook(lambda grad: grad * mask)
    return steps(t)


class Many(nn.Module):
    """Layers that nobody uses much."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.slope = nn.PReLU(WIDTH)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.dictionary = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.zeros(())})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.slope(self.bilinear(x, x.flip(0))))
        found: torch.Tensor = self.cell(x, x) * self.dictionary["a"] + self.dictionary["b"]
        return found


@script(blocks(Many))
def layers_of_many_kinds(t: Any) -> Any:
    return steps(t)


class Sparse(nn.Module):
    """Sparse inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm((x * (x > 0)).to_sparse(), self.weight)


@script(blocks(Sparse))
def sparse_inputs(t: Any) -> Any:
    return steps(t)


class Hyper(nn.Module):
    """A layer whose weights another one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(3, WIDTH * WIDTH)
        self.code = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.maker(self.code).view(WIDTH, WIDTH)).tanh()


@script(blocks(Hyper))
def weights_that_are_computed(t: Any) -> Any:
    return steps(t)


class ActNorm(nn.Module):
    """Takes its first values from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
                self.ready.fill_(True)
        return (x + self.shift) * self.scale


@script(blocks(ActNorm))
def values_of_the_first_batch(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def weights_clamped_after_each_step(t: Any) -> Any:
    seen: Seen = []
    for _ in range(3):
        seen += steps(t, 1)
        each_unit(t, lambda name, param: param.clamp_(-0.2, 0.2))
    return seen


class Adapted(nn.Module):
    """LoRA by hand, whose product is merged into the frozen weight in mid-training."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.base.T + x @ self.a.T @ self.b.T


@script(blocks(Adapted))
def adapters_merged_in_between(t: Any) -> Any:
    seen = steps(t, 3)
    products: dict[str, torch.Tensor] = {}

    def find(name: str, param: nn.Parameter) -> None:
        products[name] = param.detach().clone()

    each_unit(t, find)

    def merge(name: str, param: nn.Parameter) -> None:
        block = name.rpartition(".")[0]
        if name.endswith("base"):
            param.add_(products[f"{block}.b"] @ products[f"{block}.a"])
        elif name.endswith(".b"):
            param.zero_()

    each_unit(t, merge)
    return seen + steps(t, 3)


class Objects:
    """A module's output that torch's pytrees take for a leaf, so that no tensor is found within it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxed(Blocks):
    """Blocks that return objects of a class of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).value
        return self.leave(x)


class Box(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> Objects:
        return Objects(self.linear(x).tanh())


@script(lambda: Boxed(Box), refused="3")
def objects_of_its_own(t: Any) -> Any:
    return steps(t)


class Generating(Boxed):
    """Blocks that yield."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            for part in block(x):
                x = x + part
        return self.leave(x)


class Yielding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        return (self.linear(x).tanh() * factor for factor in (0.5, 0.25))


@script(lambda: Generating(Yielding), refused="3")
def blocks_that_yield(t: Any) -> Any:
    return steps(t)


class Reversible(torch.autograd.Function):
    """Keeps no activation: computes the forward again and runs a backward of its own within the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            found: torch.Tensor = module(x)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(inside), grad)
        return inside.grad, None


class Reversing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Reversible.apply(x, self.body)
        return found


@script(blocks(Reversing))
def backwards_within_the_backward(t: Any) -> Any:
    return steps(t)


class Implicit(nn.Module):
    """A fixed point whose gradient a hook solves for (deep equilibrium)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def step(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (0.3 * self.linear(z) + x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(8):
                z = self.step(z, x)
        z = self.step(z, x)
        if not z.requires_grad:
            return z
        start = z.detach().requires_grad_()
        again = self.step(start, x.detach())

        def solve(grad: torch.Tensor) -> torch.Tensor:
            found = grad
            for _ in range(8):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(solve)
        return z


@script(blocks(Implicit), refused="3")
def fixed_points(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))))
def statistics_of_batch_norm_anew(t: Any) -> Any:
    seen = steps(t, 2)
    torch.optim.swa_utils.update_bn([data(number) for number in range(3)], t.module)
    t.module.eval()
    seen.append(t(data(5)).detach())
    t.module.train()
    return seen + steps(t, 2)


@script(blocks(linear), refused="0123")
def shared_memory(t: Any) -> Any:
    seen = steps(t, 1)
    t.module.share_memory()
    return seen + steps(t, 2)


@script(blocks(linear), refused="0123")
def storages_set(t: Any) -> Any:
    seen = steps(t, 1)
    with torch.no_grad():
        t.module.enter.weight.set_(torch.ones(WIDTH, WIDTH))
    return seen + steps(t, 2)


@script(blocks(linear))
def parameters_under_another_name(t: Any) -> Any:
    seen = steps(t, 2)
    one = t.module.blocks[1]
    weight = one._parameters.pop("weight")
    one.register_parameter("kernel", weight)
    one.forward = lambda x: functional.linear(x, one.kernel, one.bias)
    return seen + steps(t, 2)


@script(blocks(linear))
def before_the_backward_of_a_module(t: Any) -> Any:
    for block in t.module.blocks:
        block.register_full_backward_pre_hook(lambda module, grads: tuple(grad * 0.5 for grad in grads))
    return steps(t)


@script(blocks(linear), refused="0123")
def backwards_of_several_losses_at_once(t: Any) -> Any:
    seen: Seen = []
    for number in range(2):
        y = t(data(number))
        torch.autograd.backward([y.square().mean(), y.abs().mean()])
        t.step()
        seen.append(y.detach())
    return seen


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@script(blocks(linear))
def another_default_dtype(t: Any) -> Any:
    batches = [data(number) for number in range(3)]
    with default_dtype(torch.float64):
        return steps(t, 3, loss=lambda t, number: t(batches[number]).square().mean())


@script(blocks(linear))
def checkpoints_in_checkpoints(t: Any) -> Any:
    model = t.module

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(model.blocks[1], x + checkpoint(model.blocks[0], x, use_reentrant=False), use_reentrant=False)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(inner, model.enter(x), use_reentrant=False, preserve_rng_state=False)
        found: torch.Tensor = model.leave(x + model.blocks[2](x))
        return found

    model.forward = forward
    return steps(t)


class Reverse(torch.autograd.Function):
    """Turns gradients round (domain adversarial training)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


@script(blocks(linear))
def gradients_turned_round(t: Any) -> Any:
    t.module.blocks[1].register_forward_hook(lambda module, args, output: Reverse.apply(output))
    return steps(t)


@script(blocks(linear))
def gradients_that_stop(t: Any) -> Any:
    """Earlier layers get a gradient in every second step only."""
    seen: Seen = []
    for number in range(4):
        handle = t.module.blocks[2].register_forward_pre_hook(lambda module, args: args[0].detach()) if number % 2 else None
        block, t.module.forward = t.module.blocks, (lambda x: t.module.leave(t.module.blocks[2](t.module.blocks[0](x))))
        value = t(data(number)).square().mean()
        assert block is t.module.blocks
        t.backward(value)
        t.step()
        if handle is not None:
            handle.remove()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def values_of_all_sizes(t: Any) -> Any:
    return steps(t, 6, loss=lambda t, number: t(data(number)).square().mean() * (1e-30, 1e10, 1e-10, 0.0, 1.0, -1.0)[number])


@script(blocks(linear))
def a_name_that_is_taken(t: Any) -> Any:
    """Attributes of the user's on the engine's model."""
    for name in ("schedule", "comm", "optimizer", "step", "units", "_gradient_target_of"):
        setattr(t.module, name, name)
    return steps(t)


@script(blocks(linear))
def blocks_frozen_one_after_another(t: Any) -> Any:
    """Gradual unfreezing, from the head down."""
    seen: Seen = []
    t.module.requires_grad_(False)
    for part in (t.module.leave, *reversed(t.module.blocks), t.module.enter):
        part.requires_grad_(True)
        seen += steps(t, 2)
    return seen
