"""Which part of a script runs: initialisation, a forward, a backward, a step, an evaluation, a save; marks between them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from zeroplan.capturing.functions import ScriptFunctions
from zeroplan.capturing.recorder import ScriptRecorder
from zeroplan.tape.expanded import Op

#: The marks' names by number, as :func:`zeroplan.engines.simulation.phase_of_mark` reads them.
NAMES = ("init", "fwd", "bwd", "step", "eval", "save", "end")
INIT, FORWARD, BACKWARD, STEP, EVALUATION, SAVE, END = range(7)
#: Added to a mark's number in a recording, so that it is none of :class:`zeroplan.tape.expanded.Mark`.
FIRST = 100


class Spans:
    """Follows the script by hooks on every module, on the backward and on every optimizer.

    Attributes:
        steps: steps so far, of the optimizer that has taken the most.
        backwards: backward passes so far.
    """

    def __init__(self, recorder: ScriptRecorder) -> None:
        self.recorder = recorder
        self.steps = 0
        self.backwards = 0
        self.on_step: list[Any] = []
        self.on_backward: list[Any] = []
        self.on_backward_begin: list[Any] = []
        self.on_backward_end: list[Any] = []
        self.on_module: list[Any] = []
        self.on_optimizer: list[Any] = []
        self._seen: Any = weakref.WeakSet()
        self._now = INIT
        self._depth = 0
        self._stepping = 0
        self._counts: Any = weakref.WeakKeyDictionary()

    def enter(self, span: int) -> None:
        """Begin a span; the one before it ends with a mark."""
        if span != self._now:
            self.recorder.out.add(Op.MARK, FIRST + self._now)
            self._now = span
        if self.recorder.phase != 2:
            self.recorder.phase = int(span in (FORWARD, EVALUATION))

    def close(self) -> None:
        """End the last span."""
        self.recorder.out.add(Op.MARK, FIRST + self._now)

    def install(self, functions: ScriptFunctions) -> None:
        """Attach the hooks; `functions` is on in the backward, too."""
        nn_module.register_module_forward_pre_hook(self._before)
        nn_module.register_module_forward_hook(self._after, always_call=True)
        optim.register_optimizer_step_pre_hook(self._before_step)
        optim.register_optimizer_step_post_hook(self._after_step)
        home: Any = torch.autograd
        run = home._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            recorder, before = self.recorder, self.recorder.phase
            if before != 2:
                self.enter(BACKWARD)
                for call in self.on_backward_begin:
                    call()
            recorder.phase = 2
            try:
                with functions.again():  # recomputation in the backward is the script's own code
                    return run(*args, **kwargs)
            finally:
                recorder.phase = 2 if before == 2 else 0
                if before != 2:
                    self.backwards += 1
                    for call in self.on_backward_end:
                        call()
                    self.enter(STEP)
                    for call in self.on_backward:
                        call()

        home._engine_run_backward = backward
        graph: Any = torch.autograd.graph
        graph._engine_run_backward = backward

    def _before(self, module: Any, _args: Any) -> None:
        if self._depth == 0 and module not in self._seen:
            self._seen.add(module)
            for call in self.on_module:
                call(module)
        if self._depth == 0 and self.recorder.phase != 2:
            self.enter(FORWARD if torch.is_grad_enabled() else EVALUATION)
        self._depth += 1

    def _after(self, module: Any, _args: Any, _out: Any) -> None:
        self._depth -= 1

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._stepping += 1
        if self._stepping == 1:
            self.enter(STEP)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._stepping -= 1
        if self._stepping == 0:
            self.stepped(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.steps = max(self._counts.values())
        for call in self.on_optimizer:
            call(optimizer)
        self._label(optimizer)
        for call in self.on_step:
            call()

    def _label(self, optimizer: Any) -> None:
        """Name the parameters, gradients and states of an optimizer."""
        label = self.recorder.label
        for group in getattr(optimizer, "param_groups", ()):
            for param in group["params"]:
                label(param, "param.full")
                label(param.grad, "grad.full")
                held = optimizer.state.get(param, {})
                for name, value in held.items() if isinstance(held, dict) else ():
                    label(value, _STATES.get(name, "optim.state"))


_STATES = {"exp_avg": "optim.exp_avg", "exp_avg_sq": "optim.exp_avg_sq", "momentum_buffer": "optim.momentum"}
