"""The included runtime on a rank of ``verify``: the model comes from host memory, and the Arena accounts for every byte."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zeroplan_runtime
from zeroplan.core.buffers import Place
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.engines.runtime.units import PEFT_PREFIX
from zeroplan.engines.torch_mesh import Passes, balance, mesh_on, passes_of, without_masks
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
from zeroplan.trace.tensor_parallel import parallelize
from zeroplan_runtime.expert_parallel import has_grouped_experts, share_experts


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
        engine.activity.end_watch(engine.ranks)
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


def lay_out(model: nn.Module, layout: ParallelLayout, device: torch.device) -> tuple[DeviceMesh | None, Passes]:
    """Give each rank its part of a model, and return the mesh for ``initialize`` and what a micro batch runs in.

    Args:
        model: a causal language model of transformers.
        layout: the degrees; data parallelism alone needs no mesh.
        device: where the ranks compute.

    Raises:
        BadInput: ranks of experts that are no dimension of a mesh.
    """
    if layout.tp == layout.cp == layout.pp == layout.ep == 1:
        return None, nullcontext
    mesh = mesh_of(layout, device)
    divide(model, mesh, layout, device)
    return mesh, passes_on(mesh, layout)


def divide(model: nn.Module, mesh: DeviceMesh, layout: ParallelLayout, device: torch.device) -> None:
    """Leave this rank its part of a model's matrices and experts, and its attention what a ring takes.

    Args:
        model: a causal language model of transformers.
        mesh: of the layout (:func:`mesh_of`).
        layout: the degrees.
        device: where the ranks compute.
    """
    if layout.cp > 1:
        without_masks(model)
    if layout.ep > 1:
        share_experts(model, _over(mesh, layout), partial=layout.sp, across=mesh["tp"] if layout.experts_across else None)
    if layout.tp > 1:
        parallelize(model, mesh["tp"], sequence=layout.sp)
    if has_grouped_experts(model):
        balance(model, device)


def passes_on(mesh: DeviceMesh, layout: ParallelLayout) -> Passes:
    """Return what a micro batch runs in."""
    return passes_of(layout, mesh["cp"] if layout.cp > 1 else None)


def mesh_of(layout: ParallelLayout, device: torch.device) -> DeviceMesh:
    """Return the mesh of a layout, without dimensions of one rank. ``ep`` is one of them, or a name for ``dp`` and ``cp``;
    where ranks of ``tp`` have different experts, ``ep_tp`` is the name of both.

    Raises:
        BadInput: where it is neither.
    """
    shared = layout.ep // layout.tp if layout.experts_across else layout.ep  # by ranks that see other samples
    divided = layout.dp % shared == 0
    if not divided and (layout.experts_across or shared != layout.dp * layout.cp):
        told = f"ep {layout.ep} / tp {layout.tp}" if layout.experts_across else f"ep {layout.ep}"
        beside = "" if layout.experts_across else f", nor is it all {layout.dp * layout.cp} of dp and cp"
        raise BadInput(
            f"{told} does not divide the {layout.dp} ranks of dp{beside}",
            where="--ep",
            remedy="use another --ep, or --engine fsdp2",
        )
    sizes = {"pp": layout.pp, "dp": layout.dp // shared if divided else layout.dp, "ep": shared if divided else 1}
    sizes |= {"cp": layout.cp, "tp": layout.tp}
    mesh = mesh_on(device, {name: size for name, size in sizes.items() if size > 1})
    if layout.experts_across:
        mesh[("ep", "tp") if shared > 1 else ("tp",)]._flatten("ep_tp")
    elif not divided:
        mesh["dp", "cp"]._flatten("ep")
    return mesh


def _over(mesh: DeviceMesh, layout: ParallelLayout) -> DeviceMesh:
    """Return the ranks that share experts, and their matrices."""
    if layout.experts_across:
        return mesh["ep_tp"]
    return mesh["ep", "tp"] if layout.tp > 1 else mesh["ep"]
