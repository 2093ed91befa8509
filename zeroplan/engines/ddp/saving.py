"""Saving under DDP: the first rank writes what all ranks hold; nothing is allocated on the GPU.

Source: transformers 5.17, trainer.py (save_model, _save_optimizer_and_scheduler); accelerate 1.15, checkpointing.py
(save_accelerator_state); lightning 2.6, pytorch/trainer/connectors/checkpoint_connector.py (dump_checkpoint). What each way of
writing takes is said in Note [Writing files] of ``zeroplan/engines/saved_files.py``.
"""

from __future__ import annotations

from zeroplan.core.saving import Saver, Saving
from zeroplan.engines.ddp.rank import DdpRank
from zeroplan.engines.saved_files import Written, largest_file


def parts_of_save(rank: DdpRank, saving: Saving) -> tuple[Written, ...]:
    """Return the host's bytes while the model is written, and then the optimizer's states."""
    adapters = rank.parameters.adapters
    only_adapters = saving.saver is Saver.TRAINER and any(adapters)  # peft, PeftModel.save_pretrained
    weights = [nbytes for p in range(len(rank.numel)) if adapters[p] or not only_adapters for nbytes in rank.kept(p)]
    stepped = rank.stepped() if saving.optimizer else []
    states = [nbytes for domain, p in stepped for _, nbytes in rank.states(domain, p)]
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
