"""Pipeline parallelism (``--pp``, ``--vpp``, ``--schedule``, ``--partition``): stages of consecutive blocks, whose part of the
tape is cut at block boundaries (:mod:`zeroplan.engines.pipeline_cut`).
"""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.option import DATA_PARALLEL, MESH, Option
from zeroplan.core.parallel import DEFAULT_SCHEDULE, ParallelLayout
from zeroplan.techniques.base import Degree, Facts, OptionValues


class PipelineTechnique(Degree):
    """Stages of consecutive blocks."""

    name, where, of_layout = "pipeline stages", "--pp", ("pp",)
    apart = ("--lora-rank",)
    pp = Option(
        int,
        1,
        "Stages of consecutive blocks (pipeline parallelism); --grad-accum micro batches pass. [1]",
        MESH,
        without=DATA_PARALLEL,
        page=True,
    )
    vpp = Option(
        int, 1, "Chunks of blocks a pipeline rank has (interleaved schedules). [1]", MESH, without=DATA_PARALLEL, page=True
    )
    schedule = Option(
        str,
        DEFAULT_SCHEDULE,
        "The order of a stage's micro batches: 1f1b, gpipe, zero-bubble, zbv or dualpipev. [1f1b]",
        MESH,
        without=DATA_PARALLEL,
        page=True,
    )
    partition = Option[str | None](
        str,
        None,
        "How DeepSpeed's PipelineModule divides layers: parameters, uniform or type:decoder. [parameters]",
        MESH,
        without=("recommend", *DATA_PARALLEL),
    )

    @classmethod
    def require_stages(cls, asked: OptionValues, *, divides_layers: bool) -> None:
        """Refuse what is asked of stages where there are none, or where the engine divides no layers (`divides_layers`).

        Raises:
            BadInput: naming the flag.
        """
        stages = asked[cls.pp] > 1
        if asked[cls.schedule] != DEFAULT_SCHEDULE and not stages:
            raise BadInput("a schedule without pipeline stages", where="--schedule", remedy="give --pp as well")
        if asked[cls.partition] is not None and not (divides_layers and stages):
            what, remedy = "layers are divided by a method on stages of DeepSpeed's PipelineModule", "or leave it out"
            raise BadInput(what, where="--partition", remedy=f"use --engine deepspeed --pp 2, {remedy}")

    def require_layout(self, layout: ParallelLayout, facts: Facts) -> None:
        """Refuse models that are not cut, and orders of micro batches that the stages do not run."""
        from zeroplan.core.expert_parallel import GROUPED
        from zeroplan.core.pipeline import layer_stages, stages_of
        from zeroplan.core.pipeline_order import PipelineOrder, schedule_of
        from zeroplan.core.tensor_parallel import PLANS

        spec, partition, order = facts.spec, facts.partition, schedule_of(facts.schedule)
        if not spec.has_shapes:
            what, remedy = "a count of parameters does not tell the blocks", "give the model's id or config.json"
            raise BadInput(what, where=self.where, remedy=remedy)
        known = (*PLANS, *GROUPED)
        if spec.model_type not in known:
            what = f"pipeline stages of {spec.model_type or 'this model'} are not modelled"
            raise BadInput(what, where=self.where, remedy=f"of {', '.join(known)} they are")
        if not partition and spec.ties:
            what = "the head is tied to the embedding, which is on another pipeline stage"
            raise BadInput(what, where=self.where, remedy="use --pp 1")
        self.require_apart(facts)
        if order.halves:
            _require_halves(layout, facts)
        if not partition:
            stages_of(spec.parameters.block_count, layout.pp * layout.vpp)
            PipelineOrder(order, 0, layout.pp, layout.vpp, facts.workload.batch.grad_accum)
            return
        if facts.schedule != DEFAULT_SCHEDULE or layout.vpp > 1:
            where = "--vpp" if layout.vpp > 1 else "--schedule"
            raise BadInput("DeepSpeed's PipelineModule runs 1f1b with one chunk a rank", where=where, remedy="leave it out")
        layer_stages(spec.parameters, layout.pp, partition)


def _require_halves(layout: ParallelLayout, facts: Facts) -> None:
    """Refuse where the halves of a backward are not known, or run otherwise than anyone wants."""
    from zeroplan.core.tensor_parallel import PLANS

    where, remedy, work = "--schedule", "use 1f1b", facts.workload
    if work.recomputation is not None:
        what = "the second half of a zero-bubble backward recomputes a block once for each of its weights"
        raise BadInput(f"{what}, which is not modelled", where=where, remedy="use 1f1b, or --no-gradient-checkpointing")
    if work.compile is not None:
        raise BadInput("torch runs no zero-bubble schedule of compiled models", where=where, remedy="use 1f1b, or no --compile")
    shared = next((name for name in ("tp", "cp", "ep") if getattr(layout, name) > 1), None)
    if shared is not None:
        what = f"a backward in two halves is not modelled with --{shared}"
        raise BadInput(what, where=where, remedy=f"{remedy}, or leave --{shared} at 1")
    if facts.spec.model_type not in PLANS:
        raise BadInput(f"a backward of {facts.spec.model_type} in two halves is not modelled", where=where, remedy=remedy)
