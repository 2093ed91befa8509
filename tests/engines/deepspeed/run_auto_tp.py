"""Traces models on one of two ranks of DeepSpeed's own AutoTP, and on ours. Started by test_auto_tp.

Usage: python run_auto_tp.py CASES.json. A case: ``{"id", "config", "checkpointing", "zero3"}``. Prints one JSON line a case:
``{"id", "ours", "theirs"}``, each the tape's events, the sizes of its storages and the shapes of its parameters.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_SIZE="2")

import deepspeed
import torch
import torch.distributed._tools.fake_collectives  # collectives of the meta device
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from deepspeed.utils import groups
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroplan.trace.api as api
from zeroplan.tape.options import Checkpointing, TracedMesh, TraceOptions
from zeroplan.trace.ranks import Ranks

RANKS, BATCH, SEQ = 2, 2, 128


class DeepSpeedRank(Ranks):
    """A rank whose model DeepSpeed divides, as its engine does with the plan of a model of transformers."""

    def lay_out(self, model: torch.nn.Module) -> None:
        """Replace the layers. On the meta device a part stays a view of the whole; on any other it is a dense copy."""
        specs = TPPlanConverter.convert(_get_hf_tp_plan(model))
        auto_tp = AutoTP(
            module=model,
            all_reduce_linears=(),
            prefix="",
            state_dict=None,
            linear_layer_setting=(torch.nn.Linear, torch.nn.Embedding),
            orig_layer_impl=None,
            keep_module_on_host=False,
            partition_config=AutoTPConfig(tp_size=RANKS, layer_specs=specs),
            model_config=model.config,
            training_mode=True,
        )
        auto_tp.set_tensor_parallel_config(RANKS, groups.get_tensor_model_parallel_group())
        auto_tp.update_linear_policies()
        auto_tp._replace_module(model)
        auto_tp.register_replicated_grad_hooks(model)
        for param in model.parameters():
            param.data = param.data.contiguous()


def tape_of(case: dict[str, Any], rank: Ranks | None) -> list[Any]:
    """What a tape holds; `rank` None traces ours."""
    options = TraceOptions(mesh=TracedMesh(tp=RANKS, whole_vocabulary=True), checkpointing=Checkpointing(case["checkpointing"]))
    options = replace(options, zero3=case.get("zero3", False))
    given = contextlib.nullcontext() if rank is None else patch.object(api, "_ranks_of", lambda _: contextlib.nullcontext(rank))
    with given:
        tape = api.traced(case["config"], "AutoModelForCausalLM", options, BATCH, SEQ, None).expand(BATCH, SEQ, None)
    events = [list(map(int, column)) for column in (tape.op, tape.arg, tape.aux)]
    return [*events, list(map(int, tape.storage_bytes)), [[p.name, *p.shape] for p in tape.params]]


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    deepspeed.init_distributed("gloo", verbose=False)
    set_autotp_mode(training=True)
    groups._init_tp_mesh_device(tensor_model_parallel_size=RANKS)
    for one in json.loads(Path(sys.argv[1]).read_text()):
        found = {"id": one["id"], "ours": tape_of(one, None), "theirs": tape_of(one, DeepSpeedRank())}
        print("RESULT " + json.dumps(found), flush=True)
