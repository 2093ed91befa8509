"""What axolotl's fused adapters keep and make, against the tensors of its functions by hand, and who has them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks.blind import RESULTS
from benchmarks.rows import load_rows, request_of
from tests.small_llama import small_llama
from tests.techniques.test_liger import kept
from zeroplan.core.errors import BadInput
from zeroplan.core.quantization import Products
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup, read_setups
from zeroplan.planner.estimate import estimate_report, estimate_runs
from zeroplan.planner.merge import left_out
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Op
from zeroplan.tape.options import Arithmetic, TracedBase, TracedTechnique, TraceOptions
from zeroplan.techniques.fused_adapters import FusedAdapters

B, S, H, INNER, LAYERS, RANK = 2, 384, 256, 640, 6, 8
TOKENS = B * S


@functools.cache
def tape_of(*techniques: TracedTechnique, base: TracedBase | None = None, dropout: bool = False) -> ExpandedTape:
    api = pytest.importorskip("zeroplan.trace.api")
    options = TraceOptions(arithmetic=Arithmetic.HALF, lora=(), lora_dropout=dropout, base=base, techniques=techniques)
    point = api.TracePoint(B, S, RANK)
    config = {**small_llama(layers=LAYERS, vocab=1500), "intermediate_size": INNER}
    found: ExpandedTape = api.trace_at(config, "AutoModelForCausalLM", options, point).expand(B, S, RANK)
    return found


def count(tape: ExpandedTape, size: int, span: slice) -> int:
    return sum(op == Op.ALLOC and aux == size for op, aux in zip(tape.op[span], tape.aux[span], strict=True))


@pytest.mark.torch
def test_a_block_keeps_gate_and_up_and_no_products_between_adapters() -> None:
    """peft keeps the activation and its product with ``up`` as well, and what lies between the adapters of seven layers."""
    saved = kept(tape_of()) - kept(tape_of(FusedAdapters()))
    assert saved == pytest.approx(LAYERS * TOKENS * (2 * 2 * INNER + 7 * 2 * RANK), abs=4096)
    alone = kept(tape_of()) - kept(tape_of(FusedAdapters(("o",))))
    assert alone == pytest.approx(LAYERS * TOKENS * 2 * RANK, abs=4096)


@pytest.mark.torch
def test_the_backward_writes_over_what_was_kept_and_makes_quantised_weights_whole() -> None:
    """By hand: of the MLP's width the gradient of ``down``'s input alone, and a weight for each product of the MLP.

    Queries, keys and values have one mask of dropout, of a byte an element; gate and up another, the output a third.
    """
    tape, dropping = (tape_of(FusedAdapters(), base=TracedBase(Products.NESTED), dropout=dropout) for dropout in (False, True))
    for one in (tape, dropping):
        forward, backward = slice(0, one.backward), slice(one.backward, None)
        wide, matrix = TOKENS * INNER * 2, INNER * H * 2
        assert [count(one, wide, span) for span in (forward, backward)] == [3 * LAYERS, LAYERS]
        assert [count(one, matrix, span) for span in (forward, backward)] == [3 * LAYERS, 3 * LAYERS]
    masks = [count(one, TOKENS * H, slice(0, one.backward)) for one in (tape, dropping)]
    assert masks[1] - masks[0] == 3 * LAYERS


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("name", ["FA05", "FA07"])
def test_runs_of_axolotls_own_functions_are_met(name: str) -> None:
    """All seven were predicted before they ran, by its patcher, on an H200: within 0.0001 % allocated, 0.012 % reserved."""
    row = {row["id"]: row for row in load_rows(RESULTS / "fused_adapters.jsonl")}[name]
    (run,) = estimate_runs(request_of(row, depth="simulated"), relief=False).runs
    assert run is not None
    assert run.plan.gpu.peak_allocated == pytest.approx(row["peak_allocated"], rel=1e-5)
    assert run.plan.gpu.peak_reserved == pytest.approx(row["peak_reserved"], rel=1e-3)


@pytest.mark.torch
def test_where_they_cannot_be_traced_pefts_own_are_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an installation without torch, to which tapes of common models were shipped."""
    asked = Ask(model="meta-llama/Llama-3.2-1B", engine="ddp", gpu="H100", lora_rank=8, fused_adapters="mlp,qkv,o")
    monkeypatch.setattr("zeroplan.planner.tapes.tape_for", _no_torch)
    plan, plain = (estimate_report(one).plans[0] for one in (asked, asked.replace(fused_adapters="")))
    assert plan.gpu.peak_allocated == plain.gpu.peak_allocated
    assert [(one.key, one.effect) for one in plan.unmodelled] == [("lora_*_kernel", Effect.LESS)]
    assert plan.fits
    assert not plain.unmodelled
    assert FusedAdapters(("o",)).fused_in(tape_of(FusedAdapters()))
    assert not FusedAdapters(("o",)).fused_in(tape_of(FusedAdapters(("mlp", "qkv"))))


