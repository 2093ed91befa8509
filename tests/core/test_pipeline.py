"""Pipeline stages: who has which block, in which order micro batches run, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_tensor_parallel import CONFIG
from zeroplan.core.errors import BadInput
from zeroplan.core.pipeline import chunks_of, stage_parameters, stages_of
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.report.plans import report_text
from zeroplan.run.ask import Ask

DEEP = CONFIG | {"num_hidden_layers": 8}


@given(st.integers(1, 200), st.integers(2, 16))
def test_stages_have_every_block_once_and_equal_weight(blocks: int, count: int) -> None:
    try:
        found = stages_of(blocks, count)
    except BadInput:
        assert blocks + 2 < count  # a first or last stage of one unit has embedding or head and no block
        return
    assert [s.first for s in found[1:]] == [s.end for s in found[:-1]]
    assert (found[0].first, found[-1].end) == (0, blocks)
    weights = [s.end - s.first + s.is_first + s.is_last for s in found]
    assert max(weights) - min(weights) <= 1


def test_torchtitans_split_of_llama_8b() -> None:
    """32 blocks on 4 stages: 34 / 4 = 8 and two heavier ones, less the embedding and the head."""
    assert [(s.first, s.end) for s in stages_of(32, 4)] == [(0, 8), (8, 17), (17, 25), (25, 32)]


def test_the_ends_may_have_no_block() -> None:
    """Llama 3's 126 blocks on 16 × 8 stages: embedding alone on the first, head alone on the last (arXiv 2407.21783, 3.3.2)."""
    found = stages_of(126, 128)
    assert (found[0].end, found[-1].first) == (0, 126)
    assert all(stage.end - stage.first == 1 for stage in found[1:-1])
    asked = Ask(model=DEEP, gpus=5, gpu="H100", pp=5, vpp=2, engine="fsdp2", stage=2, grad_accum=10, seq_len=128)
    first, *_, last = estimate_report(asked).plans[0].stages
    assert first.peak_allocated is not None
    assert last.peak_allocated is not None


def test_a_rank_with_several_chunks_has_every_second_stage() -> None:
    assert [(s.index, s.first, s.end) for s in chunks_of(32, 2, 2, 1)] == [(1, 8, 17), (3, 25, 32)]


def test_stages_share_the_parameters() -> None:
    whole = load_model(DEEP).parameters
    parts = [stage_parameters(whole, [stage]) for stage in stages_of(8, 3)]
    assert sum(part.total for part in parts) == whole.total
    assert "model.embed_tokens.weight" in parts[0].names
    assert parts[-1].names[-2:] == ("model.norm.weight", "lm_head.weight")
    for part in parts:  # modules name parameters by their place in the stage's own list
        assert {p for owned in part.modules for p in owned} == set(range(len(part)))


