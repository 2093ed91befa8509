"""Pipeline parallelism: which blocks each stage has.

Note [Stages]
    A model's blocks are divided evenly, and the embedding and the head count as one block each: stages of equal weight, the
    first ones one heavier where they do not divide; where all weigh one, the ends have no block. The embedding is on the first
    stage, the final norm and the head are on the last. With several chunks a rank (vpp) the pipeline has ranks × chunks such
    stages, and a rank has every `ranks`-th, or under a folded schedule one from each end (Note [Folded schedules] in
    ``pipeline_order.py``).
    Source: torchtitan, ``distributed/pipeline_parallel.py`` (``generate_llm_fqn_per_model_part``).

Note [Layers of a PipelineModule]
    DeepSpeed's ``PipelineModule`` divides a list of layers: here the embedding, each block, the final norm and the head. By
    ``parameters``, its default, the sums of trained parameters of the heaviest and of the lightest stage differ the least; by
    ``type:…`` the counts of the layers of a class do, which are the blocks; by ``uniform`` all stages have as many layers, the
    first ones one more. Source: DeepSpeed 0.19.8, runtime/pipe/module.py (``_partition_layers``), runtime/utils.py
    (``partition_balanced``, ``partition_uniform``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from zeroplan.core.errors import BadInput
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.pipeline_order import PipelineSchedule
from zeroplan.core.tensor_parallel import EMBEDDING
from zeroplan.core.workload import Workload

#: Classes of the layers that are no blocks.
_OTHER_LAYERS = ("Embedding", "RMSNorm", "Linear")


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: the blocks that follow one another on a rank.

    Attributes:
        index: its number, counted from 0.
        stages: the number of stages.
        first: its first block.
        end: the block behind its last.
        tied: the head is the embedding's matrix, which the last stage has as well (``TiedLayerSpec``).
    """

    index: int
    stages: int
    first: int
    end: int
    tied: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm, the head and the loss."""
        return self.index == self.stages - 1


def stages_of(blocks: int, stages: int) -> tuple[Stage, ...]:
    """Divide a number of blocks over stages. See Note [Stages]. Raises BadInput: fewer blocks than the stages need."""
    weight, heavier = divmod(blocks + 2, stages)
    found: list[Stage] = []
    end = 0
    for index in range(stages):
        first = end
        end += weight + (index < heavier) - (index == 0) - (index == stages - 1)
        if end < first or (end == first and 0 < index < stages - 1):
            raise BadInput(
                f"{stages} pipeline stages leave one without any of the {blocks} blocks",
                where="--pp",
                remedy=f"use pp × vpp of at most {blocks + 2}",
            )
        found.append(Stage(index, stages, first, end))
    return tuple(found)


def even_stages(blocks: int, stages: int) -> tuple[Stage, ...]:
    """Divide a number of blocks evenly over stages, as Megatron-LM does; the first ones have one more where that is not even.

    Raises:
        BadInput: more stages than blocks.
    """
    if stages > blocks:
        raise BadInput(
            f"{stages} pipeline stages for {blocks} blocks", where="--pp", remedy=f"use pp × vpp of at most {blocks}"
        )
    weight, heavier = divmod(blocks, stages)
    ends = [weight * index + min(index, heavier) for index in range(stages + 1)]
    return tuple(Stage(index, stages, ends[index], ends[index + 1]) for index in range(stages))


def chunks_of(
    blocks: int, ranks: int, chunks: int, rank: int, schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
) -> tuple[Stage, ...]:
    """Return the stages that one pipeline rank has. See Note [Stages]. Raises BadInput: fewer blocks than the stages need."""
    stages = stages_of(blocks, ranks * chunks)
    return tuple(stages[schedule.stage_of(chunk, rank, ranks)] for chunk in range(chunks))


def received_of(stages: Sequence[Stage]) -> int:
    """Return the tensors that a rank with these stages receives for each micro batch: for each an input unless it is the
    pipeline's first, and a gradient unless it is the last.
    """
    return sum((not stage.is_first) + (not stage.is_last) for stage in stages)


def hidden_bytes_of(workload: Workload, layout: ParallelLayout, hidden_size: int) -> int:
    """Return the bytes of one micro batch's hidden states, which pipeline stages send each other.

    Under sequence parallelism each tensor-parallel rank sends its tokens. Source: torchtitan, ``models/llama3/parallelize.py``
    (``apply_tp``), whose blocks take and return ``Shard(1)``.
    """
    tokens = (workload.batch.seq_len or 1) // (layout.cp * layout.token_parts)
    return workload.batch.micro_batch * tokens * hidden_size * workload.numerics.dtype.bytes


def recomputed_groups(stage: Stage, interval: int) -> tuple[int, int, int]:
    """Return the groups of blocks that a ``PipelineModule``'s stage recomputes together: their size, the first block, and the
    one behind the last.

    A stage's layers are grouped from its first on. A group with the embedding, the final norm or the head is not recomputed, as
    where ``checkpointable_layers`` names the blocks' class alone. Source: runtime/pipe/module.py (``forward``)
    """
    begin = min(stage.first + (interval - 1 if stage.is_first else 0), stage.end)
    end = begin + (stage.end - begin) // interval * interval if stage.is_last else stage.end
    return interval, begin, end


def layer_stages(parameters: Parameters, stages: int, method: str) -> tuple[Stage, ...]:
    """Divide a model's layers over the stages of a ``PipelineModule``. See Note [Layers of a PipelineModule].

    Args:
        parameters: the whole model's.
        method: ``parameters``, ``uniform`` or ``type:`` and a pattern, as DeepSpeed's ``partition_method``.

    Raises:
        BadInput: an unknown method, or stages that are empty or part the final norm from the head.
    """
    numbers = sorted({block_number(block) for block in parameters.blocks if block})
    layers = ["embedding", *numbers, "norm", "head"]
    outside = [
        name
        for name, shape, block in zip(parameters.names, parameters.shapes, parameters.blocks, strict=True)
        if not block and len(shape) > 1
    ]
    tied = all(_is_embedding(name) for name in outside)
    kind, of_class, pattern = method.lower().partition(":")
    if method.lower() == "uniform":
        bounds = _uniform(len(layers), stages)
    elif method.lower() == "parameters":
        counts = dict.fromkeys(layers, 0)
        for name, shape, block, on in zip(
            parameters.names, parameters.shapes, parameters.blocks, parameters.trainable, strict=True
        ):
            part = "embedding" if _is_embedding(name) else "head" if len(shape) > 1 else "norm"
            counts[block_number(block) if block else part] += math.prod(shape) if on else 0
        counts["head"] += counts["embedding"] if tied else 0
        bounds = _balanced(tuple(counts.values()), stages)
    elif kind == "type" and of_class:
        _require_blocks(pattern)
        bounds = _balanced(tuple(int(layer in numbers) for layer in layers), stages)
    else:
        raise BadInput(
            f"unknown way to partition {method[:40]!r}",
            where="--partition",
            remedy="use parameters, uniform or type:decoder, of which the blocks are counted",
        )
    last = len(layers)
    if any(end <= begin for begin, end in pairwise(bounds)):
        raise BadInput(f"{stages} stages leave one without any of the {last} layers", where="--pp", remedy="use fewer stages")
    if bounds[-2] > last - 2:
        raise BadInput(
            f"{stages} stages, divided by {method}, part the final norm from the head, which is not modelled",
            where="--pp",
            remedy="use another --pp or --partition",
        )
    blocks = [max(0, min(at - 1, len(numbers))) for at in bounds]
    return tuple(Stage(index, stages, blocks[index], blocks[index + 1], tied) for index in range(stages))


def _require_blocks(pattern: str) -> None:
    """Refuse a pattern of ``type:`` that is none, or that other layers than the blocks have in their class's name.

    What the class of the blocks is called is the program's own, so that no other pattern can be refused.
    """
    try:
        found = [name for name in _OTHER_LAYERS if re.search(pattern, name, re.IGNORECASE)]
    except re.error as error:
        raise BadInput(f"{pattern[:40]!r} is no pattern: {error}", where="--partition", remedy="use type:decoder") from None
    if found:
        raise BadInput(
            f"{pattern[:40]!r} counts {found[0]} as well, and blocks alone are modelled",
            where="--partition",
            remedy="use type:decoder",
        )


def _uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Return where each stage begins, and the end: as many layers each, the first stages one more."""
    each, more = divmod(layers, stages)
    return tuple(index * each + min(index, more) for index in range(stages + 1))


