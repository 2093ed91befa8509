"""One optimizer step over all units: norm, overflow, clipping and update, decided on the device.

The host does not wait for the norm. It writes no more than hyperparameters; the factor that undoes the loss scale and clips,
and the flag that skips a step with infinite gradients, stay in :attr:`Store.scalars` where the updates read them. What the
host must learn (was the step skipped?) is copied behind its back and read when the next step needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroplan.core.buffers import Buffer
from zeroplan_runtime.optim import reference
from zeroplan_runtime.optim.groups import ZeroOptimizer
from zeroplan_runtime.optim.reference import Hyper
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.store import UnitState

#: Places in the step's scalars.
SQUARES, NORM, FACTOR, SKIP = range(4)


@dataclass(slots=True)
class Segment:
    """A run of one unit's share that one optimizer group covers: parallel 1-D views."""

    unit: UnitState
    group: int
    master: torch.Tensor
    param: torch.Tensor | None  # the 16-bit parameters to refresh; None where the master is the parameter
    grad: torch.Tensor
    states: list[torch.Tensor]


class Outcome:
    """Whether a step was skipped and its gradient norm, on their way to the host."""

    def __init__(self, scalars: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if scalars.is_cuda:
            self._host = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)
            self._host.copy_(scalars, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = scalars.clone()

    def _wait(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host

    @property
    def skipped(self) -> bool:
        """Waits until it is known."""
        return bool(self._wait()[SKIP])

    @property
    def norm(self) -> float:
        """The norm of the unclipped gradients, without loss scale. Waits until it is known."""
        return float(self._wait()[NORM])


class Stepper:
    """Updates the masters of all units. `clip` 0 means no clipping; `may_skip` lets infinite gradients skip a step."""

    def __init__(self, schedule: Schedule, optimizer: ZeroOptimizer, *, clip: float, may_skip: bool) -> None:
        self.schedule, self.store, self.optimizer = schedule, schedule.store, optimizer
        self.clip, self.may_skip = clip, may_skip
        self.segments = [segment for unit in self.store.units for segment in self._segments(unit)]

    def _segments(self, unit: UnitState) -> list[Segment]:
        if unit.trainable is None:
            return []
        assert unit.grad is not None
        assert unit.master is not None
        flat, params = unit.trainable.layout, unit.layout.shape.params
        begins = [
            (offset, params[i].group)
            for n, (offset, i) in enumerate(zip(flat.offsets, flat.params, strict=True))
            if n == 0 or params[i].group != params[flat.params[n - 1]].group
        ]
        ends = [begin for begin, _ in begins[1:]] + [flat.full]
        first, last = self.store.share(flat)
        made = []
        for (begin, group), end in zip(begins, ends, strict=True):
            part = slice(max(begin, first) - first, min(end, last) - first)
            if part.start < part.stop:
                same = unit.master is unit.trainable.shard
                states = [unit.states[b][part] for b in _STATE_ORDER if b in unit.states]
                param = None if same else unit.trainable.shard[part]
                made.append(Segment(unit, group, unit.master[part], param, unit.grad[part], states))
        return made

    @torch.no_grad()
    def step(self, number: int, loss_scale: float = 1.0) -> Outcome:
        """Applies the gradients to masters and parameters, as applied step `number` (from 1).

        `loss_scale` is what the loss was multiplied by. The gradients must have been reduced.
        """
        self.schedule.gradients_ready()
        factor = self._measure(loss_scale)
        outcome = Outcome(self.store.scalars)
        hypers = [self.optimizer.hyper(i, number) for i in range(len(self.optimizer.param_groups))]
        # This path asks the device whether to skip, which waits; the kernels read the flag themselves.
        if not (self.may_skip and outcome.skipped):
            if self.optimizer.kind == "lamb":
                self._lamb(hypers, factor)
            else:
                for segment in self.segments:
                    self._update(segment, hypers[segment.group], factor)
        self.schedule.parameters_changed()
        self.schedule.gradients_taken()
        return outcome

    def _measure(self, loss_scale: float) -> torch.Tensor | None:
        """Fills the scalars; returns the factor on the gradients, or None when it is surely one."""
        scalars = self.store.scalars
        scalars.zero_()
        if not self.clip and not self.may_skip:
            return None if loss_scale == 1.0 else scalars[FACTOR].fill_(1.0 / loss_scale)
        for unit in self.store.units:
            if unit.grad is not None:
                scalars[SQUARES] += reference.square_sum(unit.grad)
        if self.store.setup.shards_states:
            self.store.ranks.all_reduce_sum(scalars[SQUARES])
        torch.sqrt(scalars[SQUARES], out=scalars[NORM])
        scalars[NORM].div_(loss_scale)
        if self.may_skip:
            scalars[SKIP].copy_(~torch.isfinite(scalars[SQUARES]))
        factor = scalars[FACTOR].fill_(1.0)
        if self.clip:
            factor.copy_((self.clip / (scalars[NORM] + 1e-6)).clamp(max=1.0))
        return factor.div_(loss_scale) if self.clip or loss_scale != 1.0 else None

    def _update(self, segment: Segment, hyper: Hyper, factor: torch.Tensor | None) -> None:
        kind = self.optimizer.kind
        if kind in ("adam", "adamw"):
            reference.in_chunks(reference.adam, [segment.master, *segment.states, segment.grad], hyper, factor)
        elif kind == "lion":
            reference.in_chunks(reference.lion, [segment.master, *segment.states, segment.grad], hyper, factor)
        elif segment.states:
            reference.in_chunks(reference.sgd, [segment.master, *segment.states, segment.grad], hyper, factor)
        else:
            reference.sgd(segment.master, None, segment.grad, hyper, factor)
        if segment.param is not None:
            segment.param.copy_(segment.master)

    def _lamb(self, hypers: list[Hyper], factor: torch.Tensor | None) -> None:
        """Both passes; the norms of parameters that lie on several ranks are summed in one collective between them."""
        parts: list[tuple[list[torch.Tensor], Hyper]] = []
        for unit in self.store.units:
            parts += self._lamb_parts(unit, hypers)
        norms = torch.zeros(len(parts), 2, device=self.store.scalars.device)
        for row, ((master, exp_avg, exp_avg_sq, grad), hyper) in zip(norms, parts, strict=True):
            for part in reference.chunks(master.numel()):
                reference.lamb_moments(exp_avg[part], exp_avg_sq[part], grad[part], hyper, factor)
                direction = reference.lamb_direction(master[part], exp_avg[part], exp_avg_sq[part], hyper)
                row[0] += reference.square_sum(master[part])
                row[1] += reference.square_sum(direction)
        if self.store.setup.shards_states:
            self.store.ranks.all_reduce_sum(norms)
        for row, ((master, exp_avg, exp_avg_sq, _grad), hyper) in zip(norms, parts, strict=True):
            reference.lamb_apply(master, exp_avg, exp_avg_sq, hyper, row)
        for segment in self.segments:
            if segment.param is not None:
                segment.param.copy_(segment.master)

    def _lamb_parts(self, unit: UnitState, hypers: list[Hyper]) -> list[tuple[list[torch.Tensor], Hyper]]:
        """This rank's part, possibly empty, of each of `unit`'s parameters: all ranks list the same parameters."""
        if unit.trainable is None:
            return []
        assert unit.grad is not None
        assert unit.master is not None
        flat = unit.trainable.layout
        first, last = self.store.share(flat)
        made: list[tuple[list[torch.Tensor], Hyper]] = []
        for i, offset, numel in zip(flat.params, flat.offsets, flat.numels, strict=True):
            begin = min(max(offset, first), last) - first
            end = min(max(offset + numel, first), last) - first
            states = [unit.states[b] for b in _STATE_ORDER if b in unit.states]
            tensors = [t[begin:end] for t in (unit.master, *states, unit.grad)]
            made.append((tensors, hypers[unit.layout.shape.params[i].group]))
        return made


_STATE_ORDER = (Buffer.OPTIM_EXP_AVG, Buffer.OPTIM_EXP_AVG_SQ, Buffer.OPTIM_MOMENTUM)
