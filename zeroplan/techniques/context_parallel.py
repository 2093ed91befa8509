"""Context parallelism (``--cp``): torch's ring attention over parts of each sample (:mod:`zeroplan.trace.context_parallel`)."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.option import DATA_PARALLEL, MESH, Option
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Attention
from zeroplan.techniques.base import Degree, Facts

#: Mixtures with attention that torch's ring has no plan of ours for: latent, or with sinks and windows.
_OTHER_ATTENTION = ("deepseek_v2", "deepseek_v3", "gpt_oss")


class ContextParallelTechnique(Degree):
    """Ranks that share each sample's tokens by a ring."""

    name, where, of_layout = "context parallelism", "--cp", ("cp",)
    apart = ("--lora-rank",)
    cp = Option(
        int,
        1,
        "GPUs that share each sample's tokens (context parallelism: ring attention). [1]",
        MESH,
        without=DATA_PARALLEL,
        page=True,
    )

    def require_layout(self, layout: ParallelLayout, facts: Facts) -> None:
        """Refuse what torch's ``context_parallel`` does not take, and what is not modelled."""
        from zeroplan.core.expert_parallel import GROUPED
        from zeroplan.core.tensor_parallel import PLANS

        work, cp, model = facts.workload, layout.cp, facts.spec.model_type
        tokens, pieces = work.batch.seq_len or 0, 2 * cp * (layout.tp if layout.sp else 1)
        if tokens % pieces:
            what = f"cp {cp} divides each half of a sample" + (" and sp its parts" if layout.sp else "")
            what += f", and {tokens:,} tokens are no multiple of {pieces}"
            raise BadInput(what, where=self.where, remedy="use another --seq-len")
        if work.numerics.attn is not Attention.SDPA:
            raise BadInput("torch has ring attention for sdpa alone", where="--attn", remedy="use --attn sdpa")
        known = (*PLANS, *(name for name in GROUPED if name not in _OTHER_ATTENTION))
        if model not in known:
            what = f"context parallelism of {model or 'this model'} is not modelled"
            raise BadInput(what, where=self.where, remedy=f"of {', '.join(known)} it is")
        self.require_half(facts, "ring attention is modelled for 16 bits")
        self.require_apart(facts)
        if work.recomputation is not None and work.recomputation.selective:
            what = "selective checkpointing of ring attention is not modelled"
            raise BadInput(what, where="--checkpoint-policy", remedy="use full")
