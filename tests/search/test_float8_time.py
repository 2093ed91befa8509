"""Step times of 8-bit products: what is faster, and what the casts take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.core.float8 import Bf16Layers, Float8Recipe
from zeroplan.core.rates import rates_of
from zeroplan.engines.compute_traffic import CAST_BYTES, COMPUTE, ComputeFacts
from zeroplan.engines.registry import find_engine
from zeroplan.engines.traffic import Sharing
from zeroplan.ledger.traffic import Resource, work_items
from zeroplan.ledger.work import guess_counts, matrices
from zeroplan.models.megatron import MODEL_TYPE
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_time import LayoutCost, LayoutTime

LLAMA = Ask(model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", seq_len=4096, engine="fsdp2", stage=3)


def _operations(*techniques: object) -> dict[Resource, int]:
    case = resolve(LLAMA).cases[0]
    work = case.workload.with_techniques(*techniques)
    model = matrices(case.spec)
    facts = ComputeFacts(model, guess_counts(model, work, 4096), work)
    found: dict[Resource, int] = {}
    for item in work_items(COMPUTE, facts, rates_of(case.cluster.gpu)):
        found[item.resource] = found.get(item.resource, 0) + item.amount
    return found


def test_the_products_of_blocks_are_eight_bit_and_the_heads_are_not() -> None:
    model = matrices(resolve(LLAMA).cases[0].spec)
    plain, eight = _operations(), _operations(Float8Recipe.TENSORWISE)
    assert Resource.FP8_MATMUL not in plain
    assert eight[Resource.FP8_MATMUL] == 6 * model.blocks * 4096
    assert eight[Resource.MATMUL] == 6 * (model.all - model.blocks) * 4096
    assert eight[Resource.FP8_MATMUL] + eight[Resource.MATMUL] == plain[Resource.MATMUL]
    weights = _operations(Float8Recipe.ROWWISE_WITH_GW_HP)
    assert weights[Resource.FP8_MATMUL] == 4 * model.blocks * 4096  # gradients of weights stay in 16 bits
    middle = _operations(Float8Recipe.TENSORWISE, Bf16Layers(at_start=3, at_end=1))
    assert middle[Resource.FP8_MATMUL] * 32 == eight[Resource.FP8_MATMUL] * 28
    assert middle[Resource.FP8_MATMUL] + middle[Resource.MATMUL] == plain[Resource.MATMUL]


def test_casts_are_bytes_of_memory_traffic() -> None:
    model = matrices(resolve(LLAMA).cases[0].spec)
    plain, eight = _operations(), _operations(Float8Recipe.TENSORWISE)
    assert eight[Resource.HBM] - plain[Resource.HBM] == CAST_BYTES * (model.inputs + model.outputs) * 4096
    assert model.inputs > model.outputs / 2


def _time(request: Ask, *, sharing: Sharing | None = None, eight: bool = False) -> LayoutTime:
    resolved = resolve(request)
    case = resolved.cases[0]
    if eight:
        case = replace(case, workload=case.workload.with_techniques(Float8Recipe.TENSORWISE))
    counts = rank_counts(resolved, {})
    return LayoutCost(case, counts, rates_of(case.cluster.gpu), resolved.engine, sharing).time()


def test_eight_bits_are_faster_by_less_than_two() -> None:
    plain, eight = _time(LLAMA), _time(LLAMA, eight=True)
    assert 1.15 < eight.tokens_per_second / plain.tokens_per_second < 1.9


def test_megatrons_layers_and_sharing_are_faster_than_eager_ones() -> None:
    asked = LLAMA.replace(model="meta-llama/Llama-3.1-70B", nodes=8, tp=4, pp=8, sp=True, grad_accum=64, stage=2)
    eager = _time(asked.replace(engine="fsdp2", sp=False))
    fused = _time(asked.replace(engine="megatron", stage=1, vpp=5))
    assert fused.compute < 0.9 * eager.compute
    assert fused.tensor < eager.tensor  # beside the products
    assert fused.sharding < eager.sharding


def test_what_runs_beside_nothing_takes_longer() -> None:
    asked = LLAMA.replace(engine="megatron", stage=1, nodes=8, tp=8, sp=True, grad_accum=2)
    usual = find_engine("megatron").sharing(resolve(asked).cases[0])
    beside = _time(asked, sharing=usual)
    alone = _time(asked, sharing=replace(usual, overlaps=False, pipelines_tensor=False))
    assert alone.tensor > 2 * beside.tensor
    assert alone.sharding > beside.sharding
    assert alone.compute == pytest.approx(beside.compute)


def test_gradients_in_16_bits_take_half_as_long_on_their_way() -> None:
    """Megatron-LM's ``--grad-reduce-in-bf16``, which NeMo's benchmarks in FP8 set."""
    sizes = {"num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 32000}
    given = {"model_type": MODEL_TYPE, **sizes, "max_position_embeddings": 128}
    asked = Ask(model=given, engine="megatron", stage=0, gpu="H100", gpus=8, nodes=2, seq_len=128)
    usual, less = (_time(one) for one in (asked, asked.replace(model={**given, "grad_reduce_in_bf16": True})))
    assert 0 < less.sharding < 0.6 * usual.sharding
    assert less.compute == usual.compute


def test_as_many_chunks_as_blocks_are_possible_under_megatron() -> None:
    """Which NeMo's benchmarks run: Llama 2 70B as pp 4 × vpp 20."""
    asked = LLAMA.replace(model="meta-llama/Llama-2-70b-hf", engine="megatron", stage=1, nodes=8, tp=4, sp=True)
    found = _time(asked.replace(pp=4, vpp=20, grad_accum=16))
    assert found.waiting < _time(asked.replace(pp=4, vpp=1, grad_accum=16)).waiting / 2
