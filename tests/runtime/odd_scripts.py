"""What scripts do with odd models, each a function of its trainer: :data:`SCRIPTS`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.runtime.odd_modules import (
    WIDTH,
    Choosing,
    Complex,
    Counted,
    Counting,
    Detached,
    Growing,
    Images,
    InPlace,
    Momentum,
    Normed,
    Odd,
    OwnFunction,
    OwnKeptFunction,
    Packed,
    Peeking,
    Recomputing,
    Recurrent,
    Remembering,
    Shared,
    Structures,
    Teacher,
    Twice,
    Varying,
    Words,
    blocks,
    linear,
)
from tests.runtime.test_strangers import Plain, Seen, data
from zeroplan.core.errors import BadInput

#: What a script does with its trainer; the trainer's model is what it was given.
Use = Callable[[Any], Any]


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Use, str]] = {}


def config_of(stage: int) -> dict[str, Any]:
    """The config under which each script runs."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zeroplan": {"wide_numel": 500},
    }


def script(build: Callable[[], nn.Module], refused: str = "") -> Callable[[Use], Use]:
    """Adds a script; `refused` are the stages at which one line refuses it."""

    def add(use: Use) -> Use:
        SCRIPTS[use.__name__] = (build, use, refused)
        return use

    return add


def steps(t: Any, count: int = 4, loss: Callable[[Any, int], torch.Tensor] | None = None) -> Seen:
    seen: Seen = []
    for number in range(count):
        torch.manual_seed(number)
        value = t(data(number)).square().mean() if loss is None else loss(t, number)
        seen.append(value.detach().clone())
        t.backward(value)
        t.step()
    return seen


@script(blocks(OwnFunction))
def a_function_of_its_own(t: Any) -> Any:
    return steps(t)


@script(blocks(OwnKeptFunction), refused="3")
def a_function_that_keeps_an_alias(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: Recomputing(reentrant=False)))
def a_checkpoint_within_a_forward(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: Recomputing(reentrant=True)))
def a_reentrant_checkpoint_within_a_forward(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.weight_norm(linear())))
def weight_norm(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: nn.utils.weight_norm(linear())))
def weight_norm_of_old(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.spectral_norm(linear())))
def spectral_norm(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: nn.utils.spectral_norm(linear())))
def spectral_norm_of_old(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.orthogonal(linear())))
def orthogonal(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: prune.random_unstructured(linear(), "weight", amount=0.3)))
def pruned(t: Any) -> Any:
    return steps(t)


