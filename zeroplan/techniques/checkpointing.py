"""Gradient checkpointing: the backward computes a part of the forward again.

What it does to the tape is traced: :class:`zeroplan.tape.options.Checkpointing` is how a model is checkpointed under an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.core.workload import CheckpointPolicy, GradientCheckpointing
from zeroplan.techniques.base import FileFacts, OptionValues, TakesTechniques, Technique
from zeroplan.techniques.older_transformers import before_5

_NOT_SEARCHED = (*SEARCHES, *RUNS)
#: What files may ask for beside which inputs on the host are not modelled, and tasks of one plain forward.
_NOT_BESIDE = ("compile", "images", "lengths", "checkpoint_policy")
_PLAIN = ("", "sft", "pretrain")


class CheckpointingTechnique(Technique[GradientCheckpointing]):
    """Recomputed blocks. `reentrant`: whether checkpoints are so, which files alone say; before transformers 5 they were."""

    name = "gradient checkpointing"
    kind = GradientCheckpointing
    where = "--gradient-checkpointing"
    decides = "offload_checkpoints"
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
        "Inputs of recomputed blocks wait on the host (DeepSpeed's CheckpointHiddenStatesOffload; else as Unsloth's do).",
        WORK,
        without=_NOT_SEARCHED,
        merges=False,
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
        if reentrant is None:
            reentrant = before_5(asked)
        own = offload and engine.name != "deepspeed"  # a function of autograd runs a block again as a reentrant checkpoint does
        return GradientCheckpointing(policy, reentrant=reentrant or own, on_host=offload, by_function=own)

    def filled(self, value: Any, facts: FileFacts) -> Mapping[str, Any] | Unmodelled:
        """Return that inputs wait on the host, where files ask for a function that is planned; else it is left out."""
        beside = any(one.values.get(name) for name in _NOT_BESIDE for one in (facts.files, facts.flags))
        beside = beside or facts.degrees or facts.task not in _PLAIN
        if beside or facts.engine.name not in ("ddp", "fsdp2"):
            says = "checkpoints wait on the host; they are counted on the GPU"
            return Unmodelled(facts.key(CheckpointingTechnique.offload_checkpoints), Effect.LESS, says)
        return {"offload_checkpoints": bool(value)}

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
