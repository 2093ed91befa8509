"""One rank that shares experts, traced: its parameters, its exchanges, FSDP2's plan of it, and the numbers it computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.test_expert_parallel import CONFIG
from tests.engines.test_contract import ledger_and_schedule_differ
from zeroplan.core.cluster import Cluster
from zeroplan.core.expert_parallel import with_local_experts
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.simulated import uneven
from zeroplan.tape.expanded import ExpandedTape, Kind, Op
from zeroplan.tape.options import TracedMesh, TraceOptions
from zeroplan.tapes import can_trace

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")]
BATCH, SEQ, EP = 2, 64, 4
ROUTED = BATCH * SEQ * CONFIG["num_experts_per_tok"] * CONFIG["hidden_size"] * 2  # type: ignore[operator]


@pytest.fixture(scope="module")
def tape() -> ExpandedTape:
    """Of one of four ranks."""
    from zeroplan.trace.api import trace_model

    return trace_model(CONFIG, "AutoModelForCausalLM", TraceOptions(mesh=TracedMesh(ep=EP))).expand(BATCH, SEQ)


def test_a_rank_traces_the_experts_that_the_ledger_counts(tape: ExpandedTape) -> None:
    parameters = load_model(CONFIG).parameters
    assert tape.parameters.names == parameters.names
    assert tape.parameters.shapes == with_local_experts(parameters, EP).shapes


def test_tokens_travel_to_their_experts_and_back(tape: ExpandedTape) -> None:
    """Each of the four blocks exchanges twice in the forward, and the gradients of both in the backward; before the tokens
    their numbers.
    """
    made = zip(tape.op, tape.aux, tape.kind, strict=True)
    sizes = [size for op, size, kind in made if op == Op.ALLOC and kind == Kind.COMM]
    assert sizes.count(ROUTED) == 4 * 4
    assert len(sizes) == 4 * 5


def test_twice_the_tokens_need_the_experts_tensors_twice(tape: ExpandedTape) -> None:
    """In one block the experts keep at least what arrives and its two products, in each of the four blocks."""
    inner = CONFIG["moe_intermediate_size"] / CONFIG["hidden_size"]  # type: ignore[operator]
    assert uneven({}, tape) > 4 * ROUTED * (1 + 2 * inner + inner)
    assert uneven({}, tape) < tape.activation_peak


@pytest.mark.parametrize(
    ("layout", "stage", "accumulated"),
    [
        (ParallelLayout(gpus=8, ep=EP), 2, 1),
        (ParallelLayout(gpus=8, ep=EP), 3, 2),
        (ParallelLayout(gpus=8, nodes=2, ep=EP), 3, 1),  # shards of the second dimension
        (ParallelLayout(gpus=4, ep=EP), 3, 1),  # experts that no other rank has
    ],
)
def test_what_the_ledger_keeps_the_schedule_leaves_alive(
    tape: ExpandedTape, layout: ParallelLayout, stage: int, accumulated: int
) -> None:
    work = Workload.of(micro_batch=BATCH, seq_len=SEQ, grad_accum=accumulated)
    cluster = Cluster(gpus=layout.gpus, nodes=layout.nodes)
    case = Case(load_model(CONFIG), work, cluster, ZeroConfig.of(stage), parallel=layout)
    engine = find_engine("fsdp2")
    assert engine.trace_options(case) == TraceOptions(mesh=TracedMesh(ep=EP))
    assert not ledger_and_schedule_differ(case, engine, tape)


def test_a_stage_of_a_pipeline_leaves_alive_what_the_ledger_keeps(tape: ExpandedTape) -> None:
    work = Workload.of(micro_batch=BATCH, seq_len=SEQ, grad_accum=4)
    layout = ParallelLayout(gpus=8, nodes=2, pp=2, ep=EP)
    engine = find_engine("fsdp2")
    for rank in range(2):
        case = Case(load_model(CONFIG), work, Cluster(gpus=8, nodes=2), ZeroConfig.of(2), parallel=layout, pp_rank=rank)
        assert not ledger_and_schedule_differ(case, engine, tape)


def test_one_rank_with_all_experts_computes_what_transformers_does() -> None:
    """Outputs and gradients of a block's experts, with the exchange between a rank and itself."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from zeroplan.trace.expert_parallel import share_experts

    torch.manual_seed(0)
    config: Any = Qwen3MoeConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    config._experts_implementation = "eager"
    plain, shared = Qwen3MoeExperts(config), Qwen3MoeExperts(config)
    for param in plain.parameters():
        torch.nn.init.normal_(param, std=0.1)
    shared.load_state_dict(plain.state_dict())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        share_experts(torch.nn.ModuleList([shared]), dist.group.WORLD)
        hidden = torch.randn(24, 64)
        index = torch.stack([torch.randperm(8)[:2] for _ in range(24)])
        weights = torch.rand(24, 2)
        found = []
        for module in (plain, shared):
            x = hidden.clone().requires_grad_()
            out = module(x, index, weights)
            out.square().sum().backward()
            found.append([out.detach(), x.grad, *(param.grad for param in module.parameters())])
    finally:
        dist.destroy_process_group()
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
