"""The optimizer's step over all units: gradient norm, clipping, overflow check and update, without host synchronisation.

The host gives the kernels only hyperparameters. The factor that clips and undoes the loss scale, and the flag that skips a step
with infinite gradients, stay on the device in :attr:`ModelStates.scalars`, where the updates read them. They are also copied to
the host asynchronously and read there when the next step needs to know whether the step was skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zeroplan.core.arena.layout import Flat, UnitKind
from zeroplan.core.arena.layout_setup import Feature
from zeroplan.core.errors import BadInput
from zeroplan_runtime import kernels
from zeroplan_runtime.offload.host_optimizer import HostOptimizer
from zeroplan_runtime.offload.update_request import UpdateRequest
from zeroplan_runtime.optim.frozen_parameters import FrozenParameters
from zeroplan_runtime.optim.zero_optimizer import ZeroOptimizer
from zeroplan_runtime.replicas import replicated_runs
from zeroplan_runtime.schedule import Schedule
from zeroplan_runtime.techniques.one_bit.compression_schedule import LOCAL, CompressionStep
from zeroplan_runtime.techniques.one_bit.local_steps import LocalSteps
from zeroplan_runtime.techniques.one_bit.momentum_exchange import MomentumExchange
from zeroplan_runtime.techniques.one_bit.scaled_exchange import ScaledExchange
from zeroplan_runtime.unit_state import GroupSlice, UnitState


class StepResult:
    """The scalars of one step, copied to the host asynchronously.

    The copy is in torch's pinned memory (64 bytes) and not in the Arena's, as the engine and the worker may keep several.

    Args:
        scalars: fp32, the step's scalars on the device.
    """

    def __init__(self, scalars: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if scalars.is_cuda:
            self._host = torch.empty(scalars.shape, dtype=scalars.dtype, device="cpu", pin_memory=True)
            self._host.copy_(scalars, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = scalars.clone()

    def scalars(self) -> torch.Tensor:
        """Returns the step's scalars in host memory. Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped, because gradients were not finite. Waits for the copy."""
        return bool(self.scalars()[kernels.SKIP])

    @property
    def is_mixed(self) -> bool:
        """Whether the ranks issued collectives in different orders and so mixed units. Waits for the copy."""
        highest, highest_negative = self.scalars()[kernels.ORDER : kernels.ORDER + 2].tolist()
        return bool(highest != -highest_negative)

    @property
    def norm(self) -> float:
        """The norm of the gradients before clipping, without the loss scale. Waits for the copy."""
        return float(self.scalars()[kernels.NORM])


