"""What traffic says of parameters is what the rank says, whatever the persistence thresholds are."""

from __future__ import annotations

from dataclasses import fields

import pytest

from zeroplan.core.workload import Workload
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.registry import find_engine
from zeroplan.ledger.work import Counts, Matrices
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

#: Traffic reads of the computation how often its hooks run.
NO_WORK = ComputeFacts(
    Matrices(**{one.name: 0 for one in fields(Matrices)}), Counts(**{one.name: 0 for one in fields(Counts)}), Workload()
)
MODELS = ("openai-community/gpt2", "Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("threshold", [0, 100_000, 1 << 40])
@pytest.mark.parametrize("model_threshold", [None, 0, 5_000, 1_000_000])
def test_gathers_are_those_of_the_rank(model: str, threshold: int, model_threshold: int | None) -> None:
    section = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    if model_threshold is not None:
        section["stage3_model_persistence_threshold"] = model_threshold
    config = {"zero_optimization": section, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    (case,) = resolve(Ask(model=model, ds_config=config, gpus=4)).cases
    facts = find_engine("deepspeed").traffic(case.spec, case.cluster).facts(NO_WORK, case.workload, case.zero)
    numel, room = case.spec.parameters.numel, case.zero.stage3.model_persistence_threshold
    kept = []
    for count in numel:  # in the model's order, as long as all of them have room
        if count <= threshold and sum(kept) + count <= room:
            kept.append(count)
    assert facts.persistent == sum(kept)
    assert facts.gathered == sum(numel) - sum(kept)
    assert facts.tensors == len(numel) - len(kept)
    assert facts.trained_tensors == len(numel)


def test_a_quantised_base_is_gathered_as_it_is_stored() -> None:
    """Of 4-bit weights stage 3 keeps and sends a quarter of the elements in 16 bits; the rank, which the ledger reads, says how
    many.
    """
    given = {"model": MODELS[1], "engine": "deepspeed", "stage": 3, "gpus": 4, "lora_rank": 8, "dtype": "bf16"}
    (plain,) = resolve(Ask(**given)).cases
    (packed,) = resolve(Ask(**given, quantize="nf4")).cases
    moved = []
    for case in (plain, packed):
        engine = find_engine("deepspeed")
        facts = engine.traffic(case.spec, case.cluster).facts(NO_WORK, case.workload, case.zero)
        rank = engine.ledger(case)[1]
        assert facts.gathered == rank.params - sum(rank.numel[p] for p in rank.persistent_params)
        moved.append(facts.gathered + facts.persistent)
    weights = sum(count for count, on in zip(plain.spec.parameters.numel, packed.spec.parameters.quantized, strict=True) if on)
    assert moved[0] - moved[1] == 3 * weights // 4
