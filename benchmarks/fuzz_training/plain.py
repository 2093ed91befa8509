"""The plain side: every rank a replica in one process, mean gradients, fp32 masters under a torch optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.fuzz_training.case import Case
from benchmarks.fuzz_training.model import Net, make
from benchmarks.fuzz_training.optimizers import Lamb, Lion
from benchmarks.fuzz_training.script import Seen, play
from zeroplan.core.float8 import Float8Recipe
from zeroplan_runtime.techniques.float8 import attach_float8

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: The factor on an fp16 loss.
SCALE = 256.0
#: What rounding is worth, relative to a parameter's largest change: fp32, and 8 (bf16) or 11 (fp16) significant bits.
CHANGE = {"fp32": 1e-5, "bf16": 2.0**-6, "fp16": 2.0**-9}
#: And relative to the largest value of what is in fp32.
FP32 = 2.0**-21


def groups_of(case: Case, params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the optimizer's groups over `params` in the model's order: rates and decays that differ."""
    found: list[dict[str, Any]] = []
    for i in range(case.groups):
        chosen = params[i :: case.groups]
        if chosen:
            decay = {} if case.optimizer == "rprop" else {"weight_decay": 0.02 * i}  # which Rprop has not
            found.append({"params": chosen, "lr": 0.1 / (i + 1), **decay})
    return found


