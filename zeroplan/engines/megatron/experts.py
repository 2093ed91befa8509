"""A mixture of experts in operators of sizes: router, dispatchers and experts, each expert with as many tokens as the others.

Note [Balanced experts]
    How many tokens an expert gets is decided by the data. Planned is the balance that losses and biases of routers aim at: a
    rank sends its tokens once for each expert that a token takes, and receives as many. Counts of tokens are
    left out. A dispatcher holds probabilities and map of a layer until the layer's next micro batch: they are buffers that are
    kept. The probabilities hold their graph, and so the input of a checkpoint around the layer, with its gradient, also beside
    the optimizer's step.

Sources: Megatron-Core 0.16.1, ``megatron/core/transformer/moe/moe_layer.py`` (``MoELayer.forward``),
``moe_utils.py``, ``token_dispatcher.py``, ``experts.py``; TransformerEngine of 22 August 2026,
``pytorch/module/grouped_linear.py``, ``pytorch/triton/permutation.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from zeroplan.engines.megatron import operators as ops
from zeroplan.engines.megatron.autograd import Gradients, Storage, TapeWriter, Value
from zeroplan.engines.megatron.operators import Linear, Saved
from zeroplan.engines.megatron.router import Routing, route
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.tape.expanded import Kind

_FP32, _INT64, _INT32, _BOOL = 4, 8, 4, 1


def mixture(w: TapeWriter, s: Shapes, number: int, x: Value, shared: Callable[[Value], Value] | None) -> Value:
    """A mixture of layer `number`; `shared` is what all tokens pass besides. See Note [Balanced experts]."""
    r = Routing.of(s)
    beside = None
    if shared is not None:
        with w.module("shared_experts", "SharedExpertMLP"):
            beside = shared(x)
    with w.module("router", "TopKRouter"):
        probabilities, routes = route(w, s, r, x)
    if s.model.recompute_granularity == "full" or s.model.recomputes("moe"):
        w.drop(number)
    if w.recording:
        w.holder = number  # its probabilities have a graph
    if s.model.moe_token_dispatcher_type == "allgather":
        held = [probabilities]
        del probabilities
        out = _gathered_experts(w, s, r, number, x, held, routes)
    else:
        w.keep(("dispatcher", (number,)), probabilities.nbytes + routes.nbytes)
        probabilities = Value(w.outside(probabilities.nbytes), probabilities.node, probabilities.slot)  # it lies there
        del routes
        out = _exchanged(w, s, r, number, x, probabilities)
    if beside is None:
        return out
    return w.apply([out, beside], [w.empty(out.nbytes)], [], lambda saved, g: [g[0], g[0]])[0]


# --- all-to-all ---------------------------------------------------------------------------------------------------------------


def _exchanged(w: TapeWriter, s: Shapes, r: Routing, number: int, x: Value, probabilities: Value) -> Value:
    """Tokens in the order of their experts, to their experts' ranks, through the experts, and back again.

    What Megatron's variables hold until the layer's end is held here: the tokens as they were sent and as they arrived.
    """
    w.empty(r.rows * r.experts * _INT64)  # of the map, whose columns are counted
    order: list[Storage] = []
    sent, weights = _permute(w, r, x, probabilities, order)
    w.attributes["order", number] = list(order)
    arrived = _all_to_all(w, r, sent)
    weights = _all_to_all(w, r, weights)
    out = _local_experts(w, s, r, arrived, weights)
    back = _all_to_all(w, r, out)
    del out
    return _unpermute(w, r, back, order)


def _permute(w: TapeWriter, r: Routing, x: Value, probabilities: Value, order: list[Storage]) -> tuple[Value, Value]:
    """Return the tokens once for each expert they take, expert by expert, and their probabilities; `order` gets places."""
    size, scores = x.nbytes, r.scores
    tokens, chosen = r.sent * r.token, r.sent * r.element
    if r.fused:
        order.append(w.empty(r.rows * (2 * r.experts + 1) * _INT32))

        def fused_backward(saved: Saved, g: Gradients) -> Gradients:
            return [w.empty(size), w.empty(scores)]

        outputs = [w.empty(tokens), w.empty(chosen)]
        made = w.apply([x, probabilities], outputs, order, fused_backward)
        return made[0], made[1]
    mask = w.empty(r.rows * r.experts * _BOOL)
    numbers = w.empty(r.rows * _INT64)
    order.append(w.empty(r.sent * _INT64))
    del numbers
    turned = w.apply([probabilities], [w.empty(scores)], [], lambda saved, g: g[:])[0]

    weights = w.apply([turned], [w.empty(chosen)], [turned.storage, mask], w.fresh(scores))[0]
    del turned, mask

    return w.apply([x], [w.empty(tokens)], order, w.fresh(size))[0], weights


def _unpermute(w: TapeWriter, r: Routing, x: Value, order: list[Storage]) -> Value:
    """Add up what the experts made of each token."""
    return w.apply([x], [w.empty(r.rows * r.token)], order, w.fresh(x.nbytes))[0]


def _all_to_all(w: TapeWriter, r: Routing, x: Value) -> Value:
    if r.ep == 1:
        return x
    return w.apply([x], [w.empty(x.nbytes, Kind.COMM)], [], w.fresh(x.nbytes, kind=Kind.COMM))[0]


def _local_experts(w: TapeWriter, s: Shapes, r: Routing, arrived: Value, weights: Value) -> Value:
    """Gather from the ranks that share the experts' matrices, sort by this rank's experts, compute, and do both backwards."""
    tokens, weights = _gather(w, r, arrived), _gather(w, r, weights)
    if r.local > 1:
        tokens, weights = _sort(w, r, tokens, weights)
    with w.module("experts", "TEGroupedMLP" if r.engine else "SequentialMLP"):
        made = _compute(w, s, r, tokens, weights)
    out = _sort(w, r, made)[0] if r.local > 1 else made
    if r.etp == 1:
        return out
    times, scattered = r.element // s.element, out.nbytes // r.etp
    if times == 1:
        return ops.scatter(w, out, scattered)
    part = ops.scatter(w, _cast(w, out, out.nbytes * times), scattered * times)
    return _cast(w, part, scattered)


def _cast(w: TapeWriter, x: Value, nbytes: int) -> Value:
    return w.apply([x], [w.empty(nbytes)], [], w.fresh(x.nbytes))[0]


def _gather(w: TapeWriter, r: Routing, x: Value) -> Value:
    """Gather rows from the ranks that share the experts' matrices; the gradient is scattered."""
    if r.etp == 1:
        return x
    return w.apply([x], [w.empty(x.nbytes * r.etp, Kind.COMM)], [], w.fresh(x.nbytes, kind=Kind.COMM))[0]


