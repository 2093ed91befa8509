"""Heads, biased attention and losses by autocast: what runs on an H200 took (torch 2.11, transformers 5.17), to the kilobyte.

The measured peaks are of training runs on one GPU or two, whose engine's part other tests hold; what CUDA rounds beside it is
less than 10 kB.
"""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.options import Arithmetic, TraceOptions

pytestmark = pytest.mark.torch

_ENCODER: dict[str, Any] = {"max_position_embeddings": 512, "hidden_size": 768, "num_hidden_layers": 12,
                            "num_attention_heads": 12, "intermediate_size": 3072}  # fmt: skip
BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 30522, **_ENCODER}
DEBERTA = {"model_type": "deberta-v2", "architectures": ["DebertaV2ForSequenceClassification"], "vocab_size": 128100,
           **_ENCODER,
           "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
           "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1, "position_biased_input": False,
           "type_vocab_size": 0}  # fmt: skip


BERT_LARGE = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1024, "num_hidden_layers": 24,
              "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 30522}  # fmt: skip
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_ff": 3072, "d_kv": 64,
      "num_layers": 12, "num_heads": 12, "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "how", "measured"),
    [
        (BERT, {"stage": 2, "dtype": "fp16", "micro_batch": 32, "seq_len": 512}, 8_004_961_792),
        (DEBERTA, {"stage": 1, "dtype": "bf16", "micro_batch": 16, "seq_len": 256, "attn": "eager"}, 7_416_909_824),
        (BERT_LARGE, {"engine": "ddp", "dtype": "bf16", "micro_batch": 16, "seq_len": 384}, 13_087_040_000),
        (T5, {"stage": 2, "dtype": "bf16", "micro_batch": 8, "seq_len": 256}, 8_158_862_848),
    ],
    ids=["sequence classification", "disentangled attention", "loss by autocast", "biased attention"],
)
def test_measured_peaks(model: dict[str, Any], how: dict[str, Any], measured: int) -> None:
    none = {} if how.get("engine") == "ddp" else {"offload_optimizer": "none", "offload_param": "none"}
    (plan,) = estimate_report(Ask(model=model, gpu="H200", from_scratch=True, depth="simulated", **none, **how)).plans
    assert plan.gpu.peak_allocated == pytest.approx(measured, abs=10_000)


def test_blocks_that_were_not_traced_free_what_the_traced_ones_free() -> None:
    """DeBERTa under autocast once folded into blocks that each left their last norm's output behind."""
    from zeroplan.core.workload import Attention
    from zeroplan.trace.api import _left_behind, trace_at
    from zeroplan.trace.fit import TracePoint

    options = TraceOptions(attn=Attention.EAGER, arithmetic=Arithmetic.AUTOCAST)
    tape = trace_at(DEBERTA, "AutoModelForSequenceClassification", options, TracePoint(2, 64, 0))
    assert _left_behind(tape.expand(2, 64, None)) == 0


def test_places_that_a_mask_selects_are_all() -> None:
    """A module that indexes by a mask is traced with every element, forward and backward."""
    import torch

    from zeroplan.trace.api import trace_module

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(x)
            chosen = made[x[..., 0] > 0]
            found = (x > 0).nonzero()
            return chosen.float().sum() + made.masked_select(x > 0).sum() + found.float().sum()

    tape = trace_module(Masked(), lambda: {"x": torch.empty(4, 8, 64, device="meta")}, TraceOptions(arithmetic=Arithmetic.FP32))
    sizes = tape.expand(1, 1, None).storage_bytes
    assert 4 * 8 * 64 * 4 in sizes  # chosen: every row
    assert 4 * 8 * 64 * 3 * 8 in sizes  # found: three coordinates each


def test_longformers_heads_that_mark_tokens_are_unknown() -> None:
    """They attend globally to tokens that they mark by their values; without these 4 % was missing."""
    longformer = {"model_type": "longformer", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
                  "vocab_size": 32, "num_hidden_layers": 2, "attention_window": 8, "max_position_embeddings": 66}  # fmt: skip
    head = {"architectures": ["LongformerForSequenceClassification"]}
    (plan,) = estimate_report(Ask(model={**longformer, **head}, seq_len=16, stage=2, gpu="H200")).plans
    assert (plan.depth, plan.gpu.activations, plan.fits) == ("formula", None, None)
