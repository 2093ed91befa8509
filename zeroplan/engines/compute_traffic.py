"""The work that every engine does alike: matrix products, attention, memory-bound kernels, and issuing them.

Counted for one micro batch on one rank. A product of ``(tokens, in)`` with ``(in, out)`` takes 2 operations an element of
the matrix and token; the backward takes as many for the input's gradient and again for the weight's.
Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1; Korthikanti et al. 2022, appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import means
from zeroplan.ledger.traffic import Resource, WorkBuilder
from zeroplan.ledger.work import Counts, Matrices

#: A kernel reads about two operands for each result that it writes.
PASSES = 3
#: Bytes for an element that is cast from 16 bits to 8: read for the largest, read again, written, and written once more
#: transposed, since products of 8-bit floats take rows of both operands on Ada and Hopper.
#: Source: TransformerEngine, docs/examples/fp8_primer; torchao/float8/float8_scaling_utils.py
CAST_BYTES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFacts:
    """Amounts of work of the model's own computation in one micro batch."""

    tokens: int = means("micro batch × sequence length")
    seq_len: int = means("tokens a sequence")
    matrices: int = means("elements of all matrices that a token is multiplied with")
    trained_matrices: int = means("elements of the matrices that have a weight gradient")
    recomputed_matrices: int = means(
        "elements of matrices in checkpointed blocks, but for a block's last where nothing after it is saved"
    )
    attention: int = means("heads × head size, over all blocks")
    attention_ops: int = means("operations a query, key and channel: 4, halved by the causal mask")
    recomputed_attention: int = means("attention in checkpointed blocks")
    forward_kernels: int = means("kernels of the forward")
    backward_kernels: int = means("kernels of the backward, recomputation included")
    recomputed_kernels: int = means("kernels of the backward that recompute a forward")
    checkpoints: int = means("checkpointed segments that are run again")
    forward_written: int = means("bytes that the forward's kernels write")
    backward_written: int = means("bytes that the backward's kernels write")
    forward_modules: int = means("modules entered in the forward")
    recomputed_modules: int = means("modules entered again in recomputation")
    backward_modules: int = means("modules passed in the backward")
    fp32: bool
    fp8_matrices: int = means("elements of those matrices whose products take 8-bit floats", default=0)
    fp8_trained: int = means("elements of those whose weight gradients do, too", default=0)
    fp8_recomputed: int = means("elements of those that are recomputed", default=0)
    fp8_cast: int = means("elements that are cast to 8-bit floats for each token, in the forward", default=0)
    fp8_cast_back: int = means("elements that are cast to 8-bit floats for each token, in the backward", default=0)
    segments_remapped: int = means("segments that a full card's allocator returns and takes again", default=0)
    bytes_remapped: int = means("bytes of segments that a full card's allocator returns and takes again, both ways", default=0)
    pages_remapped: int = means("pages of expandable segments that it unmaps and maps again, both ways", default=0)


