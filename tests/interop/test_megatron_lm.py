"""Megatron-LM's command lines and YAML: what is read, what is named, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.programs import megatron_lm
from zeroplan.interop.programs.known import moving_in, names_in
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

#: Arguments that the reader takes beside the model's and the layout's.
_WITH_A_MEANING = ("fp8_format", "optimizer", "no_bias_gelu_fusion")

BASE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 32 --vocab-size 4000 --tokenizer-type NullTokenizer --bf16"
)


def script(tmp_path: Any, flags: str, *, head: str = "torchrun --nproc_per_node 8 pretrain_gpt.py") -> str:
    path = tmp_path / "train.sh"
    path.write_text(f"{head} {flags}\n")
    return str(path)


def read(tmp_path: Any, more: str = "") -> Setup:
    return read_setup(script(tmp_path, f"{BASE} {more}"))


def named(setup: Setup) -> set[str]:
    return {one.key for one in setup.unmodelled}


def test_arrays_with_comments_quotes_and_conditions_are_read(tmp_path: Any) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        f"""#!/bin/bash
GPUS=8
MODEL_ARGS=(
    {BASE}  # a comment (with parentheses)
    --num-experts 8 --moe-router-topk 2
    --moe-layer-freq "([0]*2+[1]*6)"
)
FP8_ARGS=()
FP8_ARGS+=( "--fp8-format hybrid" )
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py ${{MODEL_ARGS[@]}} ${{FP8_ARGS[@]}} \\
    --expert-model-parallel-size 4 --use-distributed-optimizer
