"""What a run generates before its steps, laid beside a training's tape."""

from __future__ import annotations

from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.generation import Generation
from zeroplan.core.model_config import text_config
from zeroplan.core.workload import Attention, Precision
from zeroplan.engines.base import Case
from zeroplan.models.facts import spec_facts
from zeroplan.tape.chunked_head import chunked_head_of
from zeroplan.tape.expanded import AUTOCAST_LAYERS, QUANTIZED_LAYERS, ExpandedTape, blocks_of
from zeroplan.tape.generation import CachedModel, generation_tape
from zeroplan.tape.reference_forward import forward_without_gradients

#: Model types whose layers all keep rotated keys and values of every token in a cache that grows (transformers 5.17,
#: ``DynamicCache``), unless their config slides a window.
GROWING_CACHES = frozenset(
    ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma", "granite", "olmo", "olmo2", "smollm3")
)


def known_cache(case: Case) -> bool:
    """Return whether the cache of the case's model grows as is modelled here."""
    work, config = case.workload, text_config(case.spec.config)
    facts = spec_facts(case.spec)
    known = None not in (facts.kv_heads, facts.head_dim, facts.heads, facts.vocab_size)
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    alone = (
        case.parallel is None and not work.batch.images and work.numerics.attn is Attention.SDPA and not work.has(Float8Recipe)
    )
    return known and case.spec.model_type in GROWING_CACHES and not slides and alone


def generated(case: Case, prompts: ExpandedTape) -> ExpandedTape | None:
    """Return the events of what the case generates before a step; None where the model's head is of another kind.

    Args:
        case: the run.
        prompts: the tape of a checkpointed forward over all prompts of a rank.
    """
    work, facts = case.workload, spec_facts(case.spec)
    generation, head = work.technique(Generation), chunked_head_of(prompts.modules)
    assert generation is not None
    heads, kv_heads, width = facts.heads or 0, facts.kv_heads or 0, facts.head_dim or 0
    rows = generation.rows(work.batch.micro_batch, work.batch.grad_accum, case.layout.dp)
    compute = work.numerics.dtype.bytes
    key_width = max(compute, work.numerics.param_bytes)
    inner = text_config(case.spec.config).get("intermediate_size")
    words = rows * (facts.vocab_size or 0)
    model = CachedModel(
        key=rows * kv_heads * width * key_width,
        value=rows * kv_heads * width * compute,
        repeats=heads // kv_heads,
        compute=compute,
        key_width=key_width,
        inner=rows * compute * (inner if isinstance(inner, int) else 0),
        logits=words * compute,
        words=words,
        casts=generation.casts and work.numerics.precision is not Precision.PURE,
        weights=_weights(case, prompts, head),
    )
    return generation_tape(prompts, forward_without_gradients(prompts), head, generation, model)


def _weights(case: Case, tape: ExpandedTape, head: int) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return what each block's products make of its weights, and the head's: casts of fp32 ones under autocast, of which those
    of trained weights stay, and quantised ones in 16 bits; nothing where all are in 16 bits.
    """
    compute, params = case.workload.numerics.dtype.bytes, tape.params
    autocast = case.workload.numerics.precision is Precision.AUTOCAST
    blocks = blocks_of(tape.modules)
    place = {block: at for at, block in enumerate(blocks)}
    found: list[list[tuple[int, bool]]] = [[] for _ in range(len(blocks) + 1)]
    home: dict[int, int] = {}
    for index, module in enumerate(tape.modules):
        home[index] = place.get(index, home.get(module.parent, len(blocks)))
        packed = module.type in QUANTIZED_LAYERS
        if not packed and not (autocast and module.type in AUTOCAST_LAYERS):
            continue
        for p in module.params:
            shape = params[p].shape
            if len(shape) == 2 and (packed or params[p].itemsize != compute):
                at = home[index] if index != head else len(blocks)
                found[at].append((shape[0] * shape[1] * compute, params[p].trainable and not packed))
    return tuple(tuple(one) for one in found) if any(found) else ()
