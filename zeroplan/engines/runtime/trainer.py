"""The included runtime on a rank of ``verify``: the model comes from host memory, and the Arena accounts for every byte."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import zeroplan_runtime
from zeroplan.core.buffers import Place
from zeroplan.engines.runtime.trainer_mesh import divide, mesh_of, passes_on
from zeroplan.engines.runtime.units import PEFT_PREFIX
from zeroplan.engines.torch_mesh import Passes
from zeroplan.engines.torch_stages import (
    LazyStep,
    RankModel,
    StageModel,
    is_block,
    schedule_of_engine,
    stages_of,
)
from zeroplan.engines.torch_trainer import Step, engine_step
from zeroplan.engines.verification import Row, Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    """Build the engine with ``zeroplan_runtime.initialize``."""
    layout = run.layout
    mesh = None if layout.world_size == layout.dp and layout.ep == 1 else mesh_of(layout, run.device)

    def make() -> Any:
        model = run.prepare(run.make_model(run.dtype, cheap=True))
        if mesh is not None:
            divide(model, mesh, layout, run.device)
        return model

    stages = stages_of(run, make) if layout.pp > 1 else []
    model: Any = RankModel(stages) if stages else make()
    run.mark("load", "init")
    passes = nullcontext if mesh is None else passes_on(mesh, layout)
    several = sum(len(stage.model.layers) for stage in stages) > 1  # a single block is the root's, as in any model
    cut: dict[str, Any] = {"policy": is_block} if several else {}
    engine, *_ = zeroplan_runtime.initialize(model=model, config=dict(run.ds_config), device=run.device, mesh=mesh, **cut)
    run.mark("init", "forward")

    def rows() -> list[Row]:
        found = engine.arena.measurement()
        return [(row["buffer"], name_of(row["unit"]), row["place"], row["peak"]) for row in found]

    def name_of(unit: str) -> str:
        return str(model.whole_name(unit)) if stages else unit.removeprefix(PEFT_PREFIX)

    def close() -> None:
        if engine.model_states.nvme is not None:  # files stay on the disk of a process that ends as a rank's does
            engine.destroy()
        if engine.watchdog is not None:
            engine.watchdog.stop()
        for parameter in engine.module.parameters():  # hooks hold the units, which hold the parameters, through C++
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).copy():
                parameter._post_accumulate_grad_hooks.pop(hook)

    return Trainer(
        staged_step(run, engine, stages, passes) if stages else engine_step(run, engine, passes),
        rows,
        owned=True,
        close=close,
        where=lambda: str(engine.schedule.where),
        pinned=lambda: int(engine.arena.peak(Place.PINNED)),
    )


def staged_step(run: TrainingRun, engine: Any, stages: list[StageModel], passes: Passes) -> Step:
    """Return the loop of an engine whose module is a rank's pipeline stages: torch's schedule, then ``engine.step()``."""
    micro_batches = LazyStep(run, partial(schedule_of_engine, engine, stages), passes)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        loss = micro_batches(batch)
        run.mark("backward", "step")
        engine.step()
        return loss

    return step
