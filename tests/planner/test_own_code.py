"""LitGPT's own model code: traced where it is installed, and stood in for where not."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan
from zeroplan.core.quantization import Quantization
from zeroplan.core.sizes import GIB
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup
from zeroplan.planner import live_module
from zeroplan.planner.estimate import estimate_report, estimate_runs
from zeroplan.run.ask import Ask

LLAMA = "meta-llama/Llama-3.2-1B"
FILE: dict[str, Any] = {
    "checkpoint_dir": f"checkpoints/{LLAMA}",
    "precision": "bf16-true",
    "lora_r": 4,
    "train": {"micro_batch_size": 2, "global_batch_size": 4, "max_seq_length": 512},
    "optimizer": "AdamW",
}
WORDS, WIDTH, WIDE, BLOCKS = 1000, 64, 160, 3
#: Elements of a block's two matrices, and of its adapters.
FROZEN, ADAPTERS = 2 * WIDTH * WIDE, 4 * (WIDTH + WIDE)


def plan_of(**said: Any) -> MemoryPlan:
    return estimate_report(Ask(files=[{**FILE, **said}], program="litgpt", gpu="H200")).plans[0]


def a_litgpt(seen: dict[str, Any]) -> ModuleType:
    """A package with the names that LitGPT 0.5.13 has, whose model is an embedding, one block and a head."""
    import torch
    from torch import nn

    class Config:
        block_size = 1024

        @classmethod
        def from_name(cls, name: str, **adapters: Any) -> Config:
            if name != LLAMA:
                raise ValueError(name)
            seen.update(adapters)
            return cls()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDE, bias=False)
            self.lora_A, self.lora_B = nn.Parameter(torch.zeros(4, WIDTH)), nn.Parameter(torch.zeros(WIDE, 4))
            self.proj = nn.Linear(WIDE, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.proj(self.fc(x) + x @ self.lora_A.T @ self.lora_B.T)
            return out

    class GPT(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
            blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
            self.transformer = nn.ModuleDict({"wte": nn.Embedding(WORDS, WIDTH), "h": blocks})

        def forward(self, idx: torch.Tensor, lm_head_chunk_size: int = 0) -> Any:
            x = self.transformer["wte"](idx)
            for block in self.transformer["h"]:
                x = block(x)
            seen["chunk"] = lm_head_chunk_size
            if lm_head_chunk_size:
                return [self.lm_head(part) for part in x.split(lm_head_chunk_size, dim=1)]
            return self.lm_head(x)

    def chunked_cross_entropy(logits: Any, targets: torch.Tensor) -> torch.Tensor:
        chunks = logits if isinstance(logits, list) else [logits]
        seen["scored"] = sum(chunk.shape[1] for chunk in chunks)
        scored = zip(chunks, targets.split([chunk.shape[1] for chunk in chunks], dim=1), strict=True)
        losses = [nn.functional.cross_entropy(a.reshape(-1, WORDS), b.reshape(-1), reduction="none") for a, b in scored]
        return torch.cat(losses).mean()

    def mark_only_lora_as_trainable(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "lora_" in name

    package = ModuleType("litgpt")
    package.__spec__ = ModuleSpec("litgpt", None)
    package.Config, package.GPT = Config, GPT  # type: ignore[attr-defined]
    package.mark_only_lora_as_trainable = mark_only_lora_as_trainable  # type: ignore[attr-defined]
    package.chunked_cross_entropy = chunked_cross_entropy  # type: ignore[attr-defined]
    return package


@pytest.fixture
def litgpt(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for LitGPT's package; returns what it was asked."""
    seen: dict[str, Any] = {}
    package = a_litgpt(seen)
    for name in ("litgpt", "litgpt.lora", "litgpt.model", "litgpt.utils"):
        monkeypatch.setitem(sys.modules, name, package)
    return seen


def asked(program: str = "litgpt", **said: Any) -> MemoryPlan:
    """The plan of the file with these keys; ``lengths`` is the command line's."""
    own = {"lengths": said.pop("lengths")} if "lengths" in said else {}
    return estimate_report(Ask(files=[{**FILE, **said}], program=program, gpu="H200", **own)).plans[0]


