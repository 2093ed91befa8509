"""The fused transformer layer in a plan: what flags keep, an open fit, and no tape of layers that are gone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import zeroplan
from zeroplan.tape.expanded import ExpandedTape, Kind, Op
from zeroplan.tape.options import TraceOptions

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch]

LAYERS, HEADS, HIDDEN, INNER, SAMPLES, TOKENS = 3, 4, 64, 192, 8, 128
FLAGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
FILE = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 2}}


def fused_bert(**options: Any) -> Any:
    from zeroplan_runtime.techniques.transformer import use_transformer_layer

    config = transformers.BertConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=INNER, vocab_size=512
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    use_transformer_layer(model, **options)
    return model


def batch() -> dict[str, Any]:
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def kept(found: ExpandedTape, wanted: Kind = Kind.SAVED) -> list[int]:
    """Bytes of what the layers allocate and keep for the backward, each block as it is asked for; or of another kind."""
    inside = {i for i, module in enumerate(found.modules) if module.type == "FusedBertLayer"}
    return [size for op, _, size, kind, module in found.events() if op == Op.ALLOC and module in inside and kind == wanted]


@pytest.mark.parametrize("flags", [dict(zip(FLAGS, each, strict=True)) for each in itertools.product((False, True), repeat=3)])
def test_what_a_layer_keeps_is_the_formula(flags: dict[str, bool]) -> None:
    """To 0.1 %: cuDNN's and flash's random states beside it, and the seed, are a few bytes."""
    from zeroplan.trace.example import trace_example

    tape = trace_example(fused_bert(**flags), batch(), TraceOptions()).expand(SAMPLES, TOKENS, None)
    rows = SAMPLES * TOKENS
    wide, inner = 2 * rows * HIDDEN, 2 * rows * INNER
    # Query, key, value, context, normed sum, before GELU, output, deviations, and lse; the input is the output before.
    planned = 6 * wide + inner + 8 * rows + 4 * rows * HEADS
    planned += 0 if flags["gelu_checkpoint"] else inner
    planned += 0 if flags["normalize_invertible"] else 2 * wide + 8 * rows
    assert sum(kept(tape)) == pytest.approx(LAYERS * planned, rel=1e-3)


def test_under_autocast_weights_and_the_input_are_cast() -> None:
    """A layer asks whether autocast is on, as on a GPU, and then computes all in 16 bits."""
    from zeroplan.tape.options import Arithmetic
    from zeroplan.trace.example import trace_example

    half, autocast = (
        trace_example(fused_bert(), batch(), TraceOptions(arithmetic=one)).expand(SAMPLES, TOKENS, None)
        for one in (Arithmetic.HALF, Arithmetic.AUTOCAST)
    )
    assert sum(kept(autocast)) - sum(kept(half)) == 2 * SAMPLES * TOKENS * HIDDEN  # the first layer's input, in 16 bits
    params = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER + 4 * HIDDEN + INNER + HIDDEN + 4 * HIDDEN
    assert sum(kept(autocast, Kind.CAST)) == LAYERS * 2 * params
    assert sum(kept(half, Kind.CAST)) == 0


def test_scores_are_kept_once_or_twice_without_fused_attention() -> None:
    from zeroplan.trace.example import trace_example

    scores = 2 * SAMPLES * HEADS * TOKENS * TOKENS
    for again in (False, True):
        model = fused_bert(fused_attention=False, attn_dropout_checkpoint=again)
        tape = trace_example(model, batch(), TraceOptions()).expand(SAMPLES, TOKENS, None)
        assert kept(tape).count(scores) == LAYERS * (1 if again else 2)


def test_a_plan_of_the_module_tells_its_fit_and_what_a_flag_spares() -> None:
    plans = [
        zeroplan.estimate(fused_bert(gelu_checkpoint=one), inputs=batch(), ds_config=FILE, engine="zeroplan", vram="80G")[0]
        for one in (False, True)
    ]
    assert [plan.fits for plan in plans] == [True, True]
    spared = plans[0].gpu.peak_allocated - plans[1].gpu.peak_allocated
    assert spared == pytest.approx(LAYERS * 2 * SAMPLES * TOKENS * INNER, rel=0.2)  # the peak may move


def test_verify_judges_no_peak_of_a_cpu_which_keeps_scores() -> None:
    from zeroplan.engines.registry import find_engine
    from zeroplan.validate.live import LiveTapes, live_module

    model = fused_bert(attn_dropout_ratio=0.0, hidden_dropout_ratio=0.0)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    assert LiveTapes(find_engine("zeroplan"), live_module(model, batch()), model).cpu_differs


def test_without_a_batch_the_plan_is_not_that_of_the_models_own_layers() -> None:
    plan = zeroplan.estimate(fused_bert(), micro_batch=SAMPLES, seq_len=TOKENS, ds_config=FILE, engine="zeroplan", vram="80G")[
        0
    ]
    assert plan.gpu.peak_allocated is None
    assert {one.key for one in plan.unmodelled} == {"activations"}
    assert plan.fits is None
