"""The script of a case, written once for both sides: the engine, and plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from benchmarks.fuzz_training.case import Case
from benchmarks.fuzz_training.model import tokens

#: What one rank saw: labels and values.
Seen = list[tuple[str, torch.Tensor]]


class Trainer(Protocol):
    """One rank of a training."""

    rank: int

    @property
    def model(self) -> Callable[..., torch.Tensor]:
        """The callable that takes a batch: the engine or the wrapped model."""

    @property
    def module(self) -> nn.Module:
        """The module that holds the parameters."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Add up the gradients of the loss, divided by the micro batches of a step."""

    def ends(self, accumulation: bool) -> None:
        """Sets whether the present micro batch ends an accumulation."""

    def gathered(self, name: str) -> AbstractContextManager[None]:
        """A context in which the parameters of the unit `name`, if there is such a one, can be read and written."""

    def zero_grad(self, by: str) -> None:
        """Drops gradients by the ``engine``'s or the ``optimizer``'s method."""

    def before_steps(self, hook: Callable[..., None]) -> None:
        """Registers a hook on the optimizer's steps."""

    def whole_state(self) -> dict[str, torch.Tensor]:
        """The model's state dict, whole, on the first rank; else nothing."""


def play(trainer: Trainer, case: Case, seen: Seen) -> Iterator[str]:
    """Trains. Yields what all ranks do together: ``step`` (at the end of a micro batch), ``save``, ``load``, ``anew``,
    ``load without optimizer``.
    """
    held = [p.detach() for p in trained_of(trainer)] if "held" in case.after else []
    ema: list[torch.Tensor] = []
    if case.hooks == "optimizer":
        trainer.before_steps(_lower_rates)
    for number in range(case.steps):
        if case.drops == "start":
            trainer.zero_grad("optimizer")
        for micro in range(case.accum):
            if case.drops == "between":
                trainer.backward(trainer.model(tokens(case, number, 100 + micro, trainer.rank), number))
                trainer.zero_grad("engine" if number % 2 else "optimizer")
                for earlier in range(micro):  # they went with it
                    trainer.backward(trainer.model(tokens(case, number, earlier, trainer.rank), number))
            last = micro == case.accum - 1
            if case.by_hand:
                trainer.ends(last)
            if case.schedule == "before" and last:
                _set_rate(trainer, number)
            _lose(trainer, case, number, micro, seen)
            if case.schedule == "between" and last:
                _set_rate(trainer, number)
            if last:
                _look_before_the_step(trainer, case, number, seen)
            yield "step"
        _look(trainer, case, number, seen, held, ema)
        if "anew" in case.after and number == 0:
            for module in trainer.module.modules():
                if getattr(module, "caught", None) is not None:
                    del module.caught  # parameters get other memory, and an alias that is one of the module's would be trained
            yield "anew"
            held = [p.detach() for p in trained_of(trainer)] if held else []
        if "save" in case.after and number < 2:
            yield ("save", "load without optimizer" if "without-optimizer" in case.after else "load")[number]
        if number == 0:
            _change(trainer.module, case)


def trained_of(trainer: Trainer) -> list[nn.Parameter]:
    """Return the trained parameters with elements."""
    return [p for p in trainer.module.parameters() if p.requires_grad and p.numel()]


