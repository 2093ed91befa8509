"""Edges of a training where it once went its own way: each is as in plain torch (or DeepSpeed), or refused in one line."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zeroplan_runtime
from tests.patience import PATIENCE
from tests.runtime.ranks import RankPool
from tests.runtime.test_strangers import WIDTH, Net, data, loss_of, steps
from zeroplan.core.errors import BadInput
from zeroplan_runtime.compat import deepspeed
from zeroplan_runtime.engine import Engine
from zeroplan_runtime.parameter_states import ParameterStates

ADAM = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}


def config(stage: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        **extra,
    }


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def start(group: dist.ProcessGroup | None, settings: dict[str, Any], model: nn.Module | None = None, **given: Any) -> Engine:
    made, *_ = zeroplan_runtime.initialize(
        model=net() if model is None else model, config=settings, group=group, device="cpu", **given
    )
    return made


class Torch:
    """Plain torch with AdamW and the calls of an engine."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(x)
        return found

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(BadInput) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without_optimizer_states(group: dist.ProcessGroup, stage: int, folder: str) -> None:
    engine = start(group, config(stage))
    steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    weights = engine.module_state_dict()
    engine.destroy()
    engine = start(group, config(stage))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert engine.global_steps == 3
    steps(engine, 3, 6)
    found = engine.module_state_dict()
    engine.destroy()
    if weights is None or found is None:
        return
    fresh = Torch(net())
    fresh.module.load_state_dict(weights)
    steps(fresh, 3, 6)
    for name, value in fresh.module.state_dict().items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_without_optimizer_states_begins_them_anew(pool: RankPool, stage: int, tmp_path: Path) -> None:
    pool.run(2, without_optimizer_states, stage, str(tmp_path))


