"""TRL's head in tiles, laid over shipped tapes: a sound tape, sizes by hand, and no change where the head is another."""

from collections.abc import Iterator

import pytest

from tests.workloads import flat_workload
from zeroplan.core.workload import Precision, Workload
from zeroplan.models.load import load_model
from zeroplan.tape.chunked_head import with_chunked_head
from zeroplan.tape.expanded import ExpandedTape, Kind, Op
from zeroplan.tapes import find_tape

BATCH, SEQ = 8, 1024
ROWS, TOKENS = BATCH * (SEQ - 1), BATCH * SEQ
WORDS, WIDTH = 128_256, 2048  # of Llama-3.2-1B
TILE = 4096 * 32_768 * 2


def tape_of(precision: Precision, model: str = "meta-llama/Llama-3.2-1B", **options: bool) -> ExpandedTape:
    workload = flat_workload(micro_batch=BATCH, seq_len=SEQ, precision=precision, gradient_checkpointing=True)
    stored = find_tape(load_model(model), workload, **options)
    assert stored is not None
    return stored.expand(BATCH, SEQ, None)


def alive(tape: ExpandedTape) -> Iterator[tuple[int, set[int]]]:
    """By event, the storages that are there after it; an id is made once and freed only while it is there."""
    now: set[int] = set()
    for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)):
        if op == Op.ALLOC:
            assert arg not in now
            now.add(arg)
        elif op == Op.FREE:
            now.remove(arg)
        yield i, now


@pytest.mark.parametrize(
    ("precision", "zero3"), [(Precision.MIXED, False), (Precision.MIXED, True), (Precision.AUTOCAST, False)], ids=str
)
@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"], ids=("tied", "untied"))
def test_the_rest_of_the_tape_is_as_it_was(model: str, precision: Precision, zero3: bool) -> None:
    """A weight's gradient among it, which autograd hands over within the head's backward where the embedding has its own."""
    before = tape_of(precision, model, zero3=zero3)
    after = with_chunked_head(before, batch=BATCH, seq_len=SEQ)
    ends = [len(list(alive(tape))[-1][1]) for tape in (before, after)]
    assert ends[0] == ends[1]
    kinds = [{Kind(kind) for op, kind in zip(tape.op, tape.kind, strict=True) if op == Op.ALLOC} for tape in (before, after)]
    assert kinds[0] - kinds[1] >= {Kind.LOGITS, Kind.LOSS}
    hooks = [[(op, arg) for op, arg in zip(t.op, t.arg, strict=True) if op not in (Op.ALLOC, Op.FREE)] for t in (before, after)]
    assert hooks[0] == hooks[1]


@pytest.mark.parametrize(
    ("precision", "hidden", "weight"),
    [(Precision.MIXED, 2, 2), (Precision.AUTOCAST, 4, 4)],
    ids=("bf16", "fp32 under autocast"),
)
def test_the_backward_holds_both_sums_in_fp32_and_one_tile(precision: Precision, hidden: int, weight: int) -> None:
    tape = with_chunked_head(tape_of(precision), batch=BATCH, seq_len=SEQ)
    head = next(i for i, module in enumerate(tape.modules) if module.name == "lm_head")
    begin = next(i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if (op, arg) == (Op.BWD_ENTER, head))
    end = next(i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if (op, arg) == (Op.BWD_EXIT, head))
    sizes = tape.storage_bytes
    held = {i: sum(sizes[storage] for storage in now) for i, now in alive(tape) if begin - 1 <= i <= end}
    sums = 4 * (ROWS * WIDTH + WORDS * WIDTH)
    # One copy of each result in its own dtype; under autocast the sums are the results, and tiles of the fp32 factors are cast.
    copies = 2 * (ROWS * WIDTH + WORDS * WIDTH) if weight == 2 else 2 * (2 * 4096 * WIDTH + 2 * 32_768 * WIDTH)
    assert max(held.values()) - held[begin - 1] == sums + TILE + copies
    assert held[end] - held[begin - 1] == pytest.approx(
        WORDS * WIDTH * weight + TOKENS * WIDTH * hidden - ROWS * WIDTH * hidden, abs=30 * ROWS
    )


def test_the_gradients_of_a_tied_weight_add_up_in_the_heads_own_storage() -> None:
    """Autograd adds in place to a tensor that nothing else holds, so the third one of the plain head is not made."""
    before = tape_of(Precision.MIXED)
    after = with_chunked_head(before, batch=BATCH, seq_len=SEQ)
    grads = [[aux for op, aux in zip(tape.op, tape.aux, strict=True) if op == Op.GRAD] for tape in (before, after)]
    assert [tape.storage_bytes[aux] for tape, found in zip((before, after), grads, strict=True) for aux in found[-1:]] == [
        2 * WORDS * WIDTH
    ] * 2
    head = next(i for i, module in enumerate(after.modules) if module.name == "lm_head")
    made = [
        tape.module[i] for tape in (after,) for i, op in enumerate(tape.op) if (op, tape.arg[i]) == (Op.ALLOC, grads[1][-1])
    ]
    assert made == [head]
    assert grads[0][-1] != grads[1][-1]


def test_a_model_whose_head_has_another_loss_stays_as_it_is() -> None:
    workload = Workload.of(micro_batch=2, seq_len=128)
    stored = find_tape(load_model("google-bert/bert-base-uncased"), workload)
    assert stored is not None
    tape = stored.expand(2, 128, None)
    assert with_chunked_head(tape, batch=2, seq_len=128) is tape
