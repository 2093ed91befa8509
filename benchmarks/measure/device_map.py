"""Trains models whose layers transformers lays over all visible GPUs (``device_map="auto"``), and writes each card's peaks.

    python -m benchmarks.measure.device_map OUT.jsonl

One process, random weights, AdamW under autocast as the Trainer has it: results/device_map.jsonl. Bytes.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.engines import LORA_TARGETS
from benchmarks.measure.models import build_config

LLAMA = {"model": "meta-llama/Llama-3.2-1B", "micro_batch": 2}
CASES: tuple[dict[str, Any], ...] = (
    {"id": "DM01", **LLAMA, "seq_len": 2048},
    {"id": "DM02", **LLAMA, "seq_len": 2048, "checkpointing": True},
    {"id": "DM03", **LLAMA, "seq_len": 2048, "lora_rank": 16},
    {"id": "DM04", "model": "Qwen/Qwen2.5-0.5B", "micro_batch": 4, "seq_len": 2048},
    {"id": "DM05", **LLAMA, "seq_len": 4096, "lora_rank": 16, "checkpointing": True},
)


def build(case: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a case's model, ready to train, and where its modules lie."""
    from accelerate import dispatch_model
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.integrations.accelerate import _get_device_map

    rank, config = case.get("lora_rank"), build_config(case["model"], {})
    dtype = torch.bfloat16 if rank else torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    where = _get_device_map(model, "auto", None, None)
    model = dispatch_model(model, where, skip_keys=model._skip_keys_device_placement)
    if rank:
        lora = LoraConfig(r=rank, lora_alpha=32, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    if case.get("checkpointing"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model.train(), where


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train three steps; return the row."""
    from accelerate.utils import convert_outputs_to_fp32

    model, where = build(case)
    forward = convert_outputs_to_fp32(torch.autocast("cuda", dtype=torch.bfloat16)(model.forward))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    tokens = torch.randint(0, 30000, (case["micro_batch"], case["seq_len"]), device="cuda:0")
    cards = range(torch.cuda.device_count())
    for card in cards:
        torch.cuda.reset_peak_memory_stats(card)
    for _ in range(3):
        forward(input_ids=tokens, labels=tokens)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    peaks = {
        "allocated": [torch.cuda.max_memory_allocated(card) for card in cards],
        "reserved": [torch.cuda.max_memory_reserved(card) for card in cards],
    }
    return {
        **case,
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        **peaks,
        "last": {v: k for k, v in where.items()},
    }


def main() -> None:
    """Run all cases."""
    with Path(sys.argv[1]).open("a") as out:
        for case in CASES:
            print(json.dumps(run(case)), file=out, flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
