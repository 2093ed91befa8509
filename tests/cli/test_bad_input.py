"""Bad input: one line on stderr (what, where, the remedy), exit code 2, nothing on stdout, never a traceback."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroplan.core.errors import BadInput
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

LLAMA = "meta-llama/Llama-3.2-1B"
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
DS = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}


def _zero(**keys: object) -> dict[str, object]:
    return {**DS, "zero_optimization": {"stage": 2, **keys}}


#: name → (words after `estimate`, text that the line must hold). FILE and DS are files holding the third and fourth field.
CASES: dict[str, tuple[list[str], str]] = {
    "no model": ([], "no model"),
    "model and params": ([LLAMA, "--params", "7B"], "both"),
    "unknown model": (["meta-llama/Llama-3.2-1Bx"], "Llama-3.2-1B"),
    "misspelt count": (["--params", "7.5Q"], "--params"),
    "negative count": (["--params", "-7B"], "--params"),
    "zero count": (["--params", "0"], "--params"),
    "endless count": (["--params", "1e999"], "--params"),
    "infinite count": (["--params", "inf"], "--params"),
    "misspelt vram": ([LLAMA, "--vram", "24Q"], "--vram"),
    "negative vram": ([LLAMA, "--vram", "-24G"], "--vram"),
    "zero vram": ([LLAMA, "--vram", "0G"], "--vram"),
    "misspelt host memory": ([LLAMA, "--cpu-ram", "lots"], "--cpu-ram"),
    "misspelt disk": ([LLAMA, "--nvme", "2 TX"], "--nvme"),
    "unknown gpu": ([LLAMA, "--gpu", "H1000"], "H100"),
    "zero gpus": ([LLAMA, "--gpus", "0"], "--gpus"),
    "negative gpus": ([LLAMA, "--gpus", "-1"], "--gpus"),
    "absurd gpus": ([LLAMA, "--gpus", "99999999999"], "--gpus"),
    "text for gpus": ([LLAMA, "--gpus", "eight"], "--gpus"),
    "zero nodes": ([LLAMA, "--nodes", "0"], "--nodes"),
    "stage 4": ([LLAMA, "--stage", "4"], "stage"),
    "stage -1": ([LLAMA, "--stage", "-1"], "stage"),
    "parameter offload below stage 3": ([LLAMA, "--stage", "2", "--offload-param", "cpu"], "stage 3"),
    "nvme below stage 3": ([LLAMA, "--stage", "2", "--offload-optimizer", "nvme"], "stage 3"),
    "offload at stage 0": ([LLAMA, "--stage", "0", "--offload-optimizer", "cpu"], "stage"),
    "unknown device": ([LLAMA, "--stage", "3", "--offload-optimizer", "gpu"], "none, cpu or nvme"),
    "unknown engine": ([LLAMA, "--engine", "deepsped"], "deepspeed"),
    "fsdp2 has no stage 1": ([LLAMA, "--engine", "fsdp2", "--stage", "1"], "stage"),
    "ddp does not shard": ([LLAMA, "--engine", "ddp", "--stage", "3"], "ddp"),
    "unknown dtype": ([LLAMA, "--dtype", "int8"], "bf16"),
    "unknown optimizer": ([LLAMA, "--optimizer", "adamx"], "adam"),
    "unknown attention": ([LLAMA, "--attn", "fast"], "flash"),
    "unknown depth": ([LLAMA, "--depth", "deep"], "formula"),
    "unknown format": ([LLAMA, "--format", "xml"], "csv"),
    "zero micro batch": ([LLAMA, "--micro-batch", "0"], "--micro-batch"),
    "negative sequence": ([LLAMA, "--seq-len", "-5"], "--seq-len"),
    "sequence beyond the model": (["openai-community/gpt2", "--seq-len", "4096"], "1024"),
    "zero accumulation": ([LLAMA, "--grad-accum", "0"], "--grad-accum"),
    "zero rank": ([LLAMA, "--lora-rank", "0"], "--lora-rank"),
    "targets without rank": ([LLAMA, "--lora-targets", "q_proj"], "--lora-rank"),
    "unknown target": ([LLAMA, "--lora-rank", "8", "--lora-targets", "q_prof"], "q_proj"),
    "one-bit adam with ZeRO": ([LLAMA, "--stage", "2", "--optimizer", "onebitadam"], "onebitadam"),
    "empty optimizer": ([LLAMA, "--optimizer", ""], "unknown optimizer"),
    "one-bit adam, which DeepSpeed removed": ([LLAMA, "--stage", "0", "--optimizer", "onebitadam"], "0.19.7 removed it"),
    "unknown flag": ([LLAMA, "--gpuz", "8"], "--gpuz"),
    "missing ds_config": ([LLAMA, "--ds-config", "/nonexistent/ds.json"], "ds.json"),
    "missing folder": (["./no/such/folder"], "no/such/folder"),
    "empty model": ([""], "MODEL"),
    "a null byte": (["a\0b"], "MODEL"),
}

FILES: dict[str, tuple[object, str]] = {
    "not json": (b"{not json", "config.json"),
    "not text": (b"\xff\xfe\x00\x01", "config.json"),
    "empty": (b"", "config.json"),
    "a list": ([1, 2], "config.json"),
    "no model type": ({"hidden_size": 64}, "model_type"),
    "text for a number": ({**CONFIG, "hidden_size": "big"}, "hidden_size"),
    "a negative number": ({**CONFIG, "hidden_size": -64}, "hidden_size"),
    "zero layers' width": ({**CONFIG, "hidden_size": 0}, "hidden_size"),
    "1e30 layers": ({**CONFIG, "num_hidden_layers": 1e30}, "num_hidden_layers"),
    "a null": ({**CONFIG, "num_attention_heads": {}}, "num_attention_heads"),
    "deep nesting": (b"[" * 100_000 + b"]" * 100_000, "config.json"),
}

DS_FILES: dict[str, tuple[object, str]] = {
    "both fp16 and bf16": ({**DS, "fp16": {"enabled": True}}, "fp16"),
    "unknown zero key": (_zero(reduce_bucket_sise=5), "reduce_bucket_size"),
    "unknown offload key": (_zero(offload_optimizer={"device": "cpu", "pin_memry": True}), "pin_memory"),
    "stage 7": (_zero(stage=7), "stage"),
    "negative bucket": (_zero(reduce_bucket_size=-1), "reduce_bucket_size"),
    "text for a bucket": (_zero(reduce_bucket_size="many"), "reduce_bucket_size"),
    "placeholder device": (_zero(stage=3, offload_param={"device": "[cpu|nvme]"}), "device"),
    "batch arithmetic": ({**DS, "train_batch_size": 7, "gradient_accumulation_steps": 2}, "train_batch_size"),
    "not json": (b"{", "ds.json"),
    "a list": ([], "ds.json"),
    "deep nesting": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "ds.json"),
}


def _write(path: Path, content: object) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def _assert_one_clear_line(result: tuple[int, str, str], holds: str) -> None:
    code, out, err = result
    assert code == 2, (out, err)
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith(("Usage:", "Try "))]
    assert len(lines) == 1, err
    assert holds in lines[0], lines[0]
    assert "Traceback" not in err
    assert len(lines[0]) < 700


@pytest.mark.parametrize("name", CASES)
def test_flags(name: str, cli: Callable[..., tuple[int, str, str]]) -> None:
    words, holds = CASES[name]
    _assert_one_clear_line(cli("estimate", *words), holds)


@pytest.mark.parametrize(
    ("script", "holds"), [("", "no program"), ("train.ipynb", "nbconvert"), ("train.py --lr 3", "the program alone")]
)
def test_programs_that_no_launcher_starts(script: str, holds: str, cli: Callable[..., tuple[int, str, str]]) -> None:
    _assert_one_clear_line(cli("recommend", LLAMA, "--vram", "24G", "-o", "ds.json", "--script", script), holds)


@pytest.mark.parametrize("name", FILES)
def test_config_files(name: str, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    content, holds = FILES[name]
    _assert_one_clear_line(cli("estimate", _write(tmp_path / "config.json", content)), holds)


@pytest.mark.parametrize("name", DS_FILES)
def test_ds_config_files(name: str, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    content, holds = DS_FILES[name]
    _assert_one_clear_line(cli("estimate", LLAMA, "--ds-config", _write(tmp_path / "ds.json", content)), holds)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty", b""),
        ("a header that promises more", struct.pack("<Q", 1 << 40) + b"{}"),
        ("a truncated header", struct.pack("<Q", 100) + b'{"a"'),
        ("a header that is no JSON", struct.pack("<Q", 4) + b"abcd"),
        ("a tensor without a shape", struct.pack("<Q", 10) + b'{"a":{}}  '),
    ],
)
def test_broken_safetensors(name: str, content: bytes, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    _assert_one_clear_line(cli("estimate", str(path)), "model.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=20,
)
KNOWN = st.sampled_from([*CONFIG, "vocab_size", "tie_word_embeddings", "num_key_value_heads", "head_dim", "architectures"])


@pytest.mark.long
@settings(max_examples=150)
@given(st.dictionaries(KNOWN | st.text(max_size=10), JSON, max_size=8))
def test_any_json_as_config_is_a_plan_or_bad_input(config: dict[str, object]) -> None:
    try:
        report = estimate_report(Ask(model={**CONFIG, **config}, depth="formula", offline=True))
    except BadInput as error:
        assert str(error).isprintable()
    else:
        assert report.plans


ZERO_KEYS = st.sampled_from(
    ["stage", "offload_param", "offload_optimizer", "reduce_bucket_size", "overlap_comm", "sub_group_size"]
)


@settings(max_examples=150)
@given(st.dictionaries(ZERO_KEYS, JSON, max_size=4), st.dictionaries(st.text(max_size=12), JSON, max_size=3))
def test_any_json_as_ds_config_is_a_plan_or_bad_input(zero: dict[str, object], rest: dict[str, object]) -> None:
    try:
        report = estimate_report(Ask(model=CONFIG, ds_config={**DS, **rest, "zero_optimization": zero}, depth="formula"))
    except BadInput as error:
        assert str(error).isprintable()
    else:
        assert len(report.plans) == 1
