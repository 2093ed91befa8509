"""What Liger's kernels and cut cross-entropy keep, against their sources' tensors, and how files of programs ask for them."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

import zeroplan
from tests.small_llama import small_llama
from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setups
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import Arithmetic, TracedTechnique, TraceOptions
from zeroplan.tape.sizes import FUNCTIONS, KernelDevice
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique
from zeroplan.techniques.cut_cross_entropy import CutCrossEntropy, CutCrossEntropyTechnique
from zeroplan.techniques.liger import FAMILIES, Liger, LigerTechnique

B, S, H, KV, INNER, HEADS, WORDS = 2, 384, 256, 128, 512, 4, 1500
TOKENS = B * S


@functools.cache
def tape_of(*techniques: TracedTechnique, layers: int = 6, arithmetic: Arithmetic = Arithmetic.HALF) -> ExpandedTape:
    api = pytest.importorskip("zeroplan.trace.api")
    options = TraceOptions(arithmetic=arithmetic, techniques=techniques)
    config = small_llama(layers=layers, vocab=WORDS)
    return api.trace_at(config, "AutoModelForCausalLM", options, api.TracePoint(B, S)).expand(B, S)


def kept(tape: ExpandedTape) -> int:
    """Bytes at the forward's end."""
    sizes: dict[int, int] = {}
    for op, arg, aux, *_ in tape.events():
        if op == Op.MARK and arg == Mark.FORWARD_END:
            break
        if op == Op.ALLOC:
            sizes[arg] = aux
        elif op == Op.FREE:
            sizes.pop(arg)
    return sum(sizes.values())


@pytest.mark.torch
def test_a_block_keeps_what_ligers_functions_save() -> None:
    more = kept(tape_of(Liger(), layers=7)) - kept(tape_of(Liger()))
    norms = 2 * (2 * H + 4 + 2 * H)  # of each RMSNorm its input, a number a row, and its output
    attention = 2 * (H + 2 * KV) + 2 * H + 4 * HEADS
    gated = 6 * INNER  # gate, up and their product
    assert more == pytest.approx(TOKENS * (norms + attention + gated), abs=1024)


