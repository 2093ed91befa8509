"""The delayed parameter update equals a loop in plain torch that applies each step's gradients one forward late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import distance, ds_config, dtype_of, loss_distance, train_all

STEPS = 5


class Delayed(models.Plain):
    """:class:`models.Plain` whose updates from step `first` (counted from 1) on are seen one forward later."""

    first: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.waiting: dict[str, torch.Tensor] | None = None

    def step(self, number: int) -> list[float]:
        real, self.opt = self.opt, _Nothing()  # type: ignore[assignment]
        losses = super().step(number)  # forward, backward, masters' gradients, clipping
        self.opt = real
        grads = {name: master.grad for name, master in self.masters.items()}
        if self.waiting is not None:
            self._apply(self.waiting)
        self.waiting = grads if number + 1 >= self.first else None
        if self.waiting is None:
            self._apply(grads)
        return losses

    @torch.no_grad()
    def _apply(self, grads: dict[str, Any]) -> None:
        for name, master in self.masters.items():
            master.grad = grads[name]
        self.opt.step()
        for name, p in self.params.items():
            p.copy_(self.masters[name])


class _Nothing:
    def step(self) -> None:
        """Masters stay as they are, and so do the parameters copied from them."""


def delayed_config(stage: int, dtype: str, first: int, **changes: Any) -> dict[str, Any]:
    config = ds_config(stage, dtype, **changes)
    config["zero_optimization"] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config["zeroplan"] = {**config["zeroplan"], "delayed_update": first}
    return config


@pytest.mark.parametrize(("ranks", "dtype", "first"), [(1, "fp32", 3), (2, "bf16", 1)])
def test_equals_the_plain_loop(pool: RankPool, ranks: int, dtype: str, first: int) -> None:
    plain = Delayed(models.make(), lambda p: models.RoundedAdamW(p, lr=1e-2, weight_decay=0.1), ranks, dtype=dtype_of(dtype))
    plain.first = first
    expected = [plain.step(number) for number in range(STEPS)]
    results = pool.run(ranks, train_all, [(delayed_config(stage, dtype, first), {}) for stage in (1, 2, 3)], STEPS)
    for stage in range(3):
        mine = [rank[stage] for rank in results]
        assert loss_distance(mine, expected) == 0
        assert distance(mine[0], plain) == 0  # the parameters of before the last update, as the next forward would see them
    prompt = models.Plain(models.make(), plain.optimizer, ranks, dtype=dtype_of(dtype))
    told = [prompt.step(number) for number in range(STEPS)]
    assert [a == b for a, b in zip(told, expected, strict=True)] == [True] * first + [False] * (STEPS - first)


@pytest.mark.long
def test_clipping_accumulation_and_wider_sums_agree_at_all_stages(pool: RankPool) -> None:
    changes = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "communication_data_type": "bf16"}
    cases = [(delayed_config(stage, "bf16", 2, **changes), {}) for stage in (1, 2, 3)]
    wide = {**changes, "communication_data_type": "fp32"}
    cases += [(delayed_config(stage, "bf16", 2, **wide), {}) for stage in (1, 3)]
    found = pool.run(2, train_all, cases, STEPS)[0]
    assert found[0]["losses"] == found[1]["losses"] == found[2]["losses"]
    assert found[3]["losses"] == found[4]["losses"] != found[0]["losses"]


def drained(group: dist.ProcessGroup, config: dict[str, Any]) -> bool:
    """Whether draining sends the waiting update up: parameters are then the masters, rounded."""
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    for number in range(3):
        engine.backward(engine(models.batch(number, 0, dist.get_rank(group))))
        engine.step()

    def same() -> bool:
        engine.wait_parameters()
        units = [unit for unit in engine.model_states.units if unit.trainable is not None and unit.master is not None]
        return all(torch.equal(unit.trainable.shard, unit.master.to(torch.bfloat16)) for unit in units)

    engine.host.worker.submit(lambda: None).wait()  # the updates themselves are done, and wait
    waited = not same()
    engine.drain()
    return waited and same() and isinstance(engine.module, nn.Module)


@pytest.mark.parametrize("ranks", [1, 2])
def test_draining_ends_the_delay(pool: RankPool, ranks: int) -> None:
    assert all(pool.run(ranks, drained, delayed_config(2, "bf16", 1)))