def step_hooks(group: dist.ProcessGroup, stage: int, own: bool) -> None:
    """A hook that halves the rate before each step, and ones that count; on the optimizer given or on all."""

    def train(t: Any, optimizer: torch.optim.Optimizer) -> tuple[list[str], Any]:
        seen: list[str] = []

        def before(found: Any, args: Any, kwargs: Any) -> None:
            assert found is optimizer
            seen.append("before")
            for one in found.param_groups:
                one["lr"] *= 0.5

        def after(found: Any, args: Any, kwargs: Any) -> None:
            assert found is optimizer
            seen.append("after")

        handles = (
            [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
            if own
            else [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        )
        steps(t, 0, 3)
        for handle in handles:
            handle.remove()
        return seen, t.module_state_dict() if isinstance(t, Engine) else t.module.state_dict()

    plain = Torch(net())
    expected, values = train(plain, plain.optimizer)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
    engine = start(group, {k: v for k, v in config(stage).items() if k != "optimizer"}, model, optimizer=optimizer)
    seen, found = train(engine, optimizer)
    assert seen == expected == ["before", "after"] * 3
    if found is not None:
        for name, value in values.items():
            torch.testing.assert_close(found[name], value)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("own", [True, False], ids=["own", "global"])
def test_step_hooks_of_the_optimizer_run(pool: RankPool, stage: int, own: bool) -> None:
    pool.run(2, step_hooks, stage, own)


def test_step_hooks_run_once_where_the_optimizer_steps() -> None:
    engine = start(None, config(0))
    seen: list[int] = []
    assert engine.optimizer is not None
    engine.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    engine.backward(loss_of(engine, 0))
    engine.optimizer.step()
    assert seen == [1]
    engine.destroy()


def test_the_state_of_the_optimizer_is_refused_and_free_again_after_the_engine() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {k: v for k, v in config(1).items() if k != "optimizer"}
    engine = start(None, settings, model, optimizer=optimizer)
    steps(engine, 0, 1)
    param = next(model.parameters())
    for owner in (optimizer, engine.optimizer):
        assert owner is not None
        for act in (
            lambda owner=owner: owner.state[param]["exp_avg"].zero_(),
            lambda owner=owner: list(owner.state.items()),
            lambda owner=owner: owner.state.clear(),
            lambda owner=owner: owner.state.update({}) or owner.state.get(param),
        ):
            assert refusal(act).startswith("optimizer.state: the states are the engine's")
    engine.destroy(keep_parameters=True)
    assert not optimizer.state
    engine = start(None, settings, model, optimizer=optimizer)
    steps(engine, 0, 1)
    engine.destroy()


CHANGES: dict[str, tuple[Callable[[torch.optim.Optimizer], object], str]] = {
    "removes a parameter": (lambda o: o.param_groups[0]["params"].pop(), "param_groups[0]: its parameters were changed"),
    "empties a group": (lambda o: o.param_groups[0].update(params=[]), "param_groups[0]: its parameters were changed"),
    "pops a group": (lambda o: o.param_groups.pop(), "param_groups: 1 groups are now 0"),
    "adds a group": (
        lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "param_groups: 1 groups are now 2",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_groups_that_are_changed_under_an_engine_are_refused(name: str) -> None:
    change, said = CHANGES[name]
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = start(None, {k: v for k, v in config(2).items() if k != "optimizer"}, model, optimizer=optimizer)
    steps(engine, 0, 1)
    change(optimizer)
    assert said in refusal(lambda: steps(engine, 1, 2))
    engine.destroy()


def test_a_resume_with_parameters_in_other_groups_is_refused(tmp_path: Path) -> None:
    def grouped(first: int) -> Engine:
        model = net()
        params = list(model.parameters())
        return start(
            None, config(1), model, model_parameters=[{"params": params[:first], "lr": 0.1}, {"params": params[first:]}]
        )

    engine = grouped(3)
    steps(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = grouped(5)
    said = refusal(lambda: engine.load_checkpoint(tmp_path))
    assert "was in parameter group 1 and is in group 0 here" in said
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    engine.destroy()


def differing(group: dist.ProcessGroup, change: str) -> str:
    rank = dist.get_rank(group)
    model: nn.Module = net()
    settings, given = config(2), {}
    if rank == 1:
        if change == "model":
            model.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        elif change == "frozen":
            model.blocks[1].requires_grad_(False)
        elif change == "param dtype":
            model.enter.half()
        elif change == "stage":
            settings["zero_optimization"] = {"stage": 1}
        elif change == "clip":
            settings["gradient_clipping"] = 1.0
        elif change == "rate":
            settings["optimizer"] = {"type": "AdamW", "params": {**ADAM, "lr": 0.1}}
        elif change == "optimizer":
            settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.01}}
        elif change == "accumulation":
            settings["gradient_accumulation_steps"] = 2
        elif change == "dtype":
            settings["bf16"] = {"enabled": True}
        elif change == "groups":
            given["model_parameters"] = [{"params": [p]} for p in model.parameters()]
    return refusal(lambda: start(group, settings, model, **given))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model", "parameter 'leave.bias' is not there on rank 1 and (8,) float32 trained of parameter group 0 on rank 0"),
        ("frozen", "parameter 'blocks.1.0.weight' is (8, 8) float32 frozen on rank 1"),
        ("param dtype", "parameter 'enter.weight' is (8, 8) float16 trained of parameter group 0 on rank 1"),
        ("stage", "ds_config: zero_optimization.stage is 1 on rank 1 and 2 on rank 0"),
        ("clip", "gradient_clipping is 1.0 on rank 1 and 0.0 on rank 0"),
        ("rate", "ds_config: optimizer.params.lr is 0.1 on rank 1 and 0.01 on rank 0"),
        ("optimizer", "ds_config: optimizer.type is 'SGD' on rank 1 and 'AdamW' on rank 0"),
        ("accumulation", "gradient_accumulation_steps is 2 on rank 1 and 1 on rank 0"),
        ("dtype", "ds_config: dtype is 'bf16' on rank 1 and 'fp32' on rank 0"),
        ("groups", "parameter group 1"),
    ],
)
def test_ranks_that_differ_are_told_what_differs(pool: RankPool, change: str, said: str) -> None:
    found = pool.run(2, differing, change)
    assert found[0] == found[1]
    assert said in found[0]


class Scaled(nn.Module):
    """A layer with an extra state, as those of FP8 have, that its forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * self.scale
        return found


class Halved(Net):
    """A model whose own state dict renames, computes and adds."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["entrance"] = state.pop("enter.weight")
        state["halves"] = state["leave.weight"] / 2
        return state


class Noted(Net):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "note": torch.ones(3)}