@script(blocks(lambda: parametrizations.weight_norm(linear())))
def cached_parametrizations(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with parametrize.cached():
            return (t(data(number)) + t(data(number + 20))).square().mean()

    return steps(t, loss=loss)


@script(blocks(Twice))
def called_twice_with_and_without_gradients(t: Any) -> Any:
    return steps(t)


@script(Teacher)
def a_pass_without_gradients_before(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def functional_call_of_the_parameters(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        named = dict(t.module.named_parameters())
        found: torch.Tensor = torch.func.functional_call(t.module, named, (data(number),)).square().mean()
        return found + t(data(number)).mean()

    return steps(t, loss=loss)


@script(blocks(linear), refused="3")
def vmapped(t: Any) -> Any:
    return steps(t, loss=lambda t, number: torch.func.vmap(t.module)(data(number)).square().mean())


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def forward_mode(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        _, tangent = torch.func.jvp(t.module, (data(number),), (data(number + 9),))
        found: torch.Tensor = t(data(number)).square().mean() + tangent.detach().mean()
        return found

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def a_loss_of_tangents(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        value, tangent = torch.func.jvp(t.module, (data(number),), (data(number + 9),))
        found: torch.Tensor = value.square().mean() + tangent.square().mean()
        return found

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def dual_numbers(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            x = torch.autograd.forward_ad.make_dual(data(number), data(number + 9))
            value, tangent = torch.autograd.forward_ad.unpack_dual(t(x))
            return value.square().mean() + tangent.square().mean()

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def gradients_by_torch_func(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        grad = torch.func.grad(lambda x: t.module(x).square().sum())(data(number))
        found: torch.Tensor = t(data(number)).square().mean() + grad.square().mean()
        return found

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def an_ensemble(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        params = {name: torch.stack([p, 0.5 * p]) for name, p in t.module.named_parameters()}
        x = data(number)
        found = torch.func.vmap(lambda p: torch.func.functional_call(t.module, p, (x,)))(params)
        value: torch.Tensor = t(data(number)).mean() + found.square().mean()
        return value

    return steps(t, loss=loss)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def a_penalty_on_gradients_of_weights(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        value = t(data(number)).square().mean()
        weights = [t.module.enter.weight, t.module.blocks[1][0].weight]
        grads = torch.autograd.grad(value, weights, create_graph=True)
        return value + sum((grad.square().sum() for grad in grads), torch.zeros(()))

    return steps(t, loss=loss)


@script(blocks(Normed))
def batch_norm(t: Any) -> Any:
    seen = steps(t)
    t.module.eval()
    with torch.no_grad():
        seen.append(t(data(77)))
    t.module.train()
    return [*seen, *(b.float().clone() for b in t.module.buffers())]


@script(blocks(Counting))
def buffers_made_anew(t: Any) -> Any:
    return steps(t)


def sequence(number: int) -> torch.Tensor:
    return data(number).unsqueeze(1).repeat(1, 5, 1)


@script(lambda: Recurrent(nn.LSTM, num_layers=2))
def lstm(t: Any) -> Any:
    return steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


@script(lambda: Recurrent(nn.GRU, bidirectional=True))
def gru(t: Any) -> Any:
    return steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


@script(Packed)
def packed_sequences(t: Any) -> Any:
    return steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


@script(Words)
def tied_three_ways(t: Any) -> Any:
    return steps(t)


@script(lambda: Words(padding_idx=3, scale_grad_by_freq=True))
def embeddings_with_padding(t: Any) -> Any:
    return steps(t)


@script(blocks(Odd))
def odd_parameters(t: Any) -> Any:
    return steps(t)


@script(blocks(Counted), refused="0123")
def parameters_of_integers(t: Any) -> Any:
    return steps(t)


@script(blocks(Complex), refused="0123")
def complex_parameters(t: Any) -> Any:
    return steps(t)


@script(lambda: Images().to(memory_format=torch.channels_last))
def channels_last(t: Any) -> Any:
    return steps(t)


@script(blocks(Growing))
def parameters_of_the_first_forward(t: Any) -> Any:
    return steps(t)


@script(Structures)
def structured_inputs_and_outputs(t: Any) -> Any:
    return steps(t)


@script(InPlace)
def outputs_changed_in_place(t: Any) -> Any:
    return steps(t)


@script(Shared)
def one_block_under_several_names(t: Any) -> Any:
    return steps(t)


@script(Choosing)
def another_block_in_each_step(t: Any) -> Any:
    return steps(t, 6)


@script(blocks(lambda: torch.jit.script(linear())), refused="0123")
def scripted_blocks(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def saved_on_the_cpu(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return t(data(number)).square().mean()

    return steps(t, loss=loss)


@script(blocks(linear))
def saved_as_copies(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return t(data(number)).square().mean()

    return steps(t, loss=loss)


@script(blocks(linear))
def autocast_by_hand(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return t(data(number)).float().square().mean()

    return steps(t, loss=loss)


@script(blocks(linear), refused="0123")
def a_grad_scaler_by_hand(t: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(3):
        t.backward(scaler.scale(t(data(number)).square().mean()))
        scaler.step(t.optimizer)
        scaler.update()
        t.optimizer.zero_grad()


@script(blocks(linear), refused="0123")
def a_closure(t: Any) -> Any:
    t.optimizer.step(lambda: t(data(0)).square().mean())


@script(blocks(linear), refused="0123")
def groups_added_later(t: Any) -> Any:
    t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return steps(t)


@script(blocks(linear), refused="0123")
def an_optimizers_state_loaded(t: Any) -> Any:
    steps(t, 2)
    t.optimizer.load_state_dict(t.optimizer.state_dict())
    return steps(t)


def _schedules(optimizer: Any) -> Iterator[Any]:
    lr = torch.optim.lr_scheduler
    yield lr.LambdaLR(optimizer, lambda i: 1 / (i + 1))
    yield lr.CosineAnnealingWarmRestarts(optimizer, 2)
    yield lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer, 0.3, 2), lr.ExponentialLR(optimizer, 0.5)], [2])
    yield lr.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2)
    yield torch.optim.swa_utils.SWALR(optimizer, 0.02, 2)


@script(blocks(linear))
def schedules_by_hand(t: Any) -> Any:
    seen: Seen = []
    for schedule in _schedules(t.optimizer):
        for number in range(3):
            seen += steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
            schedule.step()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(t.optimizer, patience=0, factor=0.5)
    for number in range(4):
        seen += steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
        plateau.step(1.0)
    return seen


@script(blocks(linear))
def losses_of_parameters_alone(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        return t(data(number)).square().mean() if number % 2 else t.module.enter.weight.square().sum()

    return steps(t, loss=loss)


@script(blocks(linear))
def siamese(t: Any) -> Any:
    return steps(t, loss=lambda t, number: (t(data(number)) - t(data(number + 30))).abs().mean())


@script(blocks(linear), refused="0123")
def a_copy_of_the_engine(t: Any) -> Any:
    copy.deepcopy(t)
    if isinstance(t, Plain):
        raise BadInput("plain torch can")


@script(blocks(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)))
def transformers_of_torch(t: Any) -> Any:
    seen = steps(t, loss=lambda t, number: t(sequence(number)).square().mean())
    t.module.eval()
    with torch.no_grad():
        seen.append(t(sequence(50)))
    t.module.train()
    return seen + steps(t, loss=lambda t, number: t(sequence(number)).square().mean())


@script(Peeking, refused="3")
def a_norm_of_a_weight_in_the_forward(t: Any) -> Any:
    return steps(t)


@script(blocks(Detached))
def detached_uses(t: Any) -> Any:
    return steps(t)


@script(blocks(linear))
def pre_hooks(t: Any) -> Any:
    seen: Seen = []
    block = t.module.blocks[1]
    handles = [
        block.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        block.register_full_backward_pre_hook(lambda module, grad: (grad[0] * 0.5,)),
        block.register_forward_hook(lambda module, args, output: output + 1),
        nn.modules.module.register_module_forward_hook(lambda module, args, output: None),
    ]
    seen += steps(t)
    for handle in handles:
        handle.remove()
    return seen + steps(t)


@script(blocks(linear))
def an_average_by_hand(t: Any) -> Any:
    average: dict[str, torch.Tensor] = {}
    for number in range(3):
        steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
        for name, p in t.module.named_parameters():
            average[name] = average.get(name, 0) + (p.detach().clone() if isinstance(t, Plain) else whole(t, name, p))
    return list(average.values())


@script(lambda: Momentum("forward"), refused="3")
def a_teacher_that_follows_in_the_forward(t: Any) -> Any:
    return steps(t)


@script(lambda: Momentum("loop"), refused="3")
def a_teacher_that_follows_in_the_loop(t: Any) -> Any:
    seen: Seen = []
    for number in range(4):
        seen += steps(t, 1, lambda t, _, n=number: t(data(n)).square().mean())
        t.module.follow()
    return seen


@script(blocks(linear))
def frozen_for_a_backward(t: Any) -> Any:
    seen: Seen = []
    for number in range(4):
        t.module.blocks[0].requires_grad_(number % 2 == 0)
        value = t(data(number)).square().mean()
        t.backward(value)
        t.module.blocks[0].requires_grad_(True)
        t.step()
        seen.append(value.detach())
    return seen


@script(blocks(linear))
def anomaly_detection(t: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return steps(t)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())), refused="3")
def a_jacobian(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        found = torch.autograd.functional.jacobian(t.module, data(number)[:1], create_graph=True)
        value: torch.Tensor = t(data(number)).square().mean() + found.square().mean()
        return value

    return steps(t, loss=loss)


@script(blocks(linear))
def a_hook_that_raises_once(t: Any) -> Any:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("once")

    seen = steps(t, 2)
    y = t(data(5))
    y.register_hook(fail)
    with pytest.raises(ValueError, match="once"):
        t.backward(y.square().mean())
    (t.optimizer if isinstance(t, Plain) else t).zero_grad()
    return seen + steps(t, 2)


@script(Remembering)
def a_state_that_is_carried_on(t: Any) -> Any:
    return steps(t)


@script(blocks(Varying))
def weights_used_another_number_of_times(t: Any) -> Any:
    return steps(t, 6)


@script(blocks(lambda: nn.Sequential(linear(), nn.Tanh())))
def checkpoints_of_closures(t: Any) -> Any:
    def loss(t: Any, number: int) -> torch.Tensor:
        x = data(number)
        inner = checkpoint(lambda y: t.module.blocks[1](y).sigmoid(), x, use_reentrant=False)
        value: torch.Tensor = t(x).square().mean() + inner.mean()
        return value

    return steps(t, loss=loss)


@script(blocks(linear))
def evaluated_within_an_accumulation(t: Any) -> Any:
    seen: Seen = []
    for number in range(3):
        first = t(data(number)).square().mean()
        with torch.no_grad():
            seen.append(t(data(60)))
        t.backward(first)
        with torch.no_grad():
            seen.append(t(data(61)))
        t.step()
    return seen


@script(blocks(linear))
def training_of_another_model_between(t: Any) -> Any:
    torch.manual_seed(5)
    critic = linear()
    other = torch.optim.Adam(critic.parameters(), lr=0.01)
    seen: Seen = []
    for number in range(3):
        loss = (critic(t(data(number)).detach()).mean() - 1).square()
        other.zero_grad()
        loss.backward()
        other.step()
        seen += steps(t, 1, lambda t, _, n=number: critic(t(data(n))).square().mean())
    return [*seen, critic.weight.detach().clone()]


def whole(engine: Any, name: str, param: torch.Tensor) -> torch.Tensor:
    units = [unit for unit in engine.unit_names() if name.startswith(f"{unit}.")]
    if not units:
        return param.detach().clone()
    with engine.gathered(units[0]):
        return param.detach().clone()