def _sort(w: TapeWriter, r: Routing, *each: Value) -> list[Value]:
    """Put chunks of rows in another order: each tensor by itself, or all by TransformerEngine's kernel, which keeps places."""
    if not r.fused:
        return [_sorted(w, [one], [])[0] for one in each]
    return _sorted(w, list(each), [w.empty(r.got * _INT32)])


def _sorted(w: TapeWriter, each: list[Value], places: list[Storage]) -> list[Value]:
    sizes = [one.nbytes for one in each]
    return w.apply(each, [w.empty(size) for size in sizes], places, w.fresh(*sizes))


# --- all-gather ---------------------------------------------------------------------------------------------------------------


def _gathered_experts(w: TapeWriter, s: Shapes, r: Routing, number: int, x: Value, held: list[Value], routes: Storage) -> Value:
    """All ranks' tokens to every rank, those of its own experts through them, and the sums scattered back.

    Tokens are gathered into the buffer that Megatron's own layers share, and so is their gradient scattered.
    """
    ranks = r.ep * r.etp
    rows, local = ranks * r.rows, ranks * r.rows * r.local
    probabilities, every = held.pop(), x
    if ranks > 1:
        routes = w.empty(rows * r.experts * _BOOL, Kind.COMM)
        probabilities = _gathered_rows(w, probabilities, ranks)
        every = _gathered_tokens(w, x, ranks)
        mine = w.empty(local * _BOOL)
        chosen = w.apply([probabilities], [w.empty(local * r.element)], [], w.fresh(rows * r.experts * r.element))[0]
    else:
        mine, chosen = routes, probabilities
    w.attributes["local map", number] = [mine]
    w.empty(local * _INT64)  # of the map, whose columns are counted
    order, tokens = _taken(w, r, every, local, rows)
    turned = w.apply([chosen], [w.empty(local * r.element)], [], lambda saved, g: g[:])[0]
    mask = w.empty(local * _BOOL)
    source = local * r.element

    got = r.got * r.ep * r.local // r.experts  # of all ranks' tokens, those that take this rank's experts
    weights = w.apply([turned], [w.empty(got * r.element)], [turned.storage, mask], w.fresh(source))[0]
    del turned, mask, chosen
    w.attributes["order", number] = [*order, weights.storage]
    del routes, mine
    with w.module("experts", "TEGroupedMLP" if r.engine else "SequentialMLP"):
        made = _compute(w, s, r, tokens, weights)
    size = made.nbytes
    out = w.apply([made], [w.empty(rows * r.token)], order, w.fresh(size))[0]
    del made
    return _scattered(w, s, r, out, ranks) if ranks > 1 else out


