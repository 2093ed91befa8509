"""One optimizer step over all units: norm, overflow, clipping and update, decided on the device.

The host does not wait for the norm. It writes no more than hyperparameters; the factor that undoes the loss scale and clips,
and the flag that skips a step with infinite gradients, stay in :attr:`ModelStates.scalars` where the updates read them. What
the host must learn (was the step skipped?) is copied behind its back and read when the next step needs it.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan.core.layout import Flat
from zeroplan_runtime import kernels
from zeroplan_runtime.offload.host_optimizer import HostOptimizer
from zeroplan_runtime.offload.update_request import UpdateRequest
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.unit_state import GroupSlice, UnitState


class StepResult:
    """Whether a step was skipped and its gradient norm, on their way to the host.

    64 bytes of torch's own pinned memory and not the Arena's: users and the host's worker may keep more than one.
    """

    def __init__(self, scalars: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if scalars.is_cuda:
            self._host = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)
            self._host.copy_(scalars, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = scalars.clone()

    def scalars(self) -> torch.Tensor:
        """The step's scalars, in host memory. Waits until they are known."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    @property
    def skipped(self) -> bool:
        """Waits until it is known."""
        return bool(self.scalars()[kernels.SKIP])

    @property
    def is_mixed(self) -> bool:
        """Whether the ranks' collectives were of different units, whose bytes they have mixed. Waits until it is known."""
        highest, lowest = self.scalars()[kernels.ORDER : kernels.ORDER + 2].tolist()
        return bool(highest != -lowest)

    @property
    def norm(self) -> float:
        """The norm of the unclipped gradients, without loss scale. Waits until it is known."""
        return float(self.scalars()[kernels.NORM])


