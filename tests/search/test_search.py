"""The search against brute force, its floors against simulations, and its speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.rates import rates_of
from zeroplan.core.sizes import GIB
from zeroplan.core.workload import Workload
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.run.ask import Ask
from zeroplan.search.cost import CostModel
from zeroplan.search.memory import Memory
from zeroplan.search.recommend import least_memory, rank_all, rank_key, search
from zeroplan.search.search_options import SearchOptions, candidates_of, resolve_search
from zeroplan.search.space import NVME_PATH, Candidate, all_candidates, batch_splits

pytestmark = pytest.mark.torch

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
SEQ = 1024


@pytest.fixture(scope="module")
def problem() -> tuple[Memory, list[Candidate]]:
    """Every candidate of a small Llama on two cards, and a Memory that keeps their simulations."""
    pytest.importorskip("transformers")
    engine, cluster = find_engine("deepspeed"), Cluster.of(gpus=2, vram="80G", gpu="H100", cpu_ram="64G")
    memory = Memory(engine, load_model(SMALL), cluster)
    zeros = engine.search_space(cluster, NVME_PATH)
    space = list(
        all_candidates(zeros, Workload.of(seq_len=SEQ), batch_splits(8, ParallelLayout(2)), (False, True), engine.alloc_confs)
    )
    return memory, space


def limited(memory: Memory, gib: float, host: float) -> Memory:
    """The same with smaller limits; simulated totals do not depend on them."""
    return memory.on(replace(memory.cluster, vram=round(gib * GIB), cpu_ram=round(host * GIB)))


@pytest.mark.long
def test_search_is_exact_and_floors_are_floors(problem: tuple[Memory, list[Candidate]]) -> None:
    memory, space = problem
    cost = CostModel(find_engine("deepspeed"), memory.spec, memory.cluster, rates_of(memory.cluster.gpu))
    everything = rank_all(space, memory, cost)
    for one in everything:
        assert one.plan.gpu.total is not None
        assert memory.floor(one.candidate) <= one.plan.gpu.total, one.candidate
    totals = sorted(one.plan.gpu.total / GIB for one in everything if one.plan.gpu.total is not None)
    limits = [totals[0] * 0.9, *(totals[len(totals) * k // 6] * 1.06 for k in range(6)), totals[-1] * 1.2]
    for gib in limits:
        for host in (8, 64):
            tight = limited(memory, gib + 0.6, host)
            fitting = [one for one in rank_all([o.candidate for o in everything], tight, cost) if one.fits]
            best = min(fitting, key=lambda r: rank_key(r.candidate, r.time), default=None)
            found = search(space, tight, cost, shown=1).ranking
            assert (found[0].candidate if found else None) == (best.candidate if best else None), (gib, host)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "ddp", "zeroplan"])
def test_floors_are_tight_where_the_step_decides_and_never_above(engine: str) -> None:
    """One sequence of 64 tokens: states are all there is, so the floor of the step's buffers is what the run needs."""
    memory = Memory(find_engine(engine), load_model("Qwen/Qwen2.5-0.5B"), Cluster(gpus=3, vram=400 * GIB))
    tight = 0
    for zero, _ in memory.engine.search_space(memory.cluster, NVME_PATH):
        if zero.buckets.reduce_bucket_size < 100_000_000:
            continue
        candidate = Candidate(zero, Workload.of(micro_batch=1, seq_len=64))
        plan = memory.plan(candidate)
        allocated = (plan.gpu.peak_allocated or 0) + (plan.gpu.outside_torch or 0)
        assert memory.floor(candidate) <= allocated, zero
        tight += memory.floor(candidate) > 0.95 * allocated
    assert tight >= {"deepspeed": 1, "zeroplan": 4}.get(engine, 0)


def test_families_come_fastest_first_and_fit(problem: tuple[Memory, list[Candidate]]) -> None:
    memory, space = problem
    cost = CostModel(find_engine("deepspeed"), memory.spec, memory.cluster, rates_of(memory.cluster.gpu))
    outcome = search(space, memory.on(replace(memory.cluster, vram=6 * GIB)), cost)
    speeds = [r.time.tokens_per_second for r in outcome.ranking]
    assert speeds == pytest.approx(sorted(speeds, reverse=True))
    assert all(r.fits for r in outcome.ranking)
    families = [r.candidate.family for r in outcome.ranking]
    assert len(families) == len(set(families))
    assert outcome.considered == len(space)
    assert outcome.simulated < len(space) / 4  # floors prune, and step times order, before anything is simulated


def test_least_memory_needs_less_than_the_fastest(problem: tuple[Memory, list[Candidate]]) -> None:
    memory, space = problem
    cost = CostModel(find_engine("deepspeed"), memory.spec, memory.cluster, rates_of(memory.cluster.gpu))
    least = least_memory(space, memory.on(memory.cluster), cost).ranking
    fastest = search(space, memory.on(memory.cluster), cost, shown=1).ranking[0]
    assert least[0].plan.gpu.needed < fastest.plan.gpu.needed
    needs = [r.plan.gpu.needed for r in least]
    assert needs == sorted(needs)


@pytest.mark.parametrize("engine", ["deepspeed", "ddp", "fsdp2"])
def test_the_host_alone_is_the_plans_own_host(engine: str) -> None:
    """So a search may pass over what the host cannot hold before the GPU is simulated; a little less for a model's kernels."""
    pytest.importorskip("transformers")
    request = Ask(model=SMALL, engine=engine, lora_rank=8, gpu="H100", gpus=2, cpu_ram="64G", seq_len=SEQ, micro_batch=1)
    options = SearchOptions(gradient_checkpointing=True)
    resolved = resolve_search(request, options)
    memory = Memory(resolved.engine, resolved.spec, resolved.cluster)
    seen = set()
    for candidate in candidates_of(resolved, request, options):
        if candidate.family in seen or not memory.runnable(candidate):
            continue
        seen.add(candidate.family)
        host = memory.host(candidate)
        assert host is not None
        planned = memory.plan(candidate).cpu
        assert 0 <= planned.per_node - host.per_node < 2 * 128 << 20, candidate
        assert (planned.peak_phase, planned.pinned) == (host.peak_phase, host.pinned)
    assert seen
