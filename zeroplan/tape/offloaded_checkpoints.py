"""Inputs of checkpointed blocks that wait on the host, as DeepSpeed's ``CheckpointHiddenStatesOffload`` lets them.

Note [Offloaded checkpoints]
    While its context lasts, a checkpointed block's input goes to pinned memory by a stream of its own. The newest one stays;
    the one before it is copied when the newest is there, and is let go when the next but one is: so an input leaves the GPU
    when the second block behind its own is entered. The last two inputs of a forward never leave, but the last but one has
    its copy on the host. The backward of a block makes its input again on the GPU, and **keeps it until the context ends**,
    behind the backward: what was spared at the loss is back when the first block's gradients are made.

    Pinned buffers are used again, a buffer for each input but the last. What comes back is allocated on the copying stream,
    whose segments serve no other. The context has that stream from when it is made. A program makes it once, and enters it
    for each micro batch; one that makes it anew reserves what comes back on each of the 32 streams that torch hands out in
    turn (K00 and K01 in benchmarks/results/mesh_deepspeed.jsonl, which had four).

    Source: DeepSpeed 0.19.8, runtime/activation_checkpointing/offload_activations.py (``_ActivationOffloadEngine`` with its
    defaults ``max_fwd_stash_count`` 2, ``keep_last_count`` 1; ``_restore_tensor``, which caches; ``_sync_and_clear``); torch,
    c10/cuda/CUDAStream.cpp (``kStreamsPerPool``)
"""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.tape.checkpointed_inputs import checkpointed_inputs
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, blocks_of

#: Inputs that are on the GPU at the end of the forward (``keep_last_count``, and the last that was copied).
_STAYING = 2


def with_offloaded_checkpoints(tape: ExpandedTape) -> ExpandedTape:
    """Return the tape in which checkpointed inputs leave in the forward and come back. See Note [Offloaded checkpoints].

    Raises:
        BadInput: a model whose blocks' inputs are not found.
    """
    found = checkpointed_inputs(tape, set(blocks_of(tape.modules)))
    inputs = found.inputs
    if not inputs or len(inputs) != found.blocks:
        raise BadInput(
            "the inputs of its checkpointed blocks are not found", where="--offload-checkpoints", remedy="leave it out"
        )
    edit = TapeEdit(tape)
    edit.drop_frees([one.storage for one in inputs])
    kept = []
    for number, one in enumerate(inputs):
        storage = one.storage
        if number + _STAYING < len(inputs):
            edit.before(inputs[number + _STAYING].forward).free(storage)
            storage = edit.before(one.again).alloc(one.bytes, Kind.RETURNED)
        kept.append(storage)
    edit.before(found.backward_end).free(*kept)
    return edit.result()
