"""Parameters frozen and thawed in mid-training: as torch's optimizers, which step none without a gradient, or one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.test_edges import refusal
from tests.runtime.test_strangers import Net, loss_of
from zeroplan_runtime.checkpoint.dcp import load_dcp_checkpoint, to_dcp
from zeroplan_runtime.checkpoint.universal import load_universal_checkpoint, to_universal
from zeroplan_runtime.engine import Engine

ADAMW = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
OFFLOAD: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "host, parameters": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "files": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}


class Torch:
    """Plain torch with the calls of an engine."""

    def __init__(self, kind: str, params: dict[str, Any], clip: float) -> None:
        torch.manual_seed(0)
        self.module = Net()
        self.clip = clip
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(self.module.parameters(), **params)

    def __call__(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def start(group: Any, stage: int, kind: str = "AdamW", params: Any = ADAMW, clip: float = 0.0, **extra: Any) -> Engine:
    offload = extra.pop("offload", {})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {"stage": stage, **offload},
        "gradient_clipping": clip,
        **extra,
    }
    torch.manual_seed(0)
    made, *_ = zeroplan_runtime.initialize(model=Net(), config=config, group=group, device="cpu")
    return made


def freeze(t: Any, names: tuple[str, ...], frozen: bool = True) -> None:
    for name, param in t.module.named_parameters():
        if name.startswith(names):
            param.requires_grad_(not frozen)


def trains(t: Any, first: int, last: int) -> list[torch.Tensor]:
    seen = []
    for number in range(first, last):
        loss = loss_of(t, number)
        t.backward(loss)
        t.step()
        seen.append(loss.detach())
    return seen


def freezes_and_thaws(t: Any) -> list[torch.Tensor]:
    seen = trains(t, 0, 2)
    freeze(t, ("blocks.1.", "leave.bias", "blocks.2.0.weight"))
    seen += trains(t, 2, 4)
    freeze(t, ("leave",), False)
    freeze(t, ("enter",))
    seen += trains(t, 4, 6)
    freeze(t, ("",), False)
    return seen + trains(t, 6, 9)


def between_forward_and_step(t: Any) -> list[torch.Tensor]:
    """Frozen and thawed between a step's calls, where torch asks at the backward."""
    seen = trains(t, 0, 2)
    for number, (after_forward, after_backward) in enumerate([(True, True), (True, False), (False, True)]):
        loss = loss_of(t, number)
        freeze(t, ("blocks.0.", "enter"), after_forward)
        t.backward(loss)
        freeze(t, ("blocks.0.", "enter"), after_backward)
        t.step()
        freeze(t, ("",), False)
        seen += [loss.detach(), *trains(t, 5, 6)]
    freeze(t, ("blocks.0.", "leave.weight"))
    loss = loss_of(t, 7)
    freeze(t, ("",), False)
    t.backward(loss)
    t.step()
    return seen + trains(t, 8, 10)


def within_an_accumulation(t: Any) -> list[torch.Tensor]:
    """Frozen in a later micro batch: the gradients of the first count."""
    seen = []
    for number in range(4):
        for micro in range(2):
            freeze(t, ("blocks.2.",), number == 1 and micro == 1)
            freeze(t, ("leave",), number == 2)
            loss = loss_of(t, 2 * number + micro)
            if isinstance(t, Torch):
                loss = loss / 2
                t.backward(loss)
                if micro:
                    t.step()
            else:
                loss = t.backward(loss)
                t.step()
            seen.append(loss.detach())
    return seen


SCRIPTS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    one.__name__: one for one in (freezes_and_thaws, between_forward_and_step, within_an_accumulation)
}


def compared(group: dist.ProcessGroup, stage: int, script: str, given: dict[str, Any], clip: float, folder: str) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": 2} if script == "within_an_accumulation" else {}
    if folder:
        more["zeroplan"] = {"nvme_in_memory": True}
        given = {"offload": {key: {**value, "nvme_path": folder} for key, value in given["offload"].items()}}
    plain, engine = Torch("AdamW", ADAMW, clip), start(group, stage, clip=clip, **given, **more)
    expected = SCRIPTS[script](plain)
    found = SCRIPTS[script](engine)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-6)
    weights = engine.module_state_dict() or {}
    for name, value in plain.module.state_dict().items() if weights else ():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)
    engine.destroy()


PLACES = [*((stage, "device") for stage in range(4)), *((stage, "host") for stage in (1, 2, 3))]
PLACES += [(3, "host, parameters"), (3, "files")]
#: Where `make test` runs all scripts; the other places have the first one there.
_WHOLE = {(0, "device"), (2, "host"), (3, "device"), (3, "files")}


