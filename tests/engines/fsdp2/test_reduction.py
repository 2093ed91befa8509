"""The dtype in which FSDP2 reduces gradients: as programs say it, and against measured runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import HERE
from benchmarks.step.predict import request_of
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.planner.estimate import estimate_report, estimate_runs
from zeroplan.run.ask import Ask

ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
mixed_precision_reduce = "@"
"""


def measured(name: str, case: str, ranks: int, shape: str, micro: int) -> dict[str, Any]:
    rows = map(json.loads, (HERE / "results" / "step" / name).read_text().splitlines())
    asked = {"case": case, "ranks": ranks, "shape": shape, "micro": micro}
    return next(row for row in rows if "peak_reserved" in row and asked.items() <= row.items())


@pytest.mark.parametrize(
    ("row", "reserved"),
    [
        (("h200_x1.jsonl", "fsdp2:3", 1, "llama-1b", 1), 0.001),  # was +1.4 % of reserved
        (("h200_x4.jsonl", "fsdp2:2", 4, "llama-8b", 1), 0.001),  # was +0.6 %
        (("h200_x4_compiled.jsonl", "fsdp2:3+ckpt", 4, "llama-8b", 1), 0.12),  # allocated was +4.4 %
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_reduced_in_16_bits_as_measured(row: tuple[Any, ...], reserved: float) -> None:
    found = measured(*row)
    gpu = estimate_report(request_of(found)).plans[0].gpu
    assert gpu.peak_allocated == pytest.approx(found["peak_allocated"], rel=0.0002)
    assert gpu.peak_reserved == pytest.approx(found["peak_reserved"], rel=reserved)


def test_sizes_by_hand() -> None:
    """Parts in 16 bits are cast; the last parameter's gradient, that of the head, is there meanwhile."""
    model = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50_000,
             "num_key_value_heads": 2, "intermediate_size": 512, "tie_word_embeddings": False}  # fmt: skip
    asked: dict[str, Any] = {"model": model, "engine": "fsdp2", "gpus": 2, "gpu": "H200", "seq_len": 16, "depth": "simulated"}
    table, root = 50_000 * 256, 2 * 50_000 * 256 + 256
    beside = {}
    for name in ("fp32", "bf16"):
        (run,) = estimate_runs(Ask(**asked, reduce_dtype=name, stage=3)).runs
        assert run is not None
        alive = run.simulation.timeline.alive_by_buffer()
        assert alive[Buffer.GRAD_FULL] >= 2 * table
        beside[name] = alive[Buffer.COMM_REDUCE_SCATTER]
    room = 4 * 512 + (2 << 20)
    assert beside["bf16"] == pytest.approx(2 * root + 2 * root // 2, abs=room)  # the whole, and this rank's part
    assert beside["fp32"] == pytest.approx(4 * root, abs=room)  # the part is the gradient


def test_replicas_keep_parts_in_16_bits_until_the_backwards_end() -> None:
    """AllReduceState holds each group's part; behind the backward ranks with replicas have what those without have."""
    asked: dict[str, Any] = {"model": "meta-llama/Llama-3.2-1B", "engine": "fsdp2", "gpu": "H200", "seq_len": 64, "stage": 3}
    runs = [
        estimate_runs(Ask(**asked, gpus=gpus, dp_replicate=gpus // 2, reduce_dtype="bf16", depth="simulated")).runs[0]
        for gpus in (2, 4)
    ]
    ends = [{mark.name: mark for mark in run.simulation.timeline.marks}["bwd"] for run in runs if run is not None]
    assert ends[1].allocated == pytest.approx(ends[0].allocated, abs=4 << 20)
    assert ends[1].peak > ends[0].peak + (500 << 20)  # 2 bytes of half the blocks' 0.97 B parameters


@pytest.mark.parametrize(
    ("name", "text", "engine", "dtype"),
    [
        ("accelerate.yaml", ACCELERATE, "fsdp2", "bf16"),
        ("accelerate.yaml", ACCELERATE.replace("fsdp_version: 2", "fsdp_version: 1"), "fsdp", None),
        ("accelerate.yaml", ACCELERATE.replace("bf16", "'no'"), "fsdp2", "fp32"),
        ("titan.toml", TITAN.replace("@", "bfloat16"), "fsdp2", "bf16"),
        ("titan.toml", TITAN.replace("@", "float32"), "fsdp2", None),  # the engine's own
    ],
)
def test_programs_say_it(tmp_path: Path, name: str, text: str, engine: str, dtype: str | None) -> None:
    """accelerate reduces in the dtype of its arithmetic, torchtitan in fp32 unless its file says another."""
    (tmp_path / name).write_text(text)
    asked = {} if name == "titan.toml" else {"model": "meta-llama/Llama-3.2-1B"}
    report = estimate_report(Ask(files=(str(tmp_path / name),), gpus=2, gpu="H200", depth="formula", **asked))
    assert report.plans[0].engine == engine
    assert report.workload.get("reduce_dtype") == dtype


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"engine": "deepspeed", "reduce_dtype": "fp32"}, "--engine fsdp2"),
        ({"engine": "fsdp2", "reduce_dtype": "fp16"}, "use fp32 or bf16"),
        ({"engine": "fsdp2", "reduce_dtype": "int8"}, "--reduce-dtype"),
    ],
)
def test_what_no_policy_says_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        estimate_report(Ask(model="meta-llama/Llama-3.2-1B", gpus=2, gpu="H200", **asked))
