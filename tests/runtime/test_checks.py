"""What an engine refuses, each in one line with its remedy, and what goes on as if nothing had been."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.engine import Engine


def start(model: nn.Module | None = None, stage: int = 0, dtype: str = "fp32", **changes: Any) -> Engine:
    config = ds_config(stage, dtype, **changes)
    return zeroplan_runtime.initialize(model=model or models.make(), config=config, device="cpu")[0]


def take_steps(engine: Engine, count: int = 2, begin: int = 0) -> Engine:
    for number in range(begin, begin + count):
        engine.backward(engine(models.batch(number, 0, 0)))
        engine.step()
    return engine


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises(BadInput) as fault:
        call()
    text = str(fault.value)
    assert "\n" not in text
    assert ";" in text  # a remedy follows
    return text


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_batch_of_no_samples_trains_no_numbers_that_are_none() -> None:
    engine, empty = start(), models.batch(0, 0, 0)[:0]
    assert "the batch holds no samples, and its loss is not a number" in said_by(lambda: engine.backward(engine(empty)))
    engine.backward(engine(empty).nan_to_num())  # nothing to learn from, as a sum of no losses
    engine.step()
    take_steps(engine)
    assert all(torch.isfinite(param).all() for param in engine.module.parameters())


def test_a_checkpoint_of_a_transposed_matrix_is_not_loaded(tmp_path: Path) -> None:
    start(nn.Sequential(nn.Linear(4, 6, bias=False))).save_checkpoint(tmp_path)
    other = start(nn.Sequential(nn.Linear(6, 4, bias=False)))
    assert "'0.weight' was saved as (6, 4) and is (4, 6) here" in said_by(lambda: other.load_checkpoint(tmp_path))


# ---------------------------------------------------------------------- one engine a model


def test_two_engines_on_one_model_are_refused() -> None:
    model = models.make()
    engine = start(model)
    assert "'embed.weight' is under another engine; call engine.destroy(" in said_by(lambda: start(model))
    assert "'0.gain' is under another engine" in said_by(lambda: start(nn.Sequential(*model.blocks)))
    take_steps(engine)  # the first goes on


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_second_engine_after_destroy_trains_as_on_a_fresh_model(dtype: str) -> None:
    engine = take_steps(start(dtype=dtype))
    trained = engine.module_state_dict()
    engine.destroy(keep_parameters=True)
    engine.destroy(keep_parameters=True)  # nothing more to do
    assert same(dict(engine.module.state_dict()), trained)
    fresh = models.make(seed=1).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    fresh.load_state_dict(trained)
    again, new = take_steps(start(engine.module, dtype=dtype), begin=2), take_steps(start(fresh, dtype=dtype), begin=2)
    assert same(again.module_state_dict(), new.module_state_dict())
    assert not same(again.module_state_dict(), trained)


def keep(group: dist.ProcessGroup, stage: int) -> bool:
    engine = zeroplan_runtime.initialize(model=models.make(), config=ds_config(stage), group=group, device="cpu")[0]
    take_steps(engine)
    whole = engine.module_state_dict()
    engine.destroy(keep_parameters=True)
    return whole is None or same(dict(engine.module.state_dict()), whole)


def test_kept_parameters_are_whole_where_they_were_sharded(pool: RankPool) -> None:
    assert pool.run(2, keep, 3) == [True, True]


def test_an_emptied_model_is_refused() -> None:
    engine = start()
    engine.destroy()
    assert "is empty since its engine was destroyed; use engine.destroy(keep_parameters" in said_by(
        lambda: start(engine.module)
    )


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda e: e(models.batch(0, 0, 0)), "engine"),
        (lambda e: e.backward(torch.ones((), requires_grad=True)), "engine.backward"),
        (lambda e: e.step(), "engine.step"),
        (lambda e: e.optimizer.step(), "engine.step"),
        (lambda e: e.zero_grad(), "engine.zero_grad"),
        (lambda e: e.module_state_dict(), "engine"),
        (lambda e: e.save_checkpoint("never"), "engine.save_checkpoint"),
        (lambda e: e.load_checkpoint("never"), "engine.load_checkpoint"),
    ],
)
def test_a_destroyed_engine_says_so(call: Callable[[Engine], Any], where: str, tmp_path: Path) -> None:
    engine = start()
    engine.destroy()
    (tmp_path / "never").mkdir()
    assert said_by(lambda: call(engine)) == f"{where}: the engine has been destroyed; initialize a new one"


# ---------------------------------------------------------------------- what is given to initialize


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = models.make()


Wrapper.__name__ = "DistributedDataParallel"


def test_models_that_cannot_be_taken() -> None:
    assert "distributes the model itself; give the module within" in said_by(lambda: start(Wrapper()))
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    assert "'0.weight' has no shape yet; call the model with a batch" in said_by(lambda: start(lazy))


def test_optimizers_over_other_parameters() -> None:
    model, other = models.make(), nn.Linear(3, 2)

    def give(**arguments: Any) -> str:
        return said_by(lambda: zeroplan_runtime.initialize(model=model, config=ds_config(0), device="cpu", **arguments))

    foreign = "a tensor of shape (2, 3) is no parameter of the model"
    assert foreign in give(optimizer=torch.optim.SGD(other.parameters(), lr=1.0))
    assert foreign in give(model_parameters=[*model.parameters(), *other.parameters()])
    assert "empty parameter list" in give(model_parameters=[])
    assert "one of the params is str" in give(model_parameters=["embed"])
    take_steps(start(model))  # none of these has taken hold of it


def test_what_an_optimizer_does_no_more_under_an_engine() -> None:
    engine = start()
    assert "use engine.save_checkpoint()" in said_by(engine.optimizer.state_dict)
    assert "use engine.load_checkpoint()" in said_by(lambda: engine.optimizer.load_state_dict({}))
    new = {"params": [nn.Parameter(torch.zeros(2))]}
    assert "give all groups to initialize()" in said_by(lambda: engine.optimizer.add_param_group(new))


def test_torchs_schedules_do_not_warn() -> None:
    model = models.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    config = ds_config(0)
    engine, *_ = zeroplan_runtime.initialize(
        model=model, config=config, optimizer=optimizer, lr_scheduler=schedule, device="cpu"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        take_steps(engine)
    assert engine.get_lr() == [0.25]


# ---------------------------------------------------------------------- changes behind the engine's back


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.half(), "'norm.weight' was moved or cast"),
        (lambda m: m.blocks[2].double(), "'blocks.2.gain' was moved or cast"),
        (lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(53, 20))), "'head.weight' was put into the model"),
        (lambda m: m.load_state_dict(models.make().state_dict(), assign=True), "'embed.weight' was put into the model"),
    ],
)
def test_parameters_that_are_not_the_engines_any_more(change: Callable[[Any], Any], said: str) -> None:
    engine = start()
    change(engine.module)
    assert said in said_by(lambda: take_steps(engine))


def test_moving_to_where_it_is_changes_nothing() -> None:
    engine, other = start(), start()
    engine.to("cpu").float()
    take_steps(engine)
    take_steps(other)
    assert same(engine.module_state_dict(), other.module_state_dict())


def test_thawing_what_was_frozen_at_the_start() -> None:
    model = models.make()
    model.blocks[1].requires_grad_(False)
    engine = start(model)
    model.blocks[1].requires_grad_(True)
    assert "'blocks.1." in (text := said_by(lambda: take_steps(engine)))
    assert "was frozen when the engine was made, so it has no states, and is trained now" in text
    model.blocks[1].requires_grad_(False)  # as where another network's turn has passed
    engine.zero_grad()
    take_steps(engine)


def test_copies_are_refused() -> None:
    engine = start()
    for thing in (engine, engine.module.blocks[0].up):
        assert "cannot be copied or pickled; build a second model" in said_by(partial(copy.deepcopy, thing))
    assert "cannot be copied or pickled" in said_by(lambda: pickle.dumps(engine.module))
    engine.destroy(keep_parameters=True)
    assert same(copy.deepcopy(engine.module).state_dict(), engine.module.state_dict())


def load_midway(group: dist.ProcessGroup, stage: int, dtype: str) -> Any:
    """Loads other weights into the whole model and then the first ones into one block; the largest change that a step
    without a rate makes to them.
    """
    config = ds_config(stage, dtype, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")[0]
    take_steps(engine, 1)
    wanted = {k: v.bfloat16().float() for k, v in models.make(seed=3).state_dict().items()}
    try:
        engine.module.load_state_dict(wanted)
    except BadInput as fault:
        return str(fault)
    block = {k: v.bfloat16().float() for k, v in models.make(seed=4).blocks[1].state_dict().items()}
    engine.module.blocks[1].load_state_dict(block)
    wanted.update({f"blocks.1.{name}": value for name, value in block.items()})
    engine.optimizer.param_groups[0]["lr"] = 0.0
    take_steps(engine, 1)
    found = engine.module_state_dict()
    return None if found is None else max((found[k].float() - v).abs().max().item() for k, v in wanted.items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loaded_weights_reach_the_masters(pool: RankPool, dtype: str) -> None:
    for stage in (0, 1, 2):
        assert pool.run(2, load_midway, stage, dtype)[0] == 0.0, stage
    assert all("load before initialize()" in said for said in pool.run(2, load_midway, 3, dtype))


# ---------------------------------------------------------------------- the order of calls, and failures


def test_gradients_must_come_from_the_engine() -> None:
    engine = start()
    assert "call engine.backward(loss), not loss.backward()" in said_by(engine.step)
    direct = engine(models.batch(0, 0, 0))
    assert "call engine.backward(loss), not loss.backward()" in said_by(direct.backward)
    assert "there are no gradients of engine.backward()" in said_by(engine.step)
    assert (engine.micro_steps, engine.global_steps) == (0, 0)
    engine.zero_grad()
    assert same(take_steps(engine).module_state_dict(), take_steps(start()).module_state_dict())
    assert "there are no gradients" in said_by(engine.step)  # a step's are used once


def test_a_graph_is_gone_through_once_unless_it_is_kept() -> None:
    engine = start(optimizer={"type": "SGD", "params": {"lr": 0.5}})
    loss = engine(models.batch(0, 0, 0))
    engine.backward(loss)
    assert "call the forward again, or give retain_graph=True" in said_by(lambda: engine.backward(loss))
    assert "engine.zero_grad()" in said_by(engine.step)
    engine.zero_grad()
    loss = engine(models.batch(0, 0, 0))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()
    twice = start(optimizer={"type": "SGD", "params": {"lr": 1.0}})
    expected = take_steps(twice, 1).module_state_dict()
    assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in engine.module_state_dict().items())


class Fuse(torch.autograd.Function):
    """Fails in the backward when it is lit."""

    lit = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fuse.lit:
            Fuse.lit = False
            raise MemoryError("no more\nof it")
        return grad


class Fragile(models.Tiny):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hook = self.blocks[2].register_forward_hook(lambda _module, _args, out: Fuse.apply(out))
        try:
            return super().forward(tokens)
        finally:
            hook.remove()


def fail_midway(group: dist.ProcessGroup, stage: int) -> bool:
    """A backward fails half-way; what follows is as if it had not been."""
    torch.manual_seed(0)
    config = ds_config(stage, "bf16", gradient_accumulation_steps=2)
    engines = [
        zeroplan_runtime.initialize(model=copy.deepcopy(model), config=config, group=group, device="cpu")[0]
        for model in [Fragile()] * 2
    ]
    for fails, engine in zip((True, False), engines, strict=True):
        for number in range(2):
            for micro in range(2):
                if fails and number == 1 and micro == 0:
                    Fuse.lit = True
                    with pytest.raises(MemoryError):
                        engine.backward(engine(models.batch(9, 0, 0)))
                    again = said_by(lambda engine=engine: engine.backward(engine(models.batch(9, 0, 0))))
                    assert "left part of its gradients (MemoryError: no more)" in again
                    engine.zero_grad()
                engine.backward(engine(models.batch(number, micro, dist.get_rank(group))))
                engine.step()
    first, second = (engine.module_state_dict() for engine in engines)
    return first is None or same(first, second)


def test_a_failed_backward_leaves_nothing_once_dropped(pool: RankPool) -> None:
    for ranks, stage in ((1, 0), (2, 0), (2, 1), (2, 3)):
        assert pool.run(ranks, fail_midway, stage) == [True] * ranks, (ranks, stage)


def test_a_failed_step_is_the_engines_last_until_a_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = take_steps(start(dtype="bf16"))
    engine.save_checkpoint(tmp_path)
    expected = take_steps(engine, 1, begin=2).module_state_dict()
    update, calls = engine.optimizer_step.update, iter(range(100))

    def fails(*arguments: Any) -> None:
        if next(calls) == 3:
            raise OSError("disk is gone")
        update(*arguments)

    monkeypatch.setattr(engine.optimizer_step, "update", fails)
    with pytest.raises(OSError, match="disk is gone"):
        take_steps(engine, 1)
    for call in (engine.step, lambda: engine(models.batch(0, 0, 0)), lambda: engine.save_checkpoint(tmp_path)):
        assert "the last step failed half-way (OSError: disk is gone); load a checkpoint" in said_by(call)
    monkeypatch.undo()
    engine.load_checkpoint(tmp_path)
    assert same(take_steps(engine, 1, begin=2).module_state_dict(), expected)


def two_backwards(group: dist.ProcessGroup, stage: int, accum: int) -> Any:
    """Two backwards before each step; returns the largest difference from plain torch, or the refusal."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    config = ds_config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_accumulation_steps=accum)
    engine = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")[0]
    plain = models.make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        for micro in range(accum):
            for part in (0, 5):
                for each in range(ranks):
                    (plain(models.batch(number, micro + part, each)) / ranks / accum).backward()
                loss = engine(models.batch(number, micro + part, rank))
                engine.backward(loss)
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    found = engine.module_state_dict()
    return 0.0 if found is None else max((found[k] - v).abs().max().item() for k, v in plain.state_dict().items())


@pytest.mark.parametrize("accum", [1, 2])
def test_losses_one_by_one_add_up(pool: RankPool, accum: int) -> None:
    for stage in range(4):
        assert pool.run(2, two_backwards, stage, accum)[0] < 1e-6, stage