def compute_facts(
    model: Matrices,
    counts: Counts,
    workload: Workload,
    remapped: tuple[int, int, int] = (0, 0, 0),
    *,
    casts_counted: bool = False,
) -> ComputeFacts:
    """Derive the amounts for one micro batch.

    Args:
        model: its matrices.
        counts: kernels and bytes.
        workload: the run.
        remapped: segments, bytes and pages a step, of a run that fills its card.
        casts_counted: whether the counts hold casts to 8-bit floats, as those of a tape that was traced with them.
    """
    seq = workload.batch.seq_len or 0
    policy = workload.recomputation
    # Selective checkpointing keeps what products and attention made; else each k-th block is run again.
    again = 0 if policy is None else policy.every
    if policy is not None and policy.selective:
        again = 2 if policy.alternate else 0
    recomputed = max(0, model.blocks // again - counts.unfinished) if again else 0
    recipe = workload.technique(Float8Recipe)
    casts = recipe is not None and not casts_counted
    eight = model.blocks if recipe else 0  # the head stays in 16 bits
    return ComputeFacts(
        tokens=workload.batch.rows * seq,
        seq_len=seq,
        matrices=model.all,
        trained_matrices=model.trained,
        recomputed_matrices=recomputed,
        attention=model.attention,
        attention_ops=2 if model.causal else 4,
        recomputed_attention=model.attention // again if again else 0,
        forward_kernels=counts.forward_kernels,
        backward_kernels=counts.backward_kernels,
        recomputed_kernels=counts.recomputed_kernels,
        checkpoints=counts.checkpoints,
        forward_written=counts.forward_written,
        backward_written=counts.backward_written,
        forward_modules=counts.forward_modules,
        recomputed_modules=counts.recomputed_modules,
        backward_modules=counts.backward_modules,
        fp8_matrices=eight,
        fp8_trained=0 if recipe is Float8Recipe.ROWWISE_WITH_GW_HP else min(eight, model.trained),
        fp8_recomputed=recomputed if eight else 0,
        fp8_cast=model.inputs if casts else 0,
        fp8_cast_back=model.outputs + (model.inputs if again == 1 else 0) if casts else 0,
        fp32=workload.numerics.dtype is DType.FP32 and workload.numerics.precision is not Precision.AUTOCAST,
        segments_remapped=remapped[0],
        bytes_remapped=remapped[1],
        pages_remapped=remapped[2],
    )


def _matmul(c: ComputeFacts) -> Resource:
    return Resource.FP32_MATMUL if c.fp32 else Resource.MATMUL


_lines = WorkBuilder()


@_lines.add(_matmul, Phase.FORWARD)
def matmul_forward(c: ComputeFacts) -> int:
    """Matrix products of the forward."""
    return 2 * (c.matrices - c.fp8_matrices) * c.tokens


@_lines.add(_matmul, Phase.BACKWARD)
def matmul_backward(c: ComputeFacts) -> int:
    """Gradients of inputs, and of the weights that are trained."""
    return 2 * (c.matrices - c.fp8_matrices + c.trained_matrices - c.fp8_trained) * c.tokens


@_lines.add(_matmul, Phase.BACKWARD)
def matmul_recomputed(c: ComputeFacts) -> int:
    """Products of checkpointed blocks, once more."""
    return 2 * (c.recomputed_matrices - c.fp8_recomputed) * c.tokens


@_lines.add(Resource.FP8_MATMUL, Phase.FORWARD)
def fp8_forward(c: ComputeFacts) -> int:
    """Products of 8-bit floats in the forward: those of the blocks.

    Source: torchao/float8/float8_linear.py; TransformerEngine's modules, which leave the head alone likewise
    """
    return 2 * c.fp8_matrices * c.tokens


@_lines.add(Resource.FP8_MATMUL, Phase.BACKWARD)
def fp8_backward(c: ComputeFacts) -> int:
    """Gradients of inputs and of weights by 8-bit floats."""
    return 2 * (c.fp8_matrices + c.fp8_trained) * c.tokens


@_lines.add(Resource.FP8_MATMUL, Phase.BACKWARD)
def fp8_recomputed(c: ComputeFacts) -> int:
    """Products of 8-bit floats of checkpointed blocks, once more."""
    return 2 * c.fp8_recomputed * c.tokens


@_lines.add(Resource.ATTENTION, Phase.FORWARD)
def attention_forward(c: ComputeFacts) -> int:
    """Scores and their product with the values."""
    return c.attention_ops * c.attention * c.seq_len * c.tokens


@_lines.add(Resource.ATTENTION, Phase.BACKWARD)
def attention_backward(c: ComputeFacts) -> int:
    """Five products in place of two: the fused kernel recomputes the scores.

    Source: Dao 2023, "FlashAttention-2", section 4.1 (2.5 times the forward)
    """
    return fraction(c.attention_ops * c.attention * c.seq_len * c.tokens, 5, 2)


@_lines.add(Resource.ATTENTION, Phase.BACKWARD)
def attention_recomputed(c: ComputeFacts) -> int:
    """Attention of checkpointed blocks, once more."""
    return c.attention_ops * c.recomputed_attention * c.seq_len * c.tokens


@_lines.add(Resource.HBM, Phase.FORWARD)
def casts_forward(c: ComputeFacts) -> int:
    """The inputs of products of 8-bit floats, cast."""
    return CAST_BYTES * c.fp8_cast * c.tokens


@_lines.add(Resource.HBM, Phase.BACKWARD)
def casts_backward(c: ComputeFacts) -> int:
    """The gradients of their outputs, cast; with recomputation the inputs once more."""
    return CAST_BYTES * c.fp8_cast_back * c.tokens


@_lines.add(Resource.HBM, Phase.FORWARD)
def memory_forward(c: ComputeFacts) -> int:
    """Bytes read and written by the forward's kernels."""
    return PASSES * c.forward_written


@_lines.add(Resource.HBM, Phase.BACKWARD)
def memory_backward(c: ComputeFacts) -> int:
    """Bytes read and written by the backward's kernels."""
    return PASSES * c.backward_written


@_lines.add(Resource.KERNEL, Phase.FORWARD)
def kernels_forward(c: ComputeFacts) -> int:
    """Each kernel's start and end on the GPU."""
    return c.forward_kernels


@_lines.add(Resource.KERNEL, Phase.BACKWARD)
def kernels_backward(c: ComputeFacts) -> int:
    """Each kernel's start and end on the GPU."""
    return c.backward_kernels


@_lines.add(Resource.LAUNCH, Phase.FORWARD)
def launches_forward(c: ComputeFacts) -> int:
    """Kernels issued from the model's Python."""
    return c.forward_kernels


@_lines.add(Resource.LAUNCH, Phase.BACKWARD)
def launches_recomputed(c: ComputeFacts) -> int:
    """Kernels of checkpointed blocks, issued again from the model's Python."""
    return c.recomputed_kernels


@_lines.add(Resource.AUTOGRAD, Phase.BACKWARD)
def launches_backward(c: ComputeFacts) -> int:
    """Kernels issued by autograd's engine, which is compiled."""
    return c.backward_kernels - c.recomputed_kernels


@_lines.add(Resource.CHECKPOINT, Phase.BACKWARD)
def checkpoints_recomputed(c: ComputeFacts) -> int:
    """Segments run again: random states put back, a hook for every tensor that the segment saves.

    Source: torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator
    """
    return c.checkpoints


@_lines.add(Resource.SEGMENT, Phase.STEP)
def segments_returned(c: ComputeFacts) -> int:
    """On a full card: segments given back and taken again, each a call that waits for the device.

    Source: c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks
    """
    return c.segments_remapped


@_lines.add(Resource.MAPPING, Phase.STEP)
def segments_mapped(c: ComputeFacts) -> int:
    """On a full card: bytes of segments, unmapped and mapped anew."""
    return c.bytes_remapped


@_lines.add(Resource.PAGE, Phase.STEP)
def pages_mapped(c: ComputeFacts) -> int:
    """On a full card with expandable segments: each page unmapped and released, or created, mapped and made accessible.

    Source: c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment::map, unmapHandles
    """
    return c.pages_remapped


COMPUTE = _lines.ledger()
