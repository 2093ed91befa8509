"""Shipped tapes against real runs on GPUs, which measured the bytes live after the forward. No torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from tests.patience import PATIENCE
from tests.workloads import flat_workload
from zeroplan.core.model_config import auto_class_of
from zeroplan.core.quantization import Products
from zeroplan.core.workload import Attention, DType, Precision, Workload
from zeroplan.models.load import load_model
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import Arithmetic, Checkpointing, TracedBase, TraceOptions
from zeroplan.tapes import find_tape, shipped

_ROWS = os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks", "ground_truth", "measured.jsonl")


def live_after_forward(tape: ExpandedTape) -> int:
    """Bytes live at the forward's end, each block rounded up to 512 as CUDA's allocator does, the inputs left out."""
    live: dict[int, int] = {}
    inside = False
    for op, arg, size in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC and inside:
            live[arg] = -(-size // 512) * 512
        elif op == Op.FREE:
            live.pop(arg, None)
        elif op == Op.MARK:
            inside = arg == Mark.FORWARD_BEGIN or inside
            if arg == Mark.FORWARD_END:
                return sum(live.values())
    raise AssertionError("no end of the forward")


def measured(row_id: str) -> tuple[dict[str, object], int]:
    """The row, and what its last forward left allocated: the difference of two marks."""
    with open(_ROWS, encoding="utf-8") as stream:
        row = next(r for r in map(json.loads, stream) if r["id"] == row_id)
    marks = row["marks"]
    last = max(i for i, m in enumerate(marks) if m["at"] == "fwd")
    return row, marks[last]["alloc"] - marks[last - 1]["alloc"]


@pytest.mark.parametrize(
    "row_id, slack",
    [
        ("a4", 0),  # bf16, sdpa
        ("a8", 0),  # fp32: attention falls back to separate operators
        ("a10", 0),  # eager attention
        ("D06", 0),  # two samples of 2048
        ("D13", 0),  # OPT, fp16, dropout
        ("D14", 0),  # RoBERTa, fp16
        ("D15", 3 << 19),  # checkpointed; slack: blocks that the allocator leaves unsplit
        ("D17", 3 << 19),  # GPT-2, fp32, dropout
        ("D18", 3 << 19),  # Qwen2
        ("p5", 3 << 19),  # autocast
    ],
)
def test_live_after_forward_is_the_gpus(row_id: str, slack: int) -> None:
    row, expected = measured(row_id)
    precision = Precision.AUTOCAST if row["engine"] == "ddp" else Precision.FP32 if row["dtype"] == "fp32" else Precision.MIXED
    workload = flat_workload(
        micro_batch=int(str(row["micro_batch"])),
        seq_len=int(str(row["seq_len"])),
        dtype=DType(str(row["dtype"])),
        precision=precision,
        attn=Attention(str(row["attn"])),
        gradient_checkpointing=bool(row["gradient_checkpointing"]),
    )
    tape = find_tape(load_model(str(row["model"])), workload)
    assert tape is not None
    live = live_after_forward(tape.expand(workload.batch.micro_batch, workload.batch.seq_len or 0))
    assert abs(live - expected) <= slack, f"{live:,} bytes predicted, {expected:,} measured"


def test_every_tape_has_the_catalogs_parameters() -> None:
    spec = load_model("meta-llama/Llama-3.1-70B")
    tape = find_tape(spec, Workload())
    assert tape is not None
    params = tape.expand(1, 128).params
    assert [(p.name, p.shape) for p in params] == [(name, t.shape) for name, t in spec.tensors()]
    assert sum(math.prod(p.shape) for p in params) == spec.params


@pytest.mark.long
def test_every_shipped_model_has_the_parameters_that_the_catalog_counts() -> None:
    from zeroplan.models import catalog

    wrong = []
    for entry in catalog.entries():
        tape = shipped.find(load_model(entry.id), TraceOptions())
        if tape is not None:
            count = sum(math.prod(p.shape) for p in tape.expand(1, 64).params)
            wrong += [] if count == entry.params else [(entry.id, count, entry.params)]
    assert wrong == []


def test_a_users_copy_of_a_shipped_config_finds_its_tape() -> None:
    from zeroplan.models import catalog

    entry = catalog.find("meta-llama/Llama-3.2-1B")
    assert entry is not None
    copy = {**entry.config, "torch_dtype": "bfloat16", "bos_token_id": 1, "transformers_version": "4.40.0"}
    assert find_tape(load_model(copy), Workload()) is not None
    assert find_tape(load_model({**copy, "num_attention_heads": 16, "head_dim": 128}), Workload()) is None


def test_adapters_on_all_linear_layers_are_found_however_they_are_named() -> None:
    from zeroplan.models.lora import with_lora

    spec = with_lora(load_model("meta-llama/Llama-3.1-8B"), 16)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for targets in ((), names):
        tape = find_tape(spec, flat_workload(lora_rank=16, lora_targets=targets))
        assert tape is not None
        params = tape.expand(1, 128, 16).params
        assert sum(p.shape[0] * p.shape[1] for p in params if p.trainable) == spec.trainable
    assert shipped.find(spec, TraceOptions(lora=("q_proj",))) is None


def test_tapes_are_found_without_torch() -> None:
    code = (
        "import sys\n"
        "from zeroplan.models.load import load_model\n"
        "from zeroplan.core.workload import Workload\n"
        "from zeroplan.tapes import find_tape\n"
        "assert find_tape(load_model('meta-llama/Llama-3.1-8B'), Workload()).expand(1, 2048)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert out.stdout.strip() == "[]"


@pytest.mark.torch
@pytest.mark.parametrize(
    "model, options",
    [
        ("meta-llama/Llama-3.1-8B", TraceOptions()),
        ("openai-community/gpt2", TraceOptions(checkpointing=Checkpointing.NON_REENTRANT, arithmetic=Arithmetic.AUTOCAST)),
        ("facebook/opt-350m", TraceOptions(lora=())),
        *(
            pytest.param(model, options, marks=pytest.mark.long)
            for model, options in (
                ("Qwen/Qwen2.5-7B", TraceOptions(zero3=True)),
                ("FacebookAI/roberta-base", TraceOptions(arithmetic=Arithmetic.FP32)),
                ("meta-llama/Llama-3.2-1B", TraceOptions()),
                ("meta-llama/Llama-3.2-1B", TraceOptions(checkpointing=Checkpointing.NON_REENTRANT)),
                ("Qwen/Qwen2.5-0.5B", TraceOptions(zero3=True)),
                ("openai-community/gpt2-medium", TraceOptions()),
            )
        ),
    ],
)
def test_tracing_again_gives_what_is_shipped(model: str, options: TraceOptions) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from zeroplan.trace.api import trace_model

    spec = load_model(model)
    kept = shipped.find(spec, options)
    assert kept is not None
    again = trace_model(spec.config, auto_class_of(spec.config), options)
    for batch, seq in ((1, 384), (4, 1000)):
        one, two = kept.expand(batch, seq, 8), again.expand(batch, seq, 8)
        assert (one.op, one.arg, one.aux, one.kind, one.module) == (two.op, two.arg, two.aux, two.kind, two.module)
        assert one.modules == two.modules
        assert one.params == two.params


def test_shipped_tapes_stay_within_25_mb() -> None:
    files = [os.path.join(shipped.DATA, name) for name in os.listdir(shipped.DATA)]
    assert sum(map(os.path.getsize, files)) <= 25 << 20


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("Qwen/Qwen3-8B", None),
        *((model, TracedBase(Products.NESTED)) for model in ("Qwen/Qwen3-8B", "google/gemma-2-9b", "microsoft/phi-2")),
    ],
)
def test_adapters_under_ddp_have_shipped_tapes(model: str, base: TracedBase | None) -> None:
    """Over 16-bit weights, and over a 4-bit base; at any length, within a window and beyond."""
    by = Arithmetic.HALF_AUTOCAST if base is None else Arithmetic.AUTOCAST
    options = TraceOptions(checkpointing=Checkpointing.NON_REENTRANT, arithmetic=by, lora=(), base=base)
    tape = shipped.find(load_model(model), options)
    assert tape is not None
    assert len({tape.expand(1, seq, 16).activation_peak for seq in (512, 4095, 4096, 8192)}) == 4


def test_tapes_of_a_quantised_base_name_its_layers() -> None:
    for model in ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"):
        options = TraceOptions(checkpointing=Checkpointing.NON_REENTRANT, lora=(), base=TracedBase(Products.NESTED))
        tape = shipped.find(load_model(model), options)
        assert tape is not None
        assert "Linear4bit" in {module.type for module in tape.expand(1, 512, 16).modules}
