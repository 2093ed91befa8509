"""Ulysses (``--ulysses``): DeepSpeed's sequence parallelism, whose ranks exchange heads for tokens around attention.

Source: DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py (UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter)
"""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.option import DATA_PARALLEL, MESH, Option
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Attention
from zeroplan.techniques.base import Degree, Facts


class UlyssesTechnique(Degree):
    """Ranks that share each sample's tokens by exchanging heads."""

    name, where, of_layout = "Ulysses", "--ulysses", ("ulysses",)
    ulysses = Option(
        int,
        1,
        "GPUs that share each sample's tokens by exchanging heads (DeepSpeed's sequence_parallel_size). [1]",
        MESH,
        without=("recommend", *DATA_PARALLEL),
        page=True,
    )

    def require_layout(self, layout: ParallelLayout, facts: Facts) -> None:
        """Refuse what DeepSpeed's Ulysses refuses, and what is not modelled beside it."""
        from zeroplan.core.tensor_parallel import PLANS

        ranks, where, work, spec = layout.ulysses, self.where, facts.workload, facts.spec
        if max(layout.tp, layout.cp, layout.pp, layout.ep) > 1:
            what, remedy = "Ulysses is modelled beside data parallelism alone", "leave --tp, --cp, --pp and --ep at 1"
            raise BadInput(what, where=where, remedy=remedy)
        if spec.model_type not in PLANS:
            what = f"Ulysses of {spec.model_type or 'this model'} is not modelled"
            raise BadInput(what, where=where, remedy=f"of {', '.join(PLANS)} it is")
        heads = int(spec.config["num_attention_heads"])
        groups = int(spec.config.get("num_key_value_heads") or heads)
        if heads % ranks:
            what = f"ulysses {ranks} does not divide the {heads} attention heads"
            raise BadInput(what, where=where, remedy=f"use a divisor of {heads}")
        if groups % ranks and ranks % groups:
            what = f"neither of ulysses {ranks} and the {groups} KV heads divides the other"
            raise BadInput(what, where=where, remedy=f"use a divisor or a multiple of {groups}")
        if (work.batch.seq_len or 0) % ranks:
            what = f"ulysses {ranks} does not divide the {work.batch.seq_len:,} tokens of a sample"
            raise BadInput(what, where=where, remedy=f"use a --seq-len that {ranks} divides")
        if work.batch.pairs or work.objective.reference is not None:
            what = "pairs of samples and references are not modelled with Ulysses"
            raise BadInput(what, where=where, remedy="leave it at 1")
        if work.numerics.attn is Attention.EAGER:
            what = "DeepSpeed's Ulysses drops masks, which eager attention needs"
            raise BadInput(what, where="--attn", remedy="use sdpa or flash")
