"""The keyword arguments of ``tune``: a run on this machine, of which anything may be fixed."""

from __future__ import annotations

from zeroplan.planner.options import RunOptions


class TuneOptions(RunOptions, total=False):
    """`gpus` is the number of ranks, None for as many as there are; `stage` and the like fix what else is searched."""

    gpus: int | None
    stage: int | None
    gradient_checkpointing: bool | None
    compile: str | None
