"""DeepSpeed's names over the runtime: what they read, write and train equals plain torch, at every stage, with offload."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime.compat.deepspeed as deepspeed
from tests.runtime import models
from tests.runtime.ranks import RankPool
from zeroplan.core.errors import BadInput
from zeroplan_runtime.compat.deepspeed import utils
from zeroplan_runtime.compat.deepspeed.zero import GatheredParameters, Init

RANKS = 2
LR = 1e-2


class Mpu:
    """What DeepSpeed calls a model-parallel unit: here it only names the group of the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group


def make_engine(group: dist.ProcessGroup, stage: int, *, offload: bool = False, **changes: Any) -> Any:
    """An engine, the same model in plain torch, and its optimizer. Offloaded updates wait for the step, as clipping is on."""
    zero: dict[str, Any] = {"stage": stage, **({"cpu_offload": True} if offload else {})}
    config = {
        "train_micro_batch_size_per_gpu": models.BATCH,
        "gradient_clipping": 1e9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": zero,
        "zeroplan": {"wide_numel": 500},
        **changes,
    }
    with Init(config_dict_or_path=config):
        model = models.make()
    plain = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=Mpu(group))
    return engine, plain, torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.1)


def mean_loss(plain: nn.Module, step: int, micro: int = 0) -> Any:
    """The mean of all ranks' losses."""
    return sum(plain(models.batch(step, micro, rank)) for rank in range(RANKS)) / RANKS


