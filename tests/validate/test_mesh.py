"""verify on meshes of four ranks: trained as in one process, and as planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.ranks import RankPool
from tests.validate.small import CONFIG
from zeroplan.core.parallel import ParallelLayout
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import ExpandedTapes
from zeroplan.run.ask import Ask
from zeroplan.validate.compare import compare
from zeroplan.validate.job import job_of
from zeroplan.validate.machine import find_machine
from zeroplan.validate.measured import measurement_of
from zeroplan.validate.planned import predict

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

from tests.runtime.expert_jobs import MIXTURE  # noqa: E402  (needs transformers)
from tests.runtime.mesh_jobs import LLAMA  # noqa: E402
from tests.validate import mesh_runs  # noqa: E402

DENSE: dict[str, Any] = {**LLAMA, "model_type": "llama"}
SPARSE: dict[str, Any] = {**MIXTURE, "model_type": "qwen3_moe", "num_experts": 4, "num_key_value_heads": 4}
#: What the quick suite trains: of each kind of group one.
SOME: list[mesh_runs.Case] = [
    ("fsdp2", ParallelLayout(4, ep=4, tp=2), SPARSE, 3),
    ("zeroplan", ParallelLayout(4, tp=2, cp=2), DENSE, 3),
]
OTHERS: list[mesh_runs.Case] = [
    ("fsdp2", ParallelLayout(4, tp=2, sp=True, cp=2), DENSE, 3),
    ("fsdp2", ParallelLayout(4, tp=2), DENSE, 2),
    ("fsdp2", ParallelLayout(4, cp=2), DENSE, 2),
    ("fsdp2", ParallelLayout(4, dp_replicate=2), DENSE, 3),
    ("fsdp2", ParallelLayout(4, ep=2), SPARSE, 3),
    ("fsdp2", ParallelLayout(4, ep=2, dp_replicate=2), SPARSE, 3),
    ("fsdp2", ParallelLayout(4, ep=2, tp=2, etp=2), SPARSE, 3),
    ("fsdp2", ParallelLayout(4, ep=2, tp=4), SPARSE, 2),
    ("fsdp2", ParallelLayout(4, ep=2, tp=2, sp=True), SPARSE, 2),
    ("fsdp2", ParallelLayout(4, ep=4, cp=2), SPARSE, 3),
    ("zeroplan", ParallelLayout(4, tp=2, sp=True), DENSE, 2),
    ("zeroplan", ParallelLayout(4, cp=4), DENSE, 1),
    ("zeroplan", ParallelLayout(4, ep=4, cp=2), SPARSE, 2),
    ("zeroplan", ParallelLayout(4, ep=2, cp=2), SPARSE, 3),
    ("zeroplan", ParallelLayout(4, ep=4, tp=2), SPARSE, 3),
    ("zeroplan", ParallelLayout(4, ep=2, tp=2, etp=2, sp=True), SPARSE, 3),
]


def hold(pool: RankPool, cases: list[mesh_runs.Case]) -> None:
    """The mean of the ranks' losses is that of one process, which steps by gradients of all samples."""
    found = pool.run(4, mesh_runs.train, cases)
    for number, (engine, layout, config, stage) in enumerate(cases):
        mean = [sum(step) / 4 for step in zip(*(rank[number] for rank in found), strict=True)]
        expected = mesh_runs.plain(config, layout.dp, layout.cp)
        assert mean == pytest.approx(expected, abs=2e-5), (engine, layout, stage)


@pytest.mark.long
def test_training_equals_one_process(pool: RankPool) -> None:
    hold(pool, SOME)


@pytest.mark.long
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[0]}{OTHERS.index(case)}")
def test_training_equals_one_process_on_every_mesh(pool: RankPool, case: mesh_runs.Case) -> None:
    hold(pool, [case])


#: Logits so large that the peak is beside them: elsewhere a CPU's kernels take other temporaries than CUDA's.
WIDE = {**CONFIG, "vocab_size": 4096, "intermediate_size": 256, "tie_word_embeddings": False, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 4}
MIXED = {
    **SPARSE,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 64,
    "architectures": ["Qwen3MoeForCausalLM"],
}
SEEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fsdp2", WIDE, {"tp": 2, "sp": True, "stage": 3}),
    ("fsdp2", MIXED, {"ep": 2, "stage": 2}),
    ("zeroplan", WIDE, {"tp": 2, "stage": 2}),
    ("zeroplan", MIXED, {"ep": 4, "tp": 2, "stage": 3}),
]


@pytest.mark.parametrize("seen", [SEEN[3:], pytest.param(SEEN[:3], marks=pytest.mark.long)], ids=["some", "others"])
def test_runs_are_as_planned(pool: RankPool, seen: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    """Owned buffers to the byte, and what torch allocates beside them."""
    cases, jobs = [], []
    for engine, model, asked in seen:
        cluster = find_machine().cluster(4)
        resolved = resolve(Ask(model=model, engine=engine, gpus=4, micro_batch=2, seq_len=64, from_scratch=True, **asked))
        runner, raw = resolved.engine.for_verify(None, device="cpu", own_module=False)
        case = replace(resolved.cases[0], cluster=cluster)
        cases.append((runner, case))
        jobs.append(job_of(case, runner, raw=raw, steps=2).to_json())
    found = pool.run(4, mesh_runs.run, jobs)
    for number, (runner, case) in enumerate(cases):
        planned = predict(runner, case, ExpandedTapes(runner))
        comparison = compare(planned, measurement_of([rank[number] for rank in found], device="cpu", ranks=4), 0.02)
        assert comparison.within, (seen[number], comparison.verdict)
        assert comparison.measurement.owned is (runner.name == "zeroplan")
        judged = [row for row in comparison.totals if row.judged]
        assert [row.name for row in judged] == ["live after a step", "peak of tensors"]
        assert all(abs(row.difference or 0) < 20_000 for row in judged), (seen[number], judged)
