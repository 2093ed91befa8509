"""Traces models on one of some ranks of DeepSpeed's own AutoEP, and on ours. Started by test_auto_ep.

DeepSpeed's code is that for a GPU: its Triton kernels are there, and compute nothing. Routing is balanced.

Usage: python run_auto_ep.py CASES.json. A case: ``{"id", "config", "ranks", "batch", "checkpointing", "zero3"}``. Prints one
JSON line a case: ``{"id", "ours", "theirs"}``, each the tape's events, the sizes of its storages and the shapes of its
parameters.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="8", LOCAL_SIZE="8")


import deepspeed
import torch
from deepspeed.module_inject import auto_ep_layer
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.moe import ep_kernels
from deepspeed.ops.triton_ops import _triton, swiglu_triton
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroplan.trace.api as api
from zeroplan.tape.options import Checkpointing, TracedMesh, TraceOptions
from zeroplan.trace.auto_ep import AutoEpRank

WORLD, SEQ = 8, 64


class _Idle:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def _with_idle_kernels() -> None:
    """Import DeepSpeed's Triton kernels as they are where Triton has a GPU."""
    own = SimpleNamespace(jit=lambda function: _Idle(), cdiv=lambda a, b: -(-a // b), next_power_of_2=lambda a: a)
    for name, value in (("triton", own), ("tl", SimpleNamespace(constexpr=None)), ("_TRITON_AVAILABLE", True)):
        setattr(_triton, name, value)
    for module in (ep_kernels, swiglu_triton):
        importlib.reload(module)


class DeepSpeedRank(AutoEpRank):
    """A rank whose blocks DeepSpeed replaces, as its engine does."""

    def lay_out(self, model: torch.nn.Module) -> None:
        """Replace the blocks."""
        made = AutoEP(model, AutoEPConfig(enabled=True, autoep_size=self._ranks))
        with torch.device("cpu"):
            specs = made.ep_parser()
        with torch.device("meta"):
            made.replace_moe_layers(specs, ep_size=self._ranks, ep_rank=0)
        for module in model.modules():
            if isinstance(module, auto_ep_layer.AutoEPMoELayer):
                module.bfloat16()  # as the engine does with the whole model

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the ranks exchange as many rows as each other, and the kernels take tensors that are on no GPU."""
        ranks = self._ranks

        def plan(counts: torch.Tensor, ep_size: int, experts: int, group: Any) -> Any:
            def read(tensor: torch.Tensor) -> Any:
                rows = self.rows // ranks
                return SimpleNamespace(tolist=lambda: ([rows] * ranks, [rows] * ranks))

            with patch.object(torch.Tensor, "cpu", read):
                return planned(counts, ep_size, experts, group)

        def picked(module: Any, x: torch.Tensor, bias: Any = None) -> Any:
            self.rows = x.shape[0] * module.top_k
            return forward(module, x, bias)

        planned = auto_ep_layer._split_plan_from_expert_counts
        forward = auto_ep_layer.TokenChoiceTopKRouter.forward
        nothing = SimpleNamespace(all_to_all_single=lambda *args, **kwargs: None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(auto_ep_layer, "_split_plan_from_expert_counts", plan))
            stack.enter_context(patch.object(auto_ep_layer.TokenChoiceTopKRouter, "forward", picked))
            stack.enter_context(patch.object(auto_ep_layer, "dist", nothing))
            stack.enter_context(patch.object(ep_kernels, "permute_rows_supported", lambda rows: True))
            yield


def tape_of(case: dict[str, Any], on: AutoEpRank | None) -> list[Any]:
    """What a tape holds; `on` None traces ours."""
    checkpointing = Checkpointing(case["checkpointing"])
    options = TraceOptions(mesh=TracedMesh(ep=case["ranks"], auto_ep=True), checkpointing=checkpointing, zero3=case["zero3"])
    given = contextlib.nullcontext() if on is None else patch.object(api, "_ranks_of", lambda _: contextlib.nullcontext(on))
    batch = case["batch"]
    with given:
        tape = api.traced(case["config"], "AutoModelForCausalLM", options, batch, SEQ, None).expand(batch, SEQ, None)
    events = [list(map(int, column)) for column in (tape.op, tape.arg, tape.aux)]
    return [*events, list(map(int, tape.storage_bytes)), [[p.name, *p.shape] for p in tape.params]]


if __name__ == "__main__":
    _with_idle_kernels()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    deepspeed.init_distributed("gloo", verbose=False)
    for one in json.loads(Path(sys.argv[1]).read_text()):
        theirs = tape_of(one, DeepSpeedRank(one["ranks"]))
        print("RESULT " + json.dumps({"id": one["id"], "ours": tape_of(one, None), "theirs": theirs}), flush=True)