def _lower_rates(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.8


def _look_before_the_step(trainer: Trainer, case: Case, number: int, seen: Seen) -> None:
    if case.before_step == "state":
        seen.extend((f"{name} before step {number}", value.clone()) for name, value in trainer.whole_state().items())
    elif case.before_step == "eval":
        with torch.no_grad():
            seen.append((f"eval before step {number}", trainer.model(tokens(case, number, 97, 0), number).clone()))


def _change(module: Any, case: Case) -> None:
    """Changes the model's structure."""
    match case.changes:
        case "swap":
            for first, second in (("block0", "block1"),) if case.container == "none" else (("0", "1"),):
                home = module if case.container == "none" else module.blocks
                before = getattr(home, first)
                setattr(home, first, getattr(home, second))
                setattr(home, second, before)
        case "delete":
            del module.blocks[-1]
        case "tie":
            module.head.weight = module.embed.weight


def _look_into_units(trainer: Trainer, case: Case, number: int, seen: Seen) -> None:
    """Reads and writes parameters of blocks in the context that stage 3 asks for."""
    for name, module in trainer.module.named_modules():
        if name.endswith(("blocks.0", "block0", "blocks.1", "block1")):
            with trainer.gathered(name):
                trained = [p for p in module.parameters() if p.requires_grad and p.numel()]
                seen.extend((f"{name} {number} {i}", p.clone()) for i, p in enumerate(trained))
                for p in trained[number % 2 :: 2]:
                    (from_dlpack(p.detach()) if "array-write" in case.after else p).mul_(0.75)


def _set_rate(trainer: Trainer, number: int) -> None:
    for group in trainer.param_groups:
        group["lr"] = 0.1 / (number + 1)


def _lose(trainer: Trainer, case: Case, number: int, micro: int, seen: Seen) -> None:
    """Run one micro batch's forward and backward."""
    model, batch = trainer.model, tokens(case, number, micro, trainer.rank)
    more = tokens(case, number, 50 + micro, trainer.rank)
    trained = trained_of(trainer)
    match case.loss:
        case "penalty-before":
            penalty = sum((p.float().square().sum() for p in trained), torch.zeros(()))
            loss = model(batch, number) + 0.05 * penalty
        case "penalty-after":
            loss = model(batch, number)
            loss = loss + 0.05 * sum((p.float().square().sum() for p in trained), torch.zeros(()))
        case "two-backwards":
            trainer.backward(model(more, number))
            loss = model(batch, number)
        case "retained":
            loss = model(batch, number)
            trainer.backward(loss, retain_graph=True)
        case "two-forwards":
            loss = model(batch, number) + 0.5 * model(more, number)
        case "input-gradient" | "gradient-penalty":
            dtype = next(trainer.module.parameters()).dtype
            extra = torch.zeros(*batch.shape, case.width, dtype=dtype, requires_grad=True)
            loss = model(batch, number, extra)
            penalized = case.loss == "gradient-penalty"
            (grad,) = torch.autograd.grad(loss, extra, create_graph=penalized)
            loss = loss + grad.float().square().sum() if penalized else model(batch, number, grad.detach())
        case _:
            loss = model(batch, number)
    if case.overflows == number + 1 and trainer.rank == 0:
        loss = loss * float("inf")
    else:
        seen.append((f"loss {number}.{micro}", loss.detach().clone()))
    with torch.no_grad():
        match case.within:
            case "norm":
                seen.append((f"norm within {number}.{micro}", torch.stack([p.float().norm() for p in trained])))
            case "eval":
                seen.append((f"eval within {number}.{micro}", model(more, number)))
            case "data-write":
                trained[number % len(trained)].data.mul_(0.75)
    trainer.backward(loss)


def _look(trainer: Trainer, case: Case, number: int, seen: Seen, held: list[torch.Tensor], ema: list[torch.Tensor]) -> None:
    """Do what the case's script does between two steps."""
    params = trained_of(trainer)
    with torch.no_grad():
        if "ema" in case.after:
            now = [p.double() for p in params]
            ema[:] = [e.lerp(p, 0.5) for e, p in zip(ema, now, strict=True)] if ema else now
            seen.append((f"ema {number}", torch.cat([e.flatten() for e in ema])))
        if "norm" in case.after:
            seen.append((f"norm {number}", torch.stack([p.double().norm() for p in params])))
        if "held" in case.after:
            seen.append((f"held {number}", torch.cat([p.double().flatten() for p in held])))
        if "caught" in case.after:
            caught = [one for module in trainer.module.modules() if (one := getattr(module, "caught", None)) is not None]
            seen.append((f"caught {number}", torch.cat([torch.empty(0), *(p.double().flatten() for p in caught)])))
        if "gathered" in case.after:
            _look_into_units(trainer, case, number, seen)
        elif "array-write" in case.after:
            from_dlpack(params[number % len(params)].detach()).mul_(0.5)
        if "whole-state" in case.after:
            seen.extend((f"{name} after {number}", value.clone()) for name, value in trainer.whole_state().items())
        if "write" in case.after:
            params[number % len(params)].mul_(0.5)
        if "data-write" in case.after:
            params[-1 - number % len(params)].data.add_(0.125)
        if "eval" in case.after:
            trainer.module.eval()
            seen.append((f"eval {number}", trainer.model(tokens(case, number, 99, 0), number).clone()))
            trainer.module.train()
        if "module-eval" in case.after:
            seen.append((f"module's eval {number}", trainer.module(tokens(case, number, 98, 0), number).clone()))
    if "state-dict" in case.after:
        state = trainer.module.state_dict()
        seen.append((f"state {number}", torch.cat([value.double().flatten() for _, value in sorted(state.items())])))
    if "load-state" in case.after:
        state = {name: value.clone() for name, value in trainer.module.state_dict().items()}
        state["norm.weight"] = state["norm.weight"] * 0.5
        trainer.module.load_state_dict(state)
    if "momentum" in case.after:
        for group in trainer.param_groups:
            group["momentum"] = (0.0 if case.optimizer == "momentum" else 0.3, 0.8, 0.9)[number % 3]
