"""Knobs that lower a plan's memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden.make import apart
from zeroplan.engines.registry import find_engine
from zeroplan.planner.estimate import estimate_runs
from zeroplan.planner.relief import _fused_head
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique
from zeroplan.ui.answers import answer

Cli = Callable[..., tuple[int, str, str]]
QWEN = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(("engine", "micro", "offered"), [("ddp", 8, True), ("zeroplan", 8, False), ("ddp", 1, False)])
def test_a_head_in_tiles_is_a_knob_where_logits_and_loss_are_a_large_part(engine: str, micro: int, offered: bool) -> None:
    model, length = (QWEN, 512) if micro > 1 else ("EleutherAI/pythia-160m", 64)
    ask = Ask(model=model, vram="24G", engine=engine, stage=0, micro_batch=micro, seq_len=length)
    resolved, run = resolve(ask), estimate_runs(ask).runs[0]
    assert run is not None
    changes = list(_fused_head(resolved.engine, resolved.cases[0], run, None, ""))
    assert [one.flags for one in changes] == (["--chunked-head"] if offered else [])


def test_the_head_in_tiles_needs_no_tape_of_the_users_and_is_what_its_flag_plans(cli: Cli, tmp_path: Path) -> None:
    words = ("estimate", QWEN, "--gpu", "2xRTX4090", "--micro-batch", "4", "--stage", "1", "--offload-optimizer", "none")
    with apart():  # an empty cache, and no torch
        (tiles,) = [one for one in json.loads(cli(*words, "--json")[1])["reliefs"] if one["flags"] == "--chunked-head"]
        (plan,) = json.loads(cli(*words, "--chunked-head", "--json")[1])["plans"]
        assert plan["gpu"]["total"] == tiles["total"]
        (trl,) = json.loads(cli(*words, "--chunked-head", "--json")[1])["plans"]
        assert trl["fits"] is tiles["fits"]
        code, out, err = cli(*words, "--chunked-head", "--liger")
        assert (code, out, "--liger: its fused loss has a head of its own" in err) == (2, "", True)


@pytest.mark.parametrize(
    ("engine", "program", "key"),
    [
        ("ddp", "hf-trainer", "use_liger_kernel keeps about as little"),
        ("deepspeed", "trl", ""),  # its head is in tiles as it is
        ("ddp", "axolotl", "liger_fused_linear_cross_entropy keeps about as little"),
        ("fsdp2", "torchtune", ""),  # its loss keeps every chunk's probabilities
        ("zeroplan", "hf-trainer", "zeroplan.chunked_cross_entropy: 1024"),
        ("deepspeed", "ds_config", ""),
    ],
)
def test_each_program_has_a_key_for_it(engine: str, program: str, key: str) -> None:
    assert ChunkedHeadTechnique().key(find_engine(engine), program) == key


def test_the_knob_of_a_programs_run_has_the_programs_key(cli: Cli) -> None:
    command = f"llamafactory-cli train --stage pt --model_name_or_path {QWEN} --cutoff_len 512 --bf16 true"
    with apart() as folder:
        (folder / "train.sh").write_text(f"{command} --per_device_train_batch_size 8 --finetuning_type full")
        out = cli("estimate", "--from", str(folder / "train.sh"), "--gpu", "RTX4090")[1]
    assert "head and loss in tiles (enable_liger_kernel keeps about as little) −" in " ".join(out.split())


def test_the_runtimes_key_is_the_flag(cli: Cli) -> None:
    """The flag plans what the key that the answer names plans; a model without such a head is refused in its words."""
    words = ("estimate", QWEN, "--gpu", "RTX4090", "--engine", "zeroplan", "--seq-len", "512", "--gradient-checkpointing")
    at = ("--micro-batch", "64", "--stage", "1", "--offload-optimizer", "none", "--json")
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        "zeroplan": {"chunked_cross_entropy": 1024},
    }
    with apart() as folder:
        (folder / "ds_config.json").write_text(json.dumps(config))
        (knob,) = [one for one in json.loads(cli(*words, *at)[1])["reliefs"] if one["flags"] == "--chunked-head"]
        assert "(zeroplan.chunked_cross_entropy: 1024)" in knob["what"]
        of_file = ("--ds-config", str(folder / "ds_config.json"), "--json")
        plans = [json.loads(cli(*words, *more)[1])["plans"] for more in (("--chunked-head", *at), of_file)]
        assert [plan["gpu"]["total"] for (plan,) in plans] == [knob["total"]] * 2
        other = ("recommend", "google-bert/bert-base-uncased", "--gpu", "T4", "--engine", "zeroplan", "--seq-len", "128")
        assert cli(*other)[0] == 0
        code, _, err = cli(*other, "--chunked-head")
        assert (code, err.count("\n"), "zeroplan: --chunked-head: " in err) == (2, 1, True)


def test_a_search_names_the_head_in_tiles_where_it_is_faster(cli: Cli) -> None:
    words = ("recommend", QWEN, "--gpu", "2xRTX4090")
    with apart():
        best = json.loads(cli(*words, "--json")[1])["ranking"][0]
        (said,) = [text for text in best["reasons"] if text.startswith("head and loss in tiles")]
        tiled = json.loads(cli(*words, "--chunked-head", "--json")[1])["ranking"][0]
        gain = float(said.partition(" make it ")[2].partition(" ")[0])
        assert gain > 1.02
        assert tiled["tokens_per_second"] / best["tokens_per_second"] >= gain - 0.005


def test_the_page_turns_the_knob(cli: Cli) -> None:
    """What a knob changes is a field of the page's question."""
    with apart():
        asked = {"model": QWEN, "gpu": "RTX4090", "micro_batch": 4, "engine": "ddp"}
        (knob,) = [one for one in answer(asked)["knobs"] if one["flags"] == "--chunked-head"]
        assert answer(asked | knob["change"])["report"]["plans"][0]["gpu"]["total"] == knob["total"]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("--gpu", "RTX4090"), "--lora-rank 16"),
        (("--gpu", "RTX4090", "--stage", "2"), "--lora-rank 16 --gradient-checkpointing"),
        (("--gpu", "8xH100", "--stage", "3", "--micro-batch", "4"), ""),  # recomputed blocks fit
        (("--gpu", "RTX4090", "--from-scratch"), ""),  # nothing to adapt
        (("--gpu", "RTX4090", "--lora-rank", "16", "--seq-len", "8192"), ""),
    ],
)
def test_adapters_are_named_where_nothing_else_fits_and_fit_as_said(cli: Cli, words: tuple[str, ...], flags: str) -> None:
    asked = ("estimate", "meta-llama/Llama-3.1-8B", *words)
    with apart():
        report, text = json.loads(cli(*asked, "--json")[1]), cli(*asked)[1]
        named = [one for one in report["reliefs"] if one["flags"].startswith("--lora-rank")]
        assert [one["flags"] for one in named] == ([flags] if flags else [])
        assert ("LoRA adapters of rank 16 fit" in text) is bool(flags)
        if flags:
            totals = [
                one["gpu"]["total"] for one in json.loads(cli(*asked, *flags.split(), "--json")[1])["plans"] if one["fits"]
            ]
            assert named[0]["total"] == totals[0]


def test_freed_blocks_that_wait_are_told_from_fragments() -> None:
    """One GPU waits for nobody; on many the host leads, and blocks that it has freed wait."""
    for model, gpu, nodes, says in (("8B", "RTX4090", 1, "fragments of the allocator"), ("70B", "8xH100", 4, "freed blocks")):
        offload = "cpu" if nodes == 1 else "none"
        ask = Ask(model=f"meta-llama/Llama-3.1-{model}", gpu=gpu, nodes=nodes, stage=3, offload_optimizer=offload)
        ask = ask.replace(offload_param=offload, gradient_checkpointing=nodes > 1)
        (plan,) = estimate_runs(ask, relief=False).report.plans
        assert plan.fits is None
        assert says in plan.decides
