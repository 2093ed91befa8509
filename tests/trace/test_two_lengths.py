"""Sources and targets of different lengths: a tape traced at one target length equals a trace of the very shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import SEQ2SEQ_LM
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import Kind, Op
from zeroplan.tape.options import Arithmetic, Checkpointing, TraceOptions
from zeroplan.tape.sizes import MASK_ALIGNMENT

pytest.importorskip("transformers")

VOCABULARY, TARGET = 320, 24
T5 = {
    "model_type": "t5",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 6,
    "num_decoder_layers": 6,
    "decoder_start_token_id": 0,
    "architectures": ["T5ForConditionalGeneration"],
}
BART = {
    "model_type": "bart",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 1024,
    "architectures": ["BartForConditionalGeneration"],
}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (T5, TraceOptions(checkpointing=Checkpointing.NON_REENTRANT, target_len=TARGET)),
        (BART, TraceOptions(arithmetic=Arithmetic.AUTOCAST, target_len=TARGET)),
    ],
    ids=["t5 recomputed", "bart under autocast"],
)
def test_a_tape_at_any_source_is_a_trace_of_those_shapes(config: dict[str, Any], options: TraceOptions) -> None:
    from zeroplan.trace.api import trace_at, trace_model
    from zeroplan.trace.fit import TracePoint

    tape = trace_model(config, SEQ2SEQ_LM, options)
    for batch, source in ((3, 80), (5, 17)):
        told = tape.expand(batch, source)
        true = trace_at(config, SEQ2SEQ_LM, options, TracePoint(batch, source, 0)).expand(batch, source)
        if config is T5 and source % MASK_ALIGNMENT:  # a learned mask's gradient is made twice, padded and cut: no peak has it
            assert told.activation_peak == true.activation_peak
            made = [sum(size for op, size in zip(one.op, one.aux, strict=True) if op == Op.ALLOC) for one in (told, true)]
            assert made[0] <= made[1] <= made[0] * 1.02
        else:
            assert list(told.events()) == list(true.events())
        rows = zip(told.op, told.aux, told.kind, strict=True)
        logits = next(size for op, size, kind in rows if op == Op.ALLOC and kind == Kind.LOGITS)
        assert logits == batch * TARGET * VOCABULARY * 2


def plan(config: dict[str, Any], tmp_path: Path, **asked: Any) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return estimate_report(Ask(model=str(path), engine="ddp", micro_batch=4, **asked))


@pytest.mark.long
def test_lengths_alike_are_the_one_length_and_a_shorter_target_needs_less(tmp_path: Path) -> None:
    both = plan(T5, tmp_path, seq_len=64)
    assert plan(T5, tmp_path, source_len=64, target_len=64).plans == both.plans
    shorter = plan(T5, tmp_path, source_len=64, target_len=16)
    assert shorter.workload["target_len"] == 16
    assert shorter.plans == plan(T5, tmp_path, seq_len=64, target_len=16).plans
    assert shorter.plans[0].gpu.activations < both.plans[0].gpu.activations


def test_lengths_of_no_two_sides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no encoder-decoder"):
        estimate_report(Ask(model="openai-community/gpt2", target_len=8))
    with pytest.raises(BadInput, match="target-len alone"):
        estimate_report(Ask(model="openai/whisper-small", source_len=8))
    for more in ({"seq_len": 8}, {"lengths": "4,8"}, {"tp": 2, "gpus": 2}):
        with pytest.raises(BadInput):
            plan(T5, tmp_path, source_len=64, target_len=16, **more)
    with pytest.raises(BadInput, match="1024 positions"):
        plan(BART, tmp_path, target_len=2048)


def test_whispers_target_is_its_only_length() -> None:
    asked, meant = (
        estimate_report(Ask(model="openai/whisper-small", engine="ddp", **{key: 200})) for key in ("target_len", "seq_len")
    )
    assert asked.plans == meant.plans


def test_a_translation_script_says_both(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python run_summarization.py --model_name_or_path google-t5/t5-small --per_device_train_batch_size 4 --bf16 True"
        " --learning_rate 1e-4 --output_dir out --max_source_length 512\n"
    )
    report = estimate_report(Ask(files=(str(script),), depth="formula"))
    assert (report.workload["seq_len"], report.workload["target_len"]) == (512, 128)
