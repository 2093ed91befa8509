"""Classes whose forward reads values, whose loss torch has no rule for on the meta device, or whose blocks are named stages."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.workload import Attention
from zeroplan.models.from_config import spec_from_config
from zeroplan.tape.expanded import ExpandedTape, Op
from zeroplan.tape.options import TraceOptions

pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

BATCH, LENGTH, WIDTH = 2, 24, 32
_CODER = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in (("layers", 2), ("attention_heads", 2))}
BART: dict[str, Any] = {
    "model_type": "bart",
    "architectures": ["BartForSequenceClassification"],
    "d_model": WIDTH,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 60,
    "eos_token_id": 2,
    **_CODER,
}
_SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
WAV2VEC2: dict[str, Any] = {
    "model_type": "wav2vec2",
    **_SMALL,
    "vocab_size": 20,
    "conv_dim": [16] * 7,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}
IMAGES = {"image_size": 32, "patch_size": 8}


def traced(config: dict[str, Any]) -> ExpandedTape:
    from zeroplan.trace.api import trace_at
    from zeroplan.trace.fit import TracePoint

    spec = spec_from_config(config, name="small", source="config")
    tape = trace_at(config, spec.auto_class, TraceOptions(attn=Attention.SDPA), TracePoint(BATCH, LENGTH, 0))
    return tape.expand(BATCH, LENGTH, None)


def sizes(tape: ExpandedTape) -> list[int]:
    return [size for op, _, size, *_ in tape.events() if op == Op.ALLOC]


def test_a_classifier_takes_the_token_that_ends_each_sample() -> None:
    """One row a sample is selected, not all of them."""
    tape = traced(BART)
    heads = [i for i, module in enumerate(tape.modules) if module.name.startswith("classification_head")]
    assert heads
    assert BATCH * WIDTH * 2 in sizes(tape)
    entered = next(i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if op == Op.ENTER and arg == heads[0])
    assert all(tape.aux[i] < BATCH * LENGTH * WIDTH for i in range(entered, entered + 8) if tape.op[i] == Op.ALLOC)


@pytest.mark.parametrize("architecture", ["Wav2Vec2ForCTC", "Wav2Vec2ForSequenceClassification"])
def test_sound_is_masked_and_aligned(architecture: str) -> None:
    """CTC keeps its forward variables from its forward to its backward, which makes as many for a moment."""
    tape = traced({**WAV2VEC2, "architectures": [architecture]})
    frames, labels = LENGTH - 1, max(1, LENGTH // 8)  # the convolutions lose a frame at the end
    variables = BATCH * frames * (2 * labels + 1) * 4
    assert sizes(tape).count(variables) == (2 if architecture.endswith("CTC") else 0)


def test_no_layer_is_dropped() -> None:
    """Which layers LayerDrop leaves out is drawn at each step: with all of them a step takes the most."""
    import torch
    import transformers

    from zeroplan.trace.example import trace_example

    dropped = {**WAV2VEC2, "architectures": ["Wav2Vec2ForCTC"], "layerdrop": 1.0}
    assert sizes(traced(dropped)) == sizes(traced({**dropped, "layerdrop": 0.0}))
    config = transformers.BartConfig(**{**BART, "decoder_start_token_id": 0}, encoder_layerdrop=1.0, decoder_layerdrop=1.0)
    model = transformers.BartForConditionalGeneration(config)
    ids = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    tape = trace_example(model, {"input_ids": ids, "labels": ids}, TraceOptions(attn=Attention.SDPA))
    entered = {tape.modules[arg].name for op, arg, *_ in tape.expand(BATCH, LENGTH, None).events() if op == Op.ENTER}
    assert {"model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"} <= entered
    assert model.model.encoder.layerdrop == model.config.encoder_layerdrop == 1.0


@pytest.mark.parametrize("model_type", ["dinov2", "beit"])
def test_blocks_that_are_stages_of_a_backbone_fold(model_type: str) -> None:
    head = {"dinov2": "Dinov2ForImageClassification", "beit": "BeitForImageClassification"}[model_type]
    config = {"model_type": model_type, "architectures": [head], **_SMALL, "num_hidden_layers": 12, **IMAGES}
    assert sum(module.name.endswith(".11") for module in traced(config).modules) == 1
