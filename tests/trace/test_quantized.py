"""A base in 4 bits: what is kept, what the products take, and what stays as it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.small_llama import small_llama
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.quantization import Quantization
from zeroplan.ledger.line import evaluate
from zeroplan.planner.estimate import estimate_report, estimate_runs
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.tape.options import options_for

LLAMA = small_llama()
ASKED: dict[str, Any] = {
    "model": LLAMA,
    "engine": "ddp",
    "gpu": "H200",
    "lora_rank": 8,
    "quantize": "nf4",
    "seq_len": 600,
    "micro_batch": 2,
}


def test_blocks_of_one_weight() -> None:
    """4,096 × 4,096 values: half a byte each, 2^18 scales of a byte, 1,024 scales of those in fp32."""
    assert Quantization.NF4.blocks_of_weight((4096, 4096)) == (8_388_608, 262_144, 4_096, 64, 4)
    assert Quantization.FP4.blocks_of_weight((5, 13)) == (33, 2, 4, 64, 4)
    assert Quantization.NF4_SINGLE.blocks_of_weight((5, 13)) == (33, 8, 64)
    assert Quantization.INT8.blocks_of_weight((5, 13)) == (65, 20)


def test_what_is_kept() -> None:
    """By hand: seven matrices a block in 4 bits, embedding, head and norms in fp32, adapters in fp32."""
    matrices = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    packed = 6 * sum(sum(Quantization.NF4.blocks_of_weight(shape)) for shape in matrices) + 1024
    whole = 4 * (2 * 1000 * 256 + 6 * 2 * 256 + 256)
    adapters = 4 * 6 * 8 * (2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512))
    resolved = resolve(Ask(**ASKED))
    (kept,) = (i for i in evaluate(*resolved.engine.ledger(resolved.cases[0])) if i.buffer == Buffer.PARAM_FULL)
    assert kept.bytes == packed + whole + adapters


@pytest.mark.torch
def test_each_product_takes_the_whole_weight_for_a_while() -> None:
    """The weight in 16 bits comes twice for each layer and goes again, and the layer's input is not kept for its gradient."""
    (run,) = estimate_runs(Ask(**ASKED, depth="simulated")).runs
    assert run is not None
    tape = run.tape
    assert sum(tape.parameters.quantized) == 6 * 7
    resolved = resolve(Ask(**ASKED))
    case = resolved.cases[0]
    assert options_for(case.workload).key == "sdpa_none_autocast_4bit_lora"
    whole = 2 * 512 * 256
    times = tape.storage_bytes.count(whole)
    assert times >= 6 * 3 * 2
    ledger = {item.buffer: item.bytes for item in evaluate(*resolved.engine.ledger(case))}
    held = sum(ledger[b] for b in (Buffer.PARAM_FULL, Buffer.OPTIM_EXP_AVG, Buffer.OPTIM_EXP_AVG_SQ, Buffer.WORKSPACE))
    after = run.simulation.timeline.marks[-1].allocated
    assert after == pytest.approx(held, abs=512 * 6 * 7 * 10)  # blocks are rounded up to 512 bytes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": "zeroplan"}, "not modelled under zeroplan"),
        ({"quantize": "nf3"}, "'nf3' is not modelled"),
        ({"model": "openai-community/gpt2"}, "transposed linear layers"),
        ({"model": "google-t5/t5-small", "seq_len": 512}, "causal language models"),
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        estimate_report(Ask(**{**ASKED, **changes}))  # type: ignore[arg-type]


MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4,
           "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "num_local_experts": 4,
           "vocab_size": 1000}  # fmt: skip


@pytest.mark.torch
def test_experts_were_linear_layers_before_transformers_5() -> None:
    """By hand: three matrices of 256 × 512 an expert, four experts, four blocks, in 4 bits instead of 16."""
    asked = {**ASKED, "model": MIXTRAL, "lora_targets": ["q_proj"]}

    def kept(**changes: Any) -> int:
        resolved = resolve(Ask(**asked, **changes))
        (held,) = (i for i in evaluate(*resolved.engine.ledger(resolved.cases[0])) if i.buffer == Buffer.PARAM_FULL)
        return int(held.bytes)

    elements = 4 * 4 * 3 * 256 * 512
    packed = 4 * sum(sum(Quantization.NF4.blocks_of_weight(shape)) for shape in [(4, 1024, 256), (4, 256, 512)])
    wide = 4  # --engine ddp casts what is not quantised to fp32
    assert kept() - kept(transformers_version="4.40.0") == wide * elements - packed
    (run,) = estimate_runs(Ask(**asked, transformers_version="4.40.0", depth="simulated")).runs
    assert run is not None
    assert sum(run.tape.parameters.quantized) == 4 * (4 + 2)
    assert {module.type for module in run.tape.modules if module.name.endswith(".experts")} == {"Experts4bit"}


@pytest.mark.torch
def test_a_base_waited_on_the_host_for_fsdp_1_before_transformers_5() -> None:
    def made(**changes: Any) -> int:
        (run,) = estimate_runs(Ask(**{**ASKED, "engine": "fsdp", "stage": 3, "gpus": 4}, **changes)).runs
        assert run is not None
        return run.simulation.timeline.marks[0].peak

    matrices = 6 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)
    saved = made() - made(transformers_version="4.40.0")
    assert matrices // 2 // 2 < saved < matrices // 2  # what is sharded already, and one block, are on the GPU
