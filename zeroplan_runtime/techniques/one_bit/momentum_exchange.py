"""Averages the ranks' momentum or gradients in one bit an element (Tang et al. 2021, algorithm 1).

Two collectives a unit: an all-to-all of the signs of what each rank has, and an all-gather of the signs of the mean. What both
compressions leave out stays in two errors, which the next step adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroplan.core.buffers import Buffer
from zeroplan.core.one_bit import message_words
from zeroplan_runtime import kernels
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.techniques.one_bit.compression_schedule import CompressionStep, Exchanged
from zeroplan_runtime.unit_state import GroupSlice, UnitState


class MomentumExchange:
    """Exchanges the momentum of each unit.

    Args:
        model_states: the units; their optimizer compresses.
    """

    def __init__(self, model_states: ModelStates) -> None:
        self._model_states, self._comm = model_states, model_states.comm
        self._is_whole = False  # every rank's momentum is current in all elements

    def begin(
        self, step: CompressionStep, number: int, groups: Sequence[Mapping[str, Any]], scalars: torch.Tensor | None
    ) -> None:
        """Prepares for the exchanges of a step, which follow for each unit.

        Momentum is made whole on every rank before the first time that it is exchanged after another step or a load. Errors of
        gradients are none of momentum, so both begin at zero with it.

        Args:
            step: what is exchanged in it.
            number: of the applied step, from 1.
            groups: the hyperparameters.
            scalars: the step's.
        """
        if step.begins:
            self._model_states.forget_errors()
        if step.exchanged is not Exchanged.SIGNS_OF_MOMENTUM:
            self.was_written()
            return
        setup = self._model_states.setup
        for unit in self._model_states.units if setup.shards_states and not self._is_whole else ():
            if unit.exchanged is not None and unit.trainable is not None:
                momentum = unit.exchanged.momentum
                self._comm.all_gather(momentum, self._model_states.local_shard(momentum, unit.trainable.layout))
        self._is_whole = True

    def was_written(self) -> None:
        """Notes that each rank's momentum is current in the rank's share only: another step or a load has written it."""
        self._is_whole = False

    def exchange(self, unit: UnitState, what: Exchanged, betas: tuple[float, float], scalars: torch.Tensor | None) -> None:
        """Adds this rank's gradients to the unit's momentum, and averages one of the two over the ranks.

        Args:
            unit: the unit, with gradients that were not reduced.
            what: the sum is averaged, or the gradients are before they are added.
            betas: the moments' decays.
            scalars: the step's, with the gradients' factor; where they say so, nothing is changed.
        """
        kept_part, decay = (betas[0], 0.0) if what is Exchanged.SIGNS_OF_MOMENTUM else (0.0, betas[0])
        self._average(unit, kept_part, decay, scalars)
        if what is Exchanged.SIGNS_OF_GRADIENT:
            # One bit has no zero, and the next step may be Adam's own: its quotient has no bound where v is 0.
            exp_avg, exp_avg_sq = (unit.optim_states[b] for b in (Buffer.OPTIM_EXP_AVG, Buffer.OPTIM_EXP_AVG_SQ))
            exp_avg.masked_fill_(exp_avg_sq == 0, 0.0)

    def _average(self, unit: UnitState, beta1: float, decay: float, scalars: torch.Tensor | None) -> None:
        """Averages β₁ · momentum + (1 − β₁) · gradient over the ranks, in one bit an element, and lets `decay` of the momentum
        stay beside it.
        """
        self._unpack(unit, self._mean_of_signs(unit, beta1, scalars), decay, scalars)

    def _mean_of_signs(self, unit: UnitState, beta1: float, scalars: torch.Tensor | None = None) -> torch.Tensor:
        """Averages β₁ · momentum + (1 − β₁) · gradient over the ranks, and returns the mean's messages, one a rank."""
        assert unit.exchanged is not None
        assert unit.trainable is not None
        assert unit.grads.full is not None
        kept, ranks, words = unit.exchanged, self._comm.world_size, message_words(unit.trainable.layout.shard)
        sent, received = (one[: ranks * words] for one in self._model_states.messages)
        mine = sent[self._comm.rank * words : (self._comm.rank + 1) * words]
        kernels.sign_pack(kept.momentum, unit.grads.full, kept.worker_error, sent, ranks=ranks, beta1=beta1, scalars=scalars)
        self._comm.record_collective(2 * unit.index + 1)
        self._comm.all_to_all(received, sent)
        kernels.sign_average(received, kept.server_error, mine, ranks=ranks, scalars=scalars)
        self._comm.all_gather(sent, mine)
        return sent

    def _unpack(self, unit: UnitState, sent: torch.Tensor, decay: float = 0.0, scalars: torch.Tensor | None = None) -> None:
        """Writes the values of messages to the momentum, of which `decay` stays beside them."""
        assert unit.exchanged is not None
        kernels.sign_unpack(sent, unit.exchanged.momentum, ranks=self._comm.world_size, decay=decay, scalars=scalars)
        if unit.exchanged.padding:
            torch._foreach_zero_(unit.exchanged.padding)

    def updated(
        self, unit: UnitState, step: CompressionStep, slices: Sequence[GroupSlice], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Is called after the unit's update in a step that compresses."""

    def end(self) -> None:
        """Is called after all updates of a step that compresses."""
