"""Expert parallelism (``--ep``, ``--etp``): ranks that share the experts of a mixture (:mod:`zeroplan.core.expert_parallel`).

DeepSpeed shares experts in two ways of its own: its MoE layers, of which each rank has its own experts, and AutoEP's, which
take the place of a mixture's blocks (:mod:`zeroplan.core.auto_ep`). Both follow from the model and the degrees.
"""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.option import DATA_PARALLEL, MESH, Option
from zeroplan.core.parallel import ParallelLayout
from zeroplan.techniques.base import Degree, Facts


class ExpertParallelTechnique(Degree):
    """Ranks that share experts."""

    name, where, of_layout = "expert parallelism", "--ep", ("ep", "etp")
    apart = ("--lora-rank",)
    ep = Option(int, 1, "GPUs that share the experts of a layer (expert parallelism). [1]", MESH, without=DATA_PARALLEL)
    etp = Option(
        int,
        1,
        "GPUs that share each expert's matrices: 1, or as many as --tp; any under megatron. [1]",
        MESH,
        without=DATA_PARALLEL,
    )

    def require_layout(self, layout: ParallelLayout, facts: Facts) -> None:
        """Refuse what expert parallelism does not divide, and what is not modelled beside it."""
        from zeroplan.core.expert_parallel import experts_of, require_experts

        spec, batch = facts.spec, facts.workload.batch
        if layout.etp not in (1, layout.tp):
            what = f"etp {layout.etp} is neither 1 nor tp {layout.tp}"
            remedy = "experts' matrices are whole, or shared as the dense ones are; --engine megatron has any"
            raise BadInput(what, where="--etp", remedy=remedy)
        if layout.etp > 1 and spec.has_shapes and not experts_of(spec.parameters):
            what = f"{spec.model_type or 'this model'} has no experts whose matrices could be shared"
            raise BadInput(what, where="--etp", remedy="leave it out")
        if layout.etp > 1 and layout.ep == 1:
            return  # the ranks of tp share all matrices
        tokens = batch.micro_batch * (batch.seq_len or 0) // layout.cp
        if layout.experts_across and tokens % layout.tp:
            what = f"tp {layout.tp} does not divide the {tokens:,} tokens of a micro batch, which its ranks exchange in parts"
            raise BadInput(what, where="--etp", remedy=f"use another --seq-len, or --etp {layout.tp}")
        self.require_apart(facts)
        require_experts(spec.parameters, spec.model_type, layout)
        self.require_half(facts, "shared experts are modelled in 16 bits")
        if batch.lengths:
            what = "batches of different lengths are not modelled with --ep"
            raise BadInput(what, where="--lengths", remedy="leave it out")


class OwnExpertsTechnique(Degree):
    """DeepSpeed's MoE layers (:class:`zeroplan.models.spec.OwnExperts`)."""

    name, where = "MoE layers", "model"
    engines = ("deepspeed",)
    refusal = "{engine} does not train DeepSpeed's MoE layers"
    remedy = "use --engine deepspeed"

    def require_model(self, facts: Facts) -> None:
        """Refuse a model with such layers under an engine that does not train them.

        Raises:
            BadInput: naming the model.
        """
        if facts.spec.own_experts is not None:
            self.require(ParallelLayout(1, 1), facts)

    def layout(self, facts: Facts, ep: int) -> ParallelLayout:
        """Return the layout of a module whose layers share their experts among `ep` ranks, beside data parallelism.

        Raises:
            BadInput: another `ep`, or other degrees.
        """
        if facts.degrees["ep"] not in (1, ep):
            what = f"{facts.degrees['ep']} differs from the layers' ep_size {ep}"
            raise BadInput(what, where="--ep", remedy="leave it out")
        other = next(
            (name for name, degree in facts.degrees.items() if name not in ("ep", "sp", "dp_replicate") and degree > 1), None
        )
        if other is not None:
            raise BadInput("is not modelled beside MoE layers", where=f"--{other}", remedy="leave it at 1")
        if facts.has("--lora-rank"):
            raise BadInput("adapters of MoE layers are not modelled", where="--lora-rank", remedy="leave it out")
        return ParallelLayout(facts.cluster.gpus, facts.cluster.nodes, ep=ep, own_experts=True)


class AutoEpTechnique(Degree):
    """AutoEP's layers in the place of blocks with experts."""

    name, where = "AutoEP", "--ep"
    engines = ("deepspeed",)

    def require_alone(self, facts: Facts) -> None:
        """Refuse other degrees and adapters."""
        other = next((name for name, degree in facts.degrees.items() if name not in ("ep", "sp") and degree > 1), None)
        if other is not None:
            where = f"--{other.replace('_', '-')}"
            raise BadInput("is not modelled beside AutoEP", where=where, remedy="leave it or --ep at 1")
        if facts.has("--lora-rank"):
            raise BadInput("adapters beside AutoEP are not modelled", where="--lora-rank", remedy="leave it out")

    def layout(self, facts: Facts) -> ParallelLayout:
        """Return the layout of a model whose blocks AutoEP replaces, beside data parallelism.

        Raises:
            BadInput: what AutoEP does not divide or take, and what is not modelled beside it.
        """
        from zeroplan.core.auto_ep import require_model

        ep, cluster = facts.degrees["ep"], facts.cluster
        require_model(facts.spec.parameters, facts.spec.model_type, ep)
        self.require_half(facts, "AutoEP is modelled in 16 bits")
        if facts.workload.batch.lengths:
            what = "batches of different lengths are not modelled with AutoEP"
            raise BadInput(what, where="--lengths", remedy="leave it out")
        sp = facts.degrees["sp"] > 1
        return ParallelLayout(cluster.gpus, cluster.nodes, sp=sp, ep=ep, own_experts=True, auto_ep=True)


OWN_EXPERTS, AUTO_EP = OwnExpertsTechnique(), AutoEpTechnique()
