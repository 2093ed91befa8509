"""The included runtime on a rank of ``verify``: the model comes from host memory, and the Arena accounts for every byte."""

from __future__ import annotations

import zeroplan_runtime
from zeroplan.core.buffers import Place
from zeroplan.engines.runtime.trainer_mesh import lay_out
from zeroplan.engines.runtime.units import PEFT_PREFIX
from zeroplan.engines.torch_trainer import engine_step
from zeroplan.engines.verification import Row, Trainer, TrainingRun


def build(run: TrainingRun) -> Trainer:
    """Build the engine with ``zeroplan_runtime.initialize``."""
    model = run.prepare(run.make_model(run.dtype, cheap=True))
    run.mark("load", "init")
    mesh, passes = lay_out(model, run.layout, run.device)
    engine, *_ = zeroplan_runtime.initialize(model=model, config=dict(run.ds_config), device=run.device, mesh=mesh)
    run.mark("init", "forward")

    def rows() -> list[Row]:
        found = engine.arena.measurement()
        return [(row["buffer"], row["unit"].removeprefix(PEFT_PREFIX), row["place"], row["peak"]) for row in found]

    def close() -> None:
        if engine.model_states.nvme is not None:  # files stay on the disk of a process that ends as a rank's does
            engine.destroy()
        if engine.watchdog is not None:
            engine.watchdog.stop()
        for parameter in engine.module.parameters():  # hooks hold the units, which hold the parameters, through C++
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).copy():
                parameter._post_accumulate_grad_hooks.pop(hook)

    return Trainer(
        engine_step(run, engine, passes),
        rows,
        owned=True,
        close=close,
        where=lambda: str(engine.schedule.where),
        pinned=lambda: int(engine.arena.peak(Place.PINNED)),
    )