class OptimizerStep:
    """Updates the masters of all units. `clip` 0 means no clipping; `may_skip` lets infinite gradients skip a step."""

    def __init__(self, schedule: Schedule, optimizer: ZeroOptimizer, *, clip: float, may_skip: bool) -> None:
        self.schedule, self.model_states, self.optimizer = schedule, schedule.model_states, optimizer
        self.clip, self.may_skip = clip, may_skip
        self.next_step = 1  # the step that the present gradients are for
        self.host: HostOptimizer | None = None
        self.slices = [
            [] if unit.trainable is None or unit.layout.offloaded else self.group_slices(unit, unit.param_16bit)
            for unit in self.model_states.units
        ]
        if clip or may_skip:
            schedule.grads.measure = self.measure

    def offload(self, host: HostOptimizer) -> None:
        """Leaves the offloaded units' updates to `host`, which may begin them in the backward if nothing else forbids it."""
        self.host = host
        if not (self.clip or self.may_skip or host.delayed_from):
            host.early_request = lambda: UpdateRequest(self.next_step, self._hyperparameters())

    def group_slices(self, unit: UnitState, param: torch.Tensor | None, grad: torch.Tensor | None = None) -> list[GroupSlice]:
        """The runs of a unit's share, with `param` to refresh and `grad` to read (the unit's own, if left out)."""
        assert unit.trainable is not None
        master = unit.master if unit.master is not None else torch.empty(0)  # in files: the swapper puts chunks in its place
        flat, params = unit.trainable.layout, unit.layout.shape.params
        begins = [
            (offset, params[i].group)
            for n, (offset, i) in enumerate(zip(flat.offsets, flat.params, strict=True))
            if n == 0 or params[i].group != params[flat.params[n - 1]].group
        ]
        ends = [begin for begin, _ in begins[1:]] + [flat.full]
        first, last = self.model_states.owned_range(flat)
        room = (
            kernels.SegmentWorkspace(unit.lamb_workspace, self.model_states.layout.segments(unit.layout))
            if unit.lamb_workspace is not None
            else None
        )
        made = []
        for (begin, group), end in zip(begins, ends, strict=True):
            part = slice(max(begin, first) - first, min(end, last) - first)
            # LAMB adds norms over the ranks, so even a rank with nothing of a run takes part.
            if part.start < part.stop or room is not None:
                part = slice(part.start, max(part.stop, part.start))
                states = [unit.optim_states[b][part] for b in self.model_states.setup.states if b in unit.optim_states]
                out = None if param is None else param[part]
                tensors = self._tensors(flat, begin, end, part, room) if room is not None else None
                made.append(GroupSlice(unit, group, master[part], out, part, states, tensors))
                if grad is not None:
                    made[-1].grad = grad[part]
        return made

    def _tensors(self, flat: Flat, begin: int, end: int, part: slice, room: kernels.SegmentWorkspace) -> kernels.Segments:
        """The parameters of the run ``[begin, end)`` of a flat, as bounds within this rank's `part`; padding follows its
        parameter, where its zeros change no norm.
        """
        first = self.model_states.owned_range(flat)[0] + part.start
        starts = [offset for offset in flat.offsets if begin <= offset < end]
        length = part.stop - part.start
        bounds = [min(max(start - first, 0), length) for start in [*starts[1:], end]]
        return kernels.make_segments([0, *bounds], self.model_states.arena.device, room)

    @torch.no_grad()
    def step(self, number: int, loss_scale: float = 1.0) -> StepResult:
        """Applies the gradients to masters and parameters, as applied step `number` (from 1).

        `loss_scale` is what the loss was multiplied by. A unit's gradients go as soon as its update has been given to the
        device.

        Raises:
            BadInput: when no backward came before.
        """
        if not all(_has_gradients(unit) for unit in self.model_states.units):
            raise BadInput("there are no gradients", where="engine.step", remedy="call engine.backward(loss) first")
        self.schedule.grads.wait()
        scalars = self._measure(loss_scale)
        self._compare_orders()
        result = StepResult(self.model_states.scalars)
        hyperparameters = self._hyperparameters()
        if self.host is not None:
            request = UpdateRequest(number, hyperparameters, None if scalars is None else result.scalars)
            self.host.step(request, (self.schedule.compute_stream, self.schedule.all_gather_stream))
        # Unit by unit, in the order in which the next forward needs them. See Note [Places] in model_states.
        for unit, segments in zip(self.model_states.units, self.slices, strict=True):
            if unit.trainable is None:
                continue
            for segment in segments:
                self.update(segment, hyperparameters[segment.group], number, scalars)
            if unit.offloaded is None:
                self.schedule.mark_updated(unit)
            self.schedule.grads.free(unit)
        return result

    def _measure(self, loss_scale: float) -> torch.Tensor | None:
        """Fills the scalars for the updates to read; None when these would surely say: as it is."""
        scalars, setup = self.model_states.scalars, self.model_states.setup
        if self.clip or self.may_skip:
            for unit in self.model_states.units:
                if unit.offloaded is None and unit.grad is not None:
                    self.measure(unit, unit.grad)
            kernels.global_norm(
                self.model_states.squares,
                scalars,
                max_norm=self.clip,
                loss_scale=loss_scale,
                may_skip=self.may_skip,
                reduce=self.model_states.comm.all_reduce_sum if setup.shards_states else None,
            )
            return scalars
        if loss_scale == 1.0:
            return None
        scalars.zero_()[kernels.FACTOR] = 1.0 / loss_scale
        return scalars

    def _compare_orders(self) -> None:
        """See Note [Order of collectives] in schedule."""
        if self.model_states.comm.world_size > 1:
            order = self.model_states.scalars[kernels.ORDER : kernels.ORDER + 2]
            order[0].fill_(self.model_states.comm.collectives_hash)
            order[1].fill_(-self.model_states.comm.collectives_hash)
            self.model_states.comm.all_reduce_max(order)
            self.model_states.comm.collectives_hash = 0

    def measure(self, unit: UnitState, grad: torch.Tensor) -> None:
        """Leaves `unit`'s sum of squares for the norm."""
        kernels.squares(grad, self.model_states.squares[unit.index :], workspace=self.model_states.norm_workspace)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [self.optimizer.hyper(i) for i in range(len(self.optimizer.param_groups))]

    def update(self, segment: GroupSlice, hyper: dict[str, Any], number: int, scalars: torch.Tensor | None) -> None:
        """The optimizer's arithmetic on one run, wherever it lies."""
        if segment.grad is None:
            assert segment.unit.grad is not None
            segment.grad = segment.unit.grad[segment.part]
        master, grad, states = segment.master, segment.grad, segment.states
        common: dict[str, Any] = {"param_out": segment.param, "scalars": scalars}
        shared = self.model_states.setup.shards_states
        reduce = self.model_states.comm.all_reduce_sum if shared else None
        kernels.UPDATES[self.optimizer.kernel.kernel](
            master, grad, states, segment.tensors, reduce, step=number, **hyper, **common
        )


def _has_gradients(unit: UnitState) -> bool:
    if unit.offloaded is not None:
        return unit.offloaded.has_grads
    return unit.grad_buffer is None or unit.grad_buffer.is_allocated
