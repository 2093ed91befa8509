"""Finding a tape for a model and a workload: shipped, cached, or traced now.

Shipped tapes lie in ``data/``, one file a model (xz-compressed JSON: options key -> tape), written by
``python -m zeroplan.tapes.ship``. Traced ones are cached under ``$XDG_CACHE_HOME/zeroplan/tapes``.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import IMAGE_TEXT_TO_TEXT, auto_class_of
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.models.families import FAMILIES
from zeroplan.models.spec import ModelSpec
from zeroplan.tape.format import Tape
from zeroplan.tape.options import Checkpointing, TraceOptions, options_for


def find_tape(
    spec: ModelSpec,
    workload: Workload,
    *,
    zero3: bool = False,
    plain: bool | None = None,
    layout: ParallelLayout | None = None,
) -> Tape | None:
    """The tape at hand for a model, without torch: shipped, else cached; None when there is neither.

    Args:
        spec: the model; its `config` is what identifies it.
        workload: decides attention, checkpointing, dtypes and LoRA.
        zero3: as ZeRO stage 3 runs it.
        plain: whether the plain tape will do where stage 3's is not at hand: it differs in when some activations are freed.
            None: only where nothing can be traced.
        layout: the ranks that run it; None for data parallelism alone.
    """
    return lookup(spec, options_for(workload, zero3=zero3, layout=layout), plain=plain)


def lookup(spec: ModelSpec, options: TraceOptions, *, plain: bool | None = None) -> Tape | None:
    """Find a tape for options, as :func:`find_tape` does for a workload."""
    from zeroplan.tapes import shipped
    from zeroplan.tapes.cache import read

    if not spec.config:
        return None
    tape = shipped.find(spec, options) or read(spec.config, options)
    if tape is None and options.zero3 and (not can_trace() if plain is None else plain):
        options = replace(options, zero3=False)
        tape = shipped.find(spec, options) or read(spec.config, options)
    if tape is None and options.checkpointing is Checkpointing.REENTRANT and not can_trace():
        return lookup(spec, replace(options, checkpointing=Checkpointing.NON_REENTRANT), plain=plain)
    return tape


def can_trace() -> bool:
    """Return whether torch and transformers are installed (they are not imported)."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def get_tape(spec: ModelSpec, workload: Workload, *, zero3: bool = False, layout: ParallelLayout | None = None) -> Tape:
    """The tape for a model, traced now (and cached) if none is at hand.

    Raises:
        BadInput: when it must be traced and torch is missing, or the model cannot be traced.
    """
    return tape_for(spec, options_for(workload, zero3=zero3, layout=layout), workload)


def tape_for(spec: ModelSpec, options: TraceOptions, workload: Workload) -> Tape:
    """As :func:`get_tape`, for options; the workload's numbers serve a model whose sizes follow no expressions."""
    from zeroplan.tapes import shipped
    from zeroplan.tapes.cache import read, write

    tape = shipped.find(spec, options) or read(spec.config, options) if spec.config else None
    if tape is not None:
        return tape
    if not spec.config:
        raise BadInput(f"{spec.name} has no config to trace", remedy="give a config.json or a hub id")
    if not can_trace():
        plain = lookup(spec, options)
        if plain is not None:
            return plain
        raise BadInput(f"no tape of {spec.name} is shipped", remedy="install zeroplan[torch] to trace it")
    from zeroplan.core.plumbing.progress import working
    from zeroplan.trace.api import traced

    working(f"tracing {spec.name}")
    seq = (workload.batch.seq_len or 1) // options.split_tokens
    # A described family's own head is traced as its config names it: Gemma 3's as text with images.
    own = spec.auto_class == FAMILIES[spec.model_type][1] if spec.model_type in FAMILIES else not spec.auto_class
    auto_class = auto_class_of(spec.config) if own else spec.auto_class
    if options.media and not options.media.audio_seconds:
        auto_class = IMAGE_TEXT_TO_TEXT
    tape = traced(spec.config, auto_class, options, workload.batch.micro_batch, seq, workload.lora_rank)
    if options.at is not None or tape.programs[-1].seqs[1] == 0:  # holds for all numbers that the options stand for
        write(spec.config, options, tape)
    return tape
