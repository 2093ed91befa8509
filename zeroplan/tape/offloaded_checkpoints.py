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
    for number, one in enumerate(found.inputs):
        holder = tape.arg[one.forward]
        if number == 0 and found.first_kept is None:  # the model's own variable holds what its embedding made
            holder = _caller(tape, holder)
        left = edit.first(Op.EXIT, holder, one.forward)
        assert left is not None, "a module that is entered is left"
        edit.behind(left).free(one.storage)
        back = edit.before(one.again).alloc(one.bytes, Kind.CHECKPOINT)
        end = edit.freed[one.storage]
        _hold_until_returned(edit, tape.arg[one.forward], range(one.again, end), one.bytes)
        edit.replace(end, (Op.FREE, back, 0, 0, -1))
    if found.first_kept is not None:
        back = edit.before(found.first_kept.start).alloc(found.inputs[0].bytes, Kind.CHECKPOINT)
        edit.before(found.first_kept.stop).free(back)
    return edit.result()


def _hold_until_returned(edit: TapeEdit, block: int, again: range, output: int) -> None:
    """Run a block again before anything of its backward, and keep what the function's own backward holds until it returns:
    the block's output, and autocast's copies of its weights.

    Args:
        again: the events from the block's second forward to the end of its backward.
        output: bytes.
    """
    tape = edit.tape
    entered = (at for at in range(again.start) if (tape.op[at], tape.arg[at]) == (Op.BWD_ENTER, block))
    begun = max(entered, default=again.start)
    behind = 1 + max(at for at in again if tape.op[at] == Op.ENTER)
    while tape.op[behind] == Op.ALLOC and tape.kind[behind] in (Kind.CAST, Kind.SAVED):
        behind += 1
    after = edit.before(behind)
    made = after.alloc(output, Kind.SAVED)
    early = edit.allocations(range(begun, again.start))
    edit.drop(early)
    for at in early:
        after.events.append(edit.event(at))
    casts = [tape.arg[at] for at in edit.allocations(again) if tape.kind[at] == Kind.CAST]
    edit.drop_frees([one for one in casts if edit.freed[one] in again])
    edit.behind(again.stop).free(made, *casts)


def _caller(tape: ExpandedTape, block: int) -> int:
    """Return the module whose forward calls a block: the nearest one around it that is no list of blocks."""
    around = tape.modules[block].parent
    while tape.modules[around].type == "ModuleList":
        around = tape.modules[around].parent
    return around


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
