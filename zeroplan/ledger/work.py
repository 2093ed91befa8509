"""The computation of one micro batch: matrix products, attention, kernels, bytes written, module calls.

Kernels, bytes and module calls are counted on the tape where there is one. Without a tape they are estimated from the model's
matrices, by ratios that tapes of decoders and encoders have in common; `traced` is then False.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroplan.core.expert_parallel import of_experts
from zeroplan.core.model_config import CAUSAL_LM, text_config
from zeroplan.core.workload import Workload
from zeroplan.models.facts import experts_a_token, spec_facts
from zeroplan.models.spec import ModelSpec, Tensor
from zeroplan.tape.expanded import ExpandedTape, Mark, Op

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MATRICES = ("linear", "conv1d", "head")

#: Without a tape: kernels for each matrix in the forward and in the backward, and bytes written for each byte of a matrix's
#: output. Tapes of Llama, GPT-2 and BERT have 6.3, 7.5, 4.1 kernels in the forward and 10.1, 10.6, 7.3 in the backward.
KERNELS_FORWARD, KERNELS_BACKWARD = 6, 9
#: The projections of a block with a gated MLP.
MATRICES_OF_A_BLOCK = 7
WRITTEN_FORWARD, WRITTEN_BACKWARD = 4, 8


@dataclass(frozen=True, slots=True)
class Matrices:
    """A model's matrix products, in matrix elements that each token is multiplied with.

    Attributes:
        all: all matrices.
        trained: the matrices with a weight gradient.
        blocks: the matrices in blocks, which checkpointing recomputes.
        count: the number of matrices.
        outputs: elements that they write for each token.
        inputs: elements that they read for each token, each matrix by itself.
        attention: heads × head size, summed over the blocks.
        causal: whether attention is causal.
        block_count: the number of blocks.
        grouped: of `blocks`, experts' matrices, which grouped products multiply.
    """

    all: int
    trained: int
    blocks: int
    count: int
    outputs: int
    attention: int
    causal: bool
    inputs: int = 0
    block_count: int = 0
    grouped: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Kernels, bytes written and module calls of one micro batch. Recomputation counts as backward.

    Attributes:
        recomputed_kernels: the backward's kernels that are recomputation.
        checkpoints: the checkpointed segments that they run in.
        traced: whether a tape was counted; False for an estimate.
        unfinished: elements of the matrices whose product recomputation leaves out. It stops when every saved tensor is there
            again, and a product saves its operands before it runs. Source: torch/utils/checkpoint.py, _StopRecomputationError
        casts: whether casts to 8-bit floats are among the kernels and bytes.
    """

    forward_kernels: int
    backward_kernels: int
    forward_written: int
    backward_written: int
    forward_modules: int
    recomputed_modules: int
    backward_modules: int
    recomputed_kernels: int = 0
    checkpoints: int = 0
    traced: bool = True
    unfinished: int = 0
    casts: bool = False


def matrices(spec: ModelSpec) -> Matrices:
    """Return the matrix products of a model; of a mixture of experts, those that one token passes."""
    part = _active_experts(spec.config)
    whole = trained = blocks = count = outputs = inputs = grouped = 0
    for unit in spec.units:
        for tensor in unit.tensors:
            if not _multiplies(tensor, unit.name):
                continue
            elements, rows = tensor.numel, tensor.shape[-2]
            routed = of_experts(f"{unit.name}.{tensor.name}")
            if len(tensor.shape) == 3:
                elements, rows = round(elements * part), round(rows * tensor.shape[0] * part)
            elif tensor.kind == "conv1d":
                rows = tensor.shape[-1]
            elif routed:
                elements, rows = round(elements * part), round(rows * part)
            whole += elements * unit.count
            trained += elements * unit.count if tensor.trainable else 0
            blocks += elements * unit.count if unit.block else 0
            grouped += elements * unit.count if routed else 0
            count += unit.count
            outputs += rows * unit.count
            inputs += elements // max(1, rows) * unit.count * (round(tensor.shape[0] * part) if len(tensor.shape) == 3 else 1)
    if not spec.has_shapes:
        whole = trained = blocks = spec.params
    facts = spec_facts(spec)
    width = int((facts.heads or 0) * head_width(spec.config, facts.head_dim or 0) * (facts.layers or 0))
    depth = sum(unit.count for unit in spec.units if unit.block)
    causal = spec.auto_class in ("", CAUSAL_LM)
    return Matrices(whole, trained, blocks, count, outputs, width, causal, inputs, depth, grouped)