"""
    )
    setup = read_setup(str(path))
    assert isinstance(setup.ask.model, dict)
    assert setup.ask.model["moe_layer_freq"] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert setup.ask.model["vocab_size"] == 4001  # the tokenizer adds the end of a document
    assert (setup.value("gpus"), setup.value("nodes"), setup.ask.stage, setup.ask.global_batch) == (8, 2, 1, 32)
    assert setup.degrees["ep"] == 4
    assert setup.ask.values["fp8"] == "delayed"
    assert "fp8_format" not in named(setup)


def test_switches_and_degrees(tmp_path: Any) -> None:
    setup = read(
        tmp_path,
        "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 4 --no-rope-fusion --normalization RMSNorm "
        "--use-rotary-position-embeddings --untie-embeddings-and-output-weights --recompute-activations --use-flash-attn "
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2 --overlap-grad-reduce",
    )
    model = setup.ask.model
    assert isinstance(model, dict)
    assert model["add_bias_linear"] is False
    assert model["apply_rope_fusion"] is False
    assert (model["num_query_groups"], model["position_embedding_type"]) == (4, "rope")
    assert (model["recompute_granularity"], model["attention_backend"]) == ("selective", "flash")
    assert setup.degrees == {"tp": 2, "pp": 2, "sp": True, "vpp": 2}
    assert named(setup) == {setup.key(name) for name in setup.degrees}


def test_names_that_are_not_known_are_listed_and_leave_fits_open(tmp_path: Any) -> None:
    path = script(tmp_path, f"{BASE} --my-own-memory-trick 3 --log-interval 10 --mtp-num-layers 1")
    assert {"my_own_memory_trick", "mtp_num_layers"} == named(read_setup(path))
    report = estimate_report(Ask(files=(path,), gpu="8xH100"))
    assert report.plans[0].fits is None
    assert {"my_own_memory_trick", "mtp_num_layers", "unmeasured"} <= {one.key for one in report.plans[0].unmodelled}
    assert report.workload["grad_accum"] == 2
    assert report.plans[0].settle == "measure a few steps of the program itself"  # verify runs no Megatron-LM


def test_mixtures_and_parts_that_are_recomputed(tmp_path: Any) -> None:
    setup = read(
        tmp_path,
        "--swiglu --disable-bias-linear --num-experts 8 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
        "--moe-router-dtype fp32 --recompute-granularity selective --recompute-modules moe layernorm "
        "--moe-expert-capacity-factor 1.25 --moe-z-loss-coeff 1e-3",
    )
    model = setup.ask.model
    assert isinstance(model, dict)
    assert (model["moe_aux_loss_coeff"], model["moe_router_dtype"]) == (0.01, "fp32")
    assert model["recompute_modules"] == ("moe", "layernorm")
    assert (model["moe_expert_capacity_factor"], model["moe_z_loss_coeff"]) == (1.25, 0.001)
    assert named(setup) == {"recompute_modules"}


def test_yaml_of_two_sections(tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "language_model:\n  num_layers: 8\n  hidden_size: 512\n  num_attention_heads: 8\n  activation_func: gelu\n"
        "model_parallel:\n  tensor_model_parallel_size: 2\n"
        "micro_batch_size: 2\nseq_length: 256\nmax_position_embeddings: 256\nbf16: true\nuse_distributed_optimizer: true\n"
    )
    setup = read_setup(str(path))
    assert (setup.program, setup.degrees, setup.ask.stage, setup.ask.dtype) == ("megatron-lm", {"tp": 2}, 1, "bf16")
    assert isinstance(setup.ask.model, dict)
    assert setup.ask.model["vocab_size"] == 50257


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (BASE.replace("--micro-batch-size 2", ""), "no micro batch"),
        (BASE.replace("--seq-length 256", ""), "no length"),
        (f"{BASE} --num-experts 8 --moe-layer-freq x", "no pattern"),
        (f"{BASE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "chunks of 3 layers"),
        (f"{BASE} --num-virtual-stages-per-pipeline-rank 2", "chunks without pipeline stages"),
        (BASE.replace("--num-layers 8", "--num-layers eight"), "num_layers"),
    ],
)
def test_what_megatron_refuses_is_one_line(tmp_path: Any, flags: str, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_setup(script(tmp_path, flags))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("program", [None, "megatron-lm"])
@pytest.mark.parametrize(
    ("head", "flags", "key"),
    [
        ("deepspeed --num_gpus 8 pretrain_gpt.py", "--deepspeed --deepspeed_config ds.json --zero-stage 1", "--deepspeed"),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py", "--deepspeed-activation-checkpointing", "--deepspeed_activation"),
        ("deepspeed pretrain_llama.py", "--tensor-model-parallel-size 2", "deepspeed, the launcher"),
    ],
)
def test_megatron_deepspeed_is_refused_by_its_name(tmp_path: Any, head: str, flags: str, key: str, program: str | None) -> None:
    with pytest.raises(BadInput, match="is a command of Megatron-DeepSpeed") as found:
        read_setup(script(tmp_path, f"{BASE} {flags}", head=head), program)
    assert key in found.value.where


def test_every_argument_of_its_parser_is_sorted(tmp_path: Any) -> None:
    """What moves memory and is in no figure is listed by its name, and what moves none leaves a verdict as it is."""
    everyone, moving = names_in("megatron-lm"), moving_in("megatron-lm")
    assert len(everyone) > 900
    assert set(megatron_lm._NOT_MODELLED) <= moving
    read_ones = {*megatron_lm._OWN, *megatron_lm._DEGREES, *megatron_lm._SPECIAL, *megatron_lm._SWITCHED_OFF}
    assert not read_ones & moving
    base = {word[2:].replace("-", "_") for word in BASE.split() if word.startswith("--")}
    harmless = everyone - moving - read_ones - base
    silent = [name for name in sorted(harmless) if name not in _WITH_A_MEANING]
    assert named(read(tmp_path, " ".join(f"--{name.replace('_', '-')} 1" for name in silent))) == set()
    loud = read(tmp_path, " ".join(f"--{name.replace('_', '-')} 7" for name in sorted(moving)))
    assert named(loud) == {*moving}


def test_an_argument_that_moves_memory_moves_none_at_its_usual_value(tmp_path: Any) -> None:
    assert named(read(tmp_path, "--cp-comm-type p2p --softmax-type vanilla --eval-micro-batch-size 2")) == set()
    assert named(read(tmp_path, "--cp-comm-type a2a --eval-micro-batch-size 4")) == {"cp_comm_type", "eval_micro_batch_size"}


def test_gradients_that_are_summed_in_fp32_are_more_beside_fp16_alone(tmp_path: Any) -> None:
    assert named(read(tmp_path, "--accumulate-allreduce-grads-in-fp32")) == set()
    path = script(tmp_path, f"{BASE.replace('--bf16', '--fp16')} --accumulate-allreduce-grads-in-fp32")
    assert named(read_setup(path)) == {"accumulate_allreduce_grads_in_fp32"}


@pytest.mark.parametrize(("ranks", "fits"), [(1, False), (2, None)])
def test_nvidias_fp8_example_needs_the_context_ranks_of_its_readme(tmp_path: Any, ranks: int, fits: bool | None) -> None:
    """``train_llama3_8b_h100_fp8.sh`` sets CP_SIZE to 1; its README trains with 2 on eight H100s.

    By hand, bytes: 8-bit weights and their transposes beside 16-bit embeddings, bf16 gradients, 12 bytes of each eighth of the
    optimizer, what 32 layers keep of a token (29.5 a channel: norms 6, q, k, v and their product 6, the MLP's 14 and 3.5), and
    logits in bf16 and fp32.
    """
    corpus = Path(__file__).parents[1] / "corpus" / "megatron-lm.jsonl"
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    (text,) = (row["script"] for row in rows if row["path"].endswith("llama/train_llama3_8b_h100_fp8.sh"))
    path = tmp_path / "train.sh"
    path.write_text(re.sub(r"\bCP_SIZE=1\b", f"CP_SIZE={ranks}", text))
    plan = estimate_report(Ask(files=(str(path),), gpus=8, gpu="H100")).plans[0]
    tokens, channels, words, params = 8192 // ranks, 4096, 128256, 8.03e9
    by_hand = params * (2 + 2 + 12 / 8) + tokens * (29.5 * channels * 32 + 6 * words)
    assert 1 < (plan.gpu.peak_allocated or 0) / by_hand < 1.11
    assert plan.fits is fits
    assert plan.gpu.usable is not None
    assert (plan.gpu.at_most < plan.gpu.usable) == (ranks == 2)
