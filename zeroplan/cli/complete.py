"""Completions for shells: the known names of models, GPUs, engines and optimizers. Loaded and asked only by a shell."""

from __future__ import annotations


def models(incomplete: str) -> list[str]:
    """Return the catalog's ids that begin with what was typed, with or without their organisation."""
    from zeroplan.models.catalog import ids

    typed = incomplete.lower()
    return [name for name in ids() if name.lower().startswith(typed) or name.lower().rpartition("/")[2].startswith(typed)]


def gpus(incomplete: str) -> list[str]:
    """Return the presets that begin with what was typed; a count before them, as in ``4xA``, stays."""
    from zeroplan.core.gpus import GPUS

    count, times, typed = incomplete.rpartition("x") if incomplete[:1].isdigit() else ("", "", incomplete)
    return [f"{count}{times}{gpu.name}" for gpu in GPUS.values() if gpu.name.lower().startswith(typed.lower())]


def engines(incomplete: str) -> list[str]:
    """Return the engines that begin with what was typed."""
    from zeroplan.engines.registry import engine_names

    return [name for name in engine_names() if name.startswith(incomplete.lower())]


def optimizers(incomplete: str) -> list[str]:
    """Return the optimizers that begin with what was typed."""
    from zeroplan.core.optimizers import OPTIMIZERS

    return [name for name in OPTIMIZERS if name.startswith(incomplete.lower())]