@pytest.mark.torch
def test_units_that_hold_adapters_have_gradients_of_all_their_weights(litgpt: dict[str, Any]) -> None:
    """FSDP 1 before 0.5.8: the flat gradient is a block's, whole between micro batches; the optimizer steps the adapters."""
    mixed = asked("litgpt==0.5.0", devices=2)
    lines = {line.buffer: line.bytes for line in mixed.lines}
    unit = FROZEN + ADAPTERS
    assert lines[Buffer.GRAD_SHARD] == 2 * BLOCKS * unit // 2
    assert lines[Buffer.OPTIM_EXP_AVG] <= 2 * BLOCKS * ADAPTERS
    assert mixed.fits is True
    assert litgpt["chunk"] == 128
    several = {**FILE["train"], "global_batch_size": 16}
    assert asked("litgpt==0.5.0", devices=2, train=several).gpu.peak_allocated >= (
        mixed.gpu.peak_allocated + 2 * BLOCKS * FROZEN * 9 // 10
    )
    # FSDP 2 of later versions makes none for frozen weights.
    later = {line.buffer: line.bytes for line in asked("litgpt", devices=2).lines}
    assert later[Buffer.GRAD_SHARD] == 2 * BLOCKS * ADAPTERS // 2


@pytest.mark.torch
def test_logits_are_fp32_and_stay_until_the_next_ones(litgpt: dict[str, Any]) -> None:
    """Fabric casts them; the loop's variable holds those of the micro batch before, here of one token and of the same 512.

    They lie beside the next 16-bit ones and their copies (2.5 times as much as a copy), which is more than a loss over the
    copies takes by itself: those, their softmax and the gradients of one chunk in eight (2.25 times).
    """
    long = {**FILE["train"], "max_seq_length": 1024}
    alike, shorter = asked(train=long), asked(train=long, lengths=[*[1] * 200, 1024])
    logits = 4 * WORDS * 2 * 1024
    assert alike.gpu.peak_allocated - shorter.gpu.peak_allocated == pytest.approx(logits / 4, rel=0.3)
    assert shorter.gpu.peak_allocated > 2 * logits


@pytest.mark.torch
def test_the_longest_sample_came_first(litgpt: dict[str, Any]) -> None:
    """Before 0.3.0 no later micro batch was as long, so that none met the gradients of those before it."""

    def forwards(version: str) -> list[int]:
        file = {**FILE, "devices": 2, "train": {**FILE["train"], "global_batch_size": 16}}
        request = Ask(files=[file], program=f"litgpt=={version}", gpu="H200", lengths=[*[1] * 200, 512])
        (run,) = estimate_runs(request).runs
        assert run is not None
        return [mark.peak for mark in run.simulation.timeline.marks if mark.name == "fwd"]

    old, new = forwards("0.1.0"), forwards("0.5.0")
    logits = 4 * WORDS * 2 * 512
    assert min(new[1::2]) > max(new[0::2]) + logits
    assert max(old[2:]) < min(new[1::2]) - logits


@pytest.mark.torch
def test_quantised_layers_are_fabrics(litgpt: dict[str, Any]) -> None:
    """The head is quantised as well, and weights are dequantised by way of fp16; before 0.5.5 products keep their inputs."""
    whole, packed = asked(), asked(quantize="bnb.nf4")
    line = {one.buffer: one.bytes for one in packed.lines}[Buffer.PARAM_FULL]
    matrices = [(WIDE, WIDTH), (WIDTH, WIDE)] * BLOCKS + [(WORDS, WIDTH)]
    kept = sum(sum(Quantization.NF4_SINGLE.blocks_of_weight(shape)) for shape in matrices)
    assert line == kept + 2 * (WORDS * WIDTH + BLOCKS * ADAPTERS)
    assert [one.key for one in packed.unmodelled] == ["quantize: StableEmbedding"]
    assert (whole.fits, packed.fits) == (True, None)
    old, new = asked("litgpt==0.4.0", quantize="bnb.nf4"), asked("litgpt==0.4.0")
    assert old.fits is True
    inputs = 2 * 1024 * WIDE * BLOCKS  # of the second matrix, whose input nothing else keeps
    saved = new.gpu.peak_allocated - old.gpu.peak_allocated
    assert saved < 2 * BLOCKS * FROZEN + 2 * WORDS * WIDTH - kept - inputs // 2


