"""The tape of a causal language model whose loss reads a copy of the fp32 logits, without the last of each sample."""

from __future__ import annotations

from zeroplan.tape.chunked_head import logits_of
from zeroplan.tape.edit import TapeEdit
from zeroplan.tape.expanded import ExpandedTape, Kind, Op

_WIDE = 4


def with_copied_logits(tape: ExpandedTape, rows: int, seq_len: int) -> ExpandedTape:
    """Return `tape`, of `rows` samples of `seq_len` tokens, with that copy; as it is where another loss reads its logits.

    All that the loss makes from the copy on is as large as the copy. Its backward puts the copy's gradient into zeros of the
    logits' size.
    """
    found, edit = logits_of(tape), TapeEdit(tape)
    if found is None:
        return tape
    where, head, model = found
    whole = _WIDE * rows * seq_len * tape.params[tape.modules[head].params[0]].shape[0]
    copied = whole // seq_len * (seq_len - 1)
    forward, backward = (
        [at for at in edit.allocations(span) if tape.kind[at] == Kind.LOSS and tape.aux[at] == whole]
        for span in (range(where + 1, tape.backward), range(tape.backward, len(tape)))
    )
    end = edit.hooks.get((Op.EXIT, model), -1)
    widens = tape.aux[where] != whole
    if len(forward) != 1 + widens or len(backward) not in (0, 2) or end < forward[-1]:
        return tape
    write = edit.before(forward[-1])
    copy = write.alloc(copied, Kind.LOSS)
    edit.before(end).free(copy)
    for at in (forward[-1], *backward):
        op, storage, _, kind, module = edit.event(at)
        edit.replace(at, (op, storage, copied, kind, module))
    if backward:
        gradient = tape.arg[backward[-1]]
        edit.drop_frees((gradient,))
        since = max(edit.freed[tape.arg[at]] for at in (forward[-1], backward[0]))
        write = edit.behind(since)
        put = write.alloc(whole, Kind.LOSS)
        write.free(gradient)
        edit.before(edit.freed[gradient]).free(put)
    return edit.result()
