"""The tape of transformers' ``generate``, by which GRPO makes completions before its step.

The prompts pass at once, without gradients and without the head but for their last token; then one token of every sample
passes at a time. A layer's keys and values are kept for all tokens so far, and each token makes both anew, one longer, before
the old ones go. Prompts of different lengths are padded, so attention gets a mask and its kernels no grouped heads: the keys
and values of the layer at work are repeated for every query head. Under autocast the keys are as wide as the rotary
embedding's sines, those of the weights, and weights are cast again for each token. What is smaller than a token's part of a
layer's MLP is left out.

Sources: transformers 5.17, ``generation/utils.py`` (``_sample``), ``cache_utils.py`` (``DynamicLayer``),
``integrations/sdpa_attention.py``; TRL 1.16, ``trainer/grpo_trainer.py`` (``_generate_single_turn``); torch,
aten/src/ATen/autocast_mode.cpp (``cached_cast``), aten/src/ATen/native/Distributions.cpp (``multinomial``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from zeroplan.core.generation import Generation
from zeroplan.tape.edit import EventWriter
from zeroplan.tape.expanded import ExpandedTape, Kind, Op, TapeEvent, TapeModule, blocks_of

#: Lengths of the growing cache that are played, evenly spaced: what is left of each is reused by the next in the same way.
MOST_LENGTHS = 32
_FP32 = 4


@dataclass(frozen=True, slots=True)
class CachedModel:
    """The sizes of a decoder that generates, in bytes unless said otherwise.

    Attributes:
        key: of one token's keys in one layer, of all samples.
        value: likewise of its values.
        repeats: query heads that share a head of keys.
        compute: of an element in products.
        key_width: of an element of the keys.
        inner: of one token's inner activations of an MLP, of all samples.
        logits: of one token's logits as the head makes them, of all samples.
        words: elements of the same logits.
        casts: whether the logits that the model returns are made fp32.
        weights: for each block, what each of its products has of its weight beside it, and whether that stays until all
            blocks have run; likewise of the head at last.
    """

    key: int
    value: int
    repeats: int
    compute: int
    key_width: int
    inner: int
    logits: int
    words: int
    casts: bool
    weights: tuple[tuple[tuple[int, bool], ...], ...]


def generation_tape(
    prompts: ExpandedTape, forward: Sequence[TapeEvent], head: int, generation: Generation, model: CachedModel
) -> ExpandedTape | None:
    """Return the events of one generation, all of it freed at its end; None where the forward has no such head.

    Args:
        prompts: the tape over all prompts.
        forward: events of its forward without gradients, those of modules among them.
        head: index of the layer that makes the logits.
        generation: how long.
        model: how large.
    """
    events = _events(prompts.modules, forward, head, generation, model)
    return prompts.with_events(events) if events else None


def lengths_of(generation: Generation) -> list[int]:
    """Return the lengths of the cache after the tokens that are played; the last token generated passes no more."""
    first, last = generation.prompt + 1, generation.prompt + generation.completion - 1
    if last - first < MOST_LENGTHS:
        return list(range(first, last + 1))
    return [first + (last - first) * at // (MOST_LENGTHS - 1) for at in range(MOST_LENGTHS)]


def _events(
    modules: Sequence[TapeModule], forward: Sequence[TapeEvent], head: int, generation: Generation, model: CachedModel
) -> list[TapeEvent]:
    blocks = set(blocks_of(modules))
    write = EventWriter(count(1 + max((arg for op, arg, *_ in forward if op == Op.ALLOC), default=0)))
    alive: dict[int, None] = {}
    cache: list[tuple[int, int]] = []
    found = False
    for event in forward:
        op, arg, *_ = event
        if op == Op.ENTER and arg == head:
            found = True
            break
        if op == Op.ALLOC:
            alive[arg] = None
            write.events.append(event)
        elif op == Op.FREE:
            alive.pop(arg, None)
            write.events.append(event)
        elif op == Op.EXIT and arg in blocks:
            tokens = generation.prompt
            cache.append((write.alloc(tokens * model.key, Kind.SAVED), write.alloc(tokens * model.value, Kind.SAVED)))
    if not found or not cache:
        return []
    _choose(write, model, list(alive))
    for tokens in lengths_of(generation):
        _token(write, model, cache, tokens)
    for pair in cache:
        write.free(*pair)
    return write.events


def _token(write: EventWriter, model: CachedModel, cache: list[tuple[int, int]], tokens: int) -> None:
    """Pass one token of every sample: the cache is of `tokens` tokens afterwards."""
    kept: list[int] = []
    for at, (key, value) in enumerate(cache):
        kept += _casts(write, model, at)
        longer_key = write.alloc(tokens * model.key, Kind.SAVED)
        write.free(key)
        longer_value = write.alloc(tokens * model.value, Kind.SAVED)
        write.free(value)
        cache[at] = (longer_key, longer_value)
        beside = []
        if model.repeats > 1:
            beside = [write.alloc(tokens * nbytes * model.repeats) for nbytes in (model.key, model.value)]
        if model.key_width != model.compute:  # attention takes all of it in the dtype of products
            beside.append(write.alloc(tokens * model.key * model.repeats * model.compute // model.key_width))
        write.free(*beside)
        write.free(*[write.alloc(model.inner) for _ in range(3)])
    kept += _casts(write, model, -1)
    _choose(write, model, kept)


def _casts(write: EventWriter, model: CachedModel, block: int) -> list[int]:
    """Copy what the products of a block have of their weights; return the copies that stay until all blocks have run."""
    kept = []
    for nbytes, stays in model.weights[block] if model.weights else ():
        made = write.alloc(nbytes, Kind.CAST)
        if stays:
            kept.append(made)
        else:
            write.free(made)
    return kept


def _choose(write: EventWriter, model: CachedModel, ending: list[int]) -> None:
    """Make the logits of one token and draw from them; `ending` goes when the model has returned."""
    made = write.alloc(model.logits, Kind.LOGITS)
    if model.casts:
        wide = write.alloc(_FP32 * model.words, Kind.LOGITS)
        write.free(made)
        made = wide
    write.free(*ending)
    scores = write.alloc(_FP32 * model.words, Kind.LOGITS)
    shares = write.alloc(_FP32 * model.words, Kind.LOGITS)
    drawn = write.alloc(_FP32 * model.words)
    write.free(drawn, shares, scores, made)