def optimizer_of(case: Case, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the torch optimizer of `case`. Its eps keeps Adam from turning rounding into whole steps."""
    groups: Any = groups_of(case, params)
    match case.optimizer:
        case "lamb":
            return Lamb(groups, eps=EPS, betas=BETAS)
        case "lion":
            return Lion(groups, betas=BETAS)
    name, options = TORCHS[case.optimizer]
    kind: Any = getattr(torch.optim, name)
    made: torch.optim.Optimizer = kind(groups, **options, maximize=case.maximize)
    return made


EPS, BETAS = 0.05, (0.8, 0.95)
_ADAM: dict[str, Any] = {"eps": EPS, "betas": BETAS}
_RMSPROP: dict[str, Any] = {"eps": EPS, "alpha": BETAS[1]}
#: A case's optimizers that torch has: the class, and its arguments.
TORCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adamw": ("AdamW", _ADAM),
    "adam": ("Adam", _ADAM),
    "amsgrad": ("Adam", {**_ADAM, "amsgrad": True}),
    "adamw-amsgrad": ("AdamW", {**_ADAM, "amsgrad": True}),
    "rmsprop": ("RMSprop", _RMSPROP),
    "rmsprop-momentum": ("RMSprop", {**_RMSPROP, "momentum": 0.5}),
    "rmsprop-centered": ("RMSprop", {**_RMSPROP, "momentum": 0.5, "centered": True}),
    "adagrad": ("Adagrad", {"eps": EPS, "lr_decay": 0.1}),
    "adadelta": ("Adadelta", {"eps": EPS, "rho": BETAS[0]}),
    "adamax": ("Adamax", _ADAM),
    "nadam": ("NAdam", _ADAM),
    "radam": ("RAdam", _ADAM),
    "asgd": ("ASGD", {"lambd": 0.1, "t0": 1.0}),
    "rprop": ("Rprop", {"step_sizes": (1e-3, 0.2)}),
}


def schedule_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    """Return torch's schedule of `case`; None where the script sets rates by hand, or nobody does."""
    if case.schedule == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    if case.schedule == "cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * case.steps + 2)
    return None


class Replica:
    """One rank's trainer."""

    def __init__(self, case: Case, model: Net, rank: int, optimizer: torch.optim.Optimizer, scale: float) -> None:
        self.module = model
        self.rank, self._case, self._optimizer = rank, case, optimizer
        self._scale = scale
        self._trained = [p for p in model.parameters() if p.requires_grad]  # the model's structure may change
        self._autocast = case.autocast and next(model.parameters()).dtype == torch.float32

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        (loss / self._case.accum * self._scale).backward(retain_graph=retain_graph)

    def model(self, *args: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss: torch.Tensor = self.module(*args)
            return loss

    def ends(self, accumulation: bool) -> None:
        pass

    def gathered(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def zero_grad(self, by: str) -> None:
        self.module.zero_grad()

    def trained(self) -> list[nn.Parameter]:
        return self._trained

    def before_steps(self, hook: Callable[..., None]) -> None:
        if self.rank == 0:  # the replicas share an optimizer
            self._optimizer.register_step_pre_hook(hook)

    def whole_state(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict() if self.rank == 0 else {}


@dataclass
class Trained:
    """The result of a training.

    Attributes:
        seen: by rank, what it saw; None for a rank that was not asked.
        masters: the trained parameters as the optimizer has them, by name.
        state: the first rank's state dict.
        start: the trained parameters before the first step.
        doubts: by name, how far apart two masters may be because they were set to their 16-bit parameters, which rounding
            puts on either side of a step.
    """

    seen: list[Seen]
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    doubts: dict[str, torch.Tensor] = field(default_factory=dict)


class Plain:
    """The base of the replicas: masters, optimizer, schedule."""

    def __init__(self, case: Case, dtype: torch.dtype, precise: torch.dtype, nudge: float, look: Look | None) -> None:
        self.case, self._look = case, look
        self._scale = nudge * (SCALE if case.dtype == "fp16" else 1.0)
        model = make(case).to(precise)
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        trained = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().clone()) for p in trained]
        self.optimizer = optimizer_of(case, self.masters)
        self.schedule = schedule_of(case, self.optimizer)
        _cast(model, dtype)
        self.replicas = [Replica(case, copy.deepcopy(model), rank, self.optimizer, self._scale) for rank in range(case.ranks)]
        for replica in self.replicas:
            if case.float8:
                recipe = Float8Recipe.TENSORWISE if case.float8 == "gathers" else Float8Recipe(case.float8)
                attach_float8(replica.module.stack(), recipe, torch.device("cpu"))
            replica.module.add_weight_hook()
        self._applied = 0
        self.start = [master.detach().clone() for master in self.masters]
        self.doubts = [torch.zeros_like(one) for one in self.start]
        self._note()

    def _note(self) -> None:
        self._known = [p.detach().clone() for p in self.replicas[0].trained()]

    @torch.no_grad()
    def _keep_writes(self) -> None:
        """Takes over the elements that somebody has written."""
        for i, (param, known) in enumerate(zip(self.replicas[0].trained(), self._known, strict=True)):
            self._set(i, param, param != known)

    def _set(self, i: int, param: torch.Tensor, which: torch.Tensor) -> None:
        """Set elements of a master to those of its parameter, rounded to the case's 16 bits also where the training has more.

        Notes which of them another rounding may set otherwise.
        """
        master, start, dtype = self.masters[i], self.start[i], DTYPES[self.case.dtype]
        if self.case.dtype != "fp32" and which.any():
            far = CHANGE[self.case.dtype] * (master - start).abs().max() + FP32 * master.abs().max()
            steps = ((master + far).to(dtype) - (master - far).to(dtype)).to(master.dtype)
            self.doubts[i][which] = torch.maximum(self.doubts[i], steps)[which]
        master[which] = param[which].to(dtype if self.case.dtype != "fp32" else param.dtype).to(master.dtype)

    @torch.no_grad()
    def step(self) -> None:
        """Update once by the mean of the replicas' gradients; a parameter without one counts as zeros.

        In 16 bits a step whose gradients are not finite is skipped.
        """
        self._keep_writes()
        if self._is_delayed:  # the update before has come with this backward
            self._spread()
        everybody = [replica.trained() for replica in self.replicas]
        for master, *params in zip(self.masters, *everybody, strict=True):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
            mean = grads[0] if len(grads) == 1 else sum(grads[1:], grads[0]) / len(grads)
            master.grad = mean.to(master.dtype) / self._scale
            for p in params:
                p.grad = None
        grads = [master.grad for master in self.masters if master.grad is not None]
        if self.case.dtype != "fp32" and not all(grad.isfinite().all() for grad in grads):
            return
        if self.case.clip:
            nn.utils.clip_grad_norm_(self.masters, self.case.clip)
        if self._look is not None:
            self._look(self)
        self.optimizer.step()
        self._applied += 1
        if self.schedule is not None:
            self.schedule.step()
        if not self._is_delayed:
            self._spread()

    @property
    def _is_delayed(self) -> bool:
        """Whether the parameters get the last update with the next step's backward."""
        return 0 < self.case.delayed <= self._applied

    @torch.no_grad()
    def drain(self) -> None:
        """Gives the parameters all updates."""
        self._keep_writes()
        self._spread()

    def _spread(self) -> None:
        for replica in self.replicas:
            for param, master in zip(replica.trained(), self.masters, strict=True):
                param.copy_(master)
        self._note()

    @torch.no_grad()
    def anew(self) -> None:
        """Make a new optimizer on the values that the parameters have."""
        self._keep_writes()
        for i, param in enumerate(self.replicas[0].trained()):
            self._set(i, param, torch.ones_like(param, dtype=torch.bool))
        self.optimizer = optimizer_of(self.case, self.masters)
        self.schedule = schedule_of(self.case, self.optimizer)
        for replica in self.replicas:
            replica._optimizer = self.optimizer
            for name, buffer in replica.module.named_buffers():
                if name in replica.module.state_dict():
                    buffer.copy_(dict(self.replicas[0].module.named_buffers())[name])

    @torch.no_grad()
    def save(self) -> None:
        """Copies everything that a checkpoint holds."""
        self.drain()
        model = self.replicas[0].module
        buffers = dict(model.named_buffers())
        frozen = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
        self._saved: Any = copy.deepcopy(
            (
                [master.detach() for master in self.masters],
                self.optimizer.state_dict(),
                self.schedule.state_dict() if self.schedule is not None else None,
                {name: value for name, value in model.state_dict().items() if name in buffers or name in frozen},
                self._applied,
            )
        )

    @torch.no_grad()
    def load(self, *, optimizer: bool = True) -> None:
        """Goes back to it, on every rank; without `optimizer` that stays as it is."""
        masters, state, schedule, others, applied = copy.deepcopy(self._saved)
        for master, value in zip(self.masters, masters, strict=True):
            master.copy_(value)
        if optimizer:
            self.optimizer.load_state_dict(state)
            self._applied = applied
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)
        for replica in self.replicas:
            for name, tensor in replica.module.state_dict().items():
                if name in others:
                    tensor.copy_(others[name])
        self._spread()


def _cast(model: Net, dtype: torch.dtype) -> None:
    """Casts parameters, and buffers that are saved."""
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                param.data = param.data.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)


