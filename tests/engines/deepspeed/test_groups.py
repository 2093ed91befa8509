"""Partition arithmetic against a slow, literal reading of what each rank owns."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.groups import flat_group, sub_groups
from zeroplan.engines.deepspeed.rank import deepspeed_rank
from zeroplan.ledger.derive import shard

SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 7), st.booleans(), st.booleans())
def test_every_element_has_one_owner(sizes: list[int], ranks: int, round_robin: bool, aligned: bool) -> None:
    group = flat_group(range(len(sizes)), sizes, ranks, width=2, round_robin=round_robin, aligned=aligned)
    owner: list[tuple[int, int] | None] = []
    for p in group.order:
        owner += [(p, i) for i in range(sizes[p])]
        if aligned and p != group.order[-1]:
            owner += [None] * (-len(owner) % 8)
    assert sum(1 for cell in owner if cell is None) == group.padding
    owner += [None] * (group.numel - len(owner))
    assert len(owner) == group.numel == group.partition * ranks
    assert group.numel % (2 * ranks) == 0
    for rank in range(ranks):
        part = owner[rank * group.partition : (rank + 1) * group.partition]
        expected = {
            p: [i for cell in part if cell and cell[0] == p for i in [cell[1]]] for cell in part if cell for p in [cell[0]]
        }
        owned = {p: list(range(piece.start, piece.start + piece.count)) for p, piece in group.owned(rank)}
        assert owned == expected


def test_round_robin_deals_parameters_in_turn() -> None:
    assert flat_group(range(5), [10] * 5, 2, width=2, round_robin=True).order == (0, 2, 4, 1, 3)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 900))
def test_sub_groups_close_when_they_reach_their_size(sizes: list[int], size: int) -> None:
    groups = sub_groups(range(len(sizes)), sizes, size)
    assert [p for group in groups for p in group] == list(range(len(sizes)))
    for group in groups[:-1]:
        assert sum(sizes[p] for p in group[:-1]) < size <= sum(sizes[p] for p in group)
    if sum(sizes) <= size:
        assert len(groups) == 1


def test_shard_pads_each_parameter() -> None:
    assert [shard(n, 4) for n in (1, 4, 5, 2048)] == [1, 1, 2, 512]


@pytest.mark.parametrize(
    ("detached_loss", "own_loop", "apart"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_trainer_has_a_second_group_of_what_does_not_decay(detached_loss: bool, own_loop: bool, apart: bool) -> None:
    held = {
        "wte.weight": (64, 8), "h.0.ln_1.weight": (8,), "h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_attn.bias": (24,),
        "h.0.post_norm.scale": (8,), "lm_head.weight": (64, 8),
    }  # fmt: skip
    count = len(held)
    parameters = Parameters(
        tuple(held), tuple(held.values()), (True,) * count, (False,) * count, ("",) * count, tuple((p,) for p in range(count))
    )
    work = Workload.of(seq_len=8, micro_batch=1, detached_loss=detached_loss, own_loop=own_loop)
    rank = deepspeed_rank(parameters, work, ZeroConfig.of(1), ParallelLayout(2))
    found = [group for _, group in rank.param_groups]
    assert found == ([(0, 2, 5), (1, 3, 4)] if apart else [tuple(range(count))])
    padded = [sum(rank.numel[p] for p in group) for group in found]
    assert rank.stepped_at_once == [-(-size // 4) * 2 for size in padded]
    whole = deepspeed_rank(parameters, work, ZeroConfig.of(0), ParallelLayout(2))
    assert len(whole.stepped_at_once) == len(whole.domains) == (len(found) if whole.flattens else count)