@pytest.mark.parametrize(
    ("program", "said", "where"),
    [
        ("litgpt==0.0.9", {}, "--program"),
        ("litgpt==9.0", {}, "--program"),
        ("litgpt==soon", {}, "--program"),
        ("axolotl==0.4", {}, "--program"),
        ("litgpt", {"quantize": "bnb.nf4", "devices": 2}, "quantize"),
        ("litgpt", {"quantize": "bnb.nf4", "precision": "bf16-mixed"}, "quantize"),
    ],
)
def test_what_there_is_not(program: str, said: dict[str, Any], where: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_setup({**FILE, **said}, program)
    assert where in refused.value.where


@pytest.mark.torch
def test_its_own_model_is_traced_with_its_own_loss(litgpt: dict[str, Any]) -> None:
    seen = litgpt
    report = estimate_report(Ask(files=[{**FILE, "lora_mlp": True}], program="litgpt", gpu="H200"))
    assert (report.model.params, report.model.trainable) == (
        2 * WORDS * WIDTH + BLOCKS * (FROZEN + ADAPTERS),
        BLOCKS * ADAPTERS,
    )
    switches = {"lora_r": 4, "lora_query": True, "lora_value": True, "lora_key": False, "lora_mlp": True, "lora_head": False}
    assert {key: seen[key] for key in switches} == switches
    assert (seen["chunk"], seen["scored"]) == (128, 511)
    (plan,) = report.plans
    assert (plan.unmodelled, plan.fits) == ((), True)
    # Full training shifts whole logits; pre-training has its labels shifted.
    whole = {key: value for key, value in FILE.items() if key != "lora_r"}
    estimate_report(Ask(files=[whole], program="litgpt", gpu="H200"))
    assert (seen["chunk"], seen["scored"]) == (0, 511)
    fresh = {key: value for key, value in whole.items() if key != "checkpoint_dir"} | {"model_name": LLAMA}
    estimate_report(Ask(files=[fresh], program="litgpt", gpu="H200"))
    assert seen["scored"] == 512
    # A model that the command line names, or that LitGPT does not know, is planned as transformers' is.
    other = estimate_report(Ask(files=[FILE], program="litgpt", model="Qwen/Qwen2.5-0.5B", gpu="H200"))
    assert other.model.name == "Qwen/Qwen2.5-0.5B"


def test_without_litgpt_transformers_model_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "find_spec", lambda name: None)
    plan = plan_of()
    assert plan.fits is None
    assert [(one.key, one.effect) for one in plan.unmodelled] == [("model", Effect.UNKNOWN)]


def test_precision_is_mixed_unless_said() -> None:
    """``get_default_supported_precision(training=True)`` of LitGPT."""
    setup = read_setup({key: value for key, value in FILE.items() if key != "precision"}, "litgpt")
    assert (setup.ask.dtype, setup.ask.model_dtype) == ("bf16", "fp32")
    assert "precision bf16-mixed" in setup.assumed


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("litgpt") is None, reason="LitGPT is not installed")
def test_lora_of_llama_2_7b_is_the_reported_run() -> None:
    """21.3 GB of 1e9: Lightning-AI/litgpt, tutorials/resource-tables.md."""
    file = {**FILE, "checkpoint_dir": "meta-llama/Llama-2-7b-hf", "lora_r": 8}
    file["train"] = {"micro_batch_size": 1, "global_batch_size": 128, "max_seq_length": 1304}
    (plan,) = estimate_report(Ask(files=[file], program="litgpt", gpu="H200")).plans
    assert plan.gpu.peak_allocated == pytest.approx(21.3e9, rel=0.01)
    assert plan.gpu.peak_allocated < 20 * GIB