@pytest.mark.torch
@pytest.mark.parametrize("arithmetic", [Arithmetic.HALF, Arithmetic.AUTOCAST])
def test_the_fused_head_holds_a_chunk_of_logits_and_both_gradients(arithmetic: Arithmetic) -> None:
    tape, plain = tape_of(Liger(parts=("fused_loss",)), arithmetic=arithmetic), tape_of(arithmetic=arithmetic)
    sizes = [aux for op, _, aux, *_ in tape.events() if op == Op.ALLOC]
    chunk = 128  # the least power of two that is not below 768 tokens in 6 parts
    assert FUNCTIONS["token_chunk"](KernelDevice(), TOKENS, -(-WORDS // H), 1) == chunk
    assert sizes.count(chunk * WORDS * 2) == 2
    assert TOKENS * WORDS * 2 not in sizes  # no logits of all tokens
    width, casts = (4, TOKENS * H * 2 + WORDS * H * 2) if arithmetic is Arithmetic.AUTOCAST else (2, TOKENS * H * 2)
    waits = (TOKENS + WORDS) * H * width  # both gradients, in place of probabilities in fp32 and the product's factors
    assert kept(plain) - kept(tape) == pytest.approx(TOKENS * (WORDS * 4 + 8) + casts - waits, abs=1024)


@pytest.mark.torch
def test_cut_cross_entropy_keeps_numbers_a_token_and_a_word() -> None:
    tape, plain = tape_of(CutCrossEntropy()), tape_of()
    assert not [aux for op, _, aux, *_ in tape.events() if op == Op.ALLOC and aux >= TOKENS * WORDS * 2]
    waits = 12 * B * (S - 1) + 4 * WORDS
    assert kept(plain) - kept(tape) == pytest.approx(TOKENS * (WORDS * 4 + 8) - waits, abs=1024)


@pytest.mark.torch
def test_a_family_that_liger_does_not_list_runs_as_it_is() -> None:
    api = pytest.importorskip("zeroplan.trace.api")
    config = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 128,
        "architectures": ["GPT2LMHeadModel"],
    }
    tapes = [
        api.trace_at(config, "AutoModelForCausalLM", TraceOptions(techniques=t), api.TracePoint(1, 64))
        for t in ((), (Liger(),))
    ]
    one, other = (tape.expand(1, 64) for tape in tapes)
    assert (one.op, one.aux) == (other.op, other.aux)


@pytest.mark.torch
def test_modules_are_themselves_again_after_a_trace() -> None:
    transformers = pytest.importorskip("transformers")
    before = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    tape_of(Liger(parts=("rope", "rms_norm", "glu", "loss")))
    assert transformers.models.llama.modeling_llama.apply_rotary_pos_emb is before


def test_parts_are_those_of_the_family() -> None:
    granite = Liger().kernels("granite")
    assert granite is not None
    assert granite.loss
    assert not granite.head
    assert Liger().kernels("gpt2") is None
    only = Liger(parts=("rope",)).kernels("llama")
    assert only is not None
    assert only.rotary
    assert not (only.head)
    assert not (only.gated)
    assert not (only.norms)
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"} <= FAMILIES.keys()


def read(tmp_path: Path, name: str, text: str) -> dict[str, object]:
    (tmp_path / name).write_text(text)
    ask = read_setups([tmp_path / name]).ask
    chunked = ChunkedHeadTechnique.chunked_head
    options = (LigerTechnique.liger, LigerTechnique.liger_parts, CutCrossEntropyTechnique.cut_cross_entropy, chunked)
    return {option.name: ask[option] for option in options}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "axolotl.yaml",
            "base_model: meta-llama/Llama-3.2-1B\nsequence_len: 1024\nmicro_batch_size: 1\ndatasets: []\nplugins:\n"
            "  - axolotl.integrations.liger.LigerPlugin\nliger_rope: true\nliger_glu_activation: true\n",
            {"liger_parts": "rope,glu"},
        ),
        (
            "cce.yaml",
            "base_model: meta-llama/Llama-3.2-1B\nsequence_len: 1024\nmicro_batch_size: 1\ndatasets: []\nplugins:\n"
            "  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n",
            {"cut_cross_entropy": True},
        ),
        (
            "factory.yaml",
            "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\n"
            "template: llama3\ndataset: x\nenable_liger_kernel: true\n",
            {"liger": True},
        ),
        (
            "factory_dpo.yaml",
            "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: dpo\nfinetuning_type: full\ncutoff_len: 512\n"
            "template: llama3\ndataset: x\nenable_liger_kernel: true\n",
            {"liger_parts": "rope,rms_norm,glu"},
        ),
        (
            "trl_dpo.yaml",  # TRL's own head is there all the same
            "model_name_or_path: meta-llama/Llama-3.2-1B\nloss_type: sigmoid\nbeta: 0.1\nmax_length: 512\nbf16: true\n"
            "use_liger_kernel: true\n",
            {"liger_parts": "rope,rms_norm,glu", "chunked_head": True},
        ),
        (
            "trl_sft.yaml",
            "model_name_or_path: meta-llama/Llama-3.2-1B\ndataset_text_field: text\nmax_length: 512\nbf16: true\n"
            "use_liger_kernel: true\n",
            {"liger_parts": "rope,rms_norm,glu", "chunked_head": True},
        ),
    ],
)
def test_programs_keys(tmp_path: Path, name: str, text: str, expected: dict[str, object]) -> None:
    found = read(tmp_path, name, text)
    assert {key: value for key, value in found.items() if value} == expected


def test_a_file_with_ligers_layers_beside_trls_head_is_planned_with_both(tmp_path: Path) -> None:
    text = "model_name_or_path: meta-llama/Llama-3.2-1B\nloss_type: sigmoid\nbeta: 0.1\nmax_length: 512\nbf16: true\n"
    plans = []
    for key in ("", "use_liger_kernel: true\n"):
        (tmp_path / "dpo.yaml").write_text(text + key)
        plans.append(zeroplan.estimate(files=[tmp_path / "dpo.yaml"], program="trl", gpu="H100")[0])
    assert not [one for one in plans[1].unmodelled if one.key == "use_liger_kernel"]
    assert plans[1].gpu.peak_allocated < plans[0].gpu.peak_allocated


def test_conflicts_are_one_line() -> None:
    with pytest.raises(BadInput, match="cut cross-entropy beside it"):
        zeroplan.estimate("meta-llama/Llama-3.2-1B", engine="ddp", liger=True, cut_cross_entropy=True, depth="formula")
    with pytest.raises(BadInput, match="are not modelled under zeroplan"):
        zeroplan.estimate("meta-llama/Llama-3.2-1B", engine="zeroplan", liger=True, depth="formula")


def test_families_that_are_not_modelled_are_named() -> None:
    plan = zeroplan.estimate("mistralai/Mixtral-8x7B-v0.1", engine="fsdp2", gpus=8, liger=True, depth="formula")[0]
    assert "Liger's kernels for mixtral" in json.dumps([one.says for one in plan.unmodelled])
