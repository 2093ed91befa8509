"""Bytes on the host that writing a file takes, by the function that writes it.

Note [Writing files]
    ``torch.save`` brings one storage after another to the host and writes it, so it needs room for the largest one; tensors on
    the host are written from where they are (torch 2.13, serialization.py, _save). safetensors copies every tensor of a file
    to the host before it writes the first; tensors on the host are not copied (safetensors 0.8, torch.py, _flatten_as_ptr).
    transformers divides a model into files of at most 50 GB (transformers 5.17, modeling_utils.py, save_pretrained;
    huggingface_hub, serialization/_torch.py, split_torch_state_dict_into_shards), accelerate writes one file (accelerate 1.15,
    checkpointing.py, save_accelerator_state). Lightning saves into memory and writes that to the file (lightning 2.6,
    fabric/utilities/cloud_io.py, _atomic_save). torch's distributed checkpoint copies each tensor of a rank into pinned
    memory of its own (_OverlappingCpuLoader) and keeps all copies until the file is written; what was pinned stays pinned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.core.buffers import Phase
from zeroplan.core.parameters import Parameters
from zeroplan.core.saving import Saver, Saving
from zeroplan.core.workload import Workload

if TYPE_CHECKING:
    from zeroplan.engines.simulation import CheckpointPhase

#: Bytes of a file of safetensors at most, unless one tensor has more (``max_shard_size``).
LARGEST_FILE = 50 * 1000**3


class Written(NamedTuple):
    """One part of a save, which begins when the part before it has let go: bytes on every rank's host, and on the first's."""

    every: int
    first: int


def save_phase(held: int, *parts: Written) -> CheckpointPhase:
    """Return the phase of a save on the host, beside the `held` bytes that are there between steps.

    A node is counted with the first rank among its own, and with all others at their highest at the same time.
    """
    from zeroplan.engines.simulation import CheckpointPhase

    every = max((part.every for part in parts), default=0)
    first = max((part.first for part in parts), default=0)
    return CheckpointPhase(Phase.SAVE, 0, held + every, max(0, first - every))


def rewrites_experts(workload: Workload, parameters: Parameters) -> bool:
    """Return whether transformers takes stacked experts apart before it writes them (revert_weight_conversion)."""
    saving = workload.technique(Saving)
    if saving is None or saving.saver is not Saver.TRAINER or any(parameters.adapters):
        return False
    return any(len(shape) > 2 and "experts" in name for name, shape in zip(parameters.names, parameters.shapes, strict=True))


EXPERTS_APART = "transformers takes stacked experts apart before it writes them, into copies that are in no figure"


def largest_file(sizes: Iterable[int]) -> int:
    """Return the bytes of the largest file into which ``save_pretrained`` divides tensors of these bytes, in their order."""
    largest = current = 0
    for nbytes in sizes:
        if nbytes > LARGEST_FILE:  # a file of its own
            largest = max(largest, nbytes)
            continue
        if current + nbytes > LARGEST_FILE:
            current = 0
        current += nbytes
        largest = max(largest, current)
    return largest


def pinned_copies(sizes: Iterable[int]) -> int:
    """Return the bytes that a rank's distributed checkpoint pins for tensors of these bytes on the GPU.

    Source: torch 2.11 to 2.13, distributed/checkpoint/filesystem.py, _write_files_from_queue, whose ``tensor_dict`` keeps each.
    """
    from zeroplan.simulate.allocator.pinned_host import PinnedAllocator

    pinned = PinnedAllocator()
    for nbytes in sizes:
        pinned.alloc(nbytes)
    return pinned.peak_resident