def ties(model: Any) -> None:
    model.leave.weight = model.enter.weight


def swaps(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def deletes(model: Any) -> None:
    del model.blocks[1]


def wraps(model: Any) -> None:
    model.leave = nn.Sequential(model.leave, nn.Identity())


CHANGED = {"ties": ties, "swaps": swaps, "deletes": deletes, "wraps": wraps}


def after_a_change(group: dist.ProcessGroup, stage: int, name: str, folder: str) -> None:
    from safetensors.torch import load_file

    plain, engine = Torch(net()), start(group, config(stage))
    for t in (plain, engine):
        steps(t, 0, 1)
        CHANGED[name](t.module)
        steps(t, 1, 2)
    expected, found = plain.module.state_dict(), engine.module_state_dict()
    engine.save_16bit_model(folder)
    written = load_file(f"{folder}/model.safetensors")
    named = dict(plain.module.named_parameters())
    assert set(written) == set(named)
    for key, value in named.items():
        torch.testing.assert_close(written[key], value.detach())
    if found is not None:
        assert list(found) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)
    assert "is not the parameter that had this name at initialize" in refusal(lambda: engine.save_checkpoint(folder))
    engine.destroy()


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_was_changed_is_written_as_it_is(pool: RankPool, stage: int, name: str, tmp_path: Path) -> None:
    pool.run(2, after_a_change, stage, name, str(tmp_path))


def own_state_dicts(group: dist.ProcessGroup, stage: int, folder: str) -> None:
    torch.manual_seed(0)
    model = Halved()
    expected = copy.deepcopy(model).state_dict()
    engine = start(group, config(stage), model)
    found = engine.module_state_dict()
    if found is not None:
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = start(group, config(stage), Noted())
    assert "holds 'note', which no checkpoint holds" in refusal(lambda: engine.save_checkpoint(folder))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_dict_of_the_models_own_is_what_it_gives(pool: RankPool, stage: int, tmp_path: Path) -> None:
    pool.run(2, own_state_dicts, stage, str(tmp_path))


def extra_states(group: dist.ProcessGroup, stage: int, folder: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Scaled(), nn.Linear(WIDTH, WIDTH))

    engine = start(group, config(stage), make())
    engine.module[0].scale = 0.5
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    state, loss = engine.module_state_dict(), loss_of(engine, 9).item()
    assert state is None or state["0._extra_state"] == {"scale": 0.5}
    said = refusal(lambda: engine.save_16bit_model(folder))
    assert "'0._extra_state' is no tensor" in said
    engine.destroy()
    engine = start(group, config(stage), make())
    engine.load_checkpoint(folder)
    assert engine.module[0].scale == 0.5
    assert loss_of(engine, 9).item() == loss
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_extra_states_are_in_checkpoints(pool: RankPool, stage: int, tmp_path: Path) -> None:
    pool.run(2, extra_states, stage, str(tmp_path))


def test_names_of_a_checkpoint_wrapper_are_in_no_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    engine = start(None, config(3), model)
    steps(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path)
    values = engine.module_state_dict()
    assert values is not None
    assert list(values) == list(net().state_dict()) == sorted(load_file(tmp_path / "model.safetensors"), key=list(values).index)
    engine.destroy()
    engine = start(None, config(1))
    engine.load_checkpoint(tmp_path)
    assert all(torch.equal(value, values[key]) for key, value in engine.module.state_dict().items())
    engine.destroy()


