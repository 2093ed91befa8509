"""Every line of every engine: documented, derived equals plain, and the items add up to the plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import OPTIMIZERS, find_optimizer
from zeroplan.core.workload import DType, OptimizerKind, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.ledger.derive import Derived
from zeroplan.ledger.line import derived, evaluate, glossary_of, symbols
from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor
from zeroplan.planner.formula import formula_plan

DIM = st.integers(1, 3000)


def tiny(hidden: int = 64, layers: int = 3, vocab: int = 1000, *, frozen: bool = False) -> ModelSpec:
    """A small transformer-like model."""
    block = (
        Tensor("attn.weight", (3 * hidden, hidden), trainable=not frozen),
        Tensor("mlp.weight", (4 * hidden, hidden)),
        Tensor("norm.weight", (hidden,)),
    )
    units = (
        SpecUnit("embed", (Tensor("weight", (vocab, hidden), trainable=not frozen),)),
        SpecUnit("blocks.{}", block, count=layers, block=True),
        SpecUnit("head", (Tensor("bias", (vocab,)),)),
    )
    return ModelSpec("tiny", units, "test")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Case]:
    """An engine and any case that it can run."""
    engine = find_engine(draw(st.sampled_from(engine_names())))
    spec = tiny(draw(DIM), draw(st.integers(1, 40)), draw(DIM), frozen=draw(st.booleans()))
    zero = draw(st.sampled_from(engine.options()))
    workload = Workload.of(
        seq_len=16,
        grad_accum=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from([DType.BF16, DType.FP16])),
        precision=draw(st.sampled_from(list(Precision))),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        optimizer_kind=draw(st.sampled_from(list(OptimizerKind))),
    )
    case = Case(spec, workload, Cluster(gpus=draw(st.integers(1, 16)), nodes=draw(st.integers(1, 4))), zero)
    try:
        engine.require_workload(case)
    except BadInput:
        reject()
    return engine, case


@settings(max_examples=200)
@given(cases())
def test_derived_equals_plain_and_every_item_has_a_formula(drawn: tuple[Any, Case]) -> None:
    engine, case = drawn
    ledger, facts = engine.ledger(case)
    plain = evaluate(ledger, facts)
    explained = list(derived(ledger, facts))
    assert [(i.name, i.bytes) for i in plain] == [(i.name, i.bytes) for i in explained]
    assert all(i.formula and i.doc for i in explained)
    named = symbols(facts)
    for line in ledger:
        value = line.fn(named)
        assert value == 0 or isinstance(value, Derived), f"{line.name} lost its derivation"


@settings(max_examples=200)
@given(cases())
def test_the_items_add_up_to_the_plan(drawn: tuple[Any, Case]) -> None:
    engine, case = drawn
    plan = formula_plan(engine, case)
    on_gpu = sum(line.bytes for line in plan.lines if line.place == "hbm")
    assert plan.gpu.model_states + plan.gpu.fixed_buffers == on_gpu
    host = sum(line.bytes for line in plan.lines if line.place in ("dram", "pinned"))
    assert plan.cpu.per_node == host * case.cluster.gpus
    assert plan.cpu.pinned <= plan.cpu.per_node
    assert plan.gpu.live_after_step <= max(plan.gpu.phases.values())
    assert plan.gpu.total is plan.gpu.peak_allocated is plan.gpu.activations is None


@settings(max_examples=100)
@given(cases())
def test_every_plan_round_trips_through_json(drawn: tuple[Any, Case]) -> None:
    plan = formula_plan(*drawn)
    assert type(plan).model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("name", engine_names())
def test_every_line_says_what_it_is_for(name: str) -> None:
    engine = find_engine(name)
    cases = [Case(tiny(), Workload(), Cluster(gpus=4), zero) for zero in engine.options()]
    ledger, facts = engine.ledger(cases[0])
    assert len({line.name for line in ledger}) == len(ledger)
    assert all(len(line.doc) > 10 for line in ledger)
    if name != "zeroplan":  # the included runtime is its own source
        assert [line.name for line in ledger if not line.source] == []
    formulas = [(item.formula, facts) for ledger, facts in map(engine.ledger, cases) for item in derived(ledger, facts)]
    used = {name for formula, facts in formulas for name in re.findall(r"[a-z][a-z_0-9]*", formula) if hasattr(facts, name)}
    assert len(used) > 3
    assert used <= {name for name, meaning in glossary_of(type(facts)).items() if len(meaning) > 10}


def test_optimizer_states_by_hand() -> None:
    """Bytes a parameter with fp32 masters, one rank: master 4 + states."""
    engine = find_engine("deepspeed")
    spec = ModelSpec("flat", (SpecUnit("m", (Tensor("w", (1024, 1024)),)),), "test")
    expected = {"adamw": 8, "lion": 4, "adagrad": 4, "sgd": 0, "sgd_momentum": 4, "lamb": 8, "muon": 4, "adafactor": 4}
    expected["adamw8bit"] = 2 + 8 / 256
    expected["adagrad"] += 2  # that of the optimizer that was built for the module's 16-bit parameters, which the engine keeps
    for name, k in expected.items():
        plan = formula_plan(engine, Case(spec, Workload.of(optimizer=name), Cluster(), ZeroConfig.of(2)))
        states = sum(line.bytes for line in plan.lines if line.buffer.startswith("optim.") and line.buffer != "optim.temp")
        assert states == k * 1024 * 1024, name


def test_muon_leaves_embeddings_and_vectors_to_adam() -> None:
    engine = find_engine("deepspeed")
    spec = tiny(hidden=64, layers=1, vocab=1000)
    plan = formula_plan(engine, Case(spec, Workload.of(optimizer="muon"), Cluster(), ZeroConfig.of(3)))
    by_name = {line.buffer: line.bytes for line in plan.lines if line.place == "hbm"}
    matrix = 7 * 64 * 64
    assert by_name["optim.momentum"] == 2 * matrix  # at stage 3 as wide as a gradient on its way, bf16
    assert by_name["optim.exp_avg"] == by_name["optim.exp_avg_sq"] == 4 * (spec.params - matrix)


def test_unknown_optimizers_name_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean 'adamw'"):
        find_optimizer("adanw")
