"""Lengths of samples under dynamic padding, and the batches that come of them.

A batch is as long as its longest sample (transformers' ``DataCollatorWithPadding``), so micro batches differ in length. The
longest decides what is allocated. What is reserved grows by the changes: a block that served one length does not serve a longer
one. So a run is simulated over batches that are drawn from the lengths, the longest last.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from zeroplan.core.errors import BadInput

#: Batches that are drawn, and the seed: the same lengths give the same answer everywhere.
BATCHES, SEED = 24, 0
_WHERE = "--lengths"
_MOST_TEXT = 64 << 20
#: Samples that stand for a distribution of which mean and maximum alone are known.
_QUANTILES = 1000


def read_lengths(text: str) -> tuple[int, ...]:
    """Return the samples' lengths: those of a file (one a line, or a JSON list), or of ``mean,max``.

    Of a mean and a maximum the distribution is taken to be exponential, cut at the maximum.

    Raises:
        BadInput: neither, or no whole numbers above zero.
    """
    mean, comma, most = text.partition(",")
    if comma and mean.strip().isdigit() and most.strip().isdigit():
        return _exponential(int(mean), int(most))
    path = Path(text)
    if not path.is_file():
        raise BadInput(
            f"{text[:60]!r} is no file", where=_WHERE, remedy="give a file of lengths, or a mean and a maximum: 512,4096"
        )
    if path.stat().st_size > _MOST_TEXT:
        raise BadInput(f"{path.name} has more than 64 MiB", where=_WHERE, remedy="give a sample of the lengths")
    try:
        content = path.read_text(encoding="utf-8-sig").strip()
        found = json.loads(content) if content.startswith("[") else [int(line) for line in content.split()]
    except (OSError, ValueError, RecursionError):
        raise BadInput(f"{path.name} holds no whole numbers", where=_WHERE, remedy="write one length a line") from None
    return sampled(found, f"{_WHERE} {path.name}")


def sampled(lengths: Sequence[int], where: str = _WHERE) -> tuple[int, ...]:
    """Return at most a thousand lengths that stand for all, evenly spaced in ascending order, the longest among them.

    Raises:
        BadInput: none, or some that are no whole numbers above zero.
    """
    if not lengths or not all(isinstance(one, int) and not isinstance(one, bool) and 0 < one < 1 << 31 for one in lengths):
        raise BadInput("no lengths above zero", where=where, remedy="write one whole number for each sample")
    ordered = sorted(lengths)
    if len(ordered) <= _QUANTILES:
        return tuple(ordered)
    return (*(ordered[at * len(ordered) // _QUANTILES] for at in range(1, _QUANTILES)), ordered[-1])


def _exponential(mean: int, most: int) -> tuple[int, ...]:
    if not 0 < mean <= most < 1 << 31:
        raise BadInput(f"a mean of {mean} and a maximum of {most}", where=_WHERE, remedy="give a mean of at most the maximum")
    ranks = ((at + 0.5) / _QUANTILES for at in range(_QUANTILES - 1))
    return (*(min(most, max(1, round(-mean * math.log(1 - rank)))) for rank in ranks), most)


def padded_batches(lengths: Sequence[int], micro_batch: int, *, cut: int | None = None) -> tuple[int, ...]:
    """Draw batches of `micro_batch` samples and return each one's length, the longest that there can be last.

    Args:
        lengths: of the samples, of which each is drawn as often as any other.
        cut: samples are cut at so many tokens; None cuts none.
    """
    chance = random.Random(SEED)
    drawn = [max(chance.choices(lengths, k=min(micro_batch, 4096))) for _ in range(BATCHES)]
    found = [*drawn, max(lengths)]
    return tuple(found if cut is None else (min(one, cut) for one in found))
