"""`explain` of pipelines: every rank, the worst first, as `estimate` plans them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.explain import explain
from zeroplan.run.ask import Ask

Cli = Callable[..., tuple[int, str, str]]
LLAMA = Ask(model="meta-llama/Llama-3.1-8B", engine="fsdp2", stage=2, gpus=8, pp=4, grad_accum=8, seq_len=512)


@pytest.mark.parametrize("chunks", [1, 2])
def test_ranks_are_those_of_the_plan(chunks: int) -> None:

    request = LLAMA.replace(vpp=chunks)
    found = [one.stage for one in explain(request)]
    (plan,) = estimate_report(request).plans
    assert {one.rank: (one.blocks, one.peak_allocated) for one in found if one is not None} == {
        stage.stage: (stage.blocks, stage.peak_allocated) for stage in plan.stages
    }
    peaks = [one.peak_allocated or 0 for one in found if one is not None]
    assert peaks == sorted(peaks, reverse=True)
    flying = {one.rank: one.in_flight for one in found if one is not None}
    # Narayanan et al. 2021, section 2.2: of two chunks on four ranks the first rank has (2 − 1) · 4 + 2 · 3 + 1 forwards ahead.
    assert flying == ({0: 4, 1: 3, 2: 2, 3: 1} if chunks == 1 else {0: 11, 1: 9, 2: 7, 3: 5})


def test_text_and_json_name_the_ranks(cli: Cli) -> None:
    words = ("explain", str(LLAMA.model), "--gpus", "8", "--pp", "4", "--grad-accum", "8", "--engine", "fsdp2", "--stage", "2")
    code, said, _ = cli(*words, "--seq-len", "512", "--line", "param.full")
    assert code == 0
    assert "in 4 pipeline ranks" in said.replace("\n", " ")
    assert "pipeline rank 0, blocks 0–7, 4 micro batches in flight at most, peak" in " ".join(said.split())
    assert "1 micro batch in flight" in " ".join(said.split())
    code, said, _ = cli(*words, "--seq-len", "512", "--json")
    ranks = [plan["pipeline_rank"] for plan in json.loads(said)["plans"]]
    assert sorted(rank["rank"] for rank in ranks) == [0, 1, 2, 3]
    code, said, _ = cli("explain", str(LLAMA.model), "--gpus", "8", "--engine", "fsdp2", "--stage", "2", "--json")
    assert "pipeline_rank" not in said
