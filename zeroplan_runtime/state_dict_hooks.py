"""``state_dict()`` and ``load_state_dict()`` of a model under an engine, and of any module in it.

Up to stage 2 the parameters are unsharded and both work; loaded values reach the fp32 masters before these are used next, in
the precision of the parameters. At stage 3 the parameters are sharded and both are refused, but for parameters that DeepSpeed's
``GatheredParameters`` holds whole at the moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checks import refuse_copy
from zeroplan_runtime.full_tensors import stands_in
from zeroplan_runtime.model_states import ModelStates
from zeroplan_runtime.parameter_guard import plain_class


class StateDictHooks:
    """Hooks on the modules of `model` that have parameters.

    Args:
        model: the model under the engine.
        model_states: its parameters and masters.
        synchronize: called before parameters are read or loaded; returns when no update or copy writes them any more.
        after_load: called after parameters were loaded.
    """

    def __init__(
        self, model: nn.Module, model_states: ModelStates, *, synchronize: Callable[[], None], after_load: Callable[[], None]
    ) -> None:
        self._model, self._model_states = model, model_states
        self._synchronize, self._after_load = synchronize, after_load
        self.handles: list[Any] = []
        for module in model.modules():
            if module is model or module._parameters:
                hooked: Any = module  # torch's registration functions are untyped
                self.handles += [
                    hooked.register_state_dict_pre_hook(self._before_state_dict),
                    hooked.register_load_state_dict_pre_hook(self._before_load),
                    hooked.register_load_state_dict_post_hook(self._after_load_hook),
                ]

    __reduce_ex__ = refuse_copy

    def remove(self) -> None:
        """Removes the hooks from the model."""
        for handle in self.handles:
            handle.remove()

    def _are_gathered(self, module: nn.Module) -> bool:
        """Whether the module's own parameters, or all of the whole model, are plain tensors now."""
        params = self._model.parameters() if module is self._model else module._parameters.values()
        return all(param is None or type(param) is plain_class(type(param)) for param in params)

    def _before_state_dict(self, module: nn.Module, *_: Any) -> None:
        if stands_in(self._model):
            return
        if self._model_states.setup.shards_params:
            if self._are_gathered(module):
                return
            raise BadInput(
                "state_dict() cannot give parameters that are sharded",
                where="stage 3",
                remedy="use engine.module_state_dict(), also for save_pretrained(folder, state_dict=…), save_checkpoint() or "
                "save_16bit_model()",
            )
        self._synchronize()

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        remedy = "load before initialize(), or use engine.load_checkpoint()"
        if self._model_states.setup.shards_params:
            if self._are_gathered(module):
                return
            raise BadInput("load_state_dict() cannot load parameters that are sharded", where="stage 3", remedy=remedy)
        if any(unit.master is None for unit in self._model_states.units if unit.trainable is not None):
            raise BadInput("load_state_dict() cannot load masters in files", where="offload_optimizer", remedy=remedy)
        self._synchronize()

    def _after_load_hook(self, *_: Any) -> None:
        if not self._model_states.setup.shards_params:
            self._after_load()