def pairs(engine: Any, plain: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """Each parameter of the engine beside the same in plain torch."""
    theirs = dict(plain.named_parameters())
    return [(name, param, theirs[name]) for name, param in engine.module.named_parameters()]


def close(found: torch.Tensor | None, expected: torch.Tensor, what: object, *, most: float = 1e-6) -> None:
    """Checks shape, dtype and values."""
    assert found is not None, what
    assert found.shape == expected.shape, what
    assert found.dtype == torch.float32, what
    assert (found - expected).abs().max().item() <= most * max(1.0, expected.abs().max().item()), what


def states_one_by_one(group: dist.ProcessGroup, stage: int, offload: bool) -> None:
    rank = dist.get_rank(group)
    engine, plain, optimizer = make_engine(group, stage, offload=offload)
    assert engine.head.out_features == models.VOCAB  # an attribute of the model
    first, gain, head = engine.module.blocks[0].up.weight, engine.module.blocks[2].gain, engine.module.head.weight
    assert utils.safe_get_full_grad(first) is None
    engine.backward(engine(models.batch(0, 0, rank)))
    mean_loss(plain, 0).backward()
    for name, ours, theirs in pairs(engine, plain):
        close(utils.safe_get_full_grad(ours), theirs.grad, (stage, name))
    utils.safe_set_full_grad(first, 3 * plain.blocks[0].up.weight.grad)
    plain.blocks[0].up.weight.grad.mul_(3)
    utils.safe_set_full_grad(gain, torch.full((1,), 0.25))
    plain.blocks[2].gain.grad.fill_(0.25)
    close(utils.safe_get_full_grad(gain), plain.blocks[2].gain.grad, stage)
    engine.step()
    optimizer.step()
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() == pytest.approx(nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item())
    optimizer.zero_grad()
    for name, ours, theirs in pairs(engine, plain):
        close(utils.safe_get_full_fp32_param(ours), theirs.detach(), (stage, name))
        for key in ("exp_avg", "exp_avg_sq"):
            close(utils.safe_get_full_optimizer_state(ours, key), optimizer.state[theirs][key], (stage, name, key))
    with pytest.raises(AssertionError, match="keeps no 'momentum'; it keeps exp_avg, exp_avg_sq"):
        utils.safe_get_full_optimizer_state(first, "momentum")
    utils.safe_set_full_optimizer_state(head, torch.full_like(plain.head.weight, 1e-3), "exp_avg")
    optimizer.state[plain.head.weight]["exp_avg"].fill_(1e-3)
    utils.safe_set_full_fp32_param(first, 2 * plain.blocks[0].up.weight.detach())
    plain.blocks[0].up.weight.data.mul_(2)
    if stage == 3:
        for param, theirs in ((gain, plain.blocks[2].gain), (head, plain.head.weight)):
            part = utils.safe_get_local_fp32_param(param)
            parts: list[Any] = [None] * RANKS
            dist.all_gather_object(parts, part, group=group)
            close(torch.cat(parts), theirs.detach().view(-1), "parts")
            utils.safe_set_local_fp32_param(param, part + 1)
            theirs.data.add_(1)
            moment = utils.safe_get_local_optimizer_state(param, "exp_avg_sq")
            utils.safe_set_local_optimizer_state(param, moment * 2, "exp_avg_sq")
            optimizer.state[theirs]["exp_avg_sq"].mul_(2)
    else:
        with pytest.raises(AssertionError, match="only stage 3 shards parameters"):
            utils.safe_get_local_fp32_param(head)
    several = [engine.module.blocks[i].down.weight for i in range(5)]
    with GatheredParameters(several):
        for i, param in enumerate(several):
            close(param.detach(), plain.blocks[i].down.weight.detach(), (stage, i))
    with GatheredParameters(engine.module.parameters()):
        with torch.no_grad():
            for number in range(1 + rank):  # each rank as often as it likes, as it generates
                batch = models.batch(number, 0, rank)
                assert engine(batch).item() == pytest.approx(plain(batch).item(), rel=1e-5)
                assert engine.module(batch).item() == pytest.approx(plain(batch).item(), rel=1e-5)
        if stage == 3:
            with pytest.raises(AssertionError, match="while the user has gathered all parameters"):
                engine(models.batch(0, 0, rank))
    with GatheredParameters(several[3], modifier_rank=1):
        if rank == 1:
            several[3].data.fill_(0.125)
    plain.blocks[3].down.weight.data.fill_(0.125)
    state_dicts_of_gathered(engine, plain, stage, rank)
    for step in (1, 2):
        loss = engine(models.batch(step, 0, rank))
        assert loss.item() == pytest.approx(plain(models.batch(step, 0, rank)).item(), rel=1e-5), (stage, step)
        engine.backward(loss)
        if stage == 3 and step == 2:
            grad = utils.safe_get_local_grad(head)
            utils.safe_set_local_grad(head, grad * 0.5)
        engine.step()
        mean_loss(plain, step).backward()
        if stage == 3 and step == 2:
            plain.head.weight.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, ours, theirs in pairs(engine, plain):
        close(utils.safe_get_full_fp32_param(ours), theirs.detach(), (stage, name), most=5e-6)
    engine.destroy()


def state_dicts_of_gathered(engine: Any, plain: nn.Module, stage: int, rank: int) -> None:
    """Within ``GatheredParameters`` of all a model's state dict is whole; one rank loads another into a block."""
    up = engine.module.blocks[1].up
    if stage == 3:
        for act in (engine.module.state_dict, up.state_dict, lambda: up.load_state_dict({})):
            with pytest.raises(BadInput, match="parameters that are sharded"):
                act()
    with GatheredParameters(engine.module.parameters()):
        found, expected = engine.module.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close(found[name], value, (stage, name))
    with GatheredParameters(up.parameters(), modifier_rank=1):
        if rank == 1 or stage < 3:
            up.load_state_dict({name: 0.5 * value for name, value in up.state_dict().items()})
    for value in plain.blocks[1].up.parameters():
        value.data.mul_(0.5)


def accumulations(group: dist.ProcessGroup, stage: int) -> None:
    rank = dist.get_rank(group)
    # Three micro batches as one: two within no_sync, or set by hand, or without any count.
    for way in ("no_sync", "boundary", "unmanaged"):
        changes = {"managed_gradient_accumulation": False} if way == "unmanaged" else {}
        engine, plain, optimizer = make_engine(group, stage, **changes)
        if way == "no_sync" and stage >= 2:
            with pytest.raises(AssertionError, match="no_sync context manager is incompatible"), engine.no_sync():
                pass
            engine.destroy()
            continue
        for step in range(2):
            for micro in range(3):
                if way == "boundary":
                    engine.set_gradient_accumulation_boundary(micro == 2)
                if way == "no_sync" and micro < 2:
                    with engine.no_sync():
                        engine.backward(engine(models.batch(step, micro, rank)))
                        with pytest.raises(AssertionError, match=r"illegal to call Engine.step\(\) inside no_sync"):
                            engine.step()
                        with pytest.raises(AssertionError, match="reentry is unsupported"), engine.no_sync():
                            pass
                else:
                    engine.backward(engine(models.batch(step, micro, rank)))
                mean_loss(plain, step, micro).backward()
            assert engine.global_steps == step
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.global_steps == 2
        parts = 6 if way == "unmanaged" else 2  # DeepSpeed counts the backwards where the user's steps end accumulations
        assert engine.global_samples == parts * engine.train_batch_size()
        for name, ours, theirs in pairs(engine, plain):
            close(utils.safe_get_full_fp32_param(ours), theirs.detach(), (way, stage, name), most=5e-6)
        if way == "unmanaged":
            with pytest.raises(AssertionError, match="every step ends an accumulation"):
                engine.set_gradient_accumulation_boundary(True)
        engine.destroy()


def outside_the_groups(group: dist.ProcessGroup, stage: int) -> None:
    """A function makes the optimizer, of a part of the parameters."""
    rank = dist.get_rank(group)
    model = models.make()
    plain = copy.deepcopy(model)
    chosen = [name for name, _ in model.named_parameters() if not name.startswith(("blocks.1", "embed"))]
    config = {"train_micro_batch_size_per_gpu": models.BATCH, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    engine, returned, _, schedule = deepspeed.initialize(
        model=model,
        config=config,
        model_parameters=[param for name, param in model.named_parameters() if name in chosen],
        optimizer=lambda params: torch.optim.SGD(params, lr=LR),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        mpu=Mpu(group),
    )
    assert isinstance(returned, torch.optim.SGD) == (stage == 0)
    assert utils.safe_get_full_fp32_param(model.embed.weight) is None
    if stage == 3:
        assert utils.safe_get_local_fp32_param(model.embed.weight) is None
        assert utils.safe_get_local_grad(model.embed.weight) is None
    optimizer = torch.optim.SGD([param for name, param in plain.named_parameters() if name in chosen], lr=LR)
    like = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        engine.backward(engine(models.batch(step, 0, rank)))
        engine.step()
        mean_loss(plain, step).backward()
        optimizer.step()
        like.step()
        plain.zero_grad()
    assert schedule.get_last_lr() == like.get_last_lr() == engine.get_lr()
    found = engine.module_state_dict()
    engine.destroy(keep_parameters=True)
    assert all(param.requires_grad for param in model.parameters())
    if rank == 0:
        for name, theirs in plain.state_dict().items():
            assert (found[name] - theirs).abs().max() <= 1e-6, (stage, name)


def everything(group: dist.ProcessGroup, stage: int) -> None:
    for offload in (False, True)[: 1 + (stage > 1)]:
        states_one_by_one(group, stage, offload)
    accumulations(group, stage)
    outside_the_groups(group, stage)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_what_is_read_written_and_trained_is_plain_torchs(pool: RankPool, stage: int) -> None:
    pool.run(RANKS, everything, stage)


def gradients_by_hand(group: dist.ProcessGroup) -> None:
    model = models.make()
    plain = copy.deepcopy(model)
    config = {"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": {"type": "Adam", "params": {"lr": LR}}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config, mpu=Mpu(group))
    assert type(optimizer).__name__ == "FusedAdam"
    like = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0)
    for value in (0.5, -2.0):
        for one in (*engine.parameters(), *plain.parameters()):
            one.grad = torch.full_like(one, value)
        engine.step()
        like.step()
        assert all(param.grad is None for param in engine.parameters())
    for name, ours, theirs in pairs(engine, plain):
        assert (ours.detach() - theirs.detach()).abs().max() <= 1e-6, name
    engine.destroy()


def test_gradients_set_by_hand_are_taken_on_one_rank(pool: RankPool) -> None:
    pool.run(1, gradients_by_hand)


def test_an_optimizer_of_the_users_at_stage_0_steps_its_engine_until_its_step_is_replaced(pool: RankPool) -> None:
    pool.run(1, with_an_optimizer_of_the_users)


def with_an_optimizer_of_the_users(group: dist.ProcessGroup) -> None:
    for scheduled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        plain = copy.deepcopy(model)
        given, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=config, mpu=Mpu(group))
        assert optimizer is given
        schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, other)] if scheduled else []
        for number in range(3):
            batch = torch.full((1, 2), 1.0 + number)
            engine.backward(engine(batch).square().sum())
            engine.step()
            plain(batch).square().sum().backward()
            other.step()
            other.zero_grad()
            for schedule in schedules:
                schedule.step()
            close(model.weight.detach(), plain.weight.detach(), number)
        vars(optimizer)["step"] = functools.partial(optimizer.step)
        engine.backward(engine(torch.ones(1, 2)).sum())
        with pytest.raises(AssertionError, match="step: was replaced"):
            engine.step()
        engine.destroy()


