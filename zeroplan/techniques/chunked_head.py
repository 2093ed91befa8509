"""Heads that compute fewer logits at once: TRL's chunked loss (:mod:`zeroplan.tape.chunked_head`), and the included runtime's,
which can leave out the tokens without a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.option import WORK, Option
from zeroplan.core.workload import ChunkedHead
from zeroplan.techniques.base import Asked, TakesTechniques, Technique


class ChunkedHeadTechnique(Technique[ChunkedHead]):
    """TRL computes head and loss together in tiles, which files alone say."""

    name = "chunked head"
    kind = ChunkedHead
    where = "--from"
    labelled_share = Option[float | None](
        float,
        None,
        "Share of tokens with a label, if the head computes those alone (--engine zeroplan, TRL): 0.15.",
        WORK,
        wins=True,
    )
    chunked_head = Option(bool, False)

    def value(self, asked: Asked, engine: TakesTechniques) -> ChunkedHead | None:
        """Return the head where files ask for it."""
        return ChunkedHead() if asked[ChunkedHeadTechnique.chunked_head] else None

    def leaves(self, asked: Asked, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return the share of tokens with a label."""
        share = asked[ChunkedHeadTechnique.labelled_share]
        if share is not None and not 0 < share <= 1:
            raise BadInput(f"{share} is no share of the tokens", where="--labelled-share", remedy="use 0.15 for 15 %")
        return super().leaves(asked, engine)

    def described(self, value: ChunkedHead) -> Mapping[str, Any]:
        """Return what a report's JSON shows."""
        return {"chunked_head": True}
