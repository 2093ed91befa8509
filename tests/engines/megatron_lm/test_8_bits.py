"""TransformerEngine's layers in 8 bits: what a layer keeps of a micro batch, and what stands beside the weights."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.engines.test_contract import ledger_and_schedule_differ
from tests.workloads import flat_workload
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import FLOAT8_CAPABILITY, Float8Recipe
from zeroplan.core.gpus import GPUS
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.rates import rates_of
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.megatron.chunk import ChunkLayers, ChunkTape, chunk_tape
from zeroplan.engines.megatron.engine import Megatron, user_buffers
from zeroplan.engines.megatron.float8 import QuantizedOperands
from zeroplan.engines.megatron.rank import MegatronRank
from zeroplan.engines.megatron.rules import require_valid
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.ledger.line import evaluate
from zeroplan.models.load import load_model
from zeroplan.models.megatron import MegatronModel
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_time import LayoutCost
from zeroplan.tape.expanded import Op

HOPPER, BLACKWELL = (9, 0), (10, 0)
HIDDEN, WIDE, TOKENS = 1024, 2816, 512
MODEL = MegatronModel.of(
    {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "num_attention_heads": 8,
        "ffn_hidden_size": WIDE,
        "vocab_size": 32000,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    }
)
ASK = Ask(model="meta-llama/Llama-3.2-1B", engine="megatron", gpu="H100", gpus=8, seq_len=2048, micro_batch=1)


def kept_by_a_layer(recipe: Float8Recipe | None, capability: tuple[int, int] = HOPPER, *, tp: int = 1) -> float:
    """Return the bytes that one layer keeps of a token from its forward to its backward."""

    def held(layers: int) -> int:
        eight = None if recipe is None else QuantizedOperands.on(recipe, capability)
        shapes = Shapes(model=MODEL, micro_batch=1, seq=TOKENS, tp=tp, sequence=tp > 1, eight=eight, cudnn=True)
        return live(chunk_tape(shapes, ChunkLayers(tuple(range(layers)), embeds=False, ends=False)))

    return (held(3) - held(2)) / TOKENS


def live(chunk: ChunkTape) -> int:
    """Return the bytes that are there where the backward begins."""
    sizes: dict[int, int] = {}
    tape = chunk.tape
    for op, arg, aux in zip(tape.op[: chunk.split], tape.arg, tape.aux, strict=False):
        if op == Op.ALLOC:
            sizes[arg] = aux
        elif op == Op.FREE:
            sizes.pop(arg, None)
    return sum(sizes.values())


def test_inputs_of_products_are_kept_in_8_bits() -> None:
    """Two norms' outputs and the MLP's activation are 1 byte an element for 2. Attention keeps its own output in 16 bits, so
    the product behind it keeps that, or with delayed scaling 8 bits more.
    """
    whole = kept_by_a_layer(None)
    saved = 2 * HIDDEN + WIDE
    assert whole - kept_by_a_layer(Float8Recipe.TENSORWISE) == saved
    assert whole - kept_by_a_layer(Float8Recipe.DELAYED) == saved - HIDDEN
    assert whole - kept_by_a_layer(Float8Recipe.TENSORWISE, BLACKWELL) == saved
    blocks = saved - saved / 32  # a byte of scales for 32 elements
    assert whole - kept_by_a_layer(Float8Recipe.MXFP8, BLACKWELL) == blocks
    assert whole - kept_by_a_layer(Float8Recipe.BLOCKWISE) == blocks


def test_ranks_that_share_tokens_keep_their_parts_in_8_bits() -> None:
    whole, eight = kept_by_a_layer(None, tp=4), kept_by_a_layer(Float8Recipe.TENSORWISE, tp=4)
    assert whole - eight == (2 * HIDDEN + WIDE) / 4


def rank_of(ask: Ask) -> MegatronRank:
    case = resolve(ask.replace(stage=1)).cases[0]
    return Megatron().rank(case)


def test_weights_have_copies_in_8_bits() -> None:
    """By rows and by columns on Hopper, once on Blackwell with one scale a tensor; embedding, head and norms have none."""
    plain = rank_of(ASK)
    matrices = sum(p.numel for chunk in plain.chunks for p in chunk if p.multiplies)
    assert 0.9e9 < matrices < 1.0e9  # of 1.24 B, 263 M are the embedding's
    assert plain.quantized_bytes == 0
    assert rank_of(ASK.replace(fp8="tensorwise")).quantized_bytes == 2 * matrices
    assert rank_of(ASK.replace(fp8="delayed")).quantized_bytes == 2 * matrices
    blackwell = ASK.replace(gpu="B200")
    assert rank_of(blackwell.replace(fp8="tensorwise")).quantized_bytes == matrices
    assert rank_of(blackwell.replace(fp8="mxfp8")).quantized_bytes == 2 * matrices * 33 // 32


def test_weights_in_8_bits_lie_in_buffers_of_their_own() -> None:
    """--fp8-param-gather: a byte a matrix element in the buffer, and on Hopper one for its transpose; gradients as before."""
    plain = rank_of(ASK.replace(fp8="tensorwise"))
    found = replace(plain, gathers_eight=True)
    matrices = sum(p.numel for chunk in plain.chunks for p in chunk if p.multiplies)
    assert found.quantized_bytes == matrices
    assert plain.param_bytes - found.param_bytes == pytest.approx(matrices, rel=1e-5)  # padding apart
    assert found.buffered == pytest.approx(plain.buffered, rel=1e-5)
    assert found.stepped == pytest.approx(plain.stepped, rel=1e-5)


def test_delayed_scaling_keeps_a_history_of_each_layer() -> None:
    found = rank_of(ASK.replace(fp8="delayed"))
    assert found.history_bytes == 16 * 4 * 5 * 4  # layers, products, tensors of both passes, one fp32 number
    assert rank_of(ASK.replace(fp8="tensorwise")).history_bytes == 0


@pytest.mark.parametrize("gathers", [False, True])
def test_ledger_and_schedule_hold_them_alike(gathers: bool) -> None:
    config = {"model_type": "megatron_gpt", **asdict(MODEL), "fp8_param_gather": gathers}
    work = flat_workload(seq_len=256, grad_accum=2).with_techniques(Float8Recipe.DELAYED)
    parallel = ParallelLayout(gpus=8, tp=2, sp=True)
    case = Case(load_model(config), work, Cluster.of(gpus=8, gpu="H100"), ZeroConfig.of(1), parallel=parallel)
    sizes = {item.name: item.bytes for item in evaluate(*Megatron().ledger(case))}
    assert sizes["quantized_weights"] > 0
    tape = Megatron().own_tape(case)
    assert tape is not None
    assert ledger_and_schedule_differ(case, Megatron(), tape) == {}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fp8": "rowwise"}, "is not a recipe of megatron"),
        ({"fp8": "mxfp8"}, "scale for each 32"),
        ({"fp8": "mxfp8", "engine": "fsdp2"}, "is not a recipe of fsdp2"),
        ({"fp8": "delayed", "gpu": "A100-80G"}, "has no 8-bit floats"),
        ({"fp8": "tensorwise", "gpu": "MI300X"}, "8-bit products of MI300X are not modelled"),
    ],
)
def test_what_cannot_be_is_one_line(changed: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        resolve(ASK.replace(**changed))


def test_every_card_that_takes_8_bits_has_their_rate() -> None:
    """A search divides by it."""
    for gpu in GPUS.values():
        assert gpu.amd or (gpu.fp8_tflops is not None) == (gpu.capability >= FLOAT8_CAPABILITY), gpu.name


def test_megatrons_own_layers_have_no_8_bits() -> None:
    model = replace(MODEL, transformer_impl="local")
    with pytest.raises(BadInput, match="8-bit products are TransformerEngine's"):
        require_valid(model, ParallelLayout(gpus=1), flat_workload(seq_len=256).with_techniques(Float8Recipe.DELAYED))


def test_user_buffers_are_named_with_their_size() -> None:
    """Twelve of all tokens' hidden states: eight gather, in 8 bits where products are, four scatter in 16."""
    shapes = Shapes(model=MODEL, micro_batch=2, seq=TOKENS, tp=4, sequence=True)
    assert user_buffers(shapes) == 12 * 2 * 2 * TOKENS * HIDDEN
    eight = replace(shapes, eight=QuantizedOperands.on(Float8Recipe.DELAYED, HOPPER))
    assert user_buffers(eight) == (8 + 4 * 2) * 2 * TOKENS * HIDDEN
    case = resolve(ASK.replace(tp=2, sp=True, stage=1)).cases[0]
    assert "--tp-comm-overlap" in {one.key for one in Megatron().unmodelled(case)}


def test_casts_are_counted_once() -> None:
    """The layers' own tape has them; time does not add them again."""
    resolved = resolve(ASK.replace(stage=1, fp8="tensorwise"))
    counts = rank_counts(resolved, {})
    assert counts.casts
    case = resolved.cases[0]
    cost = LayoutCost(case, counts, rates_of(case.cluster.gpu), resolved.engine).time()
    twice = LayoutCost(case, replace(counts, casts=False), rates_of(case.cluster.gpu), resolved.engine).time()
    assert cost.compute < twice.compute
