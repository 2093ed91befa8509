"""One rank under DDP: everything whole.

A save writes on the first rank what all ranks hold; nothing is allocated on the GPU.
Source: transformers 5.17, trainer.py (save_model, _save_optimizer_and_scheduler); accelerate 1.15, checkpointing.py
(save_accelerator_state); lightning 2.6, pytorch/trainer/connectors/checkpoint_connector.py (dump_checkpoint). What each way of
writing takes is said in Note [Writing files] of ``zeroplan/engines/saved_files.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.saving import Saver, Saving
from zeroplan.core.workload import Reference
from zeroplan.engines.saved_files import Written, largest_file
from zeroplan.engines.torch_rank import TorchRank


@dataclass(frozen=True, kw_only=True)
class DdpRank(TorchRank):
    """One rank under DDP. All ranks hold the same."""

    @cached_property
    def kept_gradients(self) -> int:
        """Elements of gradients that stay between steps: all, where ``zero_grad`` only fills them with zeros."""
        return 0 if self.workload.loop.set_to_none else self.graded

    @cached_property
    def reference(self) -> int:
        """Elements of a reference model beside the trained one."""
        return self.params if self.workload.objective.reference is Reference.MODEL else 0

    @property
    def plain(self) -> bool:
        """Whether parameters are whole tensors."""
        return True

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """This rank's elements of each parameter: all of them, since DDP shards nothing."""
        return self.numel

    def parts_of_save(self, saving: Saving) -> tuple[Written, ...]:
        """Return the host's bytes while the model is written, and then the optimizer's states."""
        adapters = self.parameters.adapters
        only_adapters = saving.saver is Saver.TRAINER and any(adapters)  # peft, PeftModel.save_pretrained
        weights = [nbytes for p in range(len(self.numel)) if adapters[p] or not only_adapters for nbytes in self.kept(p)]
        stepped = self.stepped() if saving.optimizer else []
        states = [nbytes for domain, p in stepped for _, nbytes in self.states(domain, p)]
        largest_state = max(states, default=0)
        if saving.saver is Saver.TRAINER:
            written = [sum(weights) if only_adapters else largest_file(weights), largest_state]
        elif saving.saver is Saver.ACCELERATE:
            written = [sum(weights), largest_state]
        elif saving.saver is Saver.LIGHTNING:  # one file, made in memory
            written = [sum(weights) + sum(states) + max(*weights, largest_state)]
        else:
            written = [max(*weights, largest_state)]
        return tuple(Written(0, first) for first in written)