@pytest.mark.parametrize(
    ("stage", "offload", "script"),
    [
        pytest.param(*place, script, marks=() if place in _WHOLE or script == "freezes_and_thaws" else pytest.mark.long)
        for place in PLACES
        for script in SCRIPTS
    ],
)
def test_freezing_in_mid_training_is_as_in_torch(pool: RankPool, stage: int, offload: str, script: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if offload == "files" else ""
    for ranks, clip in ((1, 0.5), (2, 0.0)):
        pool.run(ranks, compared, stage, script, {"offload": OFFLOAD[offload]}, clip, folder)


@pytest.mark.parametrize(
    ("kind", "params"), [("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}), ("Adagrad", {"lr": 0.05})]
)
def test_other_optimizers_pass_over_what_is_frozen(kind: str, params: dict[str, float]) -> None:
    plain, engine = Torch(kind, params, 0.0), start(None, 2, kind, params)
    for a, b in zip(freezes_and_thaws(plain), freezes_and_thaws(engine), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    engine.destroy()


def test_delayed_updates_pass_over_what_is_frozen() -> None:
    """The update runs a step late, so its frozen set is that of its own step: another block trains on alone."""
    engine = start(None, 2, offload=OFFLOAD["host"], zeroplan={"delayed_update": 1})
    trains(engine, 0, 2)
    freeze(engine, ("blocks.1.",))
    trains(engine, 2, 3)
    with engine.gathered("blocks.1"):
        before = [param.detach().clone() for param in engine.module.blocks[1].parameters()]
    trains(engine, 3, 6)
    engine.drain()
    state = engine.module_state_dict() or {}
    names = [name for name, _ in engine.module.named_parameters() if name.startswith("blocks.1.")]
    for name, value in zip(names, before, strict=True):
        torch.testing.assert_close(state[name], value)
    engine.destroy()


def test_half_precision_counts_applied_steps_alone() -> None:
    engine = start(None, 2, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
    trains_half = [engine.module(torch.zeros(1, 8).half())]  # casts of the model are the config's
    assert trains_half
    freeze(engine, ("enter",))
    for number in range(30):
        loss = engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).half()).float().square().mean()
        engine.backward(loss)
        engine.step()
    engine.finish_step()
    assert engine.progress.skipped_steps
    assert engine.optimizer_step is not None
    assert set(engine.optimizer_step.frozen.missed.values()) == {engine.progress.applied}
    engine.destroy()


def resumes(group: dist.ProcessGroup, stage: int, other: int, form: str, folder: str) -> None:
    """A run that is saved while parameters are frozen, and goes on in another stage."""
    engine = start(group, stage)
    trains(engine, 0, 2)
    freeze(engine, ("blocks.1.", "enter.bias"))
    trains(engine, 2, 4)
    freeze(engine, ("blocks.1.0.",), False)
    trains(engine, 4, 5)
    engine.save_checkpoint(folder)
    rest = [freeze(engine, ("",), False), *trains(engine, 5, 8)][1:]
    engine.destroy()
    engine = start(group, other)
    if form == "own":
        engine.load_checkpoint(folder)
    else:
        if dist.get_rank(group) == 0:
            (to_universal if form == "universal" else to_dcp)(folder, f"{folder}/other/whole")
        dist.barrier(group)
        if form == "universal":
            load_universal_checkpoint(engine, f"{folder}/other/whole")
        else:
            load_dcp_checkpoint(engine, f"{folder}/other/whole")
    torch.testing.assert_close(torch.stack(trains(engine, 5, 8)), torch.stack(rest), rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("form", ["own", "universal", "dcp"])
def test_a_resume_knows_the_steps_that_each_has_missed(pool: RankPool, form: str, tmp_path: Path) -> None:
    pool.run(2, resumes, 1, 3, form, str(tmp_path))


def one_rank_freezes(group: dist.ProcessGroup) -> str:
    engine = start(group, 1)
    trains(engine, 0, 1)
    freeze(engine, ("blocks.1.",), dist.get_rank(group) == 1)
    said = refusal(lambda: trains(engine, 1, 2))
    engine.destroy()
    return said


def test_ranks_that_freeze_other_parameters_are_told(pool: RankPool) -> None:
    for said in pool.run(2, one_rank_freezes):
        assert "or froze different parameters" in said


REFUSED = {
    "Lamb": ({"lr": 0.01}, "the optimizer steps all of a group by one state, norm or message"),
    "NAdam": ({"lr": 0.01}, "the optimizer steps all of a group by one state, norm or message"),
    "AdamW8bit": ({"lr": 0.01}, "its states are in blocks that parameters share"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_that_cannot_pass_over_say_so(kind: str) -> None:
    params, why = REFUSED[kind]
    engine = start(None, 1, kind, params)
    trains(engine, 0, 1)
    freeze(engine, ("blocks.1.",))
    said = refusal(lambda: trains(engine, 1, 2))
    assert said.startswith("engine.step: 'blocks.1.0.weight' was trained when the engine was made and is frozen now, and")
    assert why in said
    freeze(engine, ("blocks.1.",), False)
    engine.zero_grad()
    trains(engine, 1, 2)
    engine.destroy()


def test_a_model_copied_under_a_freeze_has_its_values() -> None:
    engine = start(None, 2)
    freeze(engine, ("blocks.1.",))
    trains(engine, 0, 2)
    copied = copy.deepcopy(engine.module)
    assert all(param.requires_grad is not name.startswith("blocks.1.") for name, param in copied.named_parameters())
    engine.destroy()
