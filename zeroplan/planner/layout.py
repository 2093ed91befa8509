"""The parallel layout that a request's flags describe, held against the model and the engine."""

from __future__ import annotations

from typing import Any

from zeroplan.core.buffers import Buffer
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import auto_class_of
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import DEFAULT_SCHEDULE, DEGREES, ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.engines.base import Engine
from zeroplan.models.spec import ModelSpec
from zeroplan.run.ask import Ask
from zeroplan.techniques.base import Facts
from zeroplan.techniques.experts import AUTO_EP, OWN_EXPERTS

_DEGREES = ("tp", "cp", "ulysses", "pp", "vpp", "ep", "etp")


def layout_of(request: Ask, engine: Engine, facts: Facts, *, auto_ep: bool = False) -> ParallelLayout | None:
    """Return the layout that the request's degrees give on the cluster; None for data parallelism alone.

    Args:
        request: names the degrees.
        engine: divides embedding, head and layers in its way.
        facts: the run, whose model the degrees have to divide.
        auto_ep: whether AutoEP's layers take the place of blocks with experts.

    Raises:
        BadInput: degrees that do not divide the ranks or the model, or a model that cannot be divided so.
    """
    cluster, spec = facts.cluster, facts.spec
    if request.schedule != DEFAULT_SCHEDULE and request.pp == 1:
        raise BadInput("a schedule without pipeline stages", where="--schedule", remedy="give --pp as well")
    if request.partition is not None and not (engine.partition and request.pp > 1):
        what, remedy = "layers are divided by a method on stages of DeepSpeed's PipelineModule", "or leave it out"
        raise BadInput(what, where="--partition", remedy=f"use --engine deepspeed --pp 2, {remedy}")
    if spec.own_experts is not None:
        return OWN_EXPERTS.layout(facts, spec.own_experts.ranks)
    if auto_ep:
        AUTO_EP.require_alone(facts)
        _require_language_model(request, facts)
        return AUTO_EP.layout(facts)
    degrees: dict[str, Any] = {name: facts.degrees[name] for name in _DEGREES}
    splits = set(degrees.values()) != {1} or request.sp
    if not splits and request.dp_replicate == 1:
        return None
    layout = ParallelLayout(
        cluster.gpus,
        cluster.nodes,
        sp=request.sp,
        dp_replicate=request.dp_replicate,
        whole_vocabulary=engine.whole_vocabulary and request.tp > 1,
        **degrees,
    )
    if splits and not engine.own_layers:
        from zeroplan.techniques.degrees import DIVIDING

        _require_language_model(request, facts)
        for technique in DIVIDING:
            if technique.divides(layout):
                technique.require_layout(layout, facts)
    return layout


def facts_of(request: Ask, engine: Engine, workload: Workload, cluster: Cluster, spec: ModelSpec) -> Facts:
    """Return what rules of techniques read of a run."""
    degrees = {name: int(getattr(request, name)) for name in (*DEGREES, "vpp")} | {"sp": 1 + request.sp}
    said = [f"--{name}" for name in _DEGREES if getattr(request, name) > 1]
    return Facts(
        engine,
        workload,
        spec,
        cluster,
        degrees,
        task=request.task,
        alone=f"leave {' and '.join(said) or '--dp-replicate'} out",
        schedule=request.schedule,
        partition=request.partition or engine.partition,
    )


def unmeasured(layout: ParallelLayout) -> str:
    """Return a warning where a layout was held against few GPUs; empty elsewhere."""
    if layout.own_experts and not layout.auto_ep:
        return "MoE layers: measured on two GPUs alone"
    return ""


def _require_language_model(request: Ask, facts: Facts) -> None:
    where = next((f"--{name}" for name in _DEGREES if getattr(request, name) > 1), "--pp")
    work, spec = facts.workload, facts.spec
    if request.task is not None or (spec.config and auto_class_of(spec.config) != "AutoModelForCausalLM"):
        raise BadInput("is modelled for causal language models alone", where=where, remedy="leave it at 1, and --task out")
    if work.batch.lengths and max(request.cp, request.ulysses, request.pp) > 1:
        where = next(f"--{name}" for name in ("cp", "ulysses", "pp") if getattr(request, name) > 1)
        raise BadInput(f"batches of different lengths are not modelled with {where}", where="--lengths", remedy="leave it out")
    if Buffer.OPTIM_FACTORED in (row := find_optimizer(work.numerics.optimizer)).buffers or row.rest:
        what = f"{row.name} steps whole matrices, and is not modelled on their parts"
        raise BadInput(what, where="--optimizer", remedy="use adamw")
