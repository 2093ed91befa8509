"""The search over layouts: its order, the first that fits, and the smallest cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.plan import Verdict
from zeroplan.core.rates import Rates, rates_of
from zeroplan.engines.base import Engine, SearchedLayouts
from zeroplan.engines.case import Case
from zeroplan.engines.megatron.bridge import staged
from zeroplan.ledger.work import Counts
from zeroplan.models.megatron import MegatronModel
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.resolve import resolve
from zeroplan.report.layouts import layouts_text
from zeroplan.report.terminal import Terminal
from zeroplan.run.ask import Ask
from zeroplan.search.layout_answer import LayoutAnswer
from zeroplan.search.layout_counts import rank_counts
from zeroplan.search.layout_floor import LayoutFloors
from zeroplan.search.layout_orders import LEAST_GAIN, LayoutOrders, sequences
from zeroplan.search.layout_time import LayoutCost
from zeroplan.search.layouts import _between, search_layouts, smallest_cluster
from zeroplan.search.policy import MOST_TOKENS

Cli = Callable[..., tuple[int, str, str]]
FSDP2 = SearchedLayouts(stage=3, staged=2)
LLAMA = Ask(model="meta-llama/Llama-3.1-8B", gpus=8, gpu="H100", seq_len=8192)


def test_layouts_that_share_less_come_first() -> None:
    found = list(LayoutOrders(FSDP2).of(LLAMA.replace(nodes=8, seq_len=32768)))
    ranks = [one["tp"] * one["pp"] * one["cp"] for one in found]
    assert ranks == sorted(ranks)
    assert all(64 % count == 0 for count in ranks)
    assert max(one["tp"] for one in found) == 8  # a group of matrices stays within a node
    assert max(one["cp"] for one in found) == 8  # 4,096 tokens a rank
    assert len({json.dumps(one, sort_keys=True) for one in found}) == len(found)
    of_two = [one for one in found if one["tp"] * one["pp"] * one["cp"] == 2]
    assert [(one["tp"], one["pp"], one["cp"]) for one in of_two] == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    for one in found:
        assert one["sp"] == (one["tp"] > 1 and one["pp"] == 1)
        assert one["stage"] == (3 if one["pp"] == 1 else 2)
        assert one.get("grad_accum", 1) >= (one["pp"] if one["pp"] > 1 else 1)
    assert all(one["cp"] == 1 for one in LayoutOrders(FSDP2).of(LLAMA.replace(nodes=8, seq_len=4096)))


def test_the_fastest_that_fits_is_the_answer() -> None:
    """8,192 tokens of Llama 3.1 8B on one node: FSDP2 alone misses, and what comes behind it is slower."""
    found = smallest_cluster(LLAMA, checkpointing=False)
    assert found.best is not None
    assert found.best.request.nodes == 1
    assert found.best.plan.fits is True
    assert any(one.layout.dp == 8 for one in found.tried)
    ranked = (*found.tried, found.best)  # a variant counts for a little less
    speeds = [one.tokens_per_second / (1 if one.simpler is None else 1 + LEAST_GAIN) for one in ranked]
    assert speeds == sorted(speeds, reverse=True)
    for one in found.tried:
        assert one.plan.verdict in (Verdict.DOES_NOT_FIT, Verdict.MAY_FIT)
    text = layouts_text(found, terminal=Terminal(width=None))
    assert f"Modelled: {found.best.time.tokens_per_second:,.0f} tokens/s" in text
    assert "8 GPUs as dp 8, ZeRO-3: " in text
    assert "were not measured" in text
    assert text.splitlines()[0] == layouts_text(found, terminal=Terminal(width=None), quiet=True)


def test_what_exceeds_the_card_by_counts_alone_is_not_simulated(cli: Cli) -> None:
    code, said, _ = cli("recommend", "meta-llama/Llama-3.1-405B", "--gpu", "H100", "--gpus", "8", "--layouts")
    assert code == 1
    assert "Nothing fits" in said
    assert "24 layouts of 756.0 of 79.1 GiB a GPU and more" in said
    code, said, _ = cli("recommend", "meta-llama/Llama-3.1-405B", "--gpu", "H100", "--gpus", "8", "--layouts", "--json")
    answer = json.loads(said)
    assert answer["best"] is None
    assert answer["tried"] == []
    (cluster,) = answer["too_large"]
    assert cluster["layouts"] > 10
    assert cluster["least"] >= 12 * 405e9 / 8 > cluster["usable"]


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        (LLAMA.model, {"stage": 3}),
        (LLAMA.model, {"stage": 3, "grad_accum": 2, "gradient_checkpointing": True}),
        (LLAMA.model, {"tp": 4, "sp": True, "stage": 3}),
        (LLAMA.model, {"stage": 3, "seq_len": 8192, "gradient_checkpointing": True, "checkpoint_policy": "selective"}),
        (LLAMA.model, {"pp": 4, "stage": 2, "grad_accum": 4}),
        (LLAMA.model, {"pp": 8, "stage": 2, "grad_accum": 32, "gradient_checkpointing": True}),
        (LLAMA.model, {"tp": 2, "pp": 2, "stage": 2, "grad_accum": 8, "gradient_checkpointing": True}),
        (LLAMA.model, {"stage": 3, "optimizer": "sgd"}),
        (LLAMA.model, {"pp": 4, "vpp": 2, "stage": 2, "grad_accum": 4}),
        (LLAMA.model, {"pp": 2, "vpp": 4, "stage": 2, "grad_accum": 8, "gradient_checkpointing": True}),
        (LLAMA.model, {"stage": 3, "dp_replicate": 2}),
        (LLAMA.model, {"stage": 2, "dp_replicate": 4}),
        (LLAMA.model, {"tp": 2, "pp": 2, "stage": 2, "grad_accum": 8}),
        (LLAMA.model, {"pp": 2, "stage": 2, "grad_accum": 8, "seq_len": 4096}),
        (LLAMA.model, {"tp": 2, "sp": True, "stage": 3, "seq_len": 8192}),
        (LLAMA.model, {"engine": "deepspeed", "stage": 3, "seq_len": 8192}),
        (LLAMA.model, {"engine": "deepspeed", "pp": 2, "stage": 1, "grad_accum": 8, "seq_len": 4096}),
        ("Qwen/Qwen3-30B-A3B", {"ep": 4, "stage": 3, "seq_len": 4096}),
        ("Qwen/Qwen3-30B-A3B", {"stage": 3, "seq_len": 4096, "gradient_checkpointing": True, "checkpoint_policy": "selective"}),
        ("mistralai/Mixtral-8x7B-v0.1", {"stage": 3, "seq_len": 4096}),
        ("deepseek-ai/DeepSeek-V3", {"ep": 8, "stage": 3, "seq_len": 4096}),
        ("deepseek-ai/DeepSeek-V2-Lite", {"ep": 4, "stage": 3, "gradient_checkpointing": True}),
        ("deepseek-ai/DeepSeek-V2-Lite", {"ep": 2, "pp": 4, "stage": 2, "grad_accum": 16, "gradient_checkpointing": True}),
    ],
)
def test_no_plan_is_below_its_floor(model: str, degrees: dict[str, Any]) -> None:
    request = LLAMA.replace(**{"model": model, "engine": "fsdp2", "seq_len": 512, **degrees})
    whole = request.replace(tp=1, sp=False, pp=1, vpp=1, ep=1, stage=3, schedule="1f1b", dp_replicate=1)
    floor = LayoutFloors(resolve(whole).cases[0]).of(request)
    (plan,) = estimate_report(request).plans
    assert plan.gpu.peak_allocated is not None
    assert 0.4 * plan.gpu.peak_allocated < floor < plan.gpu.peak_allocated


def test_numbers_of_nodes_between() -> None:
    assert [list(_between(nodes)) for nodes in (1, 2, 4, 8)] == [[], [], [3], [5, 6, 7]]
    assert list(_between(16)) == list(range(9, 16))
    assert list(_between(64)) == list(range(36, 64, 4))


def test_the_fewest_nodes_are_asked_for_by_a_question_mark(cli: Cli) -> None:
    """Llama 3.1 8B needs 16 bytes a parameter: more than one H100 has, and less than two."""
    asked = ("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--seq-len", "1024", "--gradient-checkpointing")
    code, said, _ = cli(*asked, "--nodes", "?", "--json")
    assert code == 0
    answer = json.loads(said)
    layout = answer["best"]["layout"]
    assert (answer["best"]["nodes"], layout["dp"] * layout["tp"] * layout["pp"]) == (1, 2)
    assert "nodes of 8 GPUs are assumed" in answer["warnings"][0]
    code, _, fault = cli(*asked, "--nodes", "several")
    assert code == 2
    assert "--nodes: 'several' is no number" in fault


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"engine": "ddp"}, "layouts are searched for deepspeed, fsdp2 and megatron alone"),
        ({"gpu": None}, "no GPU is named"),
        ({"model": "nobody/knows-this-model"}, "nobody/knows-this-model"),
    ],
)
def test_what_cannot_be_asked_is_one_line(changed: dict[str, str | None], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        search_layouts(LLAMA.replace(**changed))  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_where_nothing_fits_more_stages_than_blocks_are_left_out() -> None:
    """More stages are looked at where nothing fits: of 64 ranks' all but those which 28 blocks cannot fill."""
    asked = Ask(model="Qwen/Qwen2.5-7B", vram="4G", gpus=8, nodes=8, seq_len=2048, gradient_checkpointing=False)
    found = search_layouts(asked, checkpointing=False)
    assert found.best is None
    assert found.too_large


