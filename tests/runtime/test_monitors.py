"""The ds_config's monitors write what a training shows, and change nothing of it."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput

STEPS, MICRO = 4, 2
TAG = "Train/Samples/"


def train(device: str = "cpu", planned: int | None = None, **sections: Any) -> list[float]:
    """The losses of a few steps in fp16 with a schedule."""
    config = ds_config(
        2,
        "fp16",
        gradient_accumulation_steps=MICRO,
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
        **sections,
    )
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, device=device)
    if engine.monitor is not None:
        engine.monitor.planned_bytes = planned
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            loss = engine(models.batch(step, micro, 0).to(device))
            total += engine.backward(loss).item()
            engine.step()
        losses.append(total)
    engine.destroy()
    return losses


def columns(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the values of the CSV files, by tag."""
    found = {}
    for file in folder.iterdir():
        with open(file, newline="") as stream:
            (step, tag), *rows = csv.reader(stream)
        assert step == "step"
        found[tag] = [(int(samples), float(value)) for samples, value in rows]
    return found


def test_csv_holds_what_the_training_was(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses = train(csv_monitor=section)
    assert losses == train()
    found = columns(tmp_path / "job")
    a_step = models.BATCH * MICRO
    samples = [a_step * (step + 1) for step in range(STEPS)]
    assert [at for at, _ in found[f"{TAG}train_loss"]] == samples
    assert [value for _, value in found[f"{TAG}train_loss"]] == pytest.approx(losses, abs=1e-6)
    rates = [value for _, value in found[f"{TAG}lr"]]
    assert rates[1] < rates[2] < rates[3]
    assert {value for _, value in found[f"{TAG}loss_scale"]} == {1024.0}
    seconds, speed = found[f"{TAG}seconds_per_batch"], found[f"{TAG}tokens_per_second"]
    assert [at for at, _ in seconds] == samples[1:]  # the first step has none before it
    for (_, one), (_, other) in zip(seconds, speed, strict=True):
        assert one * other == pytest.approx(a_step * models.LENGTH)


def test_sections_that_are_off_write_nothing(tmp_path: Path) -> None:
    train(csv_monitor={"enabled": False, "output_path": str(tmp_path)}, tensorboard={"output_path": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("section", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_package_is_one_line(section: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=f"pip install {section}"):
        train(**{section: {"enabled": True}})


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is no dependency of the suite")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = train(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [event.value for event in events.Scalars(f"{TAG}train_loss")] == pytest.approx(losses, abs=1e-6)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is no dependency of the suite")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    losses = train(wandb={"enabled": True, "project": "zeroplan"})
    import wandb

    assert wandb.run is None  # the engine has ended it
    assert len(losses) == STEPS
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.gpu
def test_on_a_gpu_no_step_waits_and_the_plan_stands_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroplan_runtime.monitors.monitor import Monitor

    stepped = Monitor.stepped

    def without_a_wait(self: Monitor, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            stepped(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Monitor, "stepped", without_a_wait)
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses = train("cuda", planned=12345, csv_monitor=section)
    found = columns(tmp_path / "job")
    assert [value for _, value in found[f"{TAG}train_loss"]] == pytest.approx(losses, abs=1e-6)
    assert {value for _, value in found[f"{TAG}memory_planned"]} == {12345.0}
    assert all(value > 0 for _, value in found[f"{TAG}memory_allocated_peak"])
    assert all(value > 0 for _, value in found[f"{TAG}seconds_per_batch"])