@lru_cache(maxsize=8)
def _balanced(weights: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return where each stage begins, and the end, so that the heaviest and the lightest stage differ the least.

    By dynamic programming over prefixes; of cuts that are equally good the last is taken. Each cut minds the best division of
    what is before it alone, so that the whole need not be the best one: it is DeepSpeed's.
    """
    count = len(weights)
    if count <= stages:
        return _uniform(count, stages)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: list[tuple[float, float]] = [(0, math.inf)] + [(math.inf, math.inf)] * count  # heaviest and lightest of a prefix
    cuts: list[list[int]] = []
    for stage in range(1, stages + 1):
        now: list[tuple[float, float]] = [(math.inf, math.inf)] * (count + 1)
        cut = [0] * (count + 1)
        for end in range(stage, count + 1):
            least = math.inf
            for begin in range(stage - 1, end):
                heaviest, lightest = best[begin]
                weight = sums[end] - sums[begin]
                heaviest, lightest = max(heaviest, weight), min(lightest, weight)
                if heaviest - lightest <= least:
                    least, now[end], cut[end] = heaviest - lightest, (heaviest, lightest), begin
        best = now
        cuts.append(cut)
    bounds = [count]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return tuple(reversed(bounds))


def _is_embedding(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] == EMBEDDING


def block_number(name: str) -> int:
    """Return the number of a block from its full name, such as 3 from ``model.layers.3``."""
    return int(name.rpartition(".")[2])


def holds(stage: Stage, name: str, block: str) -> bool:
    """Return whether a stage has a parameter, by its full name and the name of its block (empty outside the blocks)."""
    if block:
        return stage.first <= block_number(block) < stage.end
    if _is_embedding(name):
        return stage.is_first or (stage.tied and stage.is_last)
    return stage.is_last


def stage_parameters(parameters: Parameters, stages: Sequence[Stage]) -> Parameters:
    """Return the list of the parameters that some stages have, in the model's order."""
    kept = [
        p
        for p, (name, block) in enumerate(zip(parameters.names, parameters.blocks, strict=True))
        if any(holds(stage, name, block) for stage in stages)
    ]
    place = {p: at for at, p in enumerate(kept)}
    modules = [tuple(place[p] for p in owned if p in place) for owned in parameters.modules]
    if any(stage.tied for stage in stages):  # a stage makes one module of those that share a matrix
        seen: set[int] = set()
        for at, owned in enumerate(modules):
            modules[at] = tuple(p for p in owned if p not in seen)
            seen.update(owned)
    return replace(
        parameters,
        names=tuple(parameters.names[p] for p in kept),
        shapes=tuple(parameters.shapes[p] for p in kept),
        trainable=tuple(parameters.trainable[p] for p in kept),
        autocast=tuple(parameters.autocast[p] for p in kept),
        blocks=tuple(parameters.blocks[p] for p in kept),
        quantized=tuple(parameters.quantized[p] for p in kept) if parameters.quantized else (),
        modules=tuple(modules),
    )
