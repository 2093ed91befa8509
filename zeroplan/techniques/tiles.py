"""DeepSpeed's tiles of tokens: ``TiledMLP``, and ``TiledFusedLogitsLoss`` for head and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.core.workload import CheckpointPolicy, TiledLoss, TiledMlp, Workload
from zeroplan.techniques.base import Asked, Facts, TakesTechniques, Technique

_ENGINES, _REFUSAL, _REMEDY = ("deepspeed",), "tiles are DeepSpeed's, and {engine} has none", "use --engine deepspeed"


def _read(tiles: int, where: str) -> int:
    if tiles < 0:
        raise BadInput(f"{tiles} is no number of tiles", where=where, remedy="use 2 or more")
    return tiles


def _require_tiles(tiles: int, most: int, where: str, workload: Workload) -> None:
    policy = workload.recomputation
    if policy is not None and policy != CheckpointPolicy():
        what = "selective checkpointing of tiles is not modelled"
        raise BadInput(what, where="--checkpoint-policy", remedy="use full")
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
    tiled_mlp = Option(
        int,
        0,
        "MLPs run in so many tiles of tokens (DeepSpeed's TiledMLP; --engine deepspeed). [0]",
        WORK,
        metavar="TILES",
        without=(*SEARCHES, *RUNS),
    )

    def value(self, asked: Asked, engine: TakesTechniques) -> TiledMlp | None:
        """Return the tiles that the option asks for."""
        tiles = _read(asked[TiledMlpTechnique.tiled_mlp], self.where)
        return TiledMlp(tiles) if tiles else None

    def described(self, value: TiledMlp) -> Mapping[str, Any]:
        """Return the tiles."""
        return {"tiled_mlp": value.tiles}

    def require(self, value: TiledMlp, facts: Facts) -> None:
        """Refuse more tiles than a rank has tokens of a sample."""
        super().require(value, facts)
        _require_tiles(value.tiles, _tokens(facts), self.where, facts.workload)


class TiledLossTechnique(Technique[TiledLoss]):
    """Head and loss that run tile by tile."""

    name = "tiled loss"
    kind = TiledLoss
    where = "--tiled-loss"
    engines, refusal, remedy = _ENGINES, _REFUSAL, _REMEDY
    apart = ("--task", "--lora-rank", "--pp", "--tp", "--ulysses", "loss")
    because = "a loss in tiles is not modelled beside it"
    tiled_loss = Option(
        int,
        0,
        "Head and loss run in so many tiles of tokens (DeepSpeed's TiledFusedLogitsLoss; --engine deepspeed). [0]",
        WORK,
        metavar="TILES",
        without=(*SEARCHES, *RUNS),
    )

    def value(self, asked: Asked, engine: TakesTechniques) -> TiledLoss | None:
        """Return the tiles that the option asks for."""
        tiles = _read(asked[TiledLossTechnique.tiled_loss], self.where)
        return TiledLoss(tiles) if tiles else None

    def described(self, value: TiledLoss) -> Mapping[str, Any]:
        """Return the tiles."""
        return {"tiled_loss": value.tiles}

    def require(self, value: TiledLoss, facts: Facts) -> None:
        """Refuse more tiles than tokens, what is not modelled beside a loss in tiles, and a head whose gradient is not
        complete with the loss.
        """
        super().require(value, facts)
        work = facts.workload
        _require_tiles(value.tiles, _tokens(facts) * work.batch.rows, self.where, work)
        if facts.spec.ties:
            raise BadInput(
                "the head is tied to the embedding, and DeepSpeed would reduce their gradient twice in a step",
                where=self.where,
                remedy="leave it out",
            )