def test_a_16_bit_model_has_the_name_that_is_given(tmp_path: Path) -> None:
    engine = start(None, config(0))
    engine.save_16bit_model(tmp_path, "pytorch_model.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    expected = engine.module_state_dict()
    assert expected is not None
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    engine.destroy()


USES: dict[str, Callable[[Engine], object]] = {
    "evaluation": lambda e: e(data(9)),
    "the module alone": lambda e: e.module(data(9)),
    "module_state_dict": lambda e: e.module_state_dict(),
    "gathered": lambda e: e.gathered(e.unit_names()[1]).__enter__(),
    "full_tensors": lambda e: list(e.full_tensors()),
    "a parameter": lambda e: e.module.blocks[1][0].weight.sum(),
    "a state": lambda e: ParameterStates(e).whole(e.module.blocks[1][0].weight),
}


def between_backward_and_step(group: dist.ProcessGroup, stage: int, folder: str) -> None:
    offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    for clip in (0.0, 1e9):
        engine = start(group, config(stage, zero_optimization=offload, gradient_clipping=clip))
        plain = Torch(net())
        for t in (engine, plain):
            t.backward(loss_of(t, 0))
        for name, use in USES.items():
            if clip and (stage < 3 or name != "a parameter"):
                use(engine) if name != "gathered" else None
            elif not clip:
                said = refusal(partial(use, engine))
                assert "engine.step()" in said or stage == 3, name
        if clip:
            torch.testing.assert_close(loss_of(engine, 1), loss_of(plain, 1))
        else:
            refusal(partial(engine.save_16bit_model, folder))
        for t in (engine, plain):
            t.step()
        torch.testing.assert_close(loss_of(engine, 1), loss_of(plain, 1))
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_updates_that_began_before_the_step_are_not_shown(pool: RankPool, stage: int, tmp_path: Path) -> None:
    pool.run(2, between_backward_and_step, stage, str(tmp_path))


HOST = {"offload_optimizer": {"device": "cpu"}}


def written_elsewhere(group: dist.ProcessGroup, stage: int, zero: dict[str, Any], how: str) -> None:
    """Writes through an array or dlpack reach what is trained."""
    plain, engine = Torch(net()), start(group, config(stage, zero_optimization={"stage": stage, **zero}, gradient_clipping=1e9))
    for t in (plain, engine):
        steps(t, 0, 1)
        place = t.gathered("blocks.1") if isinstance(t, Engine) else nullcontext()
        with place:
            weight = t.module.blocks[1][0].weight
            if how == "numpy":
                array = weight.detach().numpy()
                array *= 0.5
                del array
            else:
                torch.from_dlpack(weight.detach()).mul_(0.5)
        steps(t, 1, 3)
    torch.testing.assert_close(loss_of(engine, 9), loss_of(plain, 9))
    engine.destroy()


@pytest.mark.parametrize("how", ["numpy", "dlpack"])
@pytest.mark.parametrize(("stage", "zero"), [(1, {}), (2, HOST), (3, {}), (3, {**HOST, "offload_param": {"device": "cpu"}})])
def test_writes_through_arrays_are_kept(pool: RankPool, stage: int, zero: dict[str, Any], how: str) -> None:
    pool.run(2, written_elsewhere, stage, zero, how)


def test_an_array_of_a_parameter_in_a_file_is_refused(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    engine = start(None, config(3, zero_optimization=zero, zeroplan={"nvme_in_memory": True}))
    with engine.gathered("blocks.1"):
        weight = engine.module.blocks[1][0].weight.detach()
        assert "writes to it would be lost" in refusal(weight.numpy)
        weight.clone().numpy()
    engine.destroy()


def test_a_linear_layer_without_a_weight_is_left_alone() -> None:
    model = net()
    spare = nn.Linear(WIDTH, WIDTH)
    del spare.weight
    model.add_module("spare", spare)
    engine, plain = start(None, config(1), model), Torch(net())
    for t in (engine, plain):
        steps(t, 0, 2)
    torch.testing.assert_close(loss_of(engine, 9), loss_of(plain, 9))
    engine.destroy()


def whole_graphs(group: dist.ProcessGroup) -> str:
    engine = start(group, config(2))
    said = refusal(lambda: engine.compile(fullgraph=True))
    steps(engine, 0, 1)
    engine.destroy()
    return said


def test_one_graph_over_units_that_hooks_part_is_refused(pool: RankPool) -> None:
    assert "engine.compile: hooks between the units part the graph" in pool.run(2, whole_graphs)[0]


def threads(group: dist.ProcessGroup, stage: int) -> None:
    plain, engine = Torch(net()), start(group, config(stage))
    with ThreadPoolExecutor(1) as others:
        for t in (plain, engine):
            for number in range(3):
                t.backward(others.submit(loss_of, t, number).result())
                t.step()
    torch.testing.assert_close(loss_of(engine, 9), loss_of(plain, 9))
    entered, go_on = Event(), Event()

    def waits(*_: Any) -> None:
        entered.set()
        go_on.wait(PATIENCE)

    handle = engine.module.blocks[1].register_forward_pre_hook(waits)
    with ThreadPoolExecutor(1) as others:
        first = others.submit(loss_of, engine, 3)
        assert entered.wait(PATIENCE)
        assert "engine: a forward runs in another thread" in refusal(lambda: loss_of(engine, 4))
        go_on.set()
        first.result()
    handle.remove()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_forwards_of_other_threads_run_one_at_a_time(pool: RankPool, stage: int) -> None:
    pool.run(2, threads, stage)


def pretrained(group: dist.ProcessGroup, stage: int, folder: str) -> None:
    """What transformers' ``save_pretrained`` writes is what the engine trains, tied weights included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    engine = start(group, config(stage, bf16={"enabled": True}), model)
    tokens = torch.arange(8)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    state = engine.module_state_dict()
    if stage == 3:
        assert "save_pretrained(folder, state_dict=" in refusal(partial(engine.module.save_pretrained, f"{folder}/none"))
    if state is not None:
        engine.module.save_pretrained(f"{folder}/given", state_dict=dict(state))
        loaded = LlamaForCausalLM.from_pretrained(f"{folder}/given", dtype=torch.bfloat16)
        for name, value in loaded.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=0, msg=name)
    dist.barrier(group)
    engine.destroy()


@pytest.mark.torch
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_save_pretrained_writes_what_is_trained(pool: RankPool, stage: int, tmp_path: Path) -> None:
    pool.run(2, pretrained, stage, str(tmp_path))


def averaged(group: dist.ProcessGroup, stage: int, zero: dict[str, Any]) -> None:
    """A copy of the model is a plain one: torch's average of weights follows, and trains by itself."""
    plain, engine = Torch(net()), start(group, config(stage, zero_optimization={"stage": stage, **zero}))
    found = []
    for t in (plain, engine):
        steps(t, 0, 1)
        average = torch.optim.swa_utils.AveragedModel(t.module)
        for number in range(1, 4):
            steps(t, number, number + 1)
            average.update_parameters(t.module)
        copied = copy.deepcopy(t.module)
        torch.manual_seed(5)
        copied(data(5)).square().mean().backward()
        assert all(type(p) is nn.Parameter for p in copied.parameters())
        found.append([*average.module.state_dict().values(), *(p.grad for p in copied.parameters())])
    assert not [hook for module in copied.modules() for hook in module._forward_pre_hooks]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(loss_of(engine, 9), loss_of(plain, 9))
    engine.destroy()
    copy.deepcopy(copied)


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (1, {}), (2, HOST)])
def test_a_copy_of_the_model_is_a_plain_one(pool: RankPool, stage: int, zero: dict[str, Any]) -> None:
    pool.run(2, averaged, stage, zero)


