"""Gathers by NCCL's copy engines: which buffers are symmetric memory, when, and how the process group is made. GPUs run it in
``benchmarks.step.limit``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.arena.layout_setup import Feature, RuntimeSetup
from zeroplan.core.errors import BadInput
from zeroplan_runtime import api, copy_engines
from zeroplan_runtime.model_states import ModelStates

KEYS = {"copy_engine_gathers": True}


@pytest.mark.parametrize(("stage", "ranks", "by_engines"), [(3, 2, True), (3, 1, False), (2, 2, False)])
def test_which_setups_gather_by_them(stage: int, ranks: int, by_engines: bool) -> None:
    on = frozenset({Feature.COPY_ENGINES})
    assert RuntimeSetup(stage=stage, ranks=ranks, features=on).gathers_by_copy_engines is by_engines
    assert not RuntimeSetup(stage=stage, ranks=ranks).gathers_by_copy_engines


def losses(group: dist.ProcessGroup, symmetric: bool) -> tuple[list[float], list[int], int]:
    """Trains with a stand-in for symmetric memory; losses, elements of each allocation, and how many slots lie in it."""
    made: list[torch.Tensor] = []

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full((numel,), torch.nan, dtype=dtype, device=device))
        return made[-1]

    real = ModelStates._allocators
    stood_in = (lambda states: dict.fromkeys(_buffers(states), allocate)) if symmetric else real
    with mock.patch.object(ModelStates, "_allocators", stood_in):
        config = ds_config(3, zeroplan=KEYS)
        engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    assert real(engine.model_states) == {}  # on a CPU
    found = []
    for step in range(3):
        loss = engine(models.batch(step, 0, dist.get_rank(group)))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    within = {one.untyped_storage().data_ptr() for one in made}
    slots = engine.model_states.param_slots.values()
    count = sum(slot.tensor.untyped_storage().data_ptr() in within for slot in slots)
    assert count in (0, len(slots))
    engine.destroy()
    return found, [one.numel() for one in made], count


def _buffers(states: ModelStates) -> list[Any]:
    """The kinds of buffers that real symmetric memory is for, as a GPU would have them."""
    arena = SimpleNamespace(device=torch.device("cuda"))
    with mock.patch.object(states, "arena", arena):
        return list(_REAL(states))


_REAL = ModelStates._allocators


def test_what_is_gathered_lies_in_symmetric_memory(pool: RankPool) -> None:
    """All slots of parameters are in one block of it, and training is the same."""
    plain, symmetric = pool.run(2, losses, False), pool.run(2, losses, True)
    for (mine, sizes, slots), (theirs, *_) in zip(symmetric, plain, strict=True):
        assert mine == theirs
        assert len(sizes) == 1
        assert slots > 1


def test_the_process_group_has_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the runtime makes it, and is asked to; a torch without the policy is told so."""
    given: list[Any] = []
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, pg_options=None, **__: given.append(pg_options))
    options = mock.MagicMock(return_value=SimpleNamespace(config=SimpleNamespace(cta_policy=0)))
    nccl = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2, Options=options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    device = torch.device("cuda:0")
    api._join(device, ds_config(3))
    api._join(device, ds_config(3, zeroplan=KEYS))
    assert given[0] is None
    assert given[1].config.cta_policy == 2
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(), raising=False)
    with pytest.raises(BadInput, match=r"^ds_config\.zeroplan\.copy_engine_gathers: torch .* has no such policy"):
        copy_engines.process_group_options()


def test_ranks_on_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 4)
    allocate = copy_engines.SymmetricMemory(mock.MagicMock())
    with pytest.raises(BadInput, match=r"^ds_config\.zeroplan\.copy_engine_gathers: copy engines reach the GPUs of one host"):
        allocate(16, torch.bfloat16, torch.device("cuda:0"))