class OptimizerStep:
    """Updates the masters and parameters of all units.

    Args:
        schedule: the units and their gradients.
        optimizer: the hyperparameters.
        clip: the gradient norm to clip to; 0 does not clip.
        may_skip: skip steps whose gradients are not finite.

    Attributes:
        next_step: the number of the applied step that the present gradients are for, from 1.
        host: updates the offloaded units; None where there are none.
        exchange: averages momentum instead of gradients after the warm-up; None unless the optimizer compresses.
        slices: for each unit the work of its update on the device.
        frozen: which parameters the step passes over.
    """

    def __init__(self, schedule: Schedule, optimizer: ZeroOptimizer, *, clip: float, may_skip: bool) -> None:
        self.schedule, self.model_states, self.optimizer = schedule, schedule.model_states, optimizer
        self.clip, self.may_skip = clip, may_skip
        self.next_step = 1
        self._hyperparameters: list[dict[str, Any]] = []  # each group's, of this step
        self._early: list[dict[str, Any]] | None = None  # those of updates that have begun in the backward
        self.host: HostOptimizer | None = None
        self._compression: CompressionStep | None = None  # of the present gradients
        self.frozen = FrozenParameters(self.model_states.units)
        self._divided = self._division  # by which the slices are
        self.slices = self._device_slices()
        self._divide_coefficients()
        self.exchange: MomentumExchange | None = None
        if self.model_states.setup.compresses:
            if self.optimizer.kernel.coefficients:
                self.exchange = ScaledExchange(self.model_states, self.slices)
            else:
                alone = Feature.LOCAL_STEPS in self.model_states.setup.features
                self.exchange = (LocalSteps if alone else MomentumExchange)(self.model_states)
        if clip or may_skip:
            schedule.grads.measure = self.measure

    def offload(self, host: HostOptimizer) -> None:
        """Makes `host` update the offloaded units, during the backward where neither clipping, checks nor delay forbid it."""
        self.host = host
        if not (self.clip or self.may_skip or host.delayed_from):
            host.early_request = self._early_request

    def begin_backward(self, number: int) -> None:
        """Prepares for the gradients of the applied step `number`, from 1."""
        if self.frozen.look() and self.host is not None:
            self.host.early_request = None  # which are passed over is known at the step
        self.next_step = number
        self._compression = None if self.exchange is None else self.optimizer.compression(number)
        self.schedule.grads.keeps_own = self._compression is not None and self._compression.compresses

    def states_were_written(self) -> None:
        """Notes that the optimizer's states were loaded, or written by the user."""
        if self.exchange is not None:
            self.exchange.was_written()

    def require_common_masters(self, where: str) -> None:
        """Refuses what reads one rank's masters for those of all, while ranks step alone.

        Raises:
            BadInput: between two steps that synchronise.
        """
        if isinstance(self.exchange, LocalSteps) and not self.exchange.in_step:
            raise BadInput(
                "each rank has masters of its own until the next step that synchronises (local steps)",
                where=where,
                remedy="save after a step whose number is a multiple of local_step_clipper, where that is a power of 2",
            )

    def has_errors(self, applied: int) -> bool:
        """Returns whether compression has left errors after so many applied steps."""
        return self.exchange is not None and any(self.optimizer.compression(n).compresses for n in range(1, applied + 1))

    def _early_request(self) -> UpdateRequest:
        self._early = self._early or self._read()
        return UpdateRequest(self.next_step, self._early)

    def group_slices(self, unit: UnitState, param: torch.Tensor | None, grad: torch.Tensor | None = None) -> list[GroupSlice]:
        """Divides a unit's share by parameter group, and by the steps that parameters have missed.

        Args:
            unit: the unit; must have trainable parameters.
            param: [share] the parameters that the update refreshes; None where there are none.
            grad: [share] the gradients; None to take the unit's own at the step.
        """
        assert unit.trainable is not None
        # in files the swapper puts chunks in its place
        master = unit.master if unit.master is not None else torch.empty(0, device="cpu")
        flat, params = unit.trainable.layout, unit.layout.shape.params
        kinds = [(params[i].group, self._missed((unit.index, n))) for n, i in enumerate(flat.params)]
        begins = [(offset, *kinds[n]) for n, offset in enumerate(flat.offsets) if n == 0 or kinds[n] != kinds[n - 1]]
        ends = [begin for begin, *_ in begins[1:]] + [flat.full]
        first, last = self.model_states.owned_range(flat)
        workspace = (
            kernels.SegmentWorkspace(unit.lamb_workspace, self.model_states.layout.segments(unit.layout))
            if unit.lamb_workspace is not None
            else None
        )
        made = []
        for (begin, group, missed), end in zip(begins, ends, strict=True):
            part = slice(max(begin, first) - first, min(end, last) - first)
            # LAMB adds norms over the ranks, so a rank that owns nothing of a group takes part, too.
            if part.start < part.stop or workspace is not None:
                part = slice(part.start, max(part.stop, part.start))
                states = [
                    self.model_states.state_slice(unit, b, part)
                    for b in self.model_states.setup.states
                    if b in unit.optim_states
                ]
                out = None if param is None else param[part]
                tensors = self._tensors(flat, begin, end, part, workspace) if workspace is not None else None
                made.append(GroupSlice(unit, group, master[part], out, part, states, tensors, missed=missed))
                if grad is not None:
                    made[-1].grad = grad[part]
        return made

    def _tensors(
        self, flat: Flat, begin: int, end: int, part: slice, workspace: kernels.SegmentWorkspace
    ) -> kernels.TensorSegments:
        """Returns the bounds of the parameters of ``[begin, end)`` of a flat within this rank's `part`.

        Padding counts to the parameter before it; its zeros do not change the norm.
        """
        first = self.model_states.owned_range(flat)[0] + part.start
        starts = [offset for offset in flat.offsets if begin <= offset < end]
        length = part.stop - part.start
        bounds = [min(max(start - first, 0), length) for start in [*starts[1:], end]]
        return kernels.make_segments([0, *bounds], self.model_states.arena.device, workspace)

    @torch.no_grad()
    def step(self, number: int, loss_scale: float = 1.0) -> StepResult:
        """Issues the update of all units and frees each unit's gradients as soon as its update has been issued.

        Call :meth:`read_hyperparameters` before.

        Args:
            number: the number of the applied step, from 1; skipped steps do not count.
            loss_scale: the factor on the loss.

        Raises:
            BadInput: when there are no gradients.
        """
        if not all(_has_gradients(unit) for unit in self.model_states.units):
            raise BadInput("there are no gradients", where="engine.step", remedy="call engine.backward(loss) first")
        self.schedule.grads.wait()
        scalars = self._measure(loss_scale)
        self._compare_collectives()
        result = StepResult(self.model_states.scalars)
        hyperparameters = self._hyperparameters
        if self.host is not None:
            request = UpdateRequest(number, hyperparameters, None if scalars is None else result.scalars)
            self.host.step(request, (self.schedule.compute_stream, self.schedule.all_gather_stream))
        # In the order in which the next forward needs the units. See Note [Places] in model_states.
        if self.exchange is not None and self._compression is not None:
            self.exchange.begin(self._compression, number, hyperparameters, scalars)
        for unit, slices in zip(self.model_states.units, self.slices, strict=True):
            if unit.trainable is None:
                continue
            if self.exchange is not None and self._compression is not None and self._compression.compresses:
                self.exchange.exchange(unit, self._compression.exchanged, hyperparameters[0]["betas"], scalars)
            for part in slices:
                self.update(part, hyperparameters[part.group], number, scalars)
            if self.exchange is not None and self._compression is not None and self._compression.compresses:
                self.exchange.updated(unit, self._compression, slices, hyperparameters)
            if unit.offloaded is None:
                self.schedule.mark_updated(unit)
            self.schedule.grads.free(unit)
        if self.exchange is not None:
            self.exchange.end()
        self._early = None
        self.frozen.stepped()
        return result

    def _measure(self, loss_scale: float) -> torch.Tensor | None:
        """The scalars, filled on the device; None where the gradients need no factor and the step cannot be skipped."""
        scalars = self.model_states.scalars
        ranks = self.model_states.ranks
        sums = self.model_states.setup.shards_states or ranks.model or ranks.ep or self.schedule.grads.keeps_own
        if self.clip or self.may_skip:
            for unit in self.model_states.units:
                grad = unit.grads.full if self.schedule.grads.keeps_own else unit.grad
                if unit.offloaded is None and grad is not None:
                    self.measure(unit, grad)
            kernels.global_norm(
                self.model_states.squares,
                scalars,
                max_norm=self.clip,
                loss_scale=loss_scale,
                may_skip=self.may_skip,
                reduce=self._sum_over_ranks if sums else None,
            )
            return scalars
        if loss_scale == 1.0:
            return None
        scalars.zero_()[kernels.FACTOR] = 1.0 / loss_scale
        return scalars

    def _compare_collectives(self) -> None:
        """Puts the hashes of the ranks' collectives into the scalars: see Note [Order of collectives] in comm."""
        if self.model_states.comm.world_size > 1:
            order = self.model_states.scalars[kernels.ORDER : kernels.ORDER + 2]
            order[0].fill_(self.model_states.comm.collectives_hash)
            order[1].fill_(-self.model_states.comm.collectives_hash)
            self.model_states.comm.all_reduce_max(order)
            self.model_states.comm.collectives_hash = 0

    def measure(self, unit: UnitState, grad: torch.Tensor) -> None:
        """Writes the sum of squares of `grad`, the gradients of `unit`, for the norm.

        What tensor-parallel ranks hold alike counts once over all of them, and so does at stage 0 what ranks with other experts
        hold alike.
        """
        squares, workspace = self.model_states.squares[unit.index :], self.model_states.norm_workspace
        kernels.squares(grad, squares, workspace=workspace)
        replicas = self.model_states.ranks.replicas
        if replicas > 1:
            once = self.model_states.scalars[kernels.ORDER + 2 :]  # a word that the step does not use
            for begin, end in replicated_runs(self.model_states, unit):
                kernels.squares(grad[begin:end], once, workspace=workspace)
                squares[0].sub_(once[0], alpha=1 - 1 / replicas)
        if self._sums_over_experts:
            setup = self.model_states.setup
            squares[0].div_(setup.across if unit.layout.shape.kind is UnitKind.EXPERTS else setup.ep)

    def _sum_over_ranks(self, values: torch.Tensor) -> None:
        """Adds sums of squares over the ranks that hold other shards, then over those that hold other parts of the model.

        Of gradients that are each rank's own it takes the mean: no rank has the norm of their mean, which is at most that
        mean's root.
        """
        if self.schedule.grads.keeps_own:
            self.model_states.comm.all_reduce_mean(values)
        elif self.model_states.setup.shards_states:
            self.model_states.comm.all_reduce_sum(values)
        elif self._sums_over_experts:
            assert self.model_states.ranks.ep is not None
            self.model_states.ranks.ep.all_reduce_sum(values)
        self.model_states.ranks.sum_over_model(values)

    @property
    def _sums_over_experts(self) -> bool:
        """Whether each rank has the whole gradients of its experts: the others' are of other ranks only."""
        return self.model_states.ranks.ep is not None and not self.model_states.setup.shards_states

    def read_hyperparameters(self) -> None:
        """Reads the groups' hyperparameters, for the next :meth:`step`.

        Raises:
            BadInput: when updates have begun with others, or the optimizer cannot take them or pass over what is frozen.
        """
        self._hyperparameters = self._read()
        self._pass_over()
        if self._early is not None and self._early != self._hyperparameters:
            raise BadInput(
                "a hyperparameter was changed between the backward and the step, but updates with the one of before have begun",
                where="optimizer.param_groups",
                remedy="change it before engine.backward(), or set gradient_clipping, with which updates wait for the step",
            )

    # ------------------------------------------------------------------ frozen parameters

    @property
    def _division(self) -> tuple[object, ...]:
        passed = self.frozen.passed_over
        return passed, {place: missed for place, missed in self.frozen.missed.items() if place not in passed}

    def _missed(self, place: tuple[int, int]) -> int | None:
        return None if place in self.frozen.passed_over else self.frozen.missed.get(place, 0)

    def _device_slices(self) -> list[list[GroupSlice]]:
        return [
            [] if unit.trainable is None or unit.layout.offloaded else self.group_slices(unit, unit.param_16bit)
            for unit in self.model_states.units
        ]

    def _pass_over(self) -> None:
        """Lets the coming step pass over the parameters that are frozen.

        Raises:
            BadInput: for an optimizer whose update of one parameter depends on others.
        """
        if chosen := self.frozen.choose():
            self.frozen.require_separate(self.optimizer.kernel, self.model_states.setup)
            self.model_states.comm.record_collective(chosen)
        self._divide()

    def load_missed_steps(self, state: Mapping[str, int]) -> None:
        """Continues from what a checkpoint has of :attr:`frozen`."""
        self.frozen.load_state_dict(state)
        self._divide()

    def _divide(self) -> None:
        """Divides the units' shares anew if other parameters are passed over, or have missed other steps, than before."""
        if self._division == self._divided:
            return
        self._divided = self._division
        self.slices = self._device_slices()
        if self.host is not None:
            self.host.wait_for_worker()
            for host in self.host.units:
                for buffers in host.buffers:
                    buffers.slices = self.group_slices(host.unit, buffers.refreshed, buffers.grad)

    def _read(self) -> list[dict[str, Any]]:
        self.optimizer.require_same_groups()
        return [self.optimizer.hyper(i) for i in range(len(self.optimizer.param_groups))]

    def update(self, part: GroupSlice, hyper: dict[str, Any], number: int, scalars: torch.Tensor | None) -> None:
        """Steps one slice on the device or the host.

        Args:
            part: the slice; its gradients are the unit's if it has none.
            hyper: the hyperparameters of its group, by the names of the kernels' arguments.
            number: the number of the applied step, from 1.
            scalars: the step's scalars; None for factor 1 and no skip.
        """
        if part.missed is None:
            if part.param is not None:  # it may share its memory with the gradients
                part.param.copy_(part.master)
            return
        number -= part.missed
        if part.grad is None:
            assert part.unit.grad is not None
            part.grad = part.unit.grad[part.part]
        master, grad = part.master, part.grad
        hyper = dict(hyper)
        if hyper.pop("maximize", False):
            grad.neg_()  # nothing reads it after the update
        common: dict[str, Any] = {"param_out": part.param, "scalars": scalars}
        if self._compression is not None:
            hyper["second_step"] = self._compression.second_step
        if self.optimizer.kernel.temporaries:
            where = "device" if part.unit.offloaded is None else "host"
            common["workspace"] = self.model_states.update_workspaces[where]
        if part.coefficients is not None:
            common["coefficients"] = part.coefficients
        if self.schedule.grads.keeps_own:
            self._update_frozen(part, number, hyper | common)
            return
        if self.optimizer.kernel.quantised and part.unit.offloaded is None:
            common["maps"] = self.model_states.maps
        shared = self.model_states.setup.shards_states
        reduce = self.model_states.comm.all_reduce_sum if shared else None
        kernels.UPDATES[self.optimizer.kernel.kernel](
            master, grad, part.states, part.tensors, reduce, step=number, **hyper, **common
        )

    def _update_frozen(self, part: GroupSlice, number: int, hyper: dict[str, Any]) -> None:
        """Steps one slice with the momentum that the ranks have exchanged, and a second moment that stays."""
        if part.coefficients is None:
            exp_avg, exp_avg_sq = part.states
            if self._compression is not None and self._compression.exchanged in LOCAL:
                hyper["weight_decay"] = 0.0  # it waits for the step that synchronises
            kernels.frozen_adam(part.master, exp_avg, exp_avg_sq, step=number, **hyper)
            return
        assert part.tensors is not None
        limits = kernels.FactorLimits(*(hyper.pop(name) for name in ("factor_min", "factor_max", "factor_threshold")))
        for name in ("coeff_beta", "min_trust", "max_trust"):  # of the warm-up
            del hyper[name]
        comm = self.model_states.comm if self.model_states.setup.shards_states else None
        kernels.frozen_lamb(
            part.master,
            part.states,
            part.tensors,
            hyper.pop("coefficients"),
            limits,
            hyper.pop("workspace"),
            add=None if comm is None else comm.all_reduce_sum,
            largest=None if comm is None else comm.all_reduce_max,
            step=number,
            **hyper,
        )

    # ------------------------------------------------------------------ what an optimizer keeps of each tensor

    def _divide_coefficients(self) -> None:
        """Gives each slice its part of the coefficients: means begin at 0, factors at 1."""
        whole, count = self.model_states.coefficients, self.optimizer.kernel.coefficients
        if whole is None:
            return
        rows = whole.view(count, -1)
        rows[0], rows[1] = 0.0, 1.0
        begin = 0
        for part in (one for unit in self.slices for one in unit):
            assert part.tensors is not None
            part.coefficients = rows[:, begin : begin + part.tensors.count]
            begin += part.tensors.count

    def _named(self) -> Iterator[tuple[str, int, int, int]]:
        """Each tensor with coefficients: its name, its column in them, its unit's index and its place there."""
        column = 0
        for unit in self.model_states.units if self.model_states.coefficients is not None else ():
            for position in range(len(unit.trainable.params) if unit.trainable is not None else 0):
                yield unit.name_of(position), column, unit.index, position
                column += 1

    def coefficient_state(self) -> dict[str, list[float]]:
        """Returns for a checkpoint each tensor's coefficients, and the scale of its momentum; empty where there are none."""
        whole = self.model_states.coefficients
        if whole is None:
            return {}
        columns = whole.view(self.optimizer.kernel.coefficients, -1).t().tolist()
        scales = self.exchange.scales if isinstance(self.exchange, ScaledExchange) else None
        return {
            name: [*columns[column], scales[unit][position] if scales is not None else 1.0]
            for name, column, unit, position in self._named()
        }

    def load_coefficient_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continues from :meth:`coefficient_state`."""
        whole = self.model_states.coefficients
        if whole is None:
            return
        rows = whole.view(self.optimizer.kernel.coefficients, -1)
        for name, column, unit, position in self._named():
            *values, scale = state[name]
            rows[:, column] = torch.tensor(values, dtype=rows.dtype, device=rows.device)
            if isinstance(self.exchange, ScaledExchange):
                self.exchange.scales[unit][position] = scale


def _has_gradients(unit: UnitState) -> bool:
    if unit.offloaded is not None:
        return unit.offloaded.has_grads
    return unit.grads.buffer is None or unit.grads.buffer.is_allocated