#: Sees a training with its masters' gradients before each step, and may change them.
Look = Callable[[Plain], None]


def train(case: Case, *, wider: bool = False, nudge: float = 1.0, look: Look | None = None) -> Trained:
    """Trains in plain torch.

    Args:
        case: the training.
        wider: in a precision so much higher that what is left is nearly free of the rounding of `case`'s own: fp32 for
            16-bit cases, fp64 for fp32.
        nudge: a factor on the loss that is taken back from the gradients, so that the backward rounds otherwise.
        look: called before each step.
    """
    precise = torch.float64 if case.dtype == "fp32" and wider else torch.float32
    plain = Plain(case, precise if wider else DTYPES[case.dtype], precise, nudge, look)
    seen: list[Seen] = [[] for _ in plain.replicas]
    ranks = [play(replica, case, one) for replica, one in zip(plain.replicas, seen, strict=True)]
    micro = 0
    while True:
        asked = {next(rank, "end") for rank in ranks}
        assert len(asked) == 1
        match asked.pop():
            case "step":
                micro += 1
                if micro % case.accum == 0:
                    plain.step()
            case "save":
                plain.save()
            case "load":
                plain.load()
            case "load without optimizer":
                plain.load(optimizer=False)
            case "anew":
                plain.anew()
                micro = 0
            case _:
                break
    plain.drain()
    masters, start, doubts = (
        dict(zip(plain.names, (one.detach() for one in tensors), strict=True))
        for tensors in (plain.masters, plain.start, plain.doubts)
    )
    return Trained(seen, masters, plain.replicas[0].module.state_dict(), start, doubts)
