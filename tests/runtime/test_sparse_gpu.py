"""Block-sparse attention by FlexAttention's kernels: output and gradients beside fp32 attention under the layout's mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroplan_runtime
from tests.runtime.test_sparse_attention import LAYOUTS, kept_scores, plain_attention
from tests.runtime.test_sparse_models import BATCH, HEADS, inputs, make, run
from zeroplan_runtime.techniques.sparse_attention import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    SparseSelfAttention,
    use_sparse_attention,
)
from zeroplan_runtime.techniques.sparse_attention.attention import tiled_attention
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's backward needs a GPU"),
]

#: Greatest error over a norm, by dtype: fp32 products may run in tf32.
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def fresh_kernels() -> Any:
    """No test meets the limit of compiled shapes through those before it."""
    torch._dynamo.reset()


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.cpu().float() - other.cpu().float()).norm() / other.cpu().float().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["fixed", "patterns", "horizontal", "past", "bigbird"])
def test_the_kernels_give_what_a_plain_reference_gives(name: str, dtype: torch.dtype) -> None:
    config, causal, tokens = LAYOUTS[name], name == "past", 584
    scores = SparseScores.make(config, tokens, causal=causal)
    scores = scores.for_kernels(queries=config.moves_queries, keys=config.moves_keys).to(torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 2, tokens, 64, generator=generator).to(dtype) for _ in range(4)]
    padding = torch.ones(2, tokens, dtype=torch.bool)
    padding[1, 300:] = False
    kept = kept_scores(config, tokens, causal=causal).unsqueeze(0) & padding[:, None, None]
    found, exact = [each.cuda().requires_grad_() for each in whole[:3]], [each.float().requires_grad_() for each in whole[:3]]
    out = tiled_attention(*found, scores, scores.block_mask(padding.cuda()))
    expected = plain_attention(*exact, kept)
    assert error(out, expected) < TOLERANCE[dtype]
    out.backward(whole[3].cuda())
    expected.backward(whole[3].float())
    for one, other in zip(found, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.isfinite().all()
        assert error(one.grad, other.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_model_computes_on_a_gpu_what_it_computes_on_a_cpu(kind: str) -> None:
    """Width 16 a head is the least that the kernels take; llama's two heads share their keys."""
    ids, mask = inputs()
    results = []
    for device in ("cpu", "cuda"):
        model = make(kind, hidden_size=32, n_embd=32)
        use_sparse_attention(model, FixedSparsityConfig(HEADS))
        results.append(run(model.to(device), ids.to(device), mask.to(device), mask.to(device)))
    assert error(results[1][0], results[0][0]) < 1e-2
    # A bias of the keys moves no probability: its gradient is rounding alone, small beside the others.
    least = 1e-5 * max(float(each.norm()) for each in results[0][1])
    for one, other in zip(results[1][1], results[0][1], strict=True):
        assert float((one.cpu() - other).norm()) < 3e-2 * max(float(other.norm()), least)


def test_the_module_takes_masks_and_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 256, 16, generator=generator) for _ in range(3))
    rpe = torch.randn(2, 2, 256, 256, generator=generator)
    padding = torch.zeros(2, 256).index_fill(1, torch.arange(200, 256), float("-inf"))
    mask = (torch.rand(256, 256, generator=generator) < 0.9).float()
    module = SparseSelfAttention(FixedSparsityConfig(2), max_seq_length=256)
    expected = module(query, key, value, rpe, padding, mask)
    found = module.cuda()(*(each.cuda() for each in (query, key, value, rpe, padding, mask)))
    assert error(found, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_engine_trains_with_it(compiled: bool) -> None:
    """Losses with checkpointing at stage 3, as written and compiled, are a CPU's without either."""

    def losses(device: str) -> list[float]:
        model = transformers.LlamaForCausalLM(make("llama", hidden_size=32).config)
        torch.manual_seed(0)
        for param in model.parameters():
            nn.init.normal_(param, std=0.2)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
            "sparse_attention": {"mode": "bigbird", "num_random_blocks": 1},
        }
        if device == "cuda":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine, *_ = zeroplan_runtime.initialize(model=model, config=config, device=device)
        if compiled and device == "cuda":
            engine.compile()
        found = []
        ids, mask = (each.to(device) for each in inputs())
        for _ in range(3):
            loss = engine(input_ids=ids, attention_mask=mask, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        engine.destroy()
        return found

    assert losses("cuda") == pytest.approx(losses("cpu"), rel=2e-2)


def test_a_long_sequence_keeps_no_scores() -> None:
    """32,768 tokens: the scores of one head alone would be 2 GiB in bf16."""
    tokens = 32768
    scores = SparseScores.make(BigBirdSparsityConfig(2, block=64, seed=0), tokens, causal=False).to(torch.device("cuda"))
    states = [torch.randn(1, 2, tokens, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    mask = scores.block_mask()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tiled_attention(*states, scores, mask).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 12 * states[0].nbytes
