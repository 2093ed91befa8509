"""Lightning's Trainer drives the runtime: on two ranks it equals Lightning's own DDP at every stage, and goes on from any."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.conftest import ROOT
from tests.patience import PATIENCE
from tests.runtime.integrations import lightning_runs as runs
from tests.runtime.ranks import RankPool
from zeroplan.core.errors import BadInput

STRATEGIES = ("ddp", "zeroplan_stage_1", "zeroplan_stage_2_offload", "zeroplan_stage_3")


def train_all(group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl

    import zeroplan_runtime.integrations.lightning as ours

    found = {name: runs.whole_run(pl, name, folder) for name in STRATEGIES}
    # From stage 1 to stage 3, and from a file with the weights alone.
    found["resumed"] = runs.resume(pl, "zeroplan_stage_3", folder / "zeroplan_stage_1" / "epoch=0.ckpt")
    model, trainer = runs.make(pl), runs.trainer(pl, ours.ZeroplanStrategy(stage=3), max_epochs=1)
    trainer.fit(model, runs.data())
    with pytest.raises(BadInput, match=r"trainer\.fit"):  # the engine is gone, and the module whole again
        _ = trainer.strategy.engine
    assert model.classify.weight.shape == (2, 16)
    trainer.save_checkpoint(folder / "after_fit.ckpt")  # two ranks' shards, which another stage takes
    found["after fit"] = runs.resume(pl, "zeroplan_stage_1", folder / "after_fit.ckpt")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def found(pair: RankPool, folder: Path) -> list[dict[str, Any]]:
    return pair.run(2, train_all, folder)


def worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_two_ranks_equal_lightnings_ddp(found: list[dict[str, Any]], strategy: str) -> None:
    """With dropout, clipping, a schedule, and an accumulation that ends before it is full."""
    for rank in found:
        theirs, mine = rank["ddp"], rank[strategy]
        assert len(mine["losses"]) == 16
        assert torch.tensor(mine["losses"]).allclose(torch.tensor(theirs["losses"]), atol=1e-6)
        assert (mine["steps"], mine["rate"]) == (theirs["steps"], theirs["rate"]) == (6, pytest.approx(1e-2 * 0.6**2))
        assert worst(mine["after fit"], theirs["after fit"]) < 1e-6
        for call in ("validate", "test"):
            assert mine[call] == pytest.approx(theirs[call], abs=1e-6)
        assert mine["test"] != pytest.approx(mine["validate"], abs=1e-3)  # of the first epoch's checkpoint
        assert (mine["predict"] - theirs["predict"]).abs().max() < 1e-5


def test_another_stage_goes_on_from_a_checkpoint(found: list[dict[str, Any]]) -> None:
    """Its first losses are those of the run that was not interrupted but for dropout, whose numbers are others."""
    resumed = found[0]["resumed"]
    assert resumed["steps"] == found[0]["after fit"]["steps"] == 6
    assert len(resumed["losses"]) == len(found[0]["after fit"]["losses"]) == 8


ALONE = """
import sys
import zeroplan_runtime
assert not [name for name in sys.modules if name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")]
import pytorch_lightning as pl
from pathlib import Path
from tests.conftest import ROOT
from tests.runtime.integrations import lightning_runs as runs
assert "zeroplan_stage_2_offload" in pl.strategies.StrategyRegistry
folder = Path({folder!r})
mine = runs.resume(pl, "zeroplan_stage_2", folder / "zeroplan_stage_3" / "epoch=0.ckpt")
theirs = runs.resume(pl, "ddp", folder / "ddp" / "epoch=0.ckpt")
print(mine["steps"], theirs["steps"], max(abs(a - b) for a, b in zip(mine["losses"], theirs["losses"], strict=True)))
print(max((mine["params"][n] - theirs["params"][n]).abs().max().item() for n in theirs["params"]))
"""


def test_another_number_of_ranks_under_the_older_name(found: list[dict[str, Any]], folder: Path, warm_python: Path) -> None:
    """``pytorch_lightning``, which is imported after the runtime; the optimizer's states come back, too: losses equal DDP's."""
    code = ALONE.format(folder=str(folder))
    done = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs, losses, params = done.stdout.split()[-4:]
    assert ours == theirs
    assert float(losses) < 1e-6
    assert float(params) < 1e-6


def test_a_checkpoint_becomes_one_file(found: list[dict[str, Any]], folder: Path) -> None:
    from zeroplan_runtime.integrations.lightning.consolidate import main

    main([str(folder / "zeroplan_stage_3" / "epoch=1.ckpt"), str(folder / "whole.ckpt")])
    whole = torch.load(folder / "whole.ckpt", weights_only=True)
    assert worst(whole["state_dict"], found[0]["ddp"]["after fit"]) < 1e-6
    assert whole["hyper_parameters"] == {"width": 16}
    with pytest.raises(SystemExit) as stop:
        main([str(folder / "ddp"), str(folder / "none.ckpt")])
    assert stop.value.code == 2


# ---------------------------------------------------------------------- refusals and the rest, on two ranks


def manual(self: Any, batch: Any, index: int) -> None:
    optimizer = self.optimizers()
    for part in range(2):
        self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]) / (1 + part))
    self.losses.append(float(functional.cross_entropy(self(batch[0]), batch[1])))
    optimizer.step()
    optimizer.zero_grad()


def none_at_the_last(self: Any, batch: Any, index: int) -> torch.Tensor | None:
    loss = functional.cross_entropy(self(batch[0]), batch[1])
    self.losses.append(loss.item())
    return None if index % 3 == 2 else loss


def two_optimizers(self: Any) -> Any:
    return [torch.optim.Adam(self.words.parameters()), torch.optim.Adam(self.classify.parameters())]


def no_clipping(self: Any, *_: Any, **__: Any) -> None:
    self.clip_gradients(self.optimizers(), gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def odd_uses(group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl

    from zeroplan_runtime.integrations.lightning import ZeroplanStrategy

    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}
    found: dict[str, Any] = {}

    def fit(strategy: Any, changes: dict[str, Any], **options: Any) -> Any:
        module, trainer = runs.make(pl, **changes), runs.trainer(pl, strategy, **{"max_epochs": 1, **options})
        trainer.fit(module, runs.data())
        return module

    def by_hand(strategy: Any) -> list[float]:
        changes = {"training_step": manual, "automatic_optimization": False, "configure_optimizers": plain_adam}
        return fit(strategy, changes, accumulate_grad_batches=1, gradient_clip_val=None).losses

    def plain_adam(self: Any) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    torch.manual_seed(1)
    found["manual"] = by_hand("zeroplan_stage_3")
    torch.manual_seed(1)
    found["manual, ddp"] = by_hand("ddp")
    torch.manual_seed(1)
    none = {"configure_optimizers": lambda self: None}
    found["bf16"] = fit(ZeroplanStrategy(2, config=adam | warmup), none, precision="bf16-mixed")
    found["bf16"] = (found["bf16"].losses, found["bf16"].classify.weight.dtype)

    def failing(self: Any, batch: Any, index: int) -> None:
        raise ValueError("of the user's own")

    broken, trainer = runs.make(pl, training_step=failing), runs.trainer(pl, "zeroplan_stage_3")
    with pytest.raises(ValueError, match="of the user's own"):
        trainer.fit(broken, runs.data())
    found["after a failure"] = broken.classify.weight.numel()

    def refused(strategy: Any = "zeroplan_stage_2", changes: dict[str, Any] | None = None, **options: Any) -> str:
        with pytest.raises(BadInput) as fault:
            fit(strategy, changes or {}, **options)
        return str(fault.value)

    found["refused"] = {
        "several": refused(
            changes={"configure_optimizers": two_optimizers, "automatic_optimization": False},
            accumulate_grad_batches=1,
            gradient_clip_val=None,
        ),
        "both": refused(ZeroplanStrategy(2, config=adam)),
        "none": refused(changes=none),
        "value": refused(gradient_clip_algorithm="value"),
        "backward": refused(changes={"backward": lambda self, loss: loss.backward()}),
        "hook": refused(changes={"configure_gradient_clipping": no_clipping}),
        "clip": refused(changes={"configure_gradient_clipping": no_clipping}, gradient_clip_val=None),
        "accumulation": refused(ZeroplanStrategy(2, config={"gradient_accumulation_steps": 2})),
        "precision": refused(precision="64-true"),
    }
    with pytest.raises(BadInput) as fault:
        runs.resume(pl, "zeroplan_stage_2", folder / "ddp" / "epoch=0.ckpt")
    found["refused"]["states"] = str(fault.value)
    with pytest.raises(BadInput) as fault:
        runs.resume(pl, "zeroplan_stage_2", folder)
    found["refused"]["folder"] = str(fault.value)
    return found


def test_manual_steps_16_bits_and_refusals(pair: RankPool, found: list[dict[str, Any]], folder: Path) -> None:
    for rank in pair.run(2, odd_uses, folder):
        assert torch.tensor(rank["manual"]).allclose(torch.tensor(rank["manual, ddp"]), atol=1e-6)
        assert rank["after a failure"] == 0  # the ranks are no longer at the same place, so nothing is gathered
        losses, dtype = rank["bf16"]
        assert dtype is torch.bfloat16
        assert torch.tensor(losses).isfinite().all()
        words = {
            "several": "2 optimizers",
            "both": "both the config",
            "none": "no optimizer",
            "value": "norm",
            "backward": "backward",
            "hook": "configure_gradient_clipping",
            "clip": "cannot clip gradients by norm to 0.1",
            "accumulation": r"accumulate_grad_batches",
            "precision": "64-true",
            "states": "optimizer's states",
            "folder": "there is no checkpoint",
        }
        assert words.keys() == rank["refused"].keys()
        for case, word in words.items():
            assert word in rank["refused"][case], case


@pytest.mark.parametrize("stage", [2, 3])
def test_no_loss_at_the_last_of_an_accumulation_steps_with_what_waits(stage: int) -> None:
    import lightning.pytorch as pl

    from zeroplan_runtime.integrations.lightning import ZeroplanStrategy

    losses = []
    for one in ("auto", ZeroplanStrategy(stage)):
        with runs.ended():
            module = without_dropout(runs.make(pl, training_step=none_at_the_last))
            torch.manual_seed(1)
            runs.trainer(pl, one, max_epochs=1, use_distributed_sampler=False).fit(module, runs.data())
            losses.append(module.losses)
    assert torch.tensor(losses[1]).allclose(torch.tensor(losses[0]), atol=1e-6)


@pytest.mark.parametrize("strategy", ["zeroplan_stage_2_offload", "zeroplan_stage_3"])
def test_after_fit_a_checkpoint_is_what_one_at_its_end_was(tmp_path: Path, strategy: str) -> None:
    """Whole, and of the weights alone; another fit goes on from it. A module that was changed since is refused."""
    import lightning.pytorch as pl

    with runs.ended():
        module, trainer = runs.make(pl), runs.trainer(pl, strategy, max_epochs=1)
        during = pl.callbacks.ModelCheckpoint(tmp_path, filename="during", save_on_train_epoch_end=True)
        trainer.callbacks.append(during)
        trainer.fit(module, runs.data())
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        trainer.save_checkpoint(tmp_path / "whole.ckpt")
        ends = []
        for name in ("during", "whole"):
            other = runs.make(pl)
            torch.manual_seed(3)
            runs.trainer(pl, strategy, max_epochs=2).fit(other, runs.data(), ckpt_path=tmp_path / f"{name}.ckpt")
            ends.append(other.state_dict())
        found = torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"]
        assert worst(found, module.state_dict()) == 0
        assert found["classify.weight"].numel()
        assert worst(*ends) == 0
        assert worst(ends[0], module.state_dict()) > 1e-4
        with torch.no_grad():
            module.classify.weight.mul_(2)
        with pytest.raises(BadInput, match=r"parameters were changed since fit\(\) ended") as fault:
            trainer.save_checkpoint(tmp_path / "changed.ckpt")
        assert "\n" not in str(fault.value)
        trainer.validate(module, runs.data(), verbose=False)
        with pytest.raises(BadInput, match="no states of an optimizer"):
            trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not (tmp_path / "changed.ckpt").exists()


def without_dropout(model: nn.Module) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@pytest.mark.gpu
def test_on_a_gpu_lightning_equals_the_engine_itself() -> None:
    """bf16 with fp32 masters, stages 2 and 3: the same losses as a loop over the engine."""
    import lightning.pytorch as pl

    import zeroplan_runtime

    with runs.ended():
        for stage in (2, 3):
            model = without_dropout(runs.make(pl))  # whose masks follow what else the Trainer draws on a GPU
            options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 1, "use_distributed_sampler": False}
            trainer = runs.trainer(pl, f"zeroplan_stage_{stage}", accelerator="gpu", **options)
            torch.manual_seed(1)
            trainer.fit(model, runs.data(), runs.data())
            config = {
                "train_micro_batch_size_per_gpu": runs.BATCH,
                "gradient_accumulation_steps": 3,
                "gradient_clipping": 0.5,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
            }
            bare = without_dropout(runs.make(pl))
            engine, *_ = zeroplan_runtime.initialize(
                model=bare, config=config, optimizer=torch.optim.AdamW(bare.parameters(), lr=1e-2, eps=1e-4)
            )
            torch.manual_seed(1)
            losses = []
            batches = list(runs.data())
            for index, (tokens, labels) in enumerate(batches):
                engine.set_gradient_accumulation_boundary(index % 3 == 2 or index == len(batches) - 1)
                loss = functional.cross_entropy(engine(tokens.cuda()), labels.cuda())
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            engine.destroy()
            assert losses == pytest.approx(model.losses, abs=1e-2)  # attention's backward adds in no fixed order
