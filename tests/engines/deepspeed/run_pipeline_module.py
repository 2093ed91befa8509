"""Runs each stage of DeepSpeed's PipelineEngine and prints what it allocates and frees. Started by test_pipeline_module.

Each stage runs by itself on the CPU, with a process group that does nothing: what it receives is zeros.

Usage: python run_pipeline_module.py CASES.json. A case: ``{"id", "model", "batch", "seq", "dtype", "partition", "stages", "dp",
"config"}``. Prints one JSON line a case: ``{"id", "parts", "stages"}``: where each stage begins in the list of layers, and by
stage and phase the bytes of its allocations, of its frees as negative numbers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")

import deepspeed
import torch
import transformers
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import engine as pipe_engine
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask

LEAST = 40_000
STEPS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Table(torch.nn.Module):
    """The embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed_tokens(ids)
        return found


class Block(torch.nn.Module):
    """One block of a Llama, which makes its own positions and mask."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        self.config = config
        self.layer = LlamaDecoderLayer(config, number)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        mask = create_causal_mask(self.config, hidden, None, None, position_ids=positions)
        found: torch.Tensor = self.layer(
            hidden, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(hidden, positions)
        )
        return found


class Norm(torch.nn.Module):
    """The final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(hidden)
        return found


class Head(torch.nn.Module):
    """The head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(hidden)
        return found


def tied_head(table: Table, hidden: torch.Tensor) -> torch.Tensor:
    """The head that is the embedding's matrix."""
    return torch.nn.functional.linear(hidden, table.embed_tokens.weight)


def allocated(action: Any) -> tuple[Any, list[int]]:
    """What an action returns, and the bytes that it allocates and frees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = action()
    events = found.profiler.kineto_results.events()
    return result, [e.nbytes() for e in events if e.name() == "[memory]" and abs(e.nbytes()) >= LEAST]


class NoTransport:
    """Sends nothing, and receives zeros, or the shape of the hidden states where that is asked for."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        code = pipe_engine.PipelineEngine.DTYPE_TO_ID[dtype]
        self.metadata = [0, code, len(shape), *shape]

    def init_process_groups(self, grid: Any) -> None:
        """Make none."""

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Send nothing."""

    def recv(self, tensor: torch.Tensor, stage: int) -> None:
        """Fill what is received."""
        tensor.zero_()
        if tensor.dtype is torch.int32:
            tensor[: len(self.metadata)] = torch.tensor(self.metadata, dtype=torch.int32)


def run(case: dict[str, Any], stage: int) -> tuple[list[int], list[Any]]:
    """One stage of a case: initialisation and two steps."""
    stages, dtype = case["stages"], DTYPES[case["dtype"]]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=stage * case["dp"], world_size=stages * case["dp"])
    deepspeed.init_distributed("gloo", verbose=False)
    config = transformers.AutoConfig.for_model(**case["model"], attn_implementation="eager")
    pipe_engine.p2p = NoTransport((case["batch"], case["seq"], config.hidden_size), dtype)
    blocks = [LayerSpec(Block, config, number) for number in range(config.num_hidden_layers)]
    layers = [LayerSpec(Table, config), *blocks, LayerSpec(Norm, config), LayerSpec(Head, config)]
    if config.tie_word_embeddings:
        weight = "embed_tokens.weight"
        layers[0] = TiedLayerSpec("words", Table, config, tied_weight_attr=weight)
        layers[-1] = TiedLayerSpec("words", Table, config, forward_fn=tied_head, tied_weight_attr=weight)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = ForCausalLMLoss(logits, labels, config.vocab_size)
        return found

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            ids = torch.randint(config.vocab_size, (case["batch"], case["seq"]))
            yield ids, ids

    torch.set_default_dtype(dtype)
    model = PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=loss,
        partition_method=case["partition"],
        activation_checkpoint_interval=int(case["checkpointed"]),
        checkpointable_layers=["Block"],
    )
    torch.set_default_dtype(torch.float32)
    engine, sizes = allocated(
        lambda: deepspeed.initialize(model=model, config=case["config"], model_parameters=model.parameters())[0]
    )
    phases = [["init", sizes]]
    for step in range(STEPS):
        _, sizes = allocated(lambda: engine.train_batch(batches()))
        phases.append([f"step{step}", sizes])
    parts = [int(part) for part in model.parts]
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    return parts, phases


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference; it would be compiled here
    gc.disable()  # as on a GPU, tensors go by their reference counts
    for one in json.loads(Path(sys.argv[1]).read_text()):
        found = [run(one, stage) for stage in range(one["stages"])]
        print("RESULT " + json.dumps({"id": one["id"], "parts": found[0][0], "stages": [p for _, p in found]}), flush=True)
        gc.collect()
