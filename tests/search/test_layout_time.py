"""The modelled time of layouts: pipelines by hand, and what each degree adds to a step."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.pipeline_order import Action, Do, PipelineOrder, PipelineSchedule
from zeroplan.core.rates import rates_of
from zeroplan.engines.fsdp2.engine import Fsdp2
from zeroplan.ledger.work import guess_counts, matrices
from zeroplan.planner.resolve import resolve
from zeroplan.run.ask import Ask
from zeroplan.search import layout_time
from zeroplan.search.layout_time import LayoutCost, LayoutTime
from zeroplan.search.pipeline_time import StageTime, play

LLAMA = Ask(model="meta-llama/Llama-3.1-70B", gpus=8, nodes=8, gpu="H100", seq_len=8192, engine="fsdp2", stage=3)
MIXTURE = LLAMA.replace(model="Qwen/Qwen3-30B-A3B", seq_len=4096)


def _time(request: Ask) -> LayoutTime:
    case = resolve(request).cases[0]
    tokens = case.workload.batch.rows * (case.workload.batch.seq_len or 0) // (case.layout.cp * case.layout.tp)
    counts = guess_counts(matrices(case.spec), case.workload, tokens)
    cluster = case.cluster
    return LayoutCost(case, counts, rates_of(cluster.gpu, cluster.network, cluster.gpus), Fsdp2()).time()


def _orders(schedule: PipelineSchedule, ranks: int, chunks: int, count: int) -> list[list[Action]]:
    return [PipelineOrder(schedule, rank, ranks, chunks, count).actions() for rank in range(ranks)]


@pytest.mark.parametrize("schedule", [PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 4), (4, 16), (8, 64)])
def test_equal_stages_wait_for_one_less_than_their_number(schedule: PipelineSchedule, ranks: int, count: int) -> None:
    """m (F + B) of work and (p − 1)(F + B) of waiting. Source: Narayanan et al. 2021, section 2.2.1."""
    stages = [StageTime(1.0, 2.0)] * ranks
    assert play(_orders(schedule, ranks, 1, count), stages, 0.0) == pytest.approx((count + ranks - 1) * 3.0)


def test_chunks_divide_the_waiting() -> None:
    """Interleaved: (p − 1)(F + B) / v of waiting. Source: Narayanan et al. 2021, section 2.2.2."""
    orders = _orders(PipelineSchedule.ONE_F_ONE_B, 4, 2, 16)
    assert play(orders, [StageTime(0.5, 1.0)] * 8, 0.0) == pytest.approx(16 * 3.0 + 3 * 3.0 / 2)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 64)])
def test_halved_backwards_wait_a_third_as_long(ranks: int, count: int) -> None:
    """ZB1P: (p − 1)(F + I − W) of waiting. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", table 1."""
    found = play(_orders(PipelineSchedule.ZERO_BUBBLE, ranks, 1, count), [StageTime(1.0, 2.0)] * ranks, 0.0)
    assert found == pytest.approx(count * 3.0 + ranks - 1)


def test_the_slowest_stage_sets_the_pace_and_sending_delays() -> None:
    orders = _orders(PipelineSchedule.ONE_F_ONE_B, 2, 1, 8)
    slow = play(orders, [StageTime(1.0, 2.0), StageTime(2.0, 4.0)], 0.0)
    assert slow == pytest.approx(8 * 6.0 + 1.0 + 2.0)
    assert play(orders, [StageTime(1.0, 2.0)] * 2, 0.25) > play(orders, [StageTime(1.0, 2.0)] * 2, 0.0)


def test_ranks_that_wait_for_each_other_are_a_fault() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        play([[Action(Do.BACKWARD, 0, 0)], [Action(Do.BACKWARD, 0, 0)]], [StageTime(1.0, 1.0)] * 2, 0.0)


def test_each_degree_costs_what_it_exchanges() -> None:
    alone = _time(LLAMA)
    assert alone.tensor == alone.ring == alone.experts == alone.waiting == 0
    inside, across = _time(LLAMA.replace(tp=8)), _time(LLAMA.replace(tp=2))
    assert inside.tensor > across.tensor > 0  # 2 (t − 1) / t of the hidden states, and as many blocks
    assert inside.compute < alone.compute
    staged = LLAMA.replace(pp=4, stage=2, grad_accum=16)
    assert _time(staged).waiting > _time(staged.replace(grad_accum=64)).waiting / 4 > 0
    assert _time(staged.replace(vpp=2)).waiting < _time(staged).waiting
    assert _time(LLAMA.replace(cp=8, seq_len=32768)).ring >= 0