@pytest.mark.parametrize(
    ("changed", "asked", "said"),
    [
        ({}, {"pp": 3}, "pp 3 does not divide 1 × 8 = 8 ranks"),
        ({}, {"pp": 2, "tp": 8}, "tp 8 × pp 2 = 16 does not divide 1 × 8 = 8 ranks"),
        ({"num_hidden_layers": 2}, {"pp": 8}, "8 pipeline stages leave one without any of the 2 blocks"),
        ({"tie_word_embeddings": True}, {"pp": 2}, "the head is tied to the embedding, which is on another pipeline stage"),
        ({}, {"pp": 2, "stage": 3}, "on a pipeline stage fsdp2 keeps parameters gathered"),
        ({}, {"pp": 2, "lora_rank": 4}, "pipeline stages with LoRA are not modelled"),
        ({}, {"pp": 2, "schedule": "zero-bubble", "grad_accum": 5}, "the 2 rounds of the zero-bubble schedule do not divide 5"),
        ({}, {"pp": 4, "grad_accum": 3}, "1f1b over 4 stages takes 4 micro batches or more, and not 3"),
        ({}, {"pp": 2, "schedule": "zbv"}, "zbv runs exactly 2 chunks a rank, and not 1; use --vpp 2"),
        (
            {"num_hidden_layers": 12},
            {"pp": 2, "vpp": 3, "schedule": "dualpipev"},
            "dualpipev runs exactly 2 chunks a rank, and not 3; use --vpp 2",
        ),
        (
            {"num_hidden_layers": 14},
            {"pp": 4, "vpp": 2, "schedule": "dualpipev", "grad_accum": 7},
            "dualpipev over 2 × 4 stages takes 8 micro batches",
        ),
        ({}, {"pp": 2, "schedule": "DualPipe"}, "DualPipe runs both ways through two copies of every stage"),
        ({}, {"pp": 2, "schedule": "interleaved"}, "the interleaved schedule is 1f1b with several chunks a rank"),
        ({}, {"pp": 4, "vpp": 4, "grad_accum": 8}, "16 pipeline stages leave one without any of the 8 blocks"),
        ({}, {"pp": 2, "vpp": 2, "grad_accum": 9}, "the 4 rounds of the interleaved schedule do not divide 9 micro batches"),
        ({}, {"vpp": 2}, "vpp 2 needs pipeline stages"),
        ({}, {"schedule": "gpipe"}, "a schedule without pipeline stages"),
        ({}, {"pp": 2, "schedule": "1b1f"}, "unknown schedule '1b1f'"),
        ({}, {"pp": 2, "lengths": [256, 512]}, "batches of different lengths are not modelled with --pp"),
        ({}, {"cp": 2, "lengths": [256, 512]}, "batches of different lengths are not modelled with --cp"),
        ({"model_type": "gpt2", "n_head": 8}, {"pp": 2}, "pipeline stages of gpt2 are not modelled"),
        ({}, {"pp": 2, "engine": "deepspeed"}, "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
    ],
)
def test_what_cannot_be_is_one_line(changed: dict[str, object], asked: dict[str, object], said: str) -> None:
    request = {"model": DEEP | changed, "gpus": 8, "engine": "fsdp2", "stage": 2, "depth": "formula", "grad_accum": 8} | asked
    with pytest.raises(BadInput) as refused:
        estimate_report(Ask(**request))  # type: ignore[arg-type]
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_stages_send_the_parts_of_samples_that_they_have() -> None:
    sizes = []
    for cp in (1, 2):
        asked = Ask(model=DEEP, gpus=8, pp=4, cp=cp, engine="fsdp2", depth="formula", grad_accum=4, seq_len=512)
        lines = estimate_report(asked).plans[0].lines
        sizes.append(sum(line.bytes for line in lines if line.buffer == "comm.pipeline"))
    assert sizes[0] == 2 * sizes[1] > 0


def test_formulas_tell_every_stage_the_worst_first() -> None:
    asked = Ask(model=DEEP, gpus=8, pp=4, engine="fsdp2", depth="formula", vram="80G", grad_accum=4)
    report = estimate_report(asked)
    plan = report.plans[0]
    assert (plan.stage, plan.fits) == (2, None)
    assert sorted(stage.stage for stage in plan.stages) == [0, 1, 2, 3]
    assert plan.gpu.model_states == plan.stages[0].model_states
    text = report_text(report)
    assert "8 GPUs as dp 2 × pp 4" in text
    assert f"Stages: {plan.stages[0].stage} needs " in text
    # Masters, gradients and two moments in fp32, over two data-parallel ranks.
    assert sum(stage.model_states for stage in plan.stages) == 16 * load_model(DEEP).params // 2


def test_chunks_of_a_rank_are_told() -> None:
    asked = Ask(model=DEEP, gpus=8, pp=2, vpp=2, engine="fsdp2", depth="formula", grad_accum=4)
    report = estimate_report(asked)
    assert "8 GPUs as dp 4 × pp 2 × vpp 2" in report_text(report)
    blocks = {one.stage: one.blocks for one in report.plans[0].stages}
    assert blocks == {0: ((0, 2), (5, 7)), 1: ((2, 5), (7, 8))}


def test_no_step_time_of_shared_models() -> None:
    from zeroplan.search.explain_time import explain_time

    with pytest.raises(BadInput, match="step times are modelled for data parallelism alone"):
        explain_time(Ask(model=DEEP, gpus=8, tp=2, engine="fsdp2", stage=3))
