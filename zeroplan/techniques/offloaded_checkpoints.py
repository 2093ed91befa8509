"""Inputs of recomputed blocks that wait on the host: as DeepSpeed's ``CheckpointHiddenStatesOffload`` lets them, and under
torch's engines by a function of autograd around each block, as Unsloth, LLaMA-Factory and axolotl have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import GradientCheckpointing, Workload
from zeroplan.techniques.base import Facts, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape


class OffloadedCheckpointsTechnique(Technique[GradientCheckpointing]):
    """Checkpoints on the host."""

    name = "offloaded checkpoints"
    kind = GradientCheckpointing
    where = "--offload-checkpoints"
    in_forms = True  # by the checkpointing's own
    engines = ("ddp", "fsdp2", "deepspeed")
    refusal = "checkpoints on the host are not planned under {engine}"
    remedy = "use --engine ddp, fsdp2 or deepspeed, or zeroplan with activation_checkpointing"
    apart = ("--task", "--pp", "--tp", "--compile", "--images", "--lengths")
    because = "checkpoints on the host are not modelled beside it"

    def of(self, workload: Workload) -> GradientCheckpointing | None:
        """Return the checkpointing whose inputs wait on the host."""
        return workload.technique(GradientCheckpointing) if workload.checkpoints_on_host else None

    def require(self, value: GradientCheckpointing, facts: Facts) -> None:
        """Refuse what neither way does, and what is not modelled beside it."""
        super().require(value, facts)
        if value.policy.selective or value.policy.every > 1:
            what = "every block's input is offloaded where every block is recomputed as a whole"
            raise BadInput(what, where=self.where, remedy="use --gradient-checkpointing with --checkpoint-policy full")
        if facts.has("--lora-rank") and not value.by_function:
            what = "DeepSpeed's context is not modelled beside adapters"
            raise BadInput(what, where="--lora-rank", remedy=f"leave it or {self.where} out")

    def expanded(self, value: GradientCheckpointing, tape: ExpandedTape, workload: Workload) -> ExpandedTape:
        """Return the tape in which the inputs leave and come back."""
        from zeroplan.tape.offloaded_checkpoints import with_checkpoints_by_function, with_offloaded_checkpoints

        return (with_checkpoints_by_function if value.by_function else with_offloaded_checkpoints)(tape)