def test_ranks_that_split_tokens_send_their_part_to_the_next_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages lie on nodes of their own: each of eight ranks sends an eighth of the hidden states."""
    sent: list[float] = []

    def noted(orders: Any, stages: Any, sending: float, schedule: Any) -> float:
        sent.append(sending)
        return play(orders, stages, sending, schedule)

    monkeypatch.setattr(layout_time, "play", noted)
    staged = LLAMA.replace(tp=8, pp=4, stage=2, grad_accum=4)
    whole, split = _time(staged), _time(staged.replace(sp=True))
    assert sent[0] / 8 <= sent[1] < sent[0] / 7
    assert split.waiting < whole.waiting


def test_experts_on_one_node_exchange_faster() -> None:
    near, far = _time(MIXTURE.replace(ep=8)), _time(MIXTURE.replace(ep=64))
    assert 0 < near.experts < far.experts
    near, far = (_time(MIXTURE.replace(ep=ep, micro_batch=4)) for ep in (8, 64))  # so that the host is ahead
    assert near.compute == far.compute  # balanced: a rank computes as many tokens as it has
    assert _time(MIXTURE).experts == 0


def test_parts_make_the_step() -> None:
    found = _time(LLAMA.replace(tp=8, pp=4, stage=2, grad_accum=16))
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_second == pytest.approx(16 * 8192 * 2 / found.total)
    assert 0 < found.utilization < 0.7


def test_replicas_sum_what_a_nodes_ranks_have_reduced() -> None:
    """8 nodes, each with all shards: 2 (r − 1) / r of a shard's fp32 gradients pass the network, and no gather does."""
    plain = LLAMA.replace(model="meta-llama/Llama-3.1-8B", seq_len=512, network="25G")  # little computation hides nothing
    whole, within = _time(plain), _time(plain.replace(dp_replicate=8))
    assert within.compute == whole.compute
    cluster, elements = resolve(plain).cluster, 8_030_261_248
    rates = rates_of(cluster.gpu, cluster.network, cluster.gpus)
    network = 2 * 4 * elements / 8 * 7 / 8 / (rates.adapter_gbs * 1e9)  # a shard's eight replicas share their node's adapter
    inside = (2 + 2 + 4) * elements * 7 / 8 / (rates.link_gbs * 1e9)
    hidden = within.compute
    assert network + inside - hidden < within.sharding < 1.3 * (network + inside)
    assert within.sharding < whole.sharding
    assert within.optimizer == pytest.approx(8 * whole.optimizer)  # a rank has an eighth of the states, and not a 64th


def test_fast_rails_make_shards_over_all_nodes_as_good_as_replicas() -> None:
    plain = LLAMA.replace(model="meta-llama/Llama-3.1-8B", seq_len=512)
    rails, ethernet = _time(plain), _time(plain.replace(network="25G"))
    assert rails.sharding < ethernet.sharding / 50


def test_links_are_those_of_the_groups() -> None:
    case = resolve(LLAMA.replace(tp=4, pp=2, cp=2, stage=2, grad_accum=8, dp_replicate=2)).cases[0]
    counts = guess_counts(matrices(case.spec), case.workload, 1024)
    rates = rates_of(case.cluster.gpu)
    found = {one.group: (one.ranks, one.inside, one.gbs) for one in LayoutCost(case, counts, rates, Fsdp2()).links}
    near, far = rates.link_gbs, rates.adapter_gbs
    assert found == {
        "tp": (4, True, near),
        "cp": (2, True, near),
        "pp": (2, False, far),
        "shards": (4, False, 2 * far),  # two GPUs of a node are in the same group, since four share their matrices
        "replicas": (2, False, far),
    }


def test_chunks_that_do_not_stay_gathered_are_gathered_again() -> None:
    staged = LLAMA.replace(pp=4, stage=2, grad_accum=16)
    assert _time(staged.replace(vpp=2)).sharding == pytest.approx(_time(staged).sharding, rel=0.3)
    assert _time(staged.replace(vpp=5)).sharding > 2 * _time(staged.replace(vpp=2)).sharding


def test_a_second_gather_has_its_copies_and_takes_processors_from_the_backward() -> None:
    once, twice = (_time(LLAMA.replace(gradient_checkpointing=True, stage=stage)) for stage in (2, 3))
    rates = rates_of(resolve(LLAMA).cluster.gpu)
    elements, shards = 70.55e9, 64
    copies = elements * ((4 + 2) / shards + 2 * 2) / (rates.hbm_gbs * 1e9)
    channels, processors = 2 * 8, 132
    taken = 2 * elements * (shards - 1) / shards / (rates.ring_gbs * 1e9) * channels / processors
    assert twice.sharding - once.sharding == pytest.approx(copies + taken, rel=0.1)


def test_gradients_in_16_bits_are_reduced_in_less_time() -> None:
    small = LLAMA.replace(seq_len=512)
    assert _time(small.replace(reduce_dtype="bf16")).sharding < _time(small).sharding


def test_without_shared_states_each_rank_updates_all() -> None:
    model = "meta-llama/Llama-3.1-8B"
    alone, shared = (_time(LLAMA.replace(model=model, engine="megatron", stage=stage)) for stage in (0, 1))
    assert alone.optimizer == pytest.approx(64 * shared.optimizer)
