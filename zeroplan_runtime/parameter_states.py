"""One parameter's master, optimizer states and gradient: read and written whole, or this rank's part of them.

What ``deepspeed.utils.safe_get_full_*`` and their siblings do, at any stage and wherever the tensors are. States that are
quantised are read as the values that they stand for, and rounded to such values when they are written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan_runtime import kernels
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.local_tensors import local_of
from zeroplan_runtime.parameter_values import require_writable, write_value
from zeroplan_runtime.unit_state import FlatParam, UnitState

#: The name of the master among the keys of the optimizer's states.
MASTER = "master"


class _Blocks(NamedTuple):
    """The memory of some blocks of a quantised state, and its map."""

    codes: torch.Tensor
    scales: torch.Tensor
    map: kernels.Map


class ParameterStates:
    """Finds the parts of an engine's trained parameters.

    Every rank must call the methods that say "whole": each rank holds a part. What they are given must be the same on every
    rank. A read drains updates on the host first, so it shows what the last step has written.
    """

    def __init__(self, engine: EngineParts) -> None:
        self._engine, self._states = engine, engine.model_states
        self._places: dict[int, tuple[UnitState, FlatParam, int]] = {}
        for unit in engine.model_states.units:
            if unit.trainable is not None:
                for position, param in enumerate(unit.trainable.params):
                    self._places[id(param)] = (unit, unit.trainable, position)
        row = engine.optimizer.row_with_states if engine.optimizer is not None else None
        kept = [buffer for buffer in engine.model_states.setup.states if buffer is not Buffer.OPTIM_SCALE]
        self._keys = {state.state_key: state.buffer for state in row.states if state.buffer in kept} if row else {}
        kernel = row.runtime if row else None
        self._format = kernels.block_format(kernel.bits, kernel.block) if kernel is not None and kernel.quantised else None
        self._keys[MASTER] = Buffer.PARAM_MASTER

    def trains(self, param: nn.Parameter) -> bool:
        """Returns whether the engine trains `param`."""
        return id(param) in self._places

    def keys(self) -> list[str]:
        """The names of the optimizer's states, as torch's optimizers and DeepSpeed have them."""
        return [key for key in self._keys if key != MASTER]

    # ------------------------------------------------------------------ masters and optimizer states

    def local(self, param: nn.Parameter, key: str = MASTER) -> torch.Tensor:
        """Returns this rank's part of a state of `param`, fp32, 1-D: a copy; empty where this rank holds none of it."""
        self._engine.schedule.require_no_early_updates("state")
        self._engine.drain()
        unit, _, begin, end, _ = self._part(param)
        return self._read(unit, self._buffer(key), begin, end).to(self._engine.device, copy=True)

    def set_local(self, param: nn.Parameter, value: torch.Tensor, key: str = MASTER) -> None:
        """Writes this rank's part of a state of `param`; every rank must call it for a master.

        Raises:
            BadInput: when `value` has another number of elements, and for a master of a weight that is rounded.
        """
        if key == MASTER:
            require_writable(self._engine, param)
        self._engine.drain()
        unit, _, begin, end, _ = self._part(param)
        self._require_numel(value, end - begin, "the rank's part")
        self._write(unit, self._buffer(key), begin, end, value.reshape(-1))
        if key == MASTER:
            write_value(self._engine, param, self.whole(param))

    def whole(self, param: nn.Parameter, key: str = MASTER) -> torch.Tensor:
        """Returns a state of `param`, whole: fp32, in its shape, on the device."""
        return self._gather(param, self.local(param, key))

    def set_whole(self, param: nn.Parameter, value: torch.Tensor, key: str = MASTER) -> None:
        """Writes a state of `param`; for a master also the parameter itself.

        Raises:
            BadInput: when `value` has another number of elements.
        """
        self._require_numel(value, local_of(param).numel(), "the parameter")
        if key == MASTER:
            write_value(self._engine, param, value)
            return
        self._engine.drain()
        unit, _, begin, end, first = self._part(param)
        self._write(unit, self._buffer(key), begin, end, value.reshape(-1)[first : first + end - begin])

    # ------------------------------------------------------------------ gradients

    def local_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the gradient of `param`, fp32, 1-D; None where there is none.

        It is averaged over the ranks once the backward that ends an accumulation is done, divided by the accumulation steps,
        and multiplied by the loss scale, as DeepSpeed gives it.
        """
        part = self._grad_part(param)
        return None if part is None else part.to(self._engine.device, torch.float32, copy=True)

    def grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient of `param`, whole: fp32, in its shape; None where there is none.

        As :meth:`local_grad`. At stages 0 and 1 the gradients of an accumulation that goes on are this rank's own, and so are
        all after the warm-up of 1-bit Adam.
        """
        unit, position = self._place(param)[0], self._place(param)[2]
        self._engine.schedule.grads.wait()
        if self._is_unreduced(unit):
            view = unit.grads.views[position]
            return (
                view.to(torch.float32, copy=True)
                if unit.grads.received[position]
                else torch.zeros_like(view, dtype=torch.float32)
            )
        part = self.local_grad(param)
        return None if part is None else self._gather(param, part)

    def set_grad(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Writes the gradient of `param`, between the last backward of an accumulation and the step.

        Raises:
            BadInput: when there are no gradients to write over, or `value` has another number of elements.
        """
        self._require_numel(value, local_of(param).numel(), "the parameter")
        unit, _, begin, end, first = self._part(param)
        if self._is_unreduced(unit) and self._engine.schedule.grads.boundary:
            unit.grads.views[self._place(param)[2]].copy_(value.view_as(unit.grads.views[self._place(param)[2]]))
            return
        self._set_grad_part(param, value.reshape(-1)[first : first + end - begin])

    def set_local_grad(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Writes this rank's part of the gradient of `param`.

        Raises:
            BadInput: as :meth:`set_grad`.
        """
        _, _, begin, end, _ = self._part(param)
        self._require_numel(value, end - begin, "the rank's part")
        self._set_grad_part(param, value.reshape(-1))

    # ------------------------------------------------------------------ where things are

    def _place(self, param: nn.Parameter) -> tuple[UnitState, FlatParam, int]:
        self._engine.checks.require_usable("engine")
        return self._places[id(param)]

    def _part(self, param: nn.Parameter) -> tuple[UnitState, FlatParam, int, int, int]:
        """Unit, flat, the elements ``[begin, end)`` of this rank's share that are the parameter's, and the first one's place
        in the parameter.
        """
        unit, flat, position = self._place(param)
        if not self._states.setup.shards_states:
            begin, numel = flat.layout.offsets[position], flat.layout.numels[position]
            return unit, flat, begin, begin + numel, 0
        rank = self._states.comm_of(flat.layout).rank
        start, end = flat.layout.overlap(position, rank)
        base = flat.layout.offsets[position] - rank * flat.layout.shard
        return (unit, flat, base + start, base + end, start) if start < end else (unit, flat, 0, 0, 0)

    def _buffer(self, key: str) -> Buffer:
        if key not in self._keys:
            raise BadInput(
                f"the optimizer keeps no {key!r}", where="optimizer state", remedy=f"it keeps {', '.join(self.keys())}"
            )
        return self._keys[key]

    def _tensor(self, unit: UnitState, buffer: Buffer) -> torch.Tensor | None:
        return unit.master if buffer is Buffer.PARAM_MASTER else unit.optim_states.get(buffer)

    def _read(self, unit: UnitState, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        if self._format is not None and buffer is not Buffer.PARAM_MASTER:
            blocks = self._blocks(self._format, unit, buffer, begin, end)
            return kernels.decode(blocks.codes, blocks.scales, self._format, blocks.map)[: end - begin]
        tensor = self._tensor(unit, buffer)
        if tensor is None:
            return self._states.optimizer_swapper.read(unit.name, buffer, begin, end)
        return tensor[begin:end]

    @torch.no_grad()
    def _write(self, unit: UnitState, buffer: Buffer, begin: int, end: int, values: torch.Tensor) -> None:
        if self._format is not None and buffer is not Buffer.PARAM_MASTER:
            blocks = self._blocks(self._format, unit, buffer, begin, end)
            whole = torch.zeros(blocks.scales.numel() * self._format.block, device=blocks.codes.device)
            whole[: end - begin].copy_(values)
            codes, scales = kernels.encode(whole, self._format, blocks.map)
            blocks.codes.copy_(codes)
            blocks.scales.copy_(scales)
            return
        tensor = self._tensor(unit, buffer)
        if tensor is not None:
            tensor[begin:end].copy_(values)
            if self._engine.optimizer_step is not None:
                self._engine.optimizer_step.states_were_written()
            return
        with self._states.share_in_file(unit, buffer) as share:
            share[begin:end].copy_(values)

    def _blocks(self, kept: kernels.BlockFormat, unit: UnitState, buffer: Buffer, begin: int, end: int) -> _Blocks:
        """Where elements ``[begin, end)`` of a quantised state of a unit's share are: a parameter's part, so whole blocks but
        for padding.
        """
        part, which = slice(begin, end), int(buffer is Buffer.OPTIM_EXP_AVG_SQ)
        scales = self._states.state_slice(unit, Buffer.OPTIM_SCALE, part).view(-1, 2)[:, which]
        return _Blocks(self._states.state_slice(unit, buffer, part), scales, (kept.first, kept.second)[which])

    def _gather(self, param: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        _, flat, begin, end, first = self._part(param)
        whole = torch.zeros(local_of(param).numel(), dtype=torch.float32, device=self._engine.device)
        whole[first : first + end - begin].copy_(part)
        if self._states.setup.shards_states:
            self._states.comm_of(flat.layout).all_reduce_sum(whole)
        return whole.view(local_of(param).shape)

    def _is_unreduced(self, unit: UnitState) -> bool:
        """Returns whether the unit's gradients are this rank's own, unsharded: at stages 0 and 1 within an accumulation, and
        where the ranks exchange momentum instead.
        """
        grads = self._engine.schedule.grads
        waits = unit.grads.slot is None and (grads.keeps_own or not grads.boundary)
        return waits and grads.has_grads and unit.grads.full is not None

    def _grad_part(self, param: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of the gradient where it is, 1-D."""
        grads = self._engine.schedule.grads
        unit, _, begin, end, first = self._part(param)
        if not grads.has_grads:
            return None
        if unit.offloaded is not None:
            if not unit.offloaded.has_grads:
                return None
            if unit.offloaded.update_requested:
                raise BadInput(
                    "updates with this step's gradients have begun, as neither clipping nor overflow checks delay them",
                    where="gradient",
                    remedy="set gradient_clipping, with which updates wait for the step",
                )
            unit.offloaded.current.grad_ready.synchronize()
            return unit.offloaded.current.grad[begin:end]
        grads.wait()
        if self._is_unreduced(unit):
            position = self._place(param)[2]
            return unit.grads.views[position].reshape(-1)[first : first + end - begin]
        return None if unit.grad is None else unit.grad[begin:end]

    @torch.no_grad()
    def _set_grad_part(self, param: nn.Parameter, values: torch.Tensor) -> None:
        part, unit = self._grad_part(param), self._place(param)[0]
        if part is None or not self._engine.schedule.grads.boundary:
            raise BadInput(
                "there are no reduced gradients",
                where="gradient",
                remedy="write it after the backward that ends an accumulation, and before the step",
            )
        part.copy_(values)
        step = self._engine.optimizer_step
        if unit.offloaded is not None and step is not None and (step.clip or step.may_skip):
            step.measure(unit, unit.offloaded.current.grad.to(self._engine.device))

    def _require_numel(self, value: torch.Tensor, numel: int, what: str) -> None:
        if value.numel() != numel:
            raise BadInput(f"{value.numel()} values for the {numel} elements of {what}", where="value")