def _no_torch(*_: object) -> None:
    raise BadInput("no tape is shipped", remedy="install zeroplan[torch] to trace it")


RECIPE = (
    "base_model: meta-llama/Llama-3.2-1B\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 512\ndatasets: []\n"
)


@pytest.mark.parametrize(
    ("more", "parts", "key"),
    [
        ("", "mlp,qkv,o", ""),
        ("lora_mlp_kernel: true\n", "mlp", ""),
        ("lora_mlp_kernel: false\n", None, ""),
        ("lora_embedding_kernel: false\n", None, ""),
        ("load_in_8bit: true\n", None, ""),
        ("rl: simpo\n", None, ""),
        ("rl: dpo\nlora_o_kernel: true\n", "o", ""),
        ("trust_remote_code: true\n", None, ""),
        ("peft_use_dora: true\n", "mlp,qkv,o", "lora_*_kernel"),
        (
            "lora_qkv_kernel: true\nfsdp_version: 2\nfsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n",
            "qkv",
            "lora_qkv_kernel",
        ),
    ],
)
def test_axolotls_keys_and_its_default(more: str, parts: str | None, key: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(RECIPE + more)
    setup = read_setups([str(tmp_path / "a.yaml")], "axolotl")
    assert setup.ask.values.get("fused_adapters") == parts
    named = [one.key for one in left_out(setup) if "kernel" in one.key]
    assert named == ([key] if key else [])


def test_under_fsdp_2_and_at_stage_3_they_are_named_or_refused(tmp_path: Path) -> None:
    (tmp_path / "z.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    for more in ("deepspeed: z.json\n", "fsdp_version: 2\nfsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"):
        (tmp_path / "a.yaml").write_text(RECIPE + more)
        assert [one.key for one in left_out(read_setups([str(tmp_path / "a.yaml")], "axolotl"))] == ["lora_*_kernel"]
    asked = Ask(model="meta-llama/Llama-3.2-1B", engine="deepspeed", gpus=2, lora_rank=8, fused_adapters="mlp,qkv,o")
    with pytest.raises(BadInput, match="outside of their layers"):
        resolve(asked.replace(stage=3))
    assert {case.zero.stage for case in resolve(asked).cases} == {0, 1, 2}


@pytest.mark.parametrize(
    ("program", "key", "said"),
    [
        ("llama-factory", "use_unsloth", {"use_unsloth": True, "finetuning_type": "lora"}),
        ("ms-swift", "tuner_backend", {"tuner_backend": "unsloth", "train_type": "lora"}),
        ("trl", "use_unsloth", {"use_unsloth": True, "use_peft": True}),
    ],
)
def test_unsloths_kernels_are_named_since_their_loss_takes_chunks_by_free_memory(
    program: str, key: str, said: dict[str, object]
) -> None:
    model = "model" if program == "ms-swift" else "model_name_or_path"
    setup = read_setup({model: "meta-llama/Llama-3.2-1B", **said}, program)
    assert [(one.effect, one.says) for one in setup.unmodelled if one.key == key] == [
        (Effect.LESS, "Unsloth's kernels keep fewer tensors")
    ]
