"""What traffic of torch's engines and Megatron's says of parameters is what their rank says, which the ledger reads."""

from __future__ import annotations

from dataclasses import fields

import pytest

from zeroplan.core.workload import Workload
from zeroplan.engines.case import Case
from zeroplan.engines.compute_traffic import ComputeFacts
from zeroplan.engines.registry import find_engine
from zeroplan.ledger.work import Counts, Matrices
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask

NO_WORK = ComputeFacts(
    Matrices(**{one.name: 0 for one in fields(Matrices)}), Counts(**{one.name: 0 for one in fields(Counts)}), Workload()
)
GIVEN = {"model": "Qwen/Qwen2.5-0.5B", "gpus": 3, "dtype": "bf16", "depth": "formula"}


def case_of(**given: object) -> Case:
    return resolve(Ask(**GIVEN | given)).cases[-1]


@pytest.mark.parametrize("more", [{}, {"lora_rank": 8}, {"lora_rank": 8, "quantize": "nf4"}], ids=["full", "lora", "qlora"])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_of_torch(engine: str, more: dict[str, object]) -> None:
    """FSDP2 pads each parameter's first dimension, and a 4-bit base is gathered as it is stored."""
    case, made = case_of(engine=engine, **more), find_engine(engine)
    facts, rank = made.traffic(case.spec, case.cluster).facts(NO_WORK, case.workload, case.zero), made.ledger(case)[1]
    assert facts.params == sum(rank.numel)
    assert facts.trainable == sum(rank.numel[p] for p in rank.trained)
    assert facts.updated == sum(rank.chunks[p] for p in rank.trained)
    if engine == "fsdp2" and not more:
        assert facts.updated > facts.trainable / 3  # not all first dimensions divide by three
    if "quantize" in more and engine == "fsdp2":
        assert facts.params < case.spec.params / 2


def test_of_megatron() -> None:
    """Each bucket is padded before the ranks share it."""
    case, made = case_of(engine="megatron"), find_engine("megatron")
    facts, rank = made.traffic(case.spec, case.cluster).facts(NO_WORK, case.workload, case.zero), made.ledger(case)[1]
    assert (facts.trainable, facts.updated, facts.grad_bytes) == (rank.held, rank.stepped, rank.grad_element)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "ddp", "megatron"])
def test_a_rank_is_derived_once_for_a_case(engine: str) -> None:
    case, made = case_of(engine=engine), find_engine(engine)
    assert made.ledger(case)[1] is made.ledger(case)[1]
