"""Attention of context-parallel ranks holds what TransformerEngine's does."""

import pytest

from zeroplan.engines.megatron.autograd import TapeWriter, Value
from zeroplan.engines.megatron.ring import ring_attention
from zeroplan.tape.expanded import Kind, Op

QUERY, KEY, STATS = 4096, 1024, 64
PAIR = 2 * KEY


def written(ranks: int) -> tuple[int, int, int]:
    """Return the most bytes of a ring's forward, those that it saves beside its inputs, and the most of its backward."""
    w = TapeWriter("attention")
    query, key, value = (w.leaf(w.empty(size, Kind.INPUT), size) for size in (QUERY, KEY, KEY))
    leaves = [query, key, value]
    made = ring_attention(w, query, key, value, ranks=ranks, output=QUERY, stats=STATS)
    saved = sum(one.nbytes for one in made.node.saved) - QUERY  # type: ignore[union-attr]
    w.begin_backward()
    gradient = w.empty(QUERY)
    output = Value(made.storage, made.node)
    del made
    grads = w.backward(output, [gradient], leaves)
    del gradient, output, grads, leaves, query, key, value
    tape, split = w.tape()
    live, most = 0, [0, 0]
    sizes: dict[int, int] = {}
    for at, (op, arg, aux) in enumerate(zip(tape.op, tape.arg, tape.aux, strict=True)):
        if op == Op.ALLOC:
            sizes[arg] = aux
            live += aux
        elif op == Op.FREE:
            live -= sizes.pop(arg)
        part = int(at >= split)
        most[part] = max(most[part], live)
    return most[0], saved, most[1]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_holds_all_keys_in_its_forward_and_two_buffers_in_its_backward(ranks: int) -> None:
    inputs = QUERY + PAIR
    forward, saved, backward = written(ranks)
    assert forward == inputs + ranks * (PAIR + QUERY + STATS) + STATS + QUERY  # each step's, the merged numbers and output
    assert saved == PAIR + QUERY + STATS
    # The output's gradient and the queries', two buffers of keys and their gradients, and the last two steps' own gradients.
    assert backward == inputs + saved + QUERY + QUERY + 2 * 2 * PAIR + (QUERY + PAIR // 2) + (QUERY + PAIR)