def head_width(config: Mapping[str, Any], usual: int) -> float:
    """Return the channels of a head that attention multiplies: the mean of a query's and a value's, which latent attention has
    apart.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.3
    """
    config = text_config(config)
    if not config.get("kv_lora_rank") or not config.get("multi_latent_attention", True):
        return usual
    values, turned = config.get("v_head_dim"), config.get("qk_rope_head_dim") or config.get("qk_pos_emb_head_dim")
    plain = config.get("qk_nope_head_dim") or config.get("qk_head_dim")
    if isinstance(values, int) and isinstance(turned, int) and isinstance(plain, int):
        return (plain + turned + values) / 2
    return usual


def _multiplies(tensor: Tensor, unit: str) -> bool:
    if tensor.kind in _MATRICES:
        return True
    name = f"{unit}.{tensor.name}".lower()
    return tensor.kind == "" and len(tensor.shape) >= 2 and not any(w in name for w in ("embed", "wte", "wpe", "conv"))


def _active_experts(config: Mapping[str, Any]) -> float:
    config = text_config(config)
    used = experts_a_token(config)
    total = next((config[name] for name in _EXPERTS if isinstance(config.get(name), int) and config[name] > 0), None)
    return min(1.0, used / total) if used and total else 1.0


def count_tape(tape: ExpandedTape) -> Counts:
    """The counts of an expanded tape. Each allocation is one kernel's output."""
    kernels, written, enters, passed = [0, 0], [0, 0], [0, 0], 0
    part = recomputed = checkpoints = unfinished = 0
    running: list[int] = []
    alloc, enter, leave, left, mark = Op.ALLOC, Op.ENTER, Op.EXIT, Op.BWD_ENTER, Op.MARK
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == alloc:
            kernels[part] += 1
            written[part] += aux
            recomputed += part and bool(running)
        elif op == enter:
            enters[part] += 1
            checkpoints += part and not running
            running.append(arg)
        elif op == leave:
            if running:  # T5's blocks are entered again before their gradients have arrived, which looks like the end of it
                running.pop()
        elif op == left:
            passed += 1
            if running:  # recomputation stops at the last tensor that is needed, inside its modules
                shapes = (tape.params[index].shape for index in tape.modules[running[-1]].params)
                unfinished += sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
                running.clear()
        elif op == mark and arg == Mark.BACKWARD_BEGIN:
            part = 1
    return Counts(
        *(kernels[0], kernels[1], written[0], written[1], enters[0], enters[1], passed),
        recomputed_kernels=int(recomputed),
        checkpoints=int(checkpoints),
        unfinished=unfinished,
    )


def scale_counts(one: Counts, two: Counts, micro_batch: int) -> Counts:
    """The counts at a micro batch, from those at micro batches 1 and 2: kernels are constant, bytes linear."""

    def line(first: int, second: int) -> int:
        return first + (second - first) * (micro_batch - 1)

    return Counts(
        one.forward_kernels,
        one.backward_kernels,
        line(one.forward_written, two.forward_written),
        line(one.backward_written, two.backward_written),
        one.forward_modules,
        one.recomputed_modules,
        one.backward_modules,
        one.recomputed_kernels,
        one.checkpoints,
        one.traced,
        one.unfinished,
        one.casts,
    )


def guess_counts(model: Matrices, workload: Workload, tokens: int) -> Counts:
    """Estimate the counts from the model's matrices, for a model without a tape."""
    written = model.outputs * tokens * workload.numerics.dtype.bytes
    again = 1 if workload.gradient_checkpointing else 0
    kernels = KERNELS_FORWARD * model.count
    return Counts(
        forward_kernels=kernels,
        backward_kernels=KERNELS_BACKWARD * model.count + again * kernels,
        forward_written=WRITTEN_FORWARD * written,
        backward_written=(WRITTEN_BACKWARD + again * WRITTEN_FORWARD) * written,
        forward_modules=2 * model.count,
        recomputed_modules=again * 2 * model.count,
        backward_modules=2 * model.count,
        recomputed_kernels=again * kernels,
        checkpoints=again * -(-model.count // MATRICES_OF_A_BLOCK),
        traced=False,
    )
