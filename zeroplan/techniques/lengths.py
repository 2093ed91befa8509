"""Samples that differ in length, padded batch by batch (:mod:`zeroplan.core.lengths`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zeroplan.core.lengths import read_lengths, sampled
from zeroplan.core.option import RUNS, WORK, Option
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.techniques.base import Facts, FileFacts, OptionValues, TakesTechniques, Technique

if TYPE_CHECKING:
    from zeroplan.tape.expanded import ExpandedTape


class LengthsTechnique(Technique[tuple[int, ...]]):
    """Lengths of samples. Files alone say `dynamic_padding`: the program pads each batch to its longest sample, at most
    ``seq_len``; and `longest_first`: the first micro batch holds the longest of the samples.
    """

    name = "lengths"
    kind = tuple
    where = "--lengths"
    in_forms = True
    leaf = "lengths"
    decides = "dynamic_padding"
    lengths = Option[str | Sequence[int] | None](
        object,
        None,
        "Samples' lengths, padded batch by batch: a file, or mean,max.",
        WORK,
        metavar="FILE|MEAN,MAX",
        text=str,
        without=RUNS,
    )
    dynamic_padding = Option(bool, False, merges=False)
    longest_first = Option(bool, False)
    engines = ("fsdp2", "ddp", "deepspeed", "fsdp")

    def leaves(self, asked: OptionValues, engine: TakesTechniques) -> Mapping[str, Any]:
        """Return the lengths of samples that are padded batch by batch; none where all are alike."""
        said = asked[LengthsTechnique.lengths]
        lengths = () if said is None else read_lengths(said) if isinstance(said, str) else sampled(said)
        return {**super().leaves(asked, engine), "lengths": lengths}

    def filled(self, value: bool, facts: FileFacts) -> Mapping[str, Any]:
        """Return that batches are padded, unless a flag says to which lengths."""
        return {"dynamic_padding": value and facts.flags[LengthsTechnique.lengths] is None}

    def left_out(self, value: tuple[int, ...], facts: Facts, tape: ExpandedTape | None) -> tuple[Unmodelled, ...]:
        """Return what batches of other lengths reserve, where the tape has none of them or the engine does not play them."""
        if self.taken_by(facts.engine) and tape is not None and tape.shapes:
            return ()
        return (Unmodelled("lengths", Effect.MORE, "what is reserved when batches differ in length"),)

    def instructions(self, value: tuple[int, ...]) -> tuple[str, ...]:
        """Return how batches are padded."""
        return ("pad each batch to its longest sample",)

    def described(self, value: tuple[int, ...]) -> Mapping[str, Any]:
        """Return the mean and the longest."""
        return {"lengths": {"mean": sum(value) / len(value), "max": max(value)}}
