"""Pipeline parallelism: which blocks each stage has, and in which order a stage runs its micro batches.

Note [Stages]
    A model's blocks are divided evenly, and the embedding and the head count as one block each: stages of equal weight, the
    first ones one heavier where they do not divide. The embedding is on the first stage, the final norm and the head are on
    the last. Source: torchtitan, ``distributed/pipeline_parallel.py`` (``generate_llm_fqn_per_model_part``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from zeroplan.core.errors import BadInput
from zeroplan.core.parameters import Parameters
from zeroplan.core.tensor_parallel import EMBEDDING


class PipelineSchedule(StrEnum):
    """The orders in which stages run micro batches."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


#: Known elsewhere, and not modelled here.
_UNMODELLED = ("interleaved", "zero-bubble")


def schedule_of(name: str) -> PipelineSchedule:
    """Return the schedule called `name`.

    Raises:
        BadInput: a schedule that is unknown or not modelled.
    """
    known = ", ".join(PipelineSchedule)
    if name in _UNMODELLED:
        raise BadInput(f"the {name} schedule is not modelled", where="--schedule", remedy=f"use one of {known}")
    try:
        return PipelineSchedule(name)
    except ValueError:
        raise BadInput(f"unknown schedule {name[:40]!r}", where="--schedule", remedy=f"use one of {known}") from None


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage.

    Attributes:
        index: its number, counted from 0.
        stages: the number of stages.
        first: its first block.
        end: the block behind its last.
    """

    index: int
    stages: int
    first: int
    end: int

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm, the head and the loss."""
        return self.index == self.stages - 1

    def in_flight(self, schedule: PipelineSchedule, micro_batches: int) -> int:
        """Return the most micro batches of which the stage has run the forward and not yet the backward."""
        if schedule is PipelineSchedule.GPIPE:
            return micro_batches
        return min(self.stages - self.index, micro_batches)

    def order(self, schedule: PipelineSchedule, micro_batches: int) -> Iterator[tuple[bool, int]]:
        """Yield what the stage runs: whether it is a forward, and the number of the micro batch.

        Sources: Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
        Training", section 3.2 (1F1B).
        """
        ahead = self.in_flight(schedule, micro_batches)
        for number in range(ahead):
            yield True, number
        for number in range(micro_batches):
            yield False, number
            if number + ahead < micro_batches:
                yield True, number + ahead


def stages_of(blocks: int, stages: int) -> tuple[Stage, ...]:
    """Divide a number of blocks over stages. See Note [Stages].

    Raises:
        BadInput: fewer blocks than the stages need.
    """
    weight, heavier = divmod(blocks + 2, stages)
    found: list[Stage] = []
    end = 0
    for index in range(stages):
        first = end
        end += weight + (index < heavier) - (index == 0) - (index == stages - 1)
        if end <= first:
            raise BadInput(
                f"pp {stages} leaves a stage without any of the {blocks} blocks", where="--pp", remedy=f"use at most {blocks}"
            )
        found.append(Stage(index, stages, first, end))
    return tuple(found)


def block_number(name: str) -> int:
    """Return the number of a block from its full name, such as 3 from ``model.layers.3``."""
    return int(name.rpartition(".")[2])


def holds(stage: Stage, name: str, block: str) -> bool:
    """Return whether a stage has a parameter, by its full name and the name of its block (empty outside the blocks)."""
    if block:
        return stage.first <= block_number(block) < stage.end
    embedding = name.rpartition(".")[0].rpartition(".")[2] == EMBEDDING
    return stage.is_first if embedding else stage.is_last


def stage_parameters(parameters: Parameters, stage: Stage) -> Parameters:
    """Return the list of the parameters that one stage has."""
    kept = [
        p for p, (name, block) in enumerate(zip(parameters.names, parameters.blocks, strict=True)) if holds(stage, name, block)
    ]
    place = {p: at for at, p in enumerate(kept)}
    return replace(
        parameters,
        names=tuple(parameters.names[p] for p in kept),
        shapes=tuple(parameters.shapes[p] for p in kept),
        trainable=tuple(parameters.trainable[p] for p in kept),
        autocast=tuple(parameters.autocast[p] for p in kept),
        blocks=tuple(parameters.blocks[p] for p in kept),
        quantized=tuple(parameters.quantized[p] for p in kept) if parameters.quantized else (),
        modules=tuple(tuple(place[p] for p in owned if p in place) for owned in parameters.modules),
    )
