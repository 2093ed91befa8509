"""Gradient checkpointing: the backward computes a part of the forward again.

What it does to the tape is traced: :class:`zeroplan.tape.options.Checkpointing` is how a model is checkpointed under an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.core.workload import CheckpointPolicy, GradientCheckpointing
from zeroplan.techniques.base import OptionValues, TakesTechniques, Technique
from zeroplan.techniques.older_transformers import before_5

_NOT_SEARCHED = (*SEARCHES, *RUNS)


class CheckpointingTechnique(Technique[GradientCheckpointing]):
    """Recomputed blocks. `reentrant`: whether checkpoints are so, which files alone say; before transformers 5 they were."""

    name = "gradient checkpointing"
    kind = GradientCheckpointing
    where = "--gradient-checkpointing"
    gradient_checkpointing = Option(
        bool,
        False,
        "Recompute blocks.",
        WORK,
        flag="--gradient-checkpointing/--no-gradient-checkpointing",
        found=True,
        page=True,
    )
    checkpoint_policy = Option(
        str,
        "full",
        "What that recomputes: full, selective (not products, attention), op or every:K. [full]",
        WORK,
        without=_NOT_SEARCHED,
        page=True,
        wins=True,
    )
    offload_checkpoints = Option(
        bool,
        False,
        "Inputs of recomputed blocks wait on the host (DeepSpeed's CheckpointHiddenStatesOffload; --engine deepspeed).",
        WORK,
        without=_NOT_SEARCHED,
    )
    reentrant = Option[bool | None](bool, None)
    off: ClassVar[Mapping[str, Any]] = {"gradient_checkpointing": False, "checkpoint_policy": "full"}

    def value(self, asked: OptionValues, engine: TakesTechniques) -> GradientCheckpointing | None:
        """Return what the backward recomputes; None where it keeps all."""
        policy = CheckpointPolicy.parse(asked[CheckpointingTechnique.checkpoint_policy])
        offload = asked[CheckpointingTechnique.offload_checkpoints]
        if not asked[CheckpointingTechnique.gradient_checkpointing]:
            if policy != CheckpointPolicy():
                remedy = "give --gradient-checkpointing as well"
                raise BadInput("a policy without checkpointing", where="--checkpoint-policy", remedy=remedy)
            if offload:
                what = "every block's input is offloaded where every block is recomputed as a whole"
                remedy = "use --gradient-checkpointing with --checkpoint-policy full"
                raise BadInput(what, where="--offload-checkpoints", remedy=remedy)
            return None
        reentrant = asked[CheckpointingTechnique.reentrant]
        return GradientCheckpointing(policy, reentrant=before_5(asked) if reentrant is None else reentrant, on_host=offload)

    def unlooped(self, value: GradientCheckpointing) -> str:
        """Return the policy, of which the loop has the plain one."""
        return "" if value.policy == CheckpointPolicy() else "verify's loop has no checkpoint policy"

    def instructions(self, value: GradientCheckpointing) -> tuple[str, ...]:
        """Return what no form says: every form switches plain checkpoints on."""
        said = [] if value.policy == CheckpointPolicy() else [f"recompute by the policy {value.policy}"]
        return (*said, *(["keep the inputs of recomputed blocks on the host"] if value.on_host else []))

    def described(self, value: GradientCheckpointing) -> Mapping[str, Any]:
        """Return the policy, and what is unusual of the way."""
        unusual = {
            "offload_checkpoints": (value.on_host, False),
            "checkpoint_interval": (value.interval, 1),
            "reentrant": (value.reentrant, False),
        }
        shown = {name: found for name, (found, usual) in unusual.items() if found != usual}
        return {"gradient_checkpointing": True, "checkpoint_policy": str(value.policy), **shown}
