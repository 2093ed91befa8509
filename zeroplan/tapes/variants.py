"""The variants of tapes that each catalog model is shipped with."""

from __future__ import annotations

from dataclasses import replace

from zeroplan.core.model_config import CAUSAL_LM, auto_class_of
from zeroplan.core.quantization import Products
from zeroplan.core.workload import Attention
from zeroplan.models import catalog
from zeroplan.tape.options import Arithmetic, Checkpointing, TracedBase, TracedMesh, TraceOptions

_NONE, _FULL, _SELECTIVE = Checkpointing.NONE, Checkpointing.NON_REENTRANT, Checkpointing.SELECTIVE
_SDPA, _EAGER, _FLASH = Attention.SDPA, Attention.EAGER, Attention.FLASH
_HALF, _FP32, _AUTOCAST = Arithmetic.HALF, Arithmetic.FP32, Arithmetic.AUTOCAST


def variants() -> tuple[TraceOptions, ...]:
    """Return the variants that the flags of ``estimate`` ask for, most used first.

    16 bits with and without DeepSpeed's stage 3, fp32 (with stage 3 under sdpa) and autocast (DDP); each without
    checkpointing and with it; LoRA on all linear layers; selective checkpointing in 16 bits under sdpa.
    """
    both = (_NONE, _FULL)
    wanted = [TraceOptions(_SDPA, how, zero3=zero3) for how in both for zero3 in (False, True)]
    wanted += [TraceOptions(_SDPA, how, zero3=zero3, lora=()) for how in both for zero3 in (False, True)]
    wanted += [TraceOptions(_SDPA, how, arithmetic) for how in both for arithmetic in (_AUTOCAST, _FP32)]
    wanted += [TraceOptions(_SDPA, how, _FP32, zero3=True) for how in both]
    wanted += [TraceOptions(_EAGER, how, zero3=zero3) for how in both for zero3 in (False, True)]
    wanted += [TraceOptions(_EAGER, how, arithmetic) for how in both for arithmetic in (_AUTOCAST, _FP32)]
    wanted += [TraceOptions(_EAGER, how, lora=()) for how in both]
    wanted += [TraceOptions(_FLASH, how, zero3=zero3) for how in both for zero3 in (False, True)]
    wanted += [TraceOptions(_SDPA, _SELECTIVE, zero3=zero3) for zero3 in (False, True)]
    wanted += [TraceOptions(_SDPA, how, arithmetic, lora=()) for how in both for arithmetic in (_AUTOCAST, _FP32)]
    return tuple(wanted)


def further_variants(model: str) -> tuple[TraceOptions, ...]:
    """Return variants that not every model is shipped with, and that are traced where they lack: an evaluation's forward, and
    adapters of a causal language model over 16-bit weights under DDP, and over a 4-bit base under DDP, TRL's adapters of 16
    bits among them, and under what shards or casts it.
    """
    entry = catalog.find(model)
    if entry is None or auto_class_of(entry.config) != CAUSAL_LM:
        return _evaluations()
    base = TracedBase(Products.NESTED)
    over = ((_AUTOCAST, base), (_HALF, base), (_AUTOCAST, replace(base, half_adapters=True)), (Arithmetic.HALF_AUTOCAST, None))
    adapted = [TraceOptions(_SDPA, how, by, lora=(), base=kept) for how in (_FULL, _NONE) for by, kept in over]
    return (*_evaluations(), *adapted)


def _evaluations() -> tuple[TraceOptions, ...]:
    whole = [TraceOptions(_SDPA, arithmetic=arithmetic, evaluation=True) for arithmetic in (_HALF, _AUTOCAST, _FP32)]
    adapted = [TraceOptions(_SDPA, arithmetic=arithmetic, lora=(), evaluation=True) for arithmetic in (_HALF, _AUTOCAST)]
    return (*whole, *adapted)


#: Models that are shipped as tensor-parallel ranks run them, too.
TENSOR_PARALLEL = frozenset(
    {
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-405B",
        "meta-llama/Llama-3.3-70B-Instruct",
        "Qwen/Qwen2.5-32B",
        "Qwen/Qwen2.5-72B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B",
    }
)


#: Of these, those that are shipped for rings of two ranks, too, which a search over layouts asks for from 8,192 tokens on.
RING = frozenset({"meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B", "Qwen/Qwen3-32B"})


#: Mixtures that are shipped as expert-parallel ranks run them, with the degrees that people use.
EXPERT_PARALLEL = {
    "deepseek-ai/DeepSeek-V3": (2, 4, 8, 16, 32, 64, 128, 256),
    "deepseek-ai/DeepSeek-V2": (8, 16, 32),
    "deepseek-ai/DeepSeek-V2-Lite": (2, 4, 8),
    "Qwen/Qwen3-235B-A22B": (8, 16, 32, 64),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": (8, 16, 32, 64),
    "Qwen/Qwen3-30B-A3B": (2, 4, 8, 16),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (2, 4, 8, 16),
    "mistralai/Mixtral-8x7B-v0.1": (2, 4, 8),
    "mistralai/Mixtral-8x22B-v0.1": (2, 4, 8),
    "allenai/OLMoE-1B-7B-0924": (2, 4, 8),
}


#: Mixtures that are shipped as ranks of DeepSpeed's AutoEP run them, each with the degree of one node, or of several where a
#: node's experts are more than one parameter group of DeepSpeed's holds.
AUTO_EP = {
    "deepseek-ai/DeepSeek-V3": 64,
    "deepseek-ai/DeepSeek-V2-Lite": 8,
    "Qwen/Qwen3-235B-A22B": 8,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": 8,
    "Qwen/Qwen3-30B-A3B": 8,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 8,
    "mistralai/Mixtral-8x7B-v0.1": 8,
    "mistralai/Mixtral-8x22B-v0.1": 8,
}


def variants_of(model: str) -> tuple[TraceOptions, ...]:
    """Return the variants that a catalog model is shipped with: every model's, and those of 2, 4 and 8 tensor-parallel ranks
    where people run it so: in 16 bits under sdpa, without checkpointing and with it, with split tokens and without. Some have
    those of a ring's ranks, and mixtures those of expert-parallel ranks, some of AutoEP's.
    """
    both = (_FULL, _NONE)
    shared = [TraceOptions(_SDPA, how, mesh=TracedMesh(ep=ep)) for ep in EXPERT_PARALLEL.get(model, ()) for how in both]
    if model in AUTO_EP:
        mesh = TracedMesh(ep=AUTO_EP[model], auto_ep=True)
        shared += [TraceOptions(_SDPA, how, zero3=zero3, mesh=mesh) for how in both for zero3 in (False, True)]
    if model not in TENSOR_PARALLEL:
        return (*variants(), *shared)
    ranks = [TraceOptions(_SDPA, how, mesh=TracedMesh(tp, sp)) for tp in (8, 4, 2) for sp in (True, False) for how in both]
    rings = [one.on_ranks(cp=2) for one in (*(TraceOptions(_SDPA, how) for how in both), *ranks)] if model in RING else []
    return (*variants(), *ranks, *rings, *shared)
