"""What nobody has tried yet: each a function of its trainer, in :data:`tests.runtime.odd_scripts.SCRIPTS`."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

from tests.runtime.odd_modules import WIDTH, blocks, linear
from tests.runtime.odd_scripts import script, steps
from tests.runtime.test_strangers import Seen, data


class Sliced(nn.Module):
    """Uses another part of its weight in each step, and the whole turned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = 1 + int(x[0, 0].abs() * 10) % WIDTH
        part = functional.linear(x, self.weight[:rows]).sum(-1, keepdim=True)
        whole = part + x @ self.weight.T + torch.einsum("bi,ij->bj", x, self.weight.view(WIDTH, WIDTH))
        return whole.tanh()


class Stacked(nn.Module):
    """One parameter whose parts are the layers' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, scale in zip(self.weights.unbind(), self.scales, strict=True):
            x = (x @ weight).tanh() * scale
        return x


class Raw(nn.Module):
    """Calls ``functional.linear`` with a layer's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.linear.weight, self.linear.bias) + self.linear(x)


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x[:, 0].abs() * 7).long() % 20)


class Sequence(nn.Module):
    """A sequence in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(linear(), nn.Dropout(0.3)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint_sequential(self.body, 2, x, use_reentrant=False)
        return found


@script(blocks(Sliced))
def slices_of_weights(t: Any) -> Any:
    return steps(t)


@script(Stacked)
def parts_of_one_parameter(t: Any) -> Any:
    return steps(t)


@script(blocks(Raw))
def a_layers_parameters_by_hand(t: Any) -> Any:
    return steps(t)


@script(Sparse)
def sparse_gradients(t: Any) -> Any:
    return steps(t)


@script(Sequence)
def a_sequence_in_checkpoints(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def one_graph_twice(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        value = t(data(number)).square().mean()
        t.backward(value, retain_graph=True)
        t.backward(value)
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def each_samples_loss_by_itself(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        values = t(data(number)).square().mean(-1)
        for i in range(4):
            t.backward(values[i], retain_graph=i < 3)
        t.step()
        seen.append(values.detach())
    return seen


@script(blocks(linear))
def losses_of_other_shapes_and_types(t: Any) -> Any:
    kinds = [lambda v: v.view(1), lambda v: v.view(1, 1), lambda v: v.double(), lambda v: torch.complex(v, v).real]
    return steps(t, loss=lambda t, number: kinds[number](t(data(number)).square().mean()))


@script(blocks(linear))
def hooks_that_give_nothing_or_another_tensor(t: Any) -> Any:
    weights = [param for name, param in t.module.named_parameters() if name.endswith("weight")]
    weights[0].register_hook(lambda grad: None)
    weights[1].register_hook(lambda grad: torch.zeros_like(grad))
    weights[2].register_hook(lambda grad: grad.t().contiguous().t() * 2)
    return steps(t)


@script(blocks(linear), refused="3")
def a_hook_of_several_gradients(t: Any) -> Any:
    seen: Seen = []
    params = [param for name, param in t.module.named_parameters() if name.endswith("weight")]
    torch.autograd.graph.register_multi_grad_hook(
        params, lambda grads: seen.append(torch.stack([grad.detach().norm() for grad in grads if grad is not None]))
    )
    return steps(t) + seen


@script(blocks(linear))
def hooks_of_all_modules(t: Any) -> Any:
    hooks = nn.modules.module
    halve = hooks.register_module_forward_hook(lambda m, i, o: o * 0.5 if isinstance(m, nn.Linear) else None)
    double = hooks.register_module_full_backward_hook(
        lambda m, given, _: (given[0] * 2, *given[1:]) if isinstance(m, nn.Linear) and given[0] is not None else None
    )
    try:
        return steps(t)
    finally:
        halve.remove()
        double.remove()


@script(blocks(linear))
def a_backward_in_another_thread(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        value = t(data(number)).square().mean()
        one = threading.Thread(target=t.backward, args=(value,))
        one.start()
        one.join()
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def a_backward_without_gradients_on(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        value = t(data(number)).square().mean()
        with torch.no_grad():
            t.backward(value)
            t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def evaluated_in_inference_mode(t: Any) -> Any:
    seen = steps(t, 2)
    with torch.inference_mode():
        seen.append(t(data(7)).clone())
    return seen + steps(t, 2)


@script(blocks(linear))
def a_rate_that_is_a_tensor(t: Any) -> Any:
    seen = steps(t, 2)
    t.optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    return seen + steps(t, 2)


@script(blocks(linear))
def a_step_that_is_not_a_number(t: Any) -> Any:
    steps(t, 2)
    for factor in (float("nan"), 1.0):
        t.backward(t(data(3)).square().mean() * factor)
        t.step()
    return [torch.tensor(float(t(data(4)).isnan().all()))]


@script(blocks(linear), refused="3")
def data_scaled_in_place(t: Any) -> Any:
    seen = steps(t, 2)
    for param in t.module.parameters():
        param.data.mul_(0.9)
    return seen + steps(t, 2)


@script(blocks(linear), refused="0123")
def an_optimizer_beside(t: Any) -> Any:
    other = torch.optim.SGD(t.module.parameters(), lr=0.01)
    seen: Seen = []
    for number in range(3):
        value = t(data(number)).square().mean()
        t.backward(value)
        other.step()
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear), refused="0123")
def values_of_gradients_clipped(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        value = t(data(number)).square().mean()
        t.backward(value)
        nn.utils.clip_grad_value_(t.module.parameters(), 1e-3)
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear), refused="0123")
def the_norm_of_gradients(t: Any) -> Any:
    seen: Seen = []
    for number in range(2):
        t.backward(t(data(number)).square().mean())
        grads = [param.grad for param in t.module.parameters() if param.grad is not None]
        seen.append(nn.utils.get_total_norm(grads).clone())
        t.step()
    return seen


@script(blocks(linear))
def no_op_moves(t: Any) -> Any:
    seen = steps(t, 2)
    t.module.to("cpu")
    t.module.cpu()
    t.module.float()
    t.module.to(torch.float32)
    t.module.requires_grad_(True)
    return seen + steps(t, 2)


@script(blocks(linear), refused="0123")
def another_dtype(t: Any) -> Any:
    seen = steps(t, 1)
    t.module.double()
    return seen + steps(t, 1, loss=lambda t, number: t(data(number).double()).square().mean().float())


@script(blocks(linear), refused="0123")
def half(t: Any) -> Any:
    seen = steps(t, 1)
    t.module.half()
    return seen + steps(t, 1, loss=lambda t, number: t(data(number).half()).square().mean().float())


@script(blocks(linear))
def layers_in_another_order(t: Any) -> Any:
    seen = steps(t, 2)
    t.module.blocks = nn.ModuleList(reversed(list(t.module.blocks)))
    return seen + steps(t, 2)


@script(blocks(linear))
def a_forward_patched_later(t: Any) -> Any:
    seen = steps(t, 2)
    one = next(module for module in t.module.modules() if isinstance(module, nn.Linear))
    one.forward = lambda x: functional.linear(x, one.weight * 2, one.bias)
    return seen + steps(t, 2)


@script(blocks(linear))
def a_class_changed_later(t: Any) -> Any:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    seen = steps(t, 2)
    one: Any = next(module for module in t.module.modules() if isinstance(module, nn.Linear))
    one.__class__ = Doubled
    return seen + steps(t, 2)


@script(blocks(linear), refused="3")
def a_step_within_the_loss(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        params = dict(t.module.named_parameters())
        value = functional_call(t.module, params, (data(number),)).square().mean()
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        moved = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
        found: torch.Tensor = functional_call(t.module, moved, (data(number + 1),)).square().mean()
        return found + 0 * t(data(number)).sum()

    return steps(t, loss=loss)


@script(blocks(linear))
def no_samples(t: Any) -> Any:
    seen = steps(t, 2)
    value = t(data(0)[:0]).square().sum()
    t.backward(value)
    t.step()
    return [*seen, value.detach(), *steps(t, 2)]


@script(blocks(linear))
def its_state_pickled(t: Any) -> Any:
    seen = steps(t, 2)
    state = t.module_state_dict() if hasattr(t, "module_state_dict") else t.module.state_dict()
    if state is None:
        return seen + steps(t, 2)
    state = pickle.loads(pickle.dumps(copy.deepcopy(state)))
    return seen + steps(t, 2)


@script(blocks(lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear())))
def activations_in_place(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: nn.Sequential(linear(), nn.Dropout(0.5))))
def train_and_eval_in_turns(t: Any) -> Any:
    seen: Seen = []
    for mode in (True, False, True):
        t.module.train(mode)
        seen += steps(t, 1)
    return seen
