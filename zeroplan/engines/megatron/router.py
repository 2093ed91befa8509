"""The router of a mixture of experts in operators of sizes.

Sources: Megatron-Core 0.16.1, ``megatron/core/transformer/moe/router.py`` (``TopKRouter``), ``moe_utils.py``
(``router_gating_linear``, ``topk_routing_with_score_function``, ``compute_routing_scores_for_aux_loss``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zeroplan.engines.megatron.autograd import Gradients, Storage, TapeWriter, Value
from zeroplan.engines.megatron.operators import Saved
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.tape.expanded import Kind

_FP32, _INT64, _INT32, _BOOL = 4, 8, 4, 1


@dataclass(frozen=True)
class Routing:
    """Sizes of a rank's mixture, in bytes unless said otherwise.

    Attributes:
        rows: tokens that the rank routes.
        experts: of the model, a number.
        topk: experts of a token, a number.
        element: bytes of a probability.
        token: hidden state of one token.
        local: experts of this rank, a number.
        ep, etp: ranks that share the experts, and each expert's matrices.
        fused: whether TransformerEngine's kernels put tokens in order.
        engine: whether router and experts multiply by TransformerEngine's functions.
        most: of the rank's tokens, those that one expert takes at most; None for all.
    """

    rows: int
    experts: int
    topk: int
    element: int
    token: int
    local: int
    ep: int
    etp: int
    fused: bool
    engine: bool
    most: int | None = None

    @classmethod
    def of(cls, s: Shapes) -> Routing:
        """Return those of a micro batch."""
        model = s.model
        whole = cls(
            rows=s.rows,
            experts=model.num_experts,
            topk=model.moe_router_topk,
            element={"fp32": 4, "fp64": 8}.get(model.moe_router_dtype, s.element),
            token=model.hidden_size * s.element,
            local=model.num_experts // s.ep,
            ep=s.ep,
            etp=s.etp,
            fused=model.moe_permute_fusion,
            engine=model.uses_engine,
        )
        factor = model.moe_expert_capacity_factor
        return replace(whole, most=whole.capacity(factor)) if factor > 0 else whole

    def capacity(self, factor: float) -> int:
        """Return the tokens that an expert may take of a rank's (``get_capacity``)."""
        return math.ceil(self.rows * self.topk / self.experts * factor)

    @property
    def sent(self) -> int:
        """Tokens that the rank sends, each once for every expert it takes, and no more than these may take; it receives as
        many.
        """
        if self.most is None:
            return self.rows * self.topk
        return self.experts * min(self.rows * self.topk // self.experts, self.most)

    @property
    def got(self) -> int:
        """Tokens that the rank's experts compute, those of the ranks that share their matrices included."""
        return self.sent * self.etp

    @property
    def scores(self) -> int:
        """A probability for each token and expert."""
        return self.rows * self.experts * self.element

    @property
    def chosen(self) -> int:
        """A probability for each token and expert that it takes."""
        return self.rows * self.topk * self.element


def route(w: TapeWriter, s: Shapes, r: Routing, x: Value) -> tuple[Value, Storage]:
    """Return the probabilities of all tokens and experts, most of them 0, and which are chosen. A forward without a graph has
    none of the losses.
    """
    logits = _gate(w, s, r, x)
    if s.model.moe_z_loss_coeff and w.recording:
        logits = _small_logits(w, r, logits)
    sigmoid = s.model.moe_router_score_function == "sigmoid"
    places: list[Storage] = []
    weights = (_sigmoid if sigmoid else _softmax)(w, s, r, logits, places)
    zeros = w.empty(r.scores)
    spread, chosen = w.empty(r.scores), r.chosen
    del zeros

    probabilities = w.apply([weights], [spread], places, w.fresh(chosen))[0]
    del weights, spread
    routes = _map(w, r)
    places.clear()
    if s.model.moe_expert_capacity_factor > 0:
        probabilities, routes = _dropped(w, s, r, probabilities, routes)
    if s.model.moe_aux_loss_coeff and w.recording:
        probabilities = _balanced(w, r, logits, probabilities)
    return probabilities, routes


def _map(w: TapeWriter, r: Routing) -> Storage:
    """Zeros in the scores' dtype, integers, chosen ones among them, and whether each is chosen."""
    zeros = w.empty(r.scores)
    integers = w.empty(r.rows * r.experts * _INT32)
    del zeros
    marked = w.empty(r.rows * r.experts * _INT32)
    del integers
    routes = w.empty(r.rows * r.experts * _BOOL)
    del marked
    return routes


def _gate(w: TapeWriter, s: Shapes, r: Routing, x: Value) -> Value:
    """The router's product. In another dtype, Megatron's own casts its factors, TransformerEngine's takes them as they are."""
    wide = r.element != s.element
    size, weight = x.nbytes, r.experts * r.token
    times = r.element // s.element

    def forward() -> Storage:
        cast = [w.empty(size * times), w.empty(weight * times)] if wide and not r.engine else []
        out = w.empty(r.scores)
        cast.clear()
        return out

    def backward(saved: Saved, g: Gradients) -> Gradients:
        factor = w.empty(weight * times) if wide else None
        made = w.empty(size * times)
        del factor
        if wide and not r.engine:
            made = w.empty(size)
        factor = w.empty(size * times) if wide else None
        grad = w.empty(weight * times, Kind.GRAD)
        del factor
        if wide and r.engine:
            made = w.empty(size)
        if wide:
            grad = w.empty(weight, Kind.GRAD)
        return [made, grad]

    return w.apply([x], [forward()], [x.storage], backward)[0]


def _softmax(w: TapeWriter, s: Shapes, r: Routing, logits: Value, places: list[Storage]) -> Value:
    """The largest logits, whose places are saved, and their softmax in fp32; or the largest of a softmax over all."""
    if s.model.moe_router_pre_softmax:
        scores = _narrowed(w, r, _normalized(w, r, logits, r.experts), r.experts)
        return _largest(w, r, scores, places)
    chosen = _largest(w, r, logits, places)
    return _narrowed(w, r, _normalized(w, r, chosen, r.topk), r.topk)


def _largest(w: TapeWriter, r: Routing, scores: Value, places: list[Storage]) -> Value:
    size = r.scores

    values, at = w.empty(r.chosen), w.empty(r.rows * r.topk * _INT64)
    places.append(at)
    return w.apply([scores], [values], [at], w.fresh(size))[0]


def _normalized(w: TapeWriter, r: Routing, x: Value, columns: int) -> Value:
    """A softmax in fp32, which keeps its result; of other dtypes a copy is made first, and a gradient of their own."""
    wide, size = r.rows * columns * _FP32, x.nbytes
    casts = r.element != _FP32
    copy = w.empty(wide) if casts else None
    out = w.empty(wide)
    del copy

    def backward(saved: Saved, g: Gradients) -> Gradients:
        made = w.empty(wide)
        return [w.empty(size) if casts else made]

    return w.apply([x], [out], [out], backward)[0]


def _narrowed(w: TapeWriter, r: Routing, x: Value, columns: int) -> Value:
    """The scores' own dtype again."""
    if r.element == _FP32:
        return x
    return w.apply([x], [w.empty(r.rows * columns * r.element)], [], w.fresh(x.nbytes))[0]


def _sigmoid(w: TapeWriter, s: Shapes, r: Routing, logits: Value, places: list[Storage]) -> Value:
    """Sigmoids in fp32, the largest of them (a bias, if there is one, is for the choice alone), and their shares of them."""
    casts, wide, narrow = r.element != _FP32, r.rows * r.experts * _FP32, r.scores
    copy = w.empty(wide) if casts else None
    kept = w.empty(wide)
    del copy

    def sigmoid_backward(saved: Saved, g: Gradients) -> Gradients:
        made = w.empty(wide)
        return [w.empty(narrow) if casts else made]

    scores = _narrowed(w, r, w.apply([logits], [kept], [kept], sigmoid_backward)[0], r.experts)
    del kept
    if s.model.moe_router_enable_expert_bias:
        biased = w.empty(wide)
        at = w.empty(r.rows * r.topk * _FP32), w.empty(r.rows * r.topk * _INT64)
        del biased
        places.append(at[1])
        del at

        def gather_backward(saved: Saved, g: Gradients) -> Gradients:
            return [w.empty(narrow)]

        chosen = w.apply([scores], [w.empty(r.chosen)], list(places), gather_backward)[0]
    else:
        chosen = _largest(w, r, scores, places)
    del scores
    if r.topk == 1:
        return chosen
    size, row = r.chosen, r.rows * r.element
    added = w.apply([chosen], [w.empty(row)], [], lambda saved, g: [g[0]])[0]
    total = w.apply([added], [w.empty(row)], [], lambda saved, g: [g[0]])[0]
    del added

    def share_backward(saved: Saved, g: Gradients) -> Gradients:
        of_chosen = w.empty(size)
        of_total = w.empty(row)
        return [of_chosen, of_total]

    saved = [chosen.storage, total.storage]
    return w.apply([chosen, total], [w.empty(size)], saved, share_backward)[0]


def _small_logits(w: TapeWriter, r: Routing, logits: Value) -> Value:
    """The z-loss: the square of each token's log-sum-exp, which hangs on the logits. torch's log-sum-exp makes a copy of them
    forward, and keeps them for a backward of three.

    Sources: ``z_loss_func``; aten/src/ATen/native/ReduceOps.cpp (``logsumexp_out_impl``), FunctionsManual.cpp
    (``logsumexp_backward``)
    """
    size, row = r.scores, r.rows * r.element
    shifted = w.empty(size)
    out = w.empty(row)
    del shifted

    def backward(saved: Saved, g: Gradients) -> Gradients:
        less = w.empty(size)
        shares = w.empty(size)
        made = w.empty(size)
        del less, shares
        return [made]

    summed = w.apply([logits], [out], [logits.storage, out], backward)[0]
    del out
    squares = w.apply([summed], [w.empty(row)], [summed.storage], w.fresh(row))[0]
    del summed
    loss = w.apply([squares], [w.empty(r.element)], [], lambda saved, g: [g[0]])[0]
    return w.apply([logits, loss], [logits.storage], [], lambda saved, g: [g[0], w.empty(r.element)])[0]


def _dropped(w: TapeWriter, s: Shapes, r: Routing, probabilities: Value, routes: Storage) -> tuple[Value, Storage]:
    """Return probabilities and map without what is beyond the experts' capacity. Source: ``apply_router_token_dropping``"""
    capacity, pairs, size = r.capacity(s.model.moe_expert_capacity_factor), r.rows * r.experts, r.scores
    until_the_end: list[Storage] = []
    if capacity > r.rows:
        made = w.empty(size)
    else:
        by_position = s.model.moe_token_drop_policy == "position"
        source = w.empty(pairs * _INT32) if by_position else None
        width = _INT32 if by_position else r.element
        until_the_end += [w.empty(capacity * r.experts * width), w.empty(capacity * r.experts * _INT64)]
        del source
        zeros = w.empty(size)
        made = w.empty(size)
        del zeros
    until_the_end.append(w.empty(pairs * _BOOL))
    del made
    kept = w.empty(pairs * _BOOL)

    held = s.model.moe_token_dispatcher_type != "allgather"  # by the dispatcher, which is counted apart
    return w.apply([probabilities], [w.empty(size)], [] if held else [kept], w.fresh(size))[0], kept


def _balanced(w: TapeWriter, r: Routing, logits: Value, probabilities: Value) -> Value:
    """The auxiliary loss of all scores, whose softmax is kept in fp32. It hangs on the probabilities."""
    scores = _normalized(w, r, logits, r.experts)
    chosen = w.empty(r.rows * r.topk * _FP32), w.empty(r.rows * r.topk * _INT64)
    routes = _map(w, r)
    del chosen, routes
    loss = w.apply([scores], [w.empty(_FP32)], [], lambda saved, g: [g[0]])[0]
    return w.apply([probabilities, loss], [probabilities.storage], [], lambda saved, g: [g[0], w.empty(_FP32)])[0]
