"""Odd models and odd uses of them, on two ranks at every stage: numbers equal plain torch's, or one line refuses."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import rare_scripts, strange_scripts, unusual_scripts  # noqa: F401  (they add scripts)
from tests.runtime.odd_modules import Blocks, linear
from tests.runtime.odd_scripts import SCRIPTS, config_of
from tests.runtime.ranks import RankPool
from tests.runtime.test_strangers import Plain, data
from zeroplan.core.errors import BadInput

STAGES = (0, 1, 2, 3)


class Zeros(Plain):
    """Plain torch where a trained parameter without a gradient has one of zeros, as in the runtime."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self.frozen = {p for p in self.module.parameters() if not p.requires_grad}
        super().backward(loss, retain_graph)

    def step(self) -> None:
        for p in self.module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None and p not in self.frozen else p.grad
        super().step()


#: A script that is compiled takes as long as fifty others.
COMPILED = ("a_whole_step_compiled",)


def outcomes(group: dist.ProcessGroup, stage: int, names: tuple[str, ...]) -> dict[str, str]:
    """By script ``equal``, ``different``, or the line that refuses it."""
    found = {}
    config = config_of(stage)
    for name in names:
        build, use, _ = SCRIPTS[name]
        torch.manual_seed(0)
        model = build()
        torch.manual_seed(0)
        plain = Zeros(build())
        engine = None
        try:
            engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
            seen = use(engine) or []
        except BadInput as fault:
            found[name] = str(fault)
            continue
        except Exception as fault:
            import traceback

            found[name] = f"crash: {type(fault).__name__}: {fault} {traceback.format_exc()[-600:]}"
            continue
        finally:
            if engine is not None:
                engine.destroy()
        try:
            expected = use(plain) or []
        except Exception as fault:
            found[name] = f"plain: {type(fault).__name__}: {fault}"
            continue
        pairs = [(a.to(b.device), b) for a, b in zip(seen, expected, strict=True)]
        far = max((((a - b).abs().max() / (b.abs().max() + 1e-3)).item() for a, b in pairs if b.numel()), default=0.0)
        found[name] = "equal" if far < 1e-4 else f"different: {far:.3g}"
    return found


def check(pool: RankPool, stage: int, names: tuple[str, ...]) -> None:
    for found in pool.run(2, outcomes, stage, names):
        for name in names:
            said = found[name]
            if str(stage) in SCRIPTS[name][2]:
                assert said != "equal", name
                assert not said.startswith(("crash", "plain", "different")), said
                assert "\n" not in said
            else:
                assert said == "equal", (name, said)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_odd_scripts(pool: RankPool, stage: int) -> None:
    check(pool, stage, tuple(name for name in SCRIPTS if name not in COMPILED))


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_compiled_scripts(pool: RankPool, stage: int) -> None:
    check(pool, stage, COMPILED)


def adversaries(group: dist.ProcessGroup, stage: int, freezes: bool) -> str:
    """Two engines that train against each other: what refuses it, or what differs from plain torch; empty if nothing.

    The maker's loss goes through the judge, whose gradients nobody wants; `freezes` says so by ``requires_grad_``.
    """
    torch.manual_seed(0)
    models = (Blocks(linear, 2), Blocks(linear, 2))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    plain = [Plain(copy.deepcopy(model)) for model in models]
    engines = [zeroplan_runtime.initialize(model=m, config=config, group=group, device="cpu")[0] for m in models]
    try:
        for maker, judge in (plain, engines):
            for number in range(4):
                made = maker(data(number))
                judge.backward(judge(made.detach()).mean() - judge(data(number + 40)).mean())
                judge.step()
                judge.module.requires_grad_(not freezes)
                maker.backward(made.square().mean() - judge(made).mean())
                judge.module.requires_grad_(True)
                (judge.optimizer if isinstance(judge, Plain) else judge).zero_grad()
                maker.step()
        for engine, other in zip(engines, plain, strict=True):
            found = engine.module_state_dict() or {}
            for name, value in found.items():
                if not torch.allclose(value, other.module.state_dict()[name], 1e-5, 1e-6):
                    return f"{name} differs"
    except BadInput as fault:
        return str(fault)
    finally:
        for engine in engines:
            engine.destroy()
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_against_each_other(pool: RankPool, stage: int) -> None:
    for said in pool.run(2, adversaries, stage, False):
        assert "came by another backward than the engine's" in said
    assert pool.run(2, adversaries, stage, True) == ["", ""]


def test_a_schedule_that_wants_a_metric_is_refused() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {}}}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(BadInput, match="ReduceLROnPlateau"):
        zeroplan_runtime.initialize(model=linear(), config=config, lr_scheduler=plateau, device="cpu")
