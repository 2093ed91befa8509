"""The work that every engine does alike: matrix products, attention, memory-bound kernels, and issuing them.

Counted for one micro batch on one rank. A product of ``(tokens, in)`` with ``(in, out)`` takes 2 operations an element of
the matrix and token; the backward takes as many for the input's gradient and again for the weight's.
Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1; Korthikanti et al. 2022, appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.buffers import Phase
from zeroplan.core.float8 import Bf16Layers, Float8Recipe
from zeroplan.core.workload import Attention, DType, Precision, Workload
from zeroplan.ledger.derive import fraction
from zeroplan.ledger.line import fact
from zeroplan.ledger.traffic import Resource, WorkBuilder
from zeroplan.ledger.work import Counts, Matrices

#: A kernel reads about two operands for each result that it writes.
PASSES = 3
#: Bytes for an element that is cast from 16 bits to 8: read for the largest, read again, written, and written once more
#: transposed, since products of 8-bit floats take rows of both operands on Ada and Hopper.
#: Source: TransformerEngine, docs/examples/fp8_primer; torchao/float8/float8_scaling_utils.py
CAST_BYTES = 6


@dataclass(frozen=True)
class ComputeFacts:
    """Amounts of work of the model's own computation in one micro batch.

    Attributes:
        model: its matrices.
        counts: kernels, bytes and module calls.
        workload: the run.
        remapped: segments, bytes and pages a step, of a run that fills its card.
        cp: the ranks that share each sample's tokens.
    """

    model: Matrices
    counts: Counts
    workload: Workload
    remapped: tuple[int, int, int] = (0, 0, 0)
    cp: int = 1

    tokens = fact("micro batch × sequence length", lambda c: c.workload.batch.rows * c.seq_len // c.cp)
    seq_len = fact("tokens a sequence", lambda c: c.workload.batch.seq_len or 0)
    matrices = fact("elements of all matrices that a token is multiplied with", lambda c: c.model.all)
    trained_matrices = fact("elements of the matrices that have a weight gradient", lambda c: c.model.trained)
    recomputed_matrices = fact(
        "elements of matrices in checkpointed blocks, but for a block's last where nothing after it is saved",
        lambda c: max(0, c.model.blocks // c._again - c.counts.unfinished) if c._again else 0,
    )
    attention = fact("heads × head size, over all blocks", lambda c: c.model.attention)
    attention_ops = fact(
        "operations a query, key and channel: 4, halved by the causal mask where one kernel does it all",
        lambda c: 2 if c.model.causal and c.fused else 4,
    )
    recomputed_attention = fact("attention in checkpointed blocks", lambda c: c.model.attention // c._again if c._again else 0)
    forward_kernels = fact("kernels of the forward", lambda c: c.counts.forward_kernels)
    backward_kernels = fact("kernels of the backward, recomputation included", lambda c: c.counts.backward_kernels)
    recomputed_kernels = fact("kernels of the backward that recompute a forward", lambda c: c.counts.recomputed_kernels)
    checkpoints = fact("checkpointed segments that are run again", lambda c: c.counts.checkpoints)
    forward_written = fact("bytes that the forward's kernels write", lambda c: c.counts.forward_written)
    backward_written = fact("bytes that the backward's kernels write", lambda c: c.counts.backward_written)
    forward_modules = fact("modules entered in the forward", lambda c: c.counts.forward_modules)
    recomputed_modules = fact("modules entered again in recomputation", lambda c: c.counts.recomputed_modules)
    backward_modules = fact("modules passed in the backward", lambda c: c.counts.backward_modules)
    fp8_matrices = fact(  # the head stays in 16 bits
        "elements of those matrices whose products take 8-bit floats", lambda c: c._in_8_bits(c.model.blocks)
    )
    fp8_trained = fact(
        "elements of those whose weight gradients do, too",
        lambda c: 0 if c._recipe is Float8Recipe.ROWWISE_WITH_GW_HP else min(c.fp8_matrices, c.model.trained),
    )
    fp8_recomputed = fact("elements of those that are recomputed", lambda c: c._in_8_bits(c.recomputed_matrices))
    fp8_cast = fact(
        "elements that are cast to 8-bit floats for each token, in the forward",
        lambda c: c._in_8_bits(c.model.inputs) if c._casts else 0,
    )
    fp8_cast_back = fact(
        "elements that are cast to 8-bit floats for each token, in the backward",
        lambda c: c._in_8_bits(c.model.outputs + (c.model.inputs if c._again == 1 else 0)) if c._casts else 0,
    )
    segments_remapped = fact("segments that a full card's allocator returns and takes again", lambda c: c.remapped[0])
    bytes_remapped = fact(
        "bytes of segments that a full card's allocator returns and takes again, both ways", lambda c: c.remapped[1]
    )
    pages_remapped = fact("pages of expandable segments that it unmaps and maps again, both ways", lambda c: c.remapped[2])

    @property
    def fused(self) -> bool:
        """Whether one kernel does all of attention; eager attention multiplies what the mask then hides."""
        return self.workload.numerics.attn is not Attention.EAGER

    @property
    def fp32(self) -> bool:
        """Whether products are in fp32."""
        numerics = self.workload.numerics
        return numerics.dtype is DType.FP32 and numerics.precision is not Precision.AUTOCAST

    @cached_property
    def _again(self) -> int:
        """Each of how many blocks is run again, 0 for none: selective checkpointing keeps what products and attention made."""
        policy = self.workload.recomputation
        if policy is None:
            return 0
        return (2 if policy.alternate else 0) if policy.selective else policy.every

    @cached_property
    def _recipe(self) -> Float8Recipe | None:
        return self.workload.technique(Float8Recipe)

    def _in_8_bits(self, amount: int) -> int:
        """Return the part of an amount of all blocks that falls to those with 8-bit products."""
        kept, blocks = self.workload.technique(Bf16Layers), self.model.block_count
        if self._recipe is None:
            return 0
        return amount if kept is None else fraction(amount, len(kept.others(blocks)), blocks)

    @property
    def _casts(self) -> bool:
        return self._recipe is not None and not self.counts.casts


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
    """Five products in place of two: the fused kernel recomputes the scores, which eager attention keeps.

    Source: Dao 2023, "FlashAttention-2", section 4.1 (2.5 times the forward)
    """
    return fraction(c.attention_ops * c.attention * c.seq_len * c.tokens, 5 if c.fused else 4, 2)


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
