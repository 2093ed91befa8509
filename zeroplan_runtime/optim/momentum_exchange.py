"""Averages the ranks' momentum in one bit an element: the compression stage of 1-bit Adam (Tang et al. 2021, algorithm 1).

Two collectives a unit: an all-to-all of the signs of what each rank has, and an all-gather of the signs of the mean. What both
compressions leave out stays in two errors, which the next step adds.
"""

from __future__ import annotations

import torch

from zeroplan.core.one_bit import message_words
from zeroplan_runtime import kernels
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.unit_state import UnitState


class MomentumExchange:
    """Exchanges the momentum of each unit.

    Args:
        model_states: the units; their optimizer compresses.
    """

    def __init__(self, model_states: ModelStates) -> None:
        self._model_states, self._comm = model_states, model_states.comm
        self._is_whole = False  # every rank's momentum is current in all elements

    def begin(self) -> None:
        """Makes every unit's momentum whole on every rank, before the first exchange after a warm-up or a load."""
        setup = self._model_states.setup
        for unit in self._model_states.units if setup.shards_states and not self._is_whole else ():
            if unit.exchanged is not None and unit.trainable is not None:
                momentum = unit.exchanged.momentum
                self._comm.all_gather(momentum, self._model_states.local_shard(momentum, unit.trainable.layout))
        self._is_whole = True

    def was_written(self) -> None:
        """Notes that each rank's momentum is current in the rank's share only: a warm-up step or a load has written it."""
        self._is_whole = False

    def exchange(self, unit: UnitState, beta1: float, scalars: torch.Tensor | None) -> None:
        """Adds this rank's gradients to the unit's momentum and averages it over the ranks.

        Args:
            unit: the unit, with gradients that were not reduced.
            beta1: the momentum's decay.
            scalars: the step's, with the gradients' factor; where they say so, nothing is changed.
        """
        assert unit.exchanged is not None
        assert unit.trainable is not None
        assert unit.grad_full is not None
        ranks, shard = self._comm.world_size, unit.trainable.layout.shard
        words = message_words(shard)
        sent, received = (one[: ranks * words] for one in self._model_states.messages)
        mine = sent[self._comm.rank * words : (self._comm.rank + 1) * words]
        kept = unit.exchanged
        kernels.sign_pack(kept.momentum, unit.grad_full, kept.worker_error, sent, ranks=ranks, beta1=beta1, scalars=scalars)
        self._comm.record_collective(2 * unit.index + 1)
        self._comm.all_to_all(received, sent)
        kernels.sign_average(received, kept.server_error, mine, ranks=ranks, scalars=scalars)
        self._comm.all_gather(sent, mine)
        kernels.sign_unpack(sent, kept.momentum, ranks=ranks, scalars=scalars)
        if kept.padding:
            torch._foreach_zero_(kept.padding)
