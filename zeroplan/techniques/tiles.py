"""DeepSpeed's tiles of tokens: ``TiledMLP``, and ``TiledFusedLogitsLoss`` for head and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from zeroplan.core.errors import BadInput
from zeroplan.core.option import RUNS, SEARCHES, WORK, Option
from zeroplan.core.workload import CheckpointPolicy, TiledLoss, TiledMlp
from zeroplan.techniques.base import Facts, OptionValues, TakesTechniques, Technique

_T = TypeVar("_T", bound=TiledMlp | TiledLoss)


def _tiles(help: str) -> Option[int]:
    return Option(int, 0, help, WORK, metavar="TILES", without=(*SEARCHES, *RUNS))


class _Tiled(Technique[_T]):
    """What runs tile by tile. The option's name is that by which a report's JSON shows the tiles."""

    engines = ("deepspeed",)
    refusal = "tiles are DeepSpeed's, and {engine} has none"
    remedy = "use --engine deepspeed"

    def value(self, asked: OptionValues, engine: TakesTechniques) -> _T | None:
        """Return the tiles that the option asks for."""
        tiles = asked[self.options[0]]
        if tiles < 0:
            raise BadInput(f"{tiles} is no number of tiles", where=self.where, remedy="use 2 or more")
        return self.kind(tiles) if tiles else None

    def described(self, value: _T) -> Mapping[str, Any]:
        """Return the tiles."""
        return {self.options[0].name: value.tiles}

    def require(self, value: _T, facts: Facts) -> None:
        """Refuse selective checkpointing, and more tiles than tokens."""
        super().require(value, facts)
        policy = facts.workload.recomputation
        if policy is not None and policy != CheckpointPolicy():
            what = "selective checkpointing of tiles is not modelled"
            raise BadInput(what, where="--checkpoint-policy", remedy="use full")
        most = self.most(facts, (facts.workload.batch.seq_len or 1) // facts.degrees["ulysses"])
        if value.tiles > most:
            what = f"{value.tiles:,} tiles of {most:,} tokens"
            raise BadInput(what, where=self.where, remedy="use 8, or fewer than tokens")

    def most(self, facts: Facts, tokens: int) -> int:
        """Return the tokens that are divided, of a rank's `tokens` of a sample."""
        return tokens


class TiledMlpTechnique(_Tiled[TiledMlp]):
    """MLPs that run tile by tile."""

    name = "tiled MLP"
    kind = TiledMlp
    where = "--tiled-mlp"
    tiled_mlp = _tiles("MLPs run in so many tiles of tokens (DeepSpeed's TiledMLP; --engine deepspeed). [0]")


class TiledLossTechnique(_Tiled[TiledLoss]):
    """Head and loss that run tile by tile."""

    name = "tiled loss"
    kind = TiledLoss
    where = "--tiled-loss"
    apart = ("--task", "--lora-rank", "--pp", "--tp", "--ulysses", "loss")
    because = "a loss in tiles is not modelled beside it"
    tiled_loss = _tiles(
        "Head and loss run in so many tiles of tokens (DeepSpeed's TiledFusedLogitsLoss; --engine deepspeed). [0]"
    )

    def most(self, facts: Facts, tokens: int) -> int:
        """Return the tokens of a micro batch."""
        return tokens * facts.workload.batch.rows

    def require(self, value: TiledLoss, facts: Facts) -> None:
        """Refuse a head whose gradient is not complete with the loss, too."""
        super().require(value, facts)
        if facts.spec.ties:
            raise BadInput(
                "the head is tied to the embedding, and DeepSpeed would reduce their gradient twice in a step",
                where=self.where,
                remedy="leave it out",
            )
