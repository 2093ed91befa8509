"""One rank of a mesh, traced: its parameters, its collectives, and the plan that FSDP2 gets of it."""

from __future__ import annotations

import pytest

from tests.engines.test_contract import ledger_and_schedule_differ
from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tensor_parallel import local_parameters
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.tape.expanded import ExpandedTape, Kind, Op
from zeroplan.tape.options import TracedMesh, TraceOptions
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
OPTIONS = (
    TraceOptions(),
    TraceOptions(mesh=TracedMesh(2)),
    TraceOptions(mesh=TracedMesh(2, True)),
    TraceOptions(mesh=TracedMesh(2, cp=2)),
)


class Tapes(dict[str, ExpandedTape]):
    """By the options' key, each traced when it is first asked for."""

    def __missing__(self, key: str) -> ExpandedTape:
        from zeroplan.trace.api import trace_model

        options = next(one for one in OPTIONS if one.key == TraceOptions().key + key)
        tape = trace_model(CONFIG, "AutoModelForCausalLM", options)
        self[key] = tape.expand(BATCH, SEQ // options.split_tokens)
        return self[key]


@pytest.fixture(scope="module")
def tapes() -> Tapes:
    """Of a rank without tensor parallelism, of one of two ranks, with split tokens, and with split samples."""
    return Tapes()


def _collectives(tape: ExpandedTape) -> list[int]:
    alloc = int(Op.ALLOC)
    return [size for op, size, kind in zip(tape.op, tape.aux, tape.kind, strict=True) if op == alloc and kind == Kind.COMM]


@pytest.mark.long
def test_a_rank_traces_the_parts_that_the_ledger_counts(tapes: Tapes) -> None:
    parameters = load_model(CONFIG).parameters
    assert tapes[""].parameters.shapes == parameters.shapes
    for key in ("_tp2", "_tp2+sp"):
        assert tapes[key].parameters.names == parameters.names
        assert tapes[key].parameters.shapes == local_parameters(parameters, "qwen3", 2).shapes


@pytest.mark.long
def test_collectives_are_allocations_of_the_tape(tapes: Tapes) -> None:
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


@pytest.mark.long
def test_shared_activations_shrink(tapes: Tapes) -> None:
    whole, shared, split = (tapes[key].activation_peak for key in ("", "_tp2", "_tp2+sp"))
    assert whole / 2 < split < shared < whole


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_ledger_keeps_the_schedule_leaves_alive(tapes: Tapes, stage: int, sp: bool) -> None:
    layout = ParallelLayout(gpus=8, tp=2, sp=sp)
    work = Workload.of(micro_batch=BATCH, seq_len=SEQ)
    case = Case(load_model(CONFIG), work, Cluster(gpus=8), ZeroConfig.of(stage), parallel=layout)
    engine = find_engine("fsdp2")
    assert engine.trace_options(case) == TraceOptions(mesh=TracedMesh(2, sp))
    assert not ledger_and_schedule_differ(case, engine, tapes["_tp2+sp" if sp else "_tp2"])


@pytest.mark.long
def test_a_ring_gathers_keys_and_values(tapes: Tapes) -> None:
    """Each block gathers both ranks' keys and values in the forward and again in the backward, and passes fp32 gradients on:
    one of its two KV heads a tensor-parallel rank, over half of the tokens.
    """
    keys_and_values = 2 * 2 * BATCH * 2 * (SEQ // 2) * 8  # bytes of one rank's, of 2 heads of 8 channels in 16 bits
    alone, ring = _collectives(tapes["_tp2"]), _collectives(tapes["_tp2_cp2"])
    assert 2 * keys_and_values not in alone
    assert ring.count(2 * keys_and_values) >= 6 * (2 + 2)  # of both ranks in 16 bits, or of one in fp32: two steps of the ring
    assert tapes["_tp2_cp2"].parameters.shapes == tapes["_tp2"].parameters.shapes
    assert tapes["_tp2_cp2"].activation_peak < 0.6 * tapes["_tp2"].activation_peak


def test_what_the_ledger_keeps_with_split_samples_the_schedule_leaves_alive(tapes: Tapes) -> None:
    work = Workload.of(micro_batch=BATCH, seq_len=SEQ)
    case = Case(load_model(CONFIG), work, Cluster(gpus=8), ZeroConfig.of(3), parallel=ParallelLayout(gpus=8, tp=2, cp=2))
    engine = find_engine("fsdp2")
    assert case.layout.shard_group == 4  # ranks that share samples share the states, too
    assert engine.trace_options(case) == TraceOptions(mesh=TracedMesh(2, cp=2))
    assert not ledger_and_schedule_differ(case, engine, tapes["_tp2_cp2"])
