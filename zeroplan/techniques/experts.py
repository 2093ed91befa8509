"""Experts that DeepSpeed shares: its MoE layers, of which each rank has its own experts, and AutoEP's, which take the place of
a mixture's blocks (:mod:`zeroplan.core.auto_ep`). Both follow from the model and the degrees, so that no workload carries them.
"""

from __future__ import annotations

from typing import Any

from zeroplan.techniques.base import Facts, Technique


class OwnExpertsTechnique(Technique[Any]):
    """DeepSpeed's MoE layers (:class:`zeroplan.models.spec.OwnExperts`)."""

    name = "MoE layers"
    kind = object
    where = "model"
    engines = ("deepspeed",)
    refusal = "{engine} does not train DeepSpeed's MoE layers"
    remedy = "use --engine deepspeed"

    def require_model(self, facts: Facts) -> None:
        """Refuse a model with such layers under an engine that does not train them.

        Raises:
            BadInput: naming the model.
        """
        if facts.spec.own_experts is not None:
            self.require(facts.spec.own_experts, facts)


class AutoEpTechnique(Technique[int]):
    """AutoEP's layers in the place of blocks with experts; the value is the degree of expert parallelism."""

    name = "AutoEP"
    kind = int
    where = "--ep"
    engines = ("deepspeed",)


OWN_EXPERTS, AUTO_EP = OwnExpertsTechnique(), AutoEpTechnique()
