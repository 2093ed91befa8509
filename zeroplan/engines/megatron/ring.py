"""Attention of context-parallel ranks in TransformerEngine: keys and values go from rank to rank, a step attends to some.

Source: TransformerEngine 2.9, transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py
(``AttnFuncWithCPAndKVP2P``), with the causal mask and in 16 bits.
"""

from __future__ import annotations

from zeroplan.engines.megatron.autograd import Gradients, Storage, TapeWriter, Value


def ring_attention(w: TapeWriter, query: Value, key: Value, value: Value, *, ranks: int, output: int, stats: int) -> Value:
    """Return the attention of the ring's last rank, which holds the most: its queries see the keys of all others.

    A forward keeps every rank's keys and values until it ends, and each step's output; the keys and values that came last are
    saved, with the queries, the output and one fp32 number for each row and head. A backward passes keys and values on with
    their gradients, in two buffers; all but the last step's are of half of the keys.

    Args:
        query, key, value: what it reads, contiguous.
        ranks: of the ring.
        output: bytes of its output.
        stats: bytes of those numbers.
    """
    pair = key.nbytes + value.nbytes
    passed = [w.empty(pair)]
    steps: list[Storage] = []
    kept: Storage | None = None
    for step in range(ranks):
        if step + 1 < ranks:
            passed.append(w.empty(pair))
        steps += [w.empty(output), w.empty(stats)]
        if step == 1:
            kept = w.empty(stats)
    assert kept is not None, "a ring has two ranks or more"
    saved = [query.storage, passed[-1], w.empty(output), kept]
    sizes = (query.nbytes, key.nbytes, value.nbytes)

    def backward(saved: tuple[Storage, ...], g: Gradients) -> Gradients:
        queries = w.empty(sizes[0])
        buffers = [w.empty(2 * pair) for _ in range(2)]
        own: list[Storage] = []
        for step in range(ranks):
            share = 1 if step + 1 == ranks else 2
            own = [w.empty(sizes[0]), *(w.empty(size // share) for size in sizes[1:])]  # the last step's go afterwards
        del own
        last = buffers[ranks % 2]
        return [queries, last, last]

    return w.apply([query, key, value], [saved[2]], saved, backward)[0]
