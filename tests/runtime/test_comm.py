"""Collectives: when one has returned, its transport holds the tensors no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.ranks import RankPool
from zeroplan_runtime import comm
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.watchdog import RankLost


@pytest.mark.parametrize("turns", [0, 3, None], ids=["at_once", "later", "never"])
def test_a_collective_waits_for_its_transport_to_let_go_but_not_for_ever(
    turns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[torch.Tensor] = []
    slept: list[float] = []

    def gather(whole: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        if turns != 0:
            held.append(whole.view(-1))  # as gloo's thread does

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == turns:
            held.clear()

    monkeypatch.setattr(comm, "_all_gather", gather)
    monkeypatch.setattr(comm, "time", SimpleNamespace(sleep=sleep))
    ranks = Communicator()
    ranks.world_size = 2
    ranks.all_gather(torch.zeros(4), torch.zeros(2))
    if turns is not None:
        assert len(slept) == turns
    assert bool(held) is (turns is None)
    assert sum(slept) < 1.1


def uses_after(group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """Collectives after which a tensor has more uses than before."""
    made = Communicator(group)
    whole, shard = torch.zeros(400 * group.size()), torch.zeros(400)
    collectives = {
        "all_gather": lambda: made.all_gather(whole, shard),
        "reduce_scatter": lambda: made.reduce_scatter(shard, whole),
        "all_reduce_mean": lambda: made.all_reduce_mean(whole),
        "all_reduce_sum": lambda: made.all_reduce_sum(whole),
        "all_reduce_max": lambda: made.all_reduce_max(whole),
        "broadcast": lambda: made.broadcast(whole),
    }
    before = comm._uses((whole, shard))
    found = []
    for _ in range(200):
        for name, collective in collectives.items():
            collective()
            found.append((name, comm._uses((whole, shard)) - before))
    return [one for one in found if one[1]]


def test_gloo_has_let_go_when_a_collective_returns(pool: RankPool) -> None:
    """A third of the gathers returns too early otherwise."""
    assert pool.run(2, uses_after) == [[]] * 2


def test_a_rank_that_is_lost_in_the_models_own_collectives_is_named() -> None:
    alone = Communicator.alone()
    alone.explain = lambda what: f"rank 1 is dead: {what}"
    gone = "[/torch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8932. Check its logs."
    with pytest.raises(RankLost, match=r"rank 1 is dead: could not compute \(Connection closed by peer"):  # noqa: SIM117
        with alone.naming_ranks_that_computing_lost():
            raise RuntimeError(gone)
    with pytest.raises(RuntimeError, match="shapes differ"), alone.naming_ranks_that_computing_lost():
        raise RuntimeError("[rows] shapes differ")
