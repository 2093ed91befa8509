"""The parallel layout that a request's flags describe, held against the model and the engine."""

from __future__ import annotations

from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Workload
from zeroplan.models.spec import ModelSpec
from zeroplan.planner.request import Request


def layout_of(request: Request, cluster: Cluster, spec: ModelSpec, workload: Workload) -> ParallelLayout | None:
    """The layout that the request's degrees give on the cluster; None for data parallelism alone.

    Raises:
        BadInput: degrees that do not divide the ranks or the model, or a model that cannot be divided so.
    """
    if request.tp == 1 and not request.sp:
        return None
    layout = ParallelLayout(cluster.gpus, cluster.nodes, tp=request.tp, sp=request.sp)
    if layout.tp > 1:
        _require_tensor_parallel(layout, spec, workload)
    return layout


def _require_tensor_parallel(layout: ParallelLayout, spec: ModelSpec, workload: Workload) -> None:
    from zeroplan.core.tensor_parallel import require_divides, tensor_plan

    if not spec.has_shapes:
        raise BadInput(
            "a count of parameters does not tell what is shared", where="--tp", remedy="give the model's id or config.json"
        )
    tensor_plan(spec.model_type)
    require_divides(spec.config, layout, workload.seq_len)
    if workload.lora_rank is not None:
        raise BadInput("tensor parallelism with LoRA is not modelled", where="--tp", remedy="leave --lora-rank out")
