"""A reference's forward behind a model's own: a sound tape, and nothing of it waits for the backward."""

from __future__ import annotations

from tests.workloads import flat_workload
from zeroplan.core.workload import Precision
from zeroplan.models.load import load_model
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.reference_forward import with_reference
from zeroplan.tapes import find_tape

BATCH, SEQ = 2, 256


def tape_of(*, checkpointed: bool) -> ExpandedTape:
    workload = flat_workload(micro_batch=BATCH, seq_len=SEQ, precision=Precision.MIXED, gradient_checkpointing=checkpointed)
    stored = find_tape(load_model("meta-llama/Llama-3.2-1B"), workload)
    assert stored is not None
    return stored.expand(BATCH, SEQ, None)


def alive_at(tape: ExpandedTape, mark: Mark) -> tuple[int, int]:
    """Bytes that are there at a mark, and the most since the mark before it; ids are made once and freed while there."""
    now: dict[int, int] = {}
    total = most = 0
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC:
            assert arg not in now
            now[arg] = aux
            total += aux
            most = max(most, total)
        elif op == Op.FREE:
            total -= now.pop(arg)
        elif op == Op.MARK:
            if arg == mark:
                return total, most
            most = total
    raise AssertionError(mark)


def hooked_at(tape: ExpandedTape, mark: Mark) -> int:
    return next(i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if (op, arg) == (Op.MARK, mark))


def test_the_references_forward_leaves_nothing_and_keeps_one_blocks_worth() -> None:
    model, reference = tape_of(checkpointed=False), tape_of(checkpointed=True)
    both = with_reference(model, reference)
    kept, most = alive_at(model, Mark.FORWARD_END)
    after, beside = alive_at(both, Mark.FORWARD_END)
    assert after == kept
    alone = alive_at(reference, Mark.FORWARD_END)[1]
    assert beside <= max(most, kept + alone)
    assert beside > kept  # it runs while the model's activations wait
    # Its sixteen checkpointed inputs are never there at once, so it peaks below the checkpointed forward.
    hidden = 2 * BATCH * SEQ * 2048
    assert beside <= kept + alone - 13 * hidden
    hooked = with_reference(model, reference, hooked=True)
    begin, end = (hooked_at(hooked, mark) for mark in (Mark.REFERENCE_BEGIN, Mark.REFERENCE_END))
    entered = [arg for op, arg in zip(hooked.op[begin:end], hooked.arg[begin:end], strict=True) if op == Op.ENTER]
    assert len(entered) == len(set(entered)) == hooked.op[begin:end].count(Op.EXIT)  # no block is recomputed there
    assert {reference.modules[module].type for module in entered} >= {"LlamaForCausalLM", "LlamaDecoderLayer", "Linear"}
    assert [op for op in both.op if op not in (Op.ALLOC, Op.FREE)] == [op for op in model.op if op not in (Op.ALLOC, Op.FREE)]
