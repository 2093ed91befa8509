"""Runs DeepSpeed with AutoEP on a small mixture, on one rank of many, beside our plan of it. Started by test_auto_ep.

The rank is on the CPU, with a process group that does nothing but copy what it is given. Its tokens are so few that what is at
least `least` bytes is the parameters', their gradients' and the optimizer's.

Usage: python run_auto_ep_engine.py CASES.json. A case: ``{"id", "model", "ranks", "rank", "ep", "config", "least"}``. Prints
one JSON line a case: ``{"id", "ours", "theirs"}``, each ``[[phase, [bytes, …]], …]``: allocations of at least `least` bytes, in
order.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")

import deepspeed
import torch
from deepspeed.module_inject import auto_ep_layer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.deepspeed import phases
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import OptimizerKind, Workload
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.engines.deepspeed.schedule import record_deepspeed
from zeroplan.tape.options import options_for
from zeroplan.trace.api import traced

SAMPLES, TOKENS, STEPS = 1, 8, 2


def copied(output: torch.Tensor, sent: torch.Tensor, **kwargs: Any) -> None:
    """What ranks exchange that are all alike: the same."""
    output.copy_(sent)


def theirs(case: dict[str, Any]) -> list[Any]:
    """What DeepSpeed allocates at initialisation and in each step of a window."""
    phases.begin(case)
    config = case["config"] | {"expert_parallel": {"enabled": True, "autoep_size": case["ep"]}}
    shape = AutoConfig.for_model(**case["model"])

    def make() -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa")

    if config["zero_optimization"]["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = make()
    else:
        model = make()
    model.train()
    # As accelerate hands them over: parameters that are listed before go behind the others once they are replaced.
    own = filter(lambda p: p.requires_grad, model.parameters())
    ids = torch.randint(3, case["model"]["vocab_size"], (SAMPLES, TOKENS))
    return phases.of_deepspeed(
        case,
        lambda: deepspeed.initialize(model=model, config=config, model_parameters=own),
        lambda engine: engine(input_ids=ids, labels=ids, use_cache=False).loss,
        STEPS,
    )


def ours(case: dict[str, Any]) -> list[Any]:
    """Return what the plan's schedule allocates and frees in the same case, phase by phase."""
    config = read_ds_config(case["config"])
    workload = Workload.of(
        micro_batch=SAMPLES,
        seq_len=TOKENS,
        grad_accum=case["config"]["gradient_accumulation_steps"],
        optimizer_kind=OptimizerKind.LOOP,
    )
    layout = ParallelLayout(case["ranks"], ep=case["ep"], own_experts=True, auto_ep=True)
    options = options_for(workload, layout=layout, zero3=config.zero.stage == 3)
    tape = traced(case["model"], "AutoModelForCausalLM", options, SAMPLES, TOKENS, None).expand(SAMPLES, TOKENS)
    rank = deepspeed_rank(tape.parameters, workload, config.zero, layout, rank=case["rank"])
    return phases.of_plan(record_deepspeed(rank, tape, steps=STEPS), case["least"])


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    for one in json.loads(Path(sys.argv[1]).read_text()):
        planned = ours(one)
        applied = patch.object(
            DeepSpeedZeroOptimizer_Stage3, "_loss_scale_update_and_overflow_cleanup", lambda optimizer: False
        )
        with applied, patch.object(auto_ep_layer.dist, "all_to_all_single", copied):  # gathered weights are anything
            found = {"id": one["id"], "ours": planned, "theirs": theirs(one)}
        print("RESULT " + json.dumps(found), flush=True)
        gc.collect()
