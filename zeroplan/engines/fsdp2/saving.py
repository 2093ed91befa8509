"""Saving under FSDP2: sharded tensors as they lie, or gathered one after another and moved to the first rank's host.

Note [FSDP2's saves]
    The sharded form holds references. accelerate, which the HF Trainer calls, first copies every shard to the host; the model's
    copies are gone before the optimizer's are made (accelerate 1.15, utils/fsdp_utils.py, save_fsdp_model and
    save_fsdp_optimizer, with ``ShardedStateDictConfig(offload_to_cpu=True)``). A loop of one's own hands the references to
    torch's distributed checkpoint, which copies all into pinned memory. With adapters the Trainer hands over those alone,
    on the GPU (_get_model_state_dict).
    A tied weight is gathered and copied once for each name that it has in the state dict.
    The full form gathers one tensor after another, with the padding of its first dimension, on every GPU; the first rank copies
    it to pageable memory, the others drop it (torch 2.13, distributed/_state_dict_utils.py, _gather_state_dict;
    distributed/tensor/placement_types.py, Shard._to_replicate_tensor). Parts on the host pass over the GPU. A loop of one's own
    has weights and states of one checkpoint together; accelerate and the Trainer, one after the other.
    The Trainer gathers the weights also for ``save_pretrained``, the frozen ones included (accelerator.py, get_state_dict).
"""

from __future__ import annotations

from collections.abc import Iterator

from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.engines.fsdp2.rank import Fsdp2Rank
from zeroplan.engines.saved_files import Written, pinned_copies


def parts_of_save(rank: Fsdp2Rank, saving: Saving) -> tuple[Written, ...]:
    """Return the host's bytes while the model is written, and then the optimizer's states. See Note [FSDP2's saves]."""
    if saving.state_dict is StateDict.FULL:
        model = sum(rank.width(p) * rank.numel[p] for p in rank.parameters.entries)
        optimizer = sum(rank.whole_states_of(p) for p in rank.trained) if saving.optimizer else 0
        firsts = (model + optimizer,) if saving.saver is Saver.LOOP else (model, optimizer)
        return tuple(Written(0, first) for first in firsts)
    adapters = rank.parameters.adapters
    only_adapters = saving.saver is Saver.TRAINER and any(adapters)
    weights = [rank.width(p) * rank.chunks[p] for p in rank.parameters.entries if adapters[p] or not only_adapters]
    stepped = rank.stepped() if saving.optimizer else []
    states = [nbytes for domain, p in stepped for _, nbytes in rank.states(domain, p)]
    if rank.offload:  # on the host already; a shard with padding is copied when it is written
        needs = [max([*weights, *states], default=0)]
    elif saving.saver is Saver.LOOP:
        needs = [pinned_copies([*weights, *states])]
    else:
        needs = [pinned_copies(weights) if only_adapters else sum(weights), sum(states)]
    return tuple(Written(every, every) for every in needs)


def gathered(rank: Fsdp2Rank, saving: Saving) -> Iterator[tuple[int, int]]:
    """Yield, tensor by tensor, the bytes that come from the host and those that are gathered; none in the sharded form."""
    if saving.state_dict is not StateDict.FULL or rank.ranks == 1:
        return
    for p in rank.parameters.entries:
        yield (rank.width(p) * rank.chunks[p] if rank.offload else 0), rank.width(p) * rank.padded(p)
    for domain, p in rank.stepped() if saving.optimizer else ():
        for _, nbytes in rank.states(domain, p):
            yield (nbytes if rank.offload else 0), nbytes * rank.ranks
