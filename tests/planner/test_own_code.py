"""LitGPT's own model code: traced where it is installed, and stood in for where not."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from zeroplan.core.plan import MemoryPlan
from zeroplan.core.units import GIB
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup
from zeroplan.planner import own_code
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.request import Request

LLAMA = "meta-llama/Llama-3.2-1B"
FILE: dict[str, Any] = {
    "checkpoint_dir": f"checkpoints/{LLAMA}",
    "precision": "bf16-true",
    "lora_r": 4,
    "train": {"micro_batch_size": 2, "global_batch_size": 4, "max_seq_length": 512},
    "optimizer": "AdamW",
}
WORDS, WIDTH = 1000, 64


def plan_of(**said: Any) -> MemoryPlan:
    return estimate_report(Request(files=[{**FILE, **said}], program="litgpt", gpu="H200")).plans[0]


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

    class GPT(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.wte, self.lm_head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
            self.h = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False)])

        def forward(self, idx: torch.Tensor, lm_head_chunk_size: int = 0) -> Any:
            x = self.h[0](self.wte(idx))
            seen["chunk"] = lm_head_chunk_size
            if lm_head_chunk_size:
                return [self.lm_head(part) for part in x.split(lm_head_chunk_size, dim=1)]
            return self.lm_head(x)

    def chunked_cross_entropy(logits: Any, targets: torch.Tensor) -> torch.Tensor:
        whole = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
        seen["scored"] = whole.shape[1]
        return nn.functional.cross_entropy(whole.reshape(-1, WORDS), targets.reshape(-1))

    def mark_only_lora_as_trainable(model: nn.Module) -> None:
        for parameter in (*model.wte.parameters(), *model.lm_head.parameters()):  # type: ignore[union-attr, operator]
            parameter.requires_grad = False

    package = ModuleType("litgpt")
    package.__spec__ = ModuleSpec("litgpt", None)
    package.Config, package.GPT = Config, GPT  # type: ignore[attr-defined]
    package.mark_only_lora_as_trainable = mark_only_lora_as_trainable  # type: ignore[attr-defined]
    package.chunked_cross_entropy = chunked_cross_entropy  # type: ignore[attr-defined]
    return package


@pytest.mark.torch
def test_its_own_model_is_traced_with_its_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    package = a_litgpt(seen)
    for name in ("litgpt", "litgpt.lora", "litgpt.model", "litgpt.utils"):
        monkeypatch.setitem(sys.modules, name, package)
    report = estimate_report(Request(files=[{**FILE, "lora_mlp": True}], program="litgpt", gpu="H200"))
    assert (report.model.params, report.model.trainable) == (2 * WORDS * WIDTH + WIDTH * WIDTH, WIDTH * WIDTH)
    switches = {"lora_r": 4, "lora_query": True, "lora_value": True, "lora_key": False, "lora_mlp": True, "lora_head": False}
    assert {key: seen[key] for key in switches} == switches
    assert (seen["chunk"], seen["scored"]) == (128, 511)
    (plan,) = report.plans
    assert [(one.key, one.effect) for one in plan.unmodelled] == [("model", Effect.MORE)]
    assert plan.fits is None
    # Full training shifts whole logits; pre-training has its labels shifted.
    whole = {key: value for key, value in FILE.items() if key != "lora_r"}
    estimate_report(Request(files=[whole], program="litgpt", gpu="H200"))
    assert (seen["chunk"], seen["scored"]) == (0, 511)
    fresh = {key: value for key, value in whole.items() if key != "checkpoint_dir"} | {"model_name": LLAMA}
    estimate_report(Request(files=[fresh], program="litgpt", gpu="H200"))
    assert seen["scored"] == 512
    # A model that the command line names, or that LitGPT does not know, is planned as transformers' is.
    other = estimate_report(Request(files=[FILE], program="litgpt", model="Qwen/Qwen2.5-0.5B", gpu="H200"))
    assert other.model.name == "Qwen/Qwen2.5-0.5B"


def test_without_litgpt_transformers_model_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "find_spec", lambda name: None)
    plan = plan_of()
    assert plan.fits is None
    assert [(one.key, one.effect) for one in plan.unmodelled] == [("model", Effect.UNKNOWN)]


def test_precision_is_mixed_unless_said() -> None:
    """``get_default_supported_precision(training=True)`` of LitGPT."""
    setup = read_setup({key: value for key, value in FILE.items() if key != "precision"}, "litgpt")
    assert (setup.dtype, setup.model_dtype) == ("bf16", "fp32")
    assert "precision bf16-mixed" in setup.assumed


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("litgpt") is None, reason="LitGPT is not installed")
def test_lora_of_llama_2_7b_is_the_reported_run() -> None:
    """21.3 GB of 1e9: Lightning-AI/litgpt, tutorials/resource-tables.md."""
    file = {**FILE, "checkpoint_dir": "meta-llama/Llama-2-7b-hf", "lora_r": 8}
    file["train"] = {"micro_batch_size": 1, "global_batch_size": 128, "max_seq_length": 1304}
    (plan,) = estimate_report(Request(files=[file], program="litgpt", gpu="H200")).plans
    assert plan.gpu.peak_allocated == pytest.approx(21.3e9, rel=0.02)
    assert plan.gpu.peak_allocated < 20 * GIB
