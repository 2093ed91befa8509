"""One rank of a tensor-parallel mesh, traced: its parameters, its collectives, and the plan that FSDP2 gets of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines.test_contract import ledger_and_schedule_differ
from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tape import ExpandedTape, Kind, Op
from zeroplan.core.tape_options import TraceOptions
from zeroplan.core.tensor_parallel import local_parameters
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.base import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.tapes import can_trace

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")]
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
BATCH, SEQ = 2, 64


@pytest.fixture(scope="module")
def tapes() -> dict[str, ExpandedTape]:
    """By the options' key, the tape of a rank without tensor parallelism, of one of two ranks, and with split tokens."""
    from zeroplan.trace.api import trace_model

    found = {}
    for options in (TraceOptions(), TraceOptions(tp=2), TraceOptions(tp=2, sp=True)):
        tape = trace_model(CONFIG, "AutoModelForCausalLM", options)
        found[options.key.removeprefix(TraceOptions().key)] = tape.expand(BATCH, SEQ // options.split_tokens)
    return found


def _collectives(tape: ExpandedTape) -> list[int]:
    alloc = int(Op.ALLOC)
    return [size for op, size, kind in zip(tape.op, tape.aux, tape.kind, strict=True) if op == alloc and kind == Kind.COMM]


def test_a_rank_traces_the_parts_that_the_ledger_counts(tapes: dict[str, ExpandedTape]) -> None:
    parameters = load_model(CONFIG).parameters
    assert tapes[""].parameters.shapes == parameters.shapes
    for key in ("_tp2", "_tp2+sp"):
        assert tapes[key].parameters.names == parameters.names
        assert tapes[key].parameters.shapes == local_parameters(parameters, "qwen3", 2).shapes


def test_collectives_are_allocations_of_the_tape(tapes: dict[str, ExpandedTape]) -> None:
    """Without split tokens each block sums two outputs in the forward and two gradients in the backward, and a gradient of
    each norm of the heads; the embedding and the head's input do once. The loss sums over the vocabulary.
    """
    assert not _collectives(tapes[""])
    whole = 2 * BATCH * SEQ * 64  # bytes of the hidden states
    summed = [size for size in _collectives(tapes["_tp2"]) if size == whole]
    assert len(summed) >= 6 * 4 + 2
    split = _collectives(tapes["_tp2+sp"])
    assert split.count(whole // 2) >= 6 * 2  # reduce-scatters of the row-wise layers' outputs
    assert split.count(whole) >= 6 * 4  # gathers before attention and MLP, and of the row-wise layers' gradients


def test_shared_activations_shrink(tapes: dict[str, ExpandedTape]) -> None:
    whole, shared, split = (tapes[key].activation_peak for key in ("", "_tp2", "_tp2+sp"))
    assert whole / 2 < split < shared < whole


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_ledger_keeps_the_schedule_leaves_alive(tapes: dict[str, ExpandedTape], stage: int, sp: bool) -> None:
    layout = ParallelLayout(gpus=8, tp=2, sp=sp)
    work = Workload(micro_batch=BATCH, seq_len=SEQ)
    case = Case(load_model(CONFIG), work, Cluster(gpus=8), ZeroConfig.of(stage), parallel=layout)
    engine = find_engine("fsdp2")
    assert engine.trace_options(case) == replace(TraceOptions(), tp=2, sp=sp)
    assert not ledger_and_schedule_differ(case, engine, tapes["_tp2+sp" if sp else "_tp2"])
