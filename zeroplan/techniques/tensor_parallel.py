"""Tensor parallelism (``--tp``), with sequence parallelism between the matrices (``--sp``). The plans are those of
:mod:`zeroplan.core.tensor_parallel`, and the tape is traced on one rank of a mesh of fake ranks (:mod:`zeroplan.trace.mesh`).
"""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.option import DATA_PARALLEL, MESH, Option
from zeroplan.core.parallel import ParallelLayout
from zeroplan.techniques.base import Degree, Facts


class TensorParallelTechnique(Degree):
    """Ranks that share each matrix."""

    name, where, of_layout = "tensor parallelism", "--tp", ("tp",)
    apart = ("--lora-rank",)
    tp = Option(int, 1, "GPUs that share each matrix (tensor parallelism). [1]", MESH, without=DATA_PARALLEL, page=True)
    sp = Option(
        bool,
        False,
        "They share the tokens between matrices, too (sequence parallelism).",
        MESH,
        flag="--sp/--no-sp",
        without=DATA_PARALLEL,
        page=True,
    )

    def require_layout(self, layout: ParallelLayout, facts: Facts) -> None:
        """Refuse what does not divide, and plans that the model does not have."""
        from zeroplan.core.tensor_parallel import require_divides, tensor_plan

        spec = facts.spec
        if not spec.has_shapes:
            what, remedy = "a count of parameters does not tell what is shared", "give the model's id or config.json"
            raise BadInput(what, where=self.where, remedy=remedy)
        plan = tensor_plan(spec.model_type, auto_tp=layout.whole_vocabulary)
        if layout.sp and not plan.splits_tokens:
            raise BadInput(f"sequence parallelism of {spec.model_type} is not modelled", where="--sp", remedy="leave it out")
        if layout.whole_vocabulary and spec.ties:
            what = "AutoTP splits a vocabulary that embedding and head share, which is not modelled"
            raise BadInput(what, where=self.where, remedy="use --engine fsdp2")
        require_divides(spec.config, layout, facts.workload.batch.seq_len)
        self.require_apart(facts)
