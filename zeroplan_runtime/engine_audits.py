"""What the engine looks for in the first micro batches: reads of parameters that are not gathered, and aliases of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from zeroplan_runtime.audit import Audit
from zeroplan_runtime.checks import kept_alias
from zeroplan_runtime.compiled import is_compiled, refuse_compiled, uncompiled
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.parameter_aliases import ParameterAliases


class EngineAudits(EngineParts):
    """Audits of forwards and backwards. What is audited runs uncompiled."""

    _aliases: ParameterAliases
    _audit: Audit | None = None
    _watches_aliases = True
    _ran_uncompiled = False

    def _audited(self) -> AbstractContextManager[object]:
        """Returns a context that checks parameter reads in the first micro batches at stage 3, and aliases in the first of
        all.
        """
        steps = self.settings.runtime_options.audit_steps
        audits = self.progress.micro_steps < steps and self.model_states.setup.shards_params
        self.schedule.keeps_guard = audits or self._watches_aliases
        if self._watches_aliases:
            self.schedule.guard.watch()
        if not self.schedule.keeps_guard:
            self._audit = None
            if self._ran_uncompiled and is_compiled(self.module):
                refuse_compiled(self.module)
                self.model_states.release_cache()  # see Note [What the uncompiled micro batch leaves] in compiled.py
            self._ran_uncompiled = False
            return nullcontext()
        self._ran_uncompiled = True
        if audits and self._audit is None:
            self._audit = Audit(self.model_states)
        return uncompiled(self._audit if self._audit is not None else nullcontext())

    def _look_for_aliases(self) -> None:
        """Looks for aliases that forwards took. The ranks agree on what follows from those of the first.

        Raises:
            BadInput: when one is kept on any rank, at stage 3, and for an array of numpy's whose values would get old.
        """
        if self.host is not None or self.model_states.setup.shards_params:
            self._aliases.require_no_arrays()
        if not self._watches_aliases:
            if self.schedule.hooked and not self.schedule.has_aliases:
                self._aliases.check()
            return
        name = self.schedule.guard.end_watch()
        found = torch.tensor(float(self.schedule.has_aliases or bool(name)), device=self.device)
        if self.comm.world_size > 1:
            self.comm.all_reduce_max(found)
        self.schedule.has_aliases = bool(found)
        if self.schedule.has_aliases and self.model_states.setup.shards_params:
            raise kept_alias(name)
        self._watches_aliases = False

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        """The engine's tensors that may lie in the parameters' memory."""
        for unit in self.model_states.units:
            yield unit.param_slot.tensor
            for flat in unit.flats():
                yield from (flat.full, flat.shard, flat.part)
            yield from (one for one in (unit.master, unit.param_16bit) if one is not None)
            hosts = unit.offloaded.buffers if unit.offloaded is not None else ()
            slices = self.optimizer_step.slices[unit.index] if self.optimizer_step is not None else []
            for part in [*slices, *(part for buffers in hosts for part in buffers.slices)]:
                yield from (one for one in (part.master, part.param) if one is not None)
            yield from (one for buffers in hosts if (one := buffers.param) is not None)
