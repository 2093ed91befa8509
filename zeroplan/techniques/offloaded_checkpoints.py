"""Inputs of recomputed blocks that wait on the host, as DeepSpeed's ``CheckpointHiddenStatesOffload`` lets them."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import GradientCheckpointing, Workload
from zeroplan.techniques.base import Facts, Technique


class OffloadedCheckpointsTechnique(Technique[GradientCheckpointing]):
    """Checkpoints on the host."""

    name = "offloaded checkpoints"
    kind = GradientCheckpointing
    where = "--offload-checkpoints"
    in_forms = True  # by the checkpointing's own
    engines = ("deepspeed",)
    refusal = "checkpoints on the host by DeepSpeed's context are planned under DeepSpeed alone"
    remedy = "use --engine deepspeed, or zeroplan with activation_checkpointing"
    apart = ("--task", "--lora-rank", "--pp", "--tp", "--compile", "--images", "--lengths")
    because = "checkpoints on the host are not modelled beside it"

    def of(self, workload: Workload) -> GradientCheckpointing | None:
        """Return the checkpointing whose inputs wait on the host."""
        return workload.technique(GradientCheckpointing) if workload.checkpoints_on_host else None

    def require(self, value: GradientCheckpointing, facts: Facts) -> None:
        """Refuse what the context does not do, and what is not modelled beside it."""
        super().require(value, facts)
        if value.policy.selective or value.policy.every > 1:
            what = "every block's input is offloaded where every block is recomputed as a whole"
            raise BadInput(what, where=self.where, remedy="use --gradient-checkpointing with --checkpoint-policy full")
