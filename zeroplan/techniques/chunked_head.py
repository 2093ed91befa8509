"""Heads that compute fewer logits at once: TRL's chunked loss (:mod:`zeroplan.tape.chunked_head`), and the included runtime's,
which can leave out the tokens without a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.workload import ChunkedHead, Compilation, Workload
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique
from zeroplan.techniques.cut_cross_entropy import CutCrossEntropy
from zeroplan.techniques.liger import Liger, LigerTechnique

#: The engine that has a key of its own for it, and the tokens of one of its tiles.
_RUNTIME, _TOKENS = "zeroplan", 1024
#: Engines under which its figures are held to measured runs, or to their source.
_ENGINES = ("ddp", "deepspeed", "fsdp2", _RUNTIME)


class ChunkedHeadTechnique(Technique[ChunkedHead]):
    """TRL, or the included runtime by its own key, computes head and loss together in tiles."""

    name = "chunked head"
    kind = ChunkedHead
    where = "--chunked-head"
    labelled_share = Option[float | None](
        float,
        None,
        "Share of tokens with a label, if the head computes those alone (--engine zeroplan, TRL): 0.15.",
        WORK,
        wins=True,
    )
    chunked_head = Option(
        bool,
        False,
        "Head and loss in tiles, as TRL's SFTTrainer or --engine zeroplan runs them.",
        WORK,
        without=RUNS,
        page=True,
    )

    def value(self, asked: OptionValues, engine: TakesTechniques) -> ChunkedHead | None:
        """Return the head where a flag or a file asks for it."""
        if not asked[ChunkedHeadTechnique.chunked_head]:
            return None
        of_trl = "pairs" in asked.values or "kl_batch" in asked.values  # its losses of preferences
        return ChunkedHead() if of_trl else self.under(engine)

    def under(self, engine: TakesTechniques) -> ChunkedHead:
        """Return the head that runs under an engine."""
        return ChunkedHead(_TOKENS if engine.name == _RUNTIME else 0)

    def key(self, engine: TakesTechniques, program: str) -> str:
        """Return the key that switches on such a head, or what a program's key has in its place; empty where it has none.

        Liger's head keeps about as little (some 0.1 GiB more or less at 2,048 tokens of 1B), its other kernels save more, and
        the loss that torchtitan computes chunk by chunk has an eighth of the logits at a time.
        """
        if engine.name == _RUNTIME:
            return f"zeroplan.chunked_cross_entropy: {_TOKENS}"
        key = "loss.chunked" if program == "torchtitan" else LigerTechnique.head_key(program)
        return key and f"{key} keeps about as little"

    def leaves(self, asked: OptionValues, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return the share of tokens with a label."""
        share = asked[ChunkedHeadTechnique.labelled_share]
        if share is not None and not 0 < share <= 1:
            raise BadInput(f"{share} is no share of the tokens", where="--labelled-share", remedy="use 0.15 for 15 %")
        return super().leaves(asked, engine)

    def require(self, value: ChunkedHead, facts: Facts) -> None:
        """Refuse another fused head beside it."""
        super().require(value, facts)
        liger = facts.workload.technique(Liger)
        if liger is not None and "fused_loss" in liger.parts:
            raise BadInput(
                "its fused loss has a head of its own, beside the one in tiles",
                where=LigerTechnique.where,
                remedy="leave it out",
            )

    def available(self, engine: TakesTechniques, work: Workload) -> bool:
        """Return whether a run could have it in place of a head that keeps all logits, at the figures that plans have."""
        objective = work.objective
        other = work.batch.pairs or objective.kl_batch or objective.reference is not None or objective.pair_loss is not None
        fused = work.has(ChunkedHead) or work.has(Liger) or work.has(CutCrossEntropy) or work.has(Compilation)
        return engine.name in _ENGINES and not other and not fused

    def written(self, value: ChunkedHead, program: str) -> Mapping[str, Any]:
        """Return the loss of SFTTrainer, which computes it so, or the runtime's key."""
        if program == _RUNTIME:
            return {"chunked_cross_entropy": value.tokens}
        return {"loss_type": "nll"} if program == "trl" else {}

    def instructions(self, value: ChunkedHead) -> tuple[str, ...]:
        """Return who else computes it so."""
        return ("compute head and loss in tiles, as TRL's SFTTrainer does",)

    def described(self, value: ChunkedHead) -> Mapping[str, Any]:
        """Return what a report's JSON shows."""
        return {"chunked_head": True}
