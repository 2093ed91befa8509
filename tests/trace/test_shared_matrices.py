"""Mixtures whose matrices tensor-parallel ranks share: the layout computes what the whole model does, and a rank's tape."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.core.test_expert_parallel import CONFIG
from tests.engines.test_contract import ledger_and_schedule_differ
from tests.patience import PATIENCE
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tensor_parallel import local_parameters
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.options import TracedMesh, TraceOptions
from zeroplan.tapes import can_trace

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
QWEN = {
    **SMALL,
    "model_type": "qwen3_moe",
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_experts": 4,
    "mlp_only_layers": [1],
}
MIXTRAL = {**SMALL, "model_type": "mixtral", "intermediate_size": 16, "num_hidden_layers": 2, "num_local_experts": 4}
DEEPSEEK = {
    **SMALL,
    "model_type": "deepseek_v3",
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
needs_torch = pytest.mark.skipif(not can_trace(), reason="tracing needs torch and transformers")


@pytest.mark.long
@pytest.mark.slow
@needs_torch
def test_two_ranks_compute_what_the_whole_model_does(warm_python: Path) -> None:
    """Loss and every gradient: tokens between the matrices whole and split, experts of both ranks shared and of one whole."""
    cases = [
        (QWEN, False, False),
        (QWEN, True, False),
        (MIXTRAL, False, False),
        (MIXTRAL, True, False),
        (DEEPSEEK, False, False),
    ]
    cases += [(QWEN, False, True), (QWEN, True, True), (DEEPSEEK, False, True)]
    start = [warm_python.with_name("torchrun"), "--standalone", "--nproc-per-node=2", "-m", "tests.trace.shared_matrices"]
    done = subprocess.run([*start, json.dumps(cases)], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [tuple(one[:3]) for one in found] == [(config["model_type"], split, across) for config, split, across in cases]
    for name, _, _, worst, off, count in found:
        assert off < 1e-4, (name, worst)
        assert count > 20


@pytest.mark.parametrize("config", [QWEN, MIXTRAL, DEEPSEEK], ids=lambda config: str(config["model_type"]))
def test_the_plans_are_those_of_transformers(config: dict[str, Any]) -> None:
    """A rank holds its part of what transformers' plan names, and the whole of the rest but embedding and head."""
    transformers = pytest.importorskip("transformers")
    model_type = str(config["model_type"])
    named = transformers.AutoConfig.for_model(model_type).base_model_tp_plan
    styles = {name.removeprefix("layers.*."): style for name, style in named.items()}
    parameters = load_model(config).parameters
    local = local_parameters(parameters, model_type, 2)
    for name, block, whole, part in zip(parameters.names, parameters.blocks, parameters.shapes, local.shapes, strict=True):
        if not block:
            continue
        inner = name[len(block) + 1 :]
        style = styles.get(inner) or styles.get(inner.rpartition(".")[0])
        cut = {"colwise": 0, "packed_colwise": 1, "rowwise": len(whole) - 1}.get(str(style))
        assert part == tuple(size // 2 if at == cut else size for at, size in enumerate(whole)), name


@functools.cache
def peak_of_the_whole() -> int:
    """Of the activations, where no rank shares matrices with another."""
    from zeroplan.trace.api import trace_model

    return trace_model(CONFIG, "AutoModelForCausalLM", TraceOptions()).expand(2, 64).activation_peak


#: Ranks of ep, whether tokens are split between the matrices, and whether the experts' ranks lie across tp.
RANKS = [(2, True, False), (2, True, True)]
MORE = [(1, False, False), (1, True, False), (2, False, True)]


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize(("ep", "sp", "across"), [*RANKS, *(pytest.param(*more, marks=pytest.mark.long) for more in MORE)])
def test_a_rank_traces_the_parts_that_the_ledger_counts(ep: int, sp: bool, across: bool) -> None:
    """Also where other ranks have other experts, and these share their matrices."""
    from zeroplan.core.expert_parallel import with_local_experts
    from zeroplan.trace.api import trace_model

    parameters = load_model(CONFIG).parameters
    tokens = 32 if sp else 64  # of one rank
    tape = trace_model(CONFIG, "AutoModelForCausalLM", TraceOptions(mesh=TracedMesh(tp=2, sp=sp, ep=ep, across=across))).expand(
        2, tokens
    )
    assert tape.parameters.names == parameters.names
    local = local_parameters(parameters, "qwen3_moe", 2, whole_experts=across)
    assert tape.parameters.shapes == with_local_experts(local, ep).shapes
    assert tape.activation_peak < peak_of_the_whole()
    work, layout = Workload.of(micro_batch=2, seq_len=64), ParallelLayout(gpus=8, tp=2, sp=sp, ep=ep, etp=1 if across else 2)
    case = Case(load_model(CONFIG), work, Cluster(gpus=8), ZeroConfig.of(3), parallel=layout)
    assert not ledger_and_schedule_differ(case, find_engine("fsdp2"), tape)


@needs_torch
def test_a_mesh_computes_in_its_own_groups_after_another_of_the_same_ranks() -> None:
    """torch takes the two for one mesh, whose groups have other names: DTensor remembers the names of the first."""
    from zeroplan.trace.api import trace_model

    for mesh in (TracedMesh(2, True, cp=2), TracedMesh(2, True, ep=2)):
        tape = trace_model(CONFIG, "AutoModelForCausalLM", TraceOptions(mesh=mesh))
        assert tape.expand(2, 32).activation_peak > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"tp": 4, "model": {**QWEN, "num_key_value_heads": 4, "moe_intermediate_size": 18}},
            "tp 4 does not divide the 18 channels of an expert",
        ),
        ({"tp": 2, "sp": True, "model": DEEPSEEK}, "sequence parallelism of deepseek_v3 is not modelled"),
        ({"tp": 4, "ep": 2, "etp": 2, "model": {**QWEN, "num_key_value_heads": 4}}, "etp 2 is neither 1 nor tp 4"),
        ({"tp": 2, "ep": 2, "seq_len": 63}, "tp 2 does not divide the 63 tokens of a micro batch"),
        ({"tp": 4, "ep": 2, "engine": "zeroplan"}, "ep 2 is no multiple of tp 4"),
        ({"tp": 2, "engine": "deepspeed"}, "AutoTP rejects qwen3_moe's tp_plan"),
        ({"cp": 2, "model": DEEPSEEK}, "context parallelism of deepseek_v3 is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused(asked: dict[str, Any], said: str) -> None:
    request = Ask(**{"model": {**QWEN, "num_key_value_heads": 4}, "gpus": 8, "engine": "fsdp2", "seq_len": 64, **asked})
    with pytest.raises(BadInput, match=said):
        estimate_report(request)


def test_what_no_gpu_has_measured_of_the_runtime_is_no_promise() -> None:
    """Mixtures on tp beside ep; on tp alone they were measured."""
    for more, named in (({"tp": 2}, []), ({"tp": 2, "ep": 2, "etp": 2}, ["--tp"]), ({"tp": 2, "ep": 2}, ["--tp"])):
        asked = {"engine": "zeroplan", "stage": 2, "seq_len": 64, "depth": "formula", "vram": "80G", **more}
        (plan,) = estimate_report(Ask(**{"model": {**QWEN, "num_key_value_heads": 4}, "gpus": 8, **asked})).plans
        assert plan.fits is None  # without activations
        assert [one.key for one in plan.unmodelled if one.key == "--tp"] == named