def _taken(w: TapeWriter, r: Routing, every: Value, local: int, rows: int) -> tuple[list[Storage], Value]:
    """Return the places of this rank's tokens among all, and the tokens."""
    got = r.got * r.ep * r.local // r.experts
    if r.fused:
        order = [w.empty(rows * (2 * r.local + 1) * _INT32)]
    else:
        mask = w.empty(local * _BOOL)
        numbers = w.empty(rows * _INT64)
        order = [w.empty(got * _INT64)]
        del numbers, mask

    return order, w.apply([every], [w.empty(got * r.token)], order, w.fresh(rows * r.token))[0]


def _gathered_rows(w: TapeWriter, x: Value, ranks: int) -> Value:
    return w.apply([x], [w.empty(x.nbytes * ranks, Kind.COMM)], [], w.fresh(x.nbytes, kind=Kind.COMM))[0]


def _gathered_tokens(w: TapeWriter, x: Value, ranks: int) -> Value:
    """Gather into the shared buffer; the gradient is scattered into it, too."""
    size = x.nbytes
    w.keep(ops.SHARED, size * ranks)
    return w.apply([x], [w.shared(size * ranks)], [], lambda saved, g: [w.shared(size)])[0]


def _scattered(w: TapeWriter, s: Shapes, r: Routing, x: Value, ranks: int) -> Value:
    """Scatter sums in the dtype of the probabilities."""
    times, part = max(1, r.element // s.element), x.nbytes // ranks
    if times == 1:
        return ops.scatter(w, x, part)
    return _cast(w, ops.scatter(w, _cast(w, x, x.nbytes * times), part * times), part)


# --- experts ------------------------------------------------------------------------------------------------------------------


def _compute(w: TapeWriter, s: Shapes, r: Routing, tokens: Value, weights: Value) -> Value:
    """The experts' MLPs: grouped products of all, or one expert after the other, whose results are joined."""
    width = s.model.moe_ffn_hidden_size // r.etp
    if r.engine or r.local == 1:
        return _expert(w, s, tokens, weights, width, r.local if r.engine else 1)
    parts = [tokens.nbytes // r.local] * r.local
    each = ops.split(w, tokens, parts)
    scales = ops.split(w, weights, [weights.nbytes // r.local] * r.local)
    made = [_expert(w, s, one, scale, width, 1) for one, scale in zip(each, scales, strict=True)]
    return w.apply(made, [w.empty(tokens.nbytes)], [], lambda saved, g: [g[0]] * len(parts))[0]


def _expert(w: TapeWriter, s: Shapes, x: Value, scale: Value, width: int, experts: int) -> Value:
    """Two products with an activation between them, which multiplies with the probabilities: of one expert, or of all by one
    grouped kernel.
    """
    model = s.model
    count = x.nbytes // (model.hidden_size * s.element)
    up = width * (1 + model.gated)
    first = _grouped(w, s, x, (up, model.hidden_size), count * up * s.element, experts)
    active = _gated(w, first, scale) if model.gated else _scaled(w, s, first, scale)
    del first
    return _grouped(w, s, active, (model.hidden_size, width), x.nbytes, experts)


def _gated(w: TapeWriter, x: Value, scale: Value) -> Value:
    """A gated activation times the probabilities, as one kernel. Source: megatron/core/fusions/fused_bias_swiglu.py"""
    size, scales = x.nbytes, scale.nbytes

    return w.apply([x, scale], [w.empty(size // 2)], [x.storage, scale.storage], w.fresh(size, scales))[0]


def _scaled(w: TapeWriter, s: Shapes, x: Value, scale: Value) -> Value:
    """An activation without a gate, for which Megatron has no such kernel, and its product with the probabilities."""
    active = ops.activate(w, x, gated=False, bias=0)
    size, row = x.nbytes, scale.nbytes
    wide = size * max(1, Routing.of(s).element // s.element)

    def backward(saved: Saved, g: Gradients) -> Gradients:
        made = w.empty(wide)
        if wide > size:
            made = w.empty(size)
        whole = w.empty(wide)
        of_scale = w.empty(row)
        del whole
        return [made, of_scale]

    product = w.apply([active, scale], [w.empty(wide)], [active.storage, scale.storage], backward)[0]
    del active
    return _cast(w, product, size) if wide > size else product


def _grouped(w: TapeWriter, s: Shapes, x: Value, shape: tuple[int, int], output: int, experts: int) -> Value:
    model = s.model
    sizes = Linear(
        shape,
        output,
        fused=model.gradient_accumulation_fusion,
        engine=model.uses_engine,
        keeps=model.uses_engine,
        element=s.element,
        eight=s.eight,
    )
    return ops.grouped_linear(w, x, sizes, experts)
