"""Pipeline parallelism: which blocks each stage has.

Note [Stages]
    A model's blocks are divided evenly, and the embedding and the head count as one block each: stages of equal weight, the
    first ones one heavier where they do not divide. The embedding is on the first stage, the final norm and the head are on
    the last. With several chunks a rank (vpp) the pipeline has ranks × chunks such stages, and a rank has every `ranks`-th.
    Source: torchtitan, ``distributed/pipeline_parallel.py`` (``generate_llm_fqn_per_model_part``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroplan.core.errors import BadInput
from zeroplan.core.parameters import Parameters
from zeroplan.core.tensor_parallel import EMBEDDING


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: the blocks that follow one another on a rank.

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
                f"{stages} pipeline stages leave one without any of the {blocks} blocks",
                where="--pp",
                remedy=f"use pp × vpp of at most {(blocks + 2) // 2}",
            )
        found.append(Stage(index, stages, first, end))
    return tuple(found)


def chunks_of(blocks: int, ranks: int, chunks: int, rank: int) -> tuple[Stage, ...]:
    """Return the stages that one pipeline rank has. See Note [Stages].

    Raises:
        BadInput: fewer blocks than the stages need.
    """
    return stages_of(blocks, ranks * chunks)[rank::ranks]


def block_number(name: str) -> int:
    """Return the number of a block from its full name, such as 3 from ``model.layers.3``."""
    return int(name.rpartition(".")[2])


def holds(stage: Stage, name: str, block: str) -> bool:
    """Return whether a stage has a parameter, by its full name and the name of its block (empty outside the blocks)."""
    if block:
        return stage.first <= block_number(block) < stage.end
    embedding = name.rpartition(".")[0].rpartition(".")[2] == EMBEDDING
    return stage.is_first if embedding else stage.is_last


def stage_parameters(parameters: Parameters, stages: Sequence[Stage]) -> Parameters:
    """Return the list of the parameters that some stages have, in the model's order."""
    kept = [
        p
        for p, (name, block) in enumerate(zip(parameters.names, parameters.blocks, strict=True))
        if any(holds(stage, name, block) for stage in stages)
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
