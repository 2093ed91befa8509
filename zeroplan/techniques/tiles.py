"""DeepSpeed's tiles of tokens: ``TiledMLP``, and ``TiledFusedLogitsLoss`` for head and loss."""

from __future__ import annotations

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import ChunkedHead, Lora, TiledLoss, TiledMlp
from zeroplan.techniques.base import Facts, Technique

_ENGINES, _REFUSAL, _REMEDY = ("deepspeed",), "tiles are DeepSpeed's, and {engine} has none", "use --engine deepspeed"


def _require_tiles(tiles: int, most: int, where: str) -> None:
    if tiles > most:
        raise BadInput(f"{tiles:,} tiles of {most:,} tokens", where=where, remedy="use 8, or fewer than tokens")


def _tokens(facts: Facts) -> int:
    return (facts.workload.batch.seq_len or 1) // facts.degrees["ulysses"]


class TiledMlpTechnique(Technique[TiledMlp]):
    """MLPs that run tile by tile."""

    name = "tiled MLP"
    kind = TiledMlp
    where = "--tiled-mlp"
    engines, refusal, remedy = _ENGINES, _REFUSAL, _REMEDY

    def require(self, value: TiledMlp, facts: Facts) -> None:
        """Refuse more tiles than a rank has tokens of a sample.

        Raises:
            BadInput: naming the flag.
        """
        super().require(value, facts)
        _require_tiles(value.tiles, _tokens(facts), self.where)


class TiledLossTechnique(Technique[TiledLoss]):
    """Head and loss that run tile by tile."""

    name = "tiled loss"
    kind = TiledLoss
    where = "--tiled-loss"
    engines, refusal, remedy = _ENGINES, _REFUSAL, _REMEDY

    def require(self, value: TiledLoss, facts: Facts) -> None:
        """Refuse more tiles than tokens, what is not modelled beside a loss in tiles, and a head whose gradient is not
        complete with the loss.

        Raises:
            BadInput: naming it.
        """
        super().require(value, facts)
        work = facts.workload
        _require_tiles(value.tiles, _tokens(facts) * work.batch.rows, self.where)
        if any(tensor.tied_to is not None for unit in facts.spec.units for tensor in unit.tensors):
            raise BadInput(
                "the head is tied to the embedding, and DeepSpeed would reduce their gradient twice in a step",
                where=self.where,
                remedy="leave it out",
            )
        others = (
            ("--task", facts.task is not None),
            ("--lora-rank", work.has(Lora)),
            ("--pp", facts.degrees["pp"] > 1),
            ("--tp", facts.degrees["tp"] > 1),
            ("--ulysses", facts.degrees["ulysses"] > 1),
            ("loss", work.has(ChunkedHead) or work.objective.pair_loss is not None),
        )
        for where, asked in others:
            if asked:
                raise BadInput("a loss in tiles is not modelled beside it", where=where, remedy="leave one of the two out")