def averaged_at_stage_3(group: dist.ProcessGroup) -> list[str]:
    """A model's averages by torch and by hand follow its weights where these are gathered; else one line says how."""
    torch.manual_seed(0)
    plain, model = Torch(net()), net()
    optimizer = {"type": "AdamW", "params": {**ADAM, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=model, config=config(3, optimizer=optimizer))
    averages = [torch.optim.swa_utils.AveragedModel(net()) for _ in range(2)]
    slow, kept = ({name: torch.zeros_like(value) for name, value in plain.module.named_parameters()} for _ in range(2))
    said = [
        refusal(partial(averages[1].update_parameters, model)),
        refusal(lambda: [slow[name].lerp(param.detach(), 0.1) for name, param in model.named_parameters()]),
    ]
    averages[1].n_averaged.zero_()
    gc.collect()  # the errors keep aliases of parameters
    for number in range(4):
        steps(plain, number, number + 1)
        steps(engine, number, number + 1)
        averages[0].update_parameters(plain.module)
        with deepspeed.zero.GatheredParameters(model.parameters()):
            averages[1].update_parameters(model)
        for name, param in plain.module.named_parameters():
            slow[name].lerp_(param.detach(), 0.1)
        for name, value in engine.full_tensors():
            kept[name].lerp_(value, 0.1)
        last = value  # stays behind, as in anybody's loop
    said.append(refusal(lambda: last + 1))
    for one, other in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        torch.testing.assert_close(other, one)
    for name, value in slow.items():
        torch.testing.assert_close(kept[name], value)
    engine.destroy()
    return said


def test_averages_at_stage_3_read_what_is_gathered(pair: RankPool) -> None:
    for said in pair.run(2, averaged_at_stage_3):
        assert all("read it within engine.gathered('" in line for line in said)


def changed_between(group: dist.ProcessGroup, stage: int) -> None:
    """Another optimizer, and another layer in a block's place, between two engines; beside plain torch."""
    plain, model = Torch(net()), net()
    engine = start(group, config(stage), model)
    for t in (plain, engine):
        steps(t, 0, 3)
    engine.destroy(keep_parameters=True)
    for one in (plain.module, model):
        torch.manual_seed(1)
        one.blocks[1] = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))
    plain.optimizer = torch.optim.SGD(plain.module.parameters(), lr=0.05, momentum=0.9)  # type: ignore[assignment]
    engine = start(group, config(stage, optimizer={"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}), model)
    for t in (plain, engine):
        steps(t, 3, 6)
    torch.testing.assert_close(loss_of(engine, 9), loss_of(plain, 9))
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_and_layers_may_change_between_two_engines(pool: RankPool, stage: int) -> None:
    pool.run(2, changed_between, stage)


DEVICES: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 3": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "host": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "8 bits": {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW8bit", "params": {"lr": 0.01}}},
    "LAMB": {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
    "background": {"zero_optimization": {"stage": 2}, "zeroplan": {"async_checkpoints": True}},
}


@pytest.mark.parametrize("name", DEVICES)
def test_the_users_default_device_changes_nothing(name: str, tmp_path: Path) -> None:
    """On ``meta``, a tensor of ours that names no device would have no values."""
    settings = {**config(0), **DEVICES[name]}
    seen: list[list[float]] = []
    for device in ("cpu", "meta"):
        model, batches = net().eval(), [data(step) for step in range(3)]
        folder = tmp_path / device
        with torch.device(device):
            engine, *_ = zeroplan_runtime.initialize(model=model, config=settings, device="cpu")
            losses = []
            for batch in [*batches, batches[0]]:
                loss = engine(batch.to(next(model.parameters()).dtype)).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if len(losses) == len(batches):
                    engine.save_checkpoint(folder)
                    engine.load_checkpoint(folder)
            engine.destroy(keep_parameters=True)
        seen.append(losses)
    assert seen[0] == seen[1]
