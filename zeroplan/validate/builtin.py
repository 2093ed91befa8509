"""The set that ``verify`` runs when no model is named: it ends within five minutes."""

from __future__ import annotations

from typing import Any

from zeroplan.validate.machine import VerifyMachine

#: On GPUs: every stage of this shape that the machine holds.
GPU_MODEL = "meta-llama/Llama-3.2-1B"
GPU_WORKLOAD = {"micro_batch": 1, "seq_len": 1024}

#: On a CPU: a Llama of 10 M parameters, of an odd width and vocabulary. Heads and lengths are such that CUDA's attention, for
#: which the plan is made, pads nothing, so that a CPU's tensors can be held against it.
CPU_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "Llama, 10 M parameters",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 717,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4997,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CPU_WORKLOAD = {"micro_batch": 2, "seq_len": 128}


def builtin_request(machine: VerifyMachine) -> dict[str, Any]:
    """Return the request's fields for this machine."""
    if machine.device == "cuda":
        return {"model": GPU_MODEL, **GPU_WORKLOAD}
    return {"model": dict(CPU_MODEL), **CPU_WORKLOAD}
