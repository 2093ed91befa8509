"""Gathered weights that autograd keeps from a linear layer's forward, or its recomputation, to its backward.

Note [Saved weights]
    torch's linear layer saves the transposed weight, a view of the gathered block, wherever its input needs a gradient. When
    stage 3 releases the parameter, the view still holds the block; in the backward the parameter is gathered once more,
    into another block, and the saved one goes when the product's backward is done. DeepSpeed's own linear function
    (zero/linear.py) saves the parameter itself, whose storage the release takes away. Under autocast the layer saves a
    16-bit copy of the weight, not the gathered block. In a checkpointed block only the recomputation saves; what it saves
    torch's checkpointing keeps itself, and detaches where it needs a gradient (torch/utils/checkpoint.py,
    _recomputation_hook), which is again a view of the block: of DeepSpeed's linear function, too, trained weights stay.

Note [Weights of graphs]
    bitsandbytes' product of a 4-bit weight puts a view of the weight that it was given, packed as it was gathered, into an
    attribute of its graph's node, and not among the saved tensors, which a backward frees and checkpointing drops. So where
    the input needs a gradient the gathered block stays until the node goes: in a recomputation until its end, when its graph
    goes; otherwise until the loss goes, whether its block is checkpointed or not (player.py, Note [The kept loss]). A loop
    that keeps its last loss into the next step holds one whole base gathered between steps, and two in a backward.
    Reentrant checkpointing, whose forward makes no graph, would keep none of it; DeepSpeed's and the Trainer's is not.
    Source: bitsandbytes 0.50, autograd/_functions.py (MatMul4Bit: ctx.tensors); zero/partition_parameters.py (free_param).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from zeroplan.core.workload import Precision
from zeroplan.engines.case import Case
from zeroplan.engines.deepspeed.rank import DeepSpeedRank

if TYPE_CHECKING:  # formulas use this module, too, and need no tape
    from zeroplan.tape.expanded import ExpandedTape


#: The class of a layer that AutoTP divides (:class:`zeroplan.trace.auto_tp.Part`), which multiplies as torch's does.
AUTO_TP = "Part"


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The weights of linear layers that are saved, by module: by its forward, and by its recomputation.

    Attributes:
        forward: of modules that run with gradients in the forward.
        recomputation: of modules that run again in the backward.
    """

    forward: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recomputation: dict[int, tuple[int, ...]] = field(default_factory=dict)


def saved_weights(rank: DeepSpeedRank, tape: ExpandedTape, read: Mapping[int, tuple[int, ...]]) -> SavedWeights:
    """Return the weights that the rank's linear layers save; with DeepSpeed's linear function those that are trained and
    recomputed. See Note [Saved weights].

    Args:
        tape: of the model.
        read: parameters of modules that nobody calls, by the module that reads them (outside_reads.py).
    """
    own, trained = rank.zero.stage3.memory_efficient_linear, rank.parameters.trainable
    from zeroplan.tape.expanded import Op

    begin = tape.backward if tape.backward < len(tape) else 0
    rest = list(zip(tape.op[begin:], tape.arg[begin:], strict=True))
    recomputed = {module for op, module in rest if op == Op.ENTER}
    needed = {module for op, module in rest if op == Op.BWD_EXIT}  # their inputs have gradients
    packed = frozenset(rank.parameters.packed)
    found = SavedWeights()
    autocast = rank.workload.numerics.precision is Precision.AUTOCAST
    for reader, weights in read.items() if not autocast else ():
        (found.recomputation if reader in recomputed else found.forward)[reader] = weights
    if rank.workload.reentrant if own else autocast:
        return found
    for index, module in enumerate(tape.modules):
        weights = tuple(p for p in module.params if len(tape.params[p].shape) == 2 and p not in packed)
        if own:
            weights = tuple(p for p in weights if trained[p] and index in recomputed)
        if ("Linear" in module.type or module.type == AUTO_TP) and weights and index in needed:
            kept = found.recomputation if index in recomputed else found.forward
            kept[index] = (*kept.get(index, ()), *weights)
    return found


def weights_of_graphs(rank: DeepSpeedRank, tape: ExpandedTape) -> dict[int, tuple[int, ...]]:
    """Return the quantised weights that products keep in their graph, by module. See Note [Weights of graphs]."""
    from zeroplan.tape.expanded import Op

    packed = frozenset(rank.parameters.packed if rank.graph_weights else ())
    needed = {module for op, module in zip(tape.op, tape.arg, strict=True) if op == Op.BWD_EXIT} if packed else set()
    found = {}
    for index in needed:
        weights = tuple(p for p in tape.modules[index].params if p in packed)
        if weights:
            found[index] = weights
    return found


def saved_elements(case: Case) -> int:
    """Return the number of elements of the weights that the model's linear layers save, as far as a formula tells. See Note
    [Saved weights].

    Of the blocks that are recomputed, those of one at a time. A single rank's weights are its shards, unless they are fetched
    from the host.
    """
    zero, workload = case.zero, case.workload
    alone = case.layout.shard_group == 1 and not zero.offloads_param
    if zero.stage < 3 or zero.stage3.memory_efficient_linear or workload.numerics.precision is Precision.AUTOCAST or alone:
        return 0
    policy = workload.recomputation
    if case.layout.tp > 1:
        return _of_parts(case)
    kept = largest = 0
    for unit in case.spec.units:
        weights = sum(tensor.numel for tensor in unit.tensors if tensor.autocast and not tensor.quantized)
        again = unit.count // policy.every if policy is not None and unit.block else 0
        kept += weights * (unit.count - again)
        largest = max(largest, weights if again else 0)
    return kept + largest


def _of_parts(case: Case) -> int:
    """As :func:`saved_elements`, for a rank of AutoTP, whose parts of linear layers follow from its list of parameters."""
    parameters, policy = case.parameters, case.workload.recomputation
    sums: dict[str, int] = {}
    for shape, block, linear in zip(parameters.shapes, parameters.blocks, parameters.autocast, strict=True):
        sums[block] = sums.get(block, 0) + (prod(shape) if linear and len(shape) == 2 else 0)
    outside = sums.pop("", 0)
    blocks = list(sums.values())
    again = 0 if policy is None else len(blocks) // policy.every
    return outside + sum(blocks[again:]) + (max(blocks) if again else 0)