def test_what_is_refused_is_an_assertion_and_bad_input() -> None:
    model = nn.Linear(2, 2)
    base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    for call, says in [
        (lambda: deepspeed.initialize(model=None, config=base), "requires a model"),
        (lambda: deepspeed.initialize(model=model), "there is no ds_config"),
        (lambda: deepspeed.DeepSpeedConfig({**base, "amp": {"enabled": True}}), "amp"),
        (lambda: deepspeed.DeepSpeedConfig({**base, "zero_optimization": {"stage": 9}}), "stage"),
        (lambda: utils.safe_set_full_grad(model.weight, model.weight), "no engine trains this parameter"),
    ]:
        with pytest.raises(AssertionError, match=says) as fault:
            call()
        assert isinstance(fault.value, BadInput)
        assert "\n" not in str(fault.value)


PROGRAM = """
import deepspeed, json, sys, torch
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
import deepspeed.comm as dist
from deepspeed.comm import all_reduce
from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseAttentionUtils, SparseSelfAttention
from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
assert SparseSelfAttention(FixedSparsityConfig(2), max_seq_length=64).get_layout(64).shape == (2, 4, 4)
layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(2, 16, -1, 2, 0.1, 0.1, 1, 0.02))
assert layer(torch.ones(2, 5, 16), torch.zeros(2, 1, 1, 5)).shape == (2, 5, 16)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.randn(11, 3), torch.randn(11, 1))
assert OffloadDeviceEnum.cpu == "cpu"
assert all_reduce is torch.distributed.all_reduce and dist.ReduceOp is torch.distributed.ReduceOp
engine, optimizer, loader, schedule = deepspeed.initialize(
    model=model, config=sys.argv[1], training_data=data,
    model_parameters=split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()]}))
assert not any(is_moe_param(param) for param in model.parameters())
assert isinstance(schedule, WarmupLR), schedule
losses = []
for x, y in loader:
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(len(x))
engine.save_checkpoint(sys.argv[2])
whole = get_fp32_state_dict_from_zero_checkpoint(sys.argv[2])
assert torch.equal(whole["weight"], model.weight.detach())
try:
    import deepspeed.pipe
except ImportError as fault:
    print(fault)
print(json.dumps([losses, engine.global_steps, dist.get_world_size(), engine.get_lr(), engine.in_features]))
"""

HJSON = """
{
  # no quotes, no commas: Hjson, as DeepSpeed reads it
  train_batch_size: 4
  dataloader_drop_last: %s
  optimizer: {
    type: Adam
    params: {lr: 0.1}
  }
  scheduler: {
    type: WarmupLR
    params: {
      warmup_num_steps: 2
      warmup_type: linear
    }
  }
  not_a_key_of_anybody: 3
}
"""


@pytest.mark.parametrize(("drop", "sizes"), [("true", [4, 4]), ("false", [4, 4, 3])])
def test_a_program_that_imports_deepspeed_runs_unchanged(
    tmp_path: Path, drop: str, sizes: list[int], warm_python: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "ds_config.hjson").write_text(HJSON % drop)
    command = [str(warm_python), "-m", "zeroplan_runtime.compat.deepspeed", str(tmp_path / "train.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "ds_config.hjson"), str(tmp_path / "saved")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    refused, result = done.stdout.strip().splitlines()
    assert "has no 'deepspeed.pipe'" in refused
    assert json.loads(result) == [sizes, len(sizes), 1, [0.05 * (len(sizes) - 1)], 3]
    assert "not_a_key_of_anybody" in done.stderr
