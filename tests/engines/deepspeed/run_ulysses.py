"""Traces models on one of some ranks of DeepSpeed's own Ulysses, and on ours. Started by test_ulysses.

Usage: python run_ulysses.py CASES.json. A case:
``{"id", "config", "ranks", "batch", "checkpointing", "zero3", "lora"}``. Prints
one JSON line a case: ``{"id", "ours", "theirs"}``, each the tape's events, the sizes of its storages and the shapes of its
parameters.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="8", LOCAL_SIZE="8")

import deepspeed
import torch
import torch.distributed._tools.fake_collectives  # collectives of the meta device
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zeroplan.trace.api as api
from zeroplan.tape.options import Arithmetic, Checkpointing, TracedMesh, TraceOptions
from zeroplan.trace.ulysses import UlyssesRank

WORLD, SEQ = 8, 64


class DeepSpeedRank(UlyssesRank):
    """A rank whose attention DeepSpeed exchanges, as accelerate registers it; the batch is that of its data loader."""

    def __init__(self, ranks: int, config: dict[str, Any]) -> None:
        super().__init__(ranks)
        self.group = torch.distributed.new_group(list(range(ranks)))
        self.config, self.batch = config, 0

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Note how many samples the next forward has, which DeepSpeed asks for beforehand."""
        self.attention.batch_size = batch["input_ids"].shape[0]
        for shape in ("query", "key_value", "context"):
            name = f"required_{shape}_shape"
            was = getattr(self.attention, name)
            setattr(self.attention, name, torch.Size([was[0], self.attention.batch_size, *was[2:]]))
        return super().inputs(batch)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Register DeepSpeed's class in the place of the attention that the model calls."""
        core = ALL_ATTENTION_FUNCTIONS["sdpa"]
        self.attention = UlyssesSPAttentionHF(
            attn=core,
            batch_size=1,
            attn_head_count=self.config["num_attention_heads"],
            attn_head_size=self.config.get("head_dim", self.config["hidden_size"] // self.config["num_attention_heads"]),
            kv_head_count=self.config["num_key_value_heads"],
            num_hidden_layers=self.config["num_hidden_layers"],
            process_group=self.group,
            seq_length_is_variable=True,
        )

        def registered(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            return self.attention(module, query, key, value, None, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS["sdpa"] = registered
        try:
            with patch.object(ulysses_sp.dist, "all_gather", gathered_by_nccl):
                yield
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = core


def gathered_by_nccl(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    """Allocate what ``ProcessGroupNCCL::allgather`` does for parts of one size: a flat buffer, which is copied out of."""
    del group
    flat = own.new_empty((len(parts), *own.shape))
    del flat


def tape_of(case: dict[str, Any], on: UlyssesRank | None) -> list[Any]:
    """What a tape holds; `on` None traces ours."""
    checkpointing = Checkpointing(case["checkpointing"])
    options = TraceOptions(mesh=TracedMesh(ulysses=case["ranks"]), checkpointing=checkpointing, zero3=case["zero3"])
    if case["lora"]:
        options = replace(options, lora=(), arithmetic=Arithmetic.HALF_AUTOCAST)
    rank = 8 if case["lora"] else None
    given = contextlib.nullcontext() if on is None else patch.object(api, "_ranks_of", lambda _: contextlib.nullcontext(on))
    batch = case["batch"]
    with given:
        tape = api.traced(case["config"], "AutoModelForCausalLM", options, batch, SEQ, rank).expand(batch, SEQ, rank)
    events = [list(map(int, column)) for column in (tape.op, tape.arg, tape.aux)]
    return [*events, list(map(int, tape.storage_bytes)), [[p.name, *p.shape] for p in tape.params]]


if __name__ == "__main__":
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    deepspeed.init_distributed("gloo", verbose=False)
    for one in json.loads(Path(sys.argv[1]).read_text()):
        theirs = tape_of(one, DeepSpeedRank(one["ranks"], one["config"]))
        print("RESULT " + json.dumps({"id": one["id"], "ours": tape_of(one, None), "theirs": theirs}), flush=True)
