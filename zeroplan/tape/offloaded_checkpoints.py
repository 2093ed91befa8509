"""Inputs of checkpointed blocks that wait on the host: as DeepSpeed's ``CheckpointHiddenStatesOffload`` lets them, or as a
function of autograd around each block does, which Unsloth, LLaMA-Factory and axolotl have.

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

    The function copies its input to the host without waiting, into memory that torch pins for it, and runs its block without
    autograd; so the input is let go as soon as the block returns. The backward copies it back by the computing stream, runs the
    block again, and lets it go with the block's own gradients. All inputs are on the host when the forward ends; the first
    block's is on the GPU, too, where autograd keeps it as a leaf, before a frozen model with adapters.

    Source: DeepSpeed 0.19.8, runtime/activation_checkpointing/offload_activations.py (``_ActivationOffloadEngine`` with its
    defaults ``max_fwd_stash_count`` 2, ``keep_last_count`` 1; ``_restore_tensor``, which caches; ``_sync_and_clear``); torch,
    c10/cuda/CUDAStream.cpp (``kStreamsPerPool``), aten/src/ATen/native/TensorConversions.cpp (``_to_copy``: ``pin_out``);
    LLaMA-Factory 0.9.6, model/model_utils/checkpointing.py (``UnslothGradientCheckpointing``)
"""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.tape.checkpointed_inputs import CheckpointedInputs, checkpointed_inputs
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Mark, Op, blocks_of

#: Inputs that are on the GPU at the end of the forward (``keep_last_count``, and the last that was copied).
_STAYING = 2


def with_offloaded_checkpoints(tape: ExpandedTape) -> ExpandedTape:
    """Return the tape in which checkpointed inputs leave in the forward and come back. See Note [Offloaded checkpoints].

    Raises:
        BadInput: a model whose blocks' inputs are not found.
    """
    found = _found(tape)
    inputs = found.inputs
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


def with_checkpoints_by_function(tape: ExpandedTape) -> ExpandedTape:
    """Return the tape in which each block's own function keeps its input on the host. See Note [Offloaded checkpoints].

    Raises:
        BadInput: a model whose blocks' inputs are not found.
    """
    found = _found(tape, first_kept=True)
    edit = TapeEdit(tape)
    for one in found.inputs:
        left = edit.first(Op.EXIT, tape.arg[one.forward], one.forward)
        assert left is not None, "a block that is entered is left"
        edit.behind(left).free(one.storage)
        back = edit.before(one.again).alloc(one.bytes, Kind.CHECKPOINT)
        edit.replace(edit.freed[one.storage], (Op.FREE, back, 0, 0, -1))
    if found.first_kept is not None:
        back = edit.before(found.first_kept.start).alloc(found.inputs[0].bytes, Kind.CHECKPOINT)
        edit.before(found.first_kept.stop).free(back)
    return edit.result()


def on_host_by_function(tape: ExpandedTape) -> tuple[int, ...]:
    """Return the bytes of each input that :func:`with_checkpoints_by_function` made wait on the host."""
    edit = TapeEdit(tape)
    end, last = edit.hooks[Op.MARK, Mark.FORWARD_END], edit.hooks[Op.MARK, Mark.BACKWARD_END]
    return tuple(tape.aux[at] for at in edit.allocations(range(end, last)) if tape.kind[at] == Kind.CHECKPOINT)


def _found(tape: ExpandedTape, *, first_kept: bool = False) -> CheckpointedInputs:
    found = checkpointed_inputs(tape, set(blocks_of(tape.modules)))
    known = len(found.inputs) + (first_kept and found.first_kept is not None)
    if not found.inputs or known != found.blocks:
        raise BadInput(
            "the inputs of its checkpointed blocks are not found", where="--offload-checkpoints", remedy="leave it out"
        )
    return found