def test_options_of_the_other_search_are_refused(cli: Cli) -> None:
    code, _, fault = cli("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "8xH100", "--layouts", "--goal", "memory")
    assert code == 2
    assert "--goal: cannot stand beside --layouts" in fault


def test_nothing_tried_is_said_so() -> None:
    assert "Nothing fits" in layouts_text(LayoutAnswer(None, ()), terminal=Terminal(width=None))


def test_layouts_of_megatron_are_searched(cli: Cli) -> None:
    """Its memory was never measured, so no layout is known to fit; pipeline stages split tokens and run in several chunks."""
    found = search_layouts(LLAMA.replace(model="meta-llama/Llama-3.1-70B", nodes=8, engine="megatron"))
    assert found.best is None
    assert found.may is not None
    ask = found.may.request
    assert (ask.engine, ask.stage, ask.sp) == ("megatron", 1, True)
    assert ask.tp <= 8 < ask.tp * ask.pp * ask.cp
    interval, usable = found.may.plan.gpu.interval, found.may.plan.gpu.usable
    assert interval is not None
    assert usable is not None
    assert interval[1] <= usable
    assert ask.vpp > 1
    assert found.may.simpler is not None
    assert found.may.simpler.waiting > found.may.time.waiting
    code, _, said = cli("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "8xH100", "--engine", "ddp", "--layouts")
    assert code == 2
    assert "layouts are searched for deepspeed, fsdp2 and megatron alone" in said


def test_layouts_in_8_bits_are_faster(cli: Cli) -> None:
    words = ("meta-llama/Llama-3.1-8B", "--engine", "megatron", "--gpu", "8xH100", "--seq-len", "4096", "--json")
    fixed = ("--tp", "2", "--sp", "--pp", "1", "--cp", "1")
    half, eight = (
        json.loads(cli("recommend", *words, *fixed, *more)[1])["may_fit"]["modelled"]["tokens_per_second"]
        for more in ((), ("--fp8", "tensorwise"))
    )
    assert 1.15 < eight / half < 1.9
    code, _, fault = cli("recommend", *words, *fixed, "--fp8", "rowwise")
    assert (code, len(fault.splitlines())) == (2, 1)


def test_a_batch_too_small_for_some_stages_leaves_the_others() -> None:
    """Of Megatron's layouts, whose stages take fewer micro batches than there are, those without a time are left out."""
    asked = LLAMA.replace(model="meta-llama/Llama-3.1-70B", nodes=16, engine="megatron", depth="formula")
    found = search_layouts(asked, global_batch=64)
    assert found.tried
    for one in found.tried:
        assert one.layout.pp == 1 or (one.request.grad_accum or 1) >= one.layout.pp
    with pytest.raises(BadInput, match="takes 8 micro batches or more, and not 4"):  # where no other is left
        search_layouts(LLAMA.replace(engine="megatron", pp=8, tp=1, cp=1), global_batch=4)


def test_layouts_of_deepspeed_are_searched() -> None:
    """Ranks share matrices or stages, never both, nor tokens; on stages it is ZeRO-1, and the stages are PipelineModule's."""
    asked = LLAMA.replace(model="meta-llama/Llama-3.1-8B", gpu="A100-40G", gpus=8, nodes=2, seq_len=4096, engine="deepspeed")
    found = search_layouts(asked)
    assert found.best is not None
    assert {one.layout.sp for one in found.listed} == {False}
    staged = search_layouts(asked.replace(pp=4, gradient_checkpointing=True)).best
    assert staged is not None
    assert (staged.request.stage, staged.layout.tp, staged.layout.vpp) == (1, 1, 1)
    assert staged.time.waiting > 0
    shared = search_layouts(asked.replace(tp=4)).chosen
    assert shared is not None
    assert shared.layout.pp == 1
    assert shared.time.tensor > 0
    plain = LayoutCost(*_cost_of(asked.replace(pp=1, tp=1, stage=1, grad_accum=4))).time()
    each = LayoutCost(*_cost_of(asked.replace(pp=1, tp=1, stage=2, grad_accum=4))).time()
    assert each.sharding > plain.sharding  # stage 2 reduces after each micro batch


def _cost_of(ask: Ask) -> tuple[Case, Counts, Rates, Engine]:
    resolved = resolve(ask)
    case = resolved.cases[0]
    return case, rank_counts(resolved, {}), rates_of(case.cluster.gpu), resolved.engine


def test_megatron_divides_126_layers_over_16_stages(cli: Cli) -> None:
    words = ("meta-llama/Llama-3.1-405B", "--engine", "megatron", "--gpu", "8xH100", "--nodes", "128", "--seq-len", "8192")
    _, text, _ = cli("estimate", *words, "--tp", "8", "--sp", "--pp", "16", "--grad-accum", "64", "--depth", "formula", "--why")
    assert "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split" in " ".join(text.split())
    model = MegatronModel.of({"num_layers": 61, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128})
    uneven, flags = staged(model, ParallelLayout(gpus=16, pp=16))
    assert (uneven.decoder_first_pipeline_num_layers, uneven.decoder_last_pipeline_num_layers) == (3, 2)
    assert flags == "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    even = replace(model, num_layers=64)
    assert staged(even, ParallelLayout(gpus=16, pp=16)) == (even, "")


def test_a_step_takes_no_more_tokens_than_published_runs_do() -> None:
    """On 16,384 GPUs the fastest layout by tokens a second would take 67 million a step; what the request says stands."""
    request = LLAMA.replace(model="meta-llama/Llama-3.1-405B", nodes=2048)
    found = search_layouts(request)
    assert found.best is not None
    assert sequences(found.best.request) * 8192 <= MOST_TOKENS
    told = search_layouts(request.replace(micro_batch=1))
    assert told.best is not None
    assert sequences(told.best.request) * 8192 > MOST_TOKENS


def test_no_rank_of_a_layout_loads_the_whole_model() -> None:
    """Shards are made or read where they belong, so that 8 ranks of a node do not hold eight models of 70B on the host."""
    found = search_layouts(LLAMA.replace(model="meta-llama/Llama-3.1-70B", nodes=8))
    assert found.best is not None
    assert found.best.request.from_scratch
    assert found.best.layout.dp == 64


def test_stages_of_three_are_tried_where_a_batch_asks_for_them_and_many_where_few_do_not_fit() -> None:
    asked = LLAMA.replace(nodes=48, seq_len=2048)
    orders = LayoutOrders(FSDP2, global_batch=2048)
    stages = {one["pp"] for one in orders.of(asked)}
    assert {1, 3, 6, 12, 16} <= stages
    assert max(stages) == 16
    assert max(one["pp"] for one in orders.with_many_stages().of(asked)) == 64
    assert 12 not in {one["pp"] for one in LayoutOrders(FSDP2).of(asked)}


def test_of_what_may_fit_comes_first_what_is_expected_to() -> None:
    def tried(verdict: Verdict, needed: int, speed: float) -> Any:
        gpu = SimpleNamespace(needed=needed, usable=40)
        return SimpleNamespace(plan=SimpleNamespace(verdict=verdict, gpu=gpu), compared=speed)

    fast, sure = tried(Verdict.MAY_FIT, 45, 10.0), tried(Verdict.MAY_FIT, 39, 5.0)
    too_large = tried(Verdict.DOES_NOT_FIT, 50, 20.0)
    assert LayoutAnswer(None, (fast, too_large, sure)).with_straddling().may is sure
    assert LayoutAnswer(None, (too_large, fast)).with_straddling().may is fast
    assert LayoutAnswer(None, (too_large,)).with_straddling().may is None
