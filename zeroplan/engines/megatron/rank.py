"""One rank of Megatron-LM: its part of the model's parameters, and the buffers in which they and their gradients lie.

Note [Megatron's buffers]
    A model chunk's gradients lie in one buffer, in the reverse order of its parameters, and so do its parameters under the
    distributed optimizer. That begins each parameter at a multiple of 64 elements, and ends each bucket at a multiple of the
    data-parallel ranks and of 128. Buckets are as large as the buffer, unless gradients are reduced during the backward, and
    then only in the first pipeline stage's first chunk. Experts that ranks share have a buffer of their own, over their own
    data-parallel ranks. Each rank's optimizer has an even part of every bucket.
    Source: Megatron-Core 0.16.1, ``megatron/core/distributed/param_and_grad_buffer.py`` (``_ParamAndGradBuffer``),
    ``distributed_data_parallel.py``, ``megatron/core/optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.workload import DType
from zeroplan.engines.megatron.chunk import ChunkLayers
from zeroplan.engines.megatron.float8 import QuantizedOperands
from zeroplan.engines.megatron.shapes import Shapes
from zeroplan.engines.rank import Rank
from zeroplan.ledger.line import means

#: Bytes of TransformerEngine's workspace for matrix products, on Hopper and later, and before.
_ENGINE_WORKSPACE, _OLDER_WORKSPACE = (32 << 20) + 1024, 4 << 20


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter on this rank: elements, whether it is a shared expert's, whether embedding and head share it, and whether
    it is a matrix that TransformerEngine multiplies with.
    """

    numel: int
    expert: bool = False
    tied: bool = False
    multiplies: bool = False


@dataclass(frozen=True, slots=True)
class GradBuffer:
    """One contiguous buffer: elements with padding, those of each parameter's part that this rank's optimizer has, and bytes of
    one parameter in it.
    """

    numel: int
    shards: tuple[int, ...]
    element: int = 0


def grad_buffer(parameters: Sequence[Parameter], ranks: int, *, distributed: bool, bucket: int = 0) -> GradBuffer:
    """Lay parameters out in a buffer. See Note [Megatron's buffers].

    Args:
        parameters: of one chunk, in its order.
        ranks: over which gradients are reduced.
        distributed: the distributed optimizer's layout.
        bucket: elements after which a bucket ends; 0 for one bucket.
    """
    if not distributed:
        sizes = tuple(p.numel for p in reversed(parameters))
        return GradBuffer(sum(sizes), sizes)
    multiple = math.lcm(ranks, 128)
    start = at = 0
    inside: list[tuple[int, int]] = []
    shards: list[int] = []

    def close(end: int) -> int:
        """End the bucket, and return where the next one begins."""
        end = -(-end // multiple) * multiple
        limit = start + (end - start) // ranks  # the first rank's part
        shards.extend(min(last, limit) - first for first, last in inside if first < limit)
        inside.clear()
        return end

    for parameter in reversed(parameters):
        at = -(-at // 64) * 64
        if parameter.tied and inside:
            start = at = close(at)
        inside.append((at, at + parameter.numel))
        at += parameter.numel
        if parameter.tied or (bucket and at - start >= bucket):
            start = at = close(at)
    end = close(at) if inside else at
    return GradBuffer(end, tuple(shards))


@dataclass(frozen=True, kw_only=True)
class MegatronRank(Rank):
    """The first of a pipeline rank's ranks.

    Attributes:
        chunks: the parameters of each of its model chunks.
        frozen_numel: elements without gradient.
        distributed: whether it runs the distributed optimizer.
        bucket: elements of a bucket of its first chunk; 0 for one bucket.
        reduces_in_half: whether gradients are kept and reduced in the model's dtype.
        shapes: the sizes of its micro batch; None where Megatron's model is not known.
        parts: what of the model each chunk has.
        capability: of the GPU.
        pp_rank: its place in the pipeline, counted from 0.
        gathers_eight: whether the matrices themselves are in 8 bits (``--fp8-param-gather``).
    """

    chunks: tuple[tuple[Parameter, ...], ...]
    frozen_numel: int = means("elements without gradient", default=0)
    distributed: bool = True
    bucket: int = 0
    reduces_in_half: bool = False
    shapes: Shapes | None = None
    parts: tuple[ChunkLayers, ...] = ()
    capability: tuple[int, int] = (9, 0)
    pp_rank: int = 0
    gathers_eight: bool = False

    @property
    def eight(self) -> QuantizedOperands | None:
        """How the layers' operands are quantised; None for products of 16 bits."""
        return self.shapes.eight if self.shapes is not None else None

    @cached_property
    def buffers(self) -> tuple[GradBuffer, ...]:
        """The buffers of every chunk: of its dense parameters, then of its shared experts, those in 8 bits by themselves."""
        found = []
        for number, chunk in enumerate(self.chunks):
            bucket = self.bucket if not number else 0
            for expert, ranks in ((False, self.layout.shard_group), (True, self.layout.expert_shard_group)):
                for eight in (False, True):
                    members = [p for p in chunk if p.expert == expert and self._in_eight(p) == eight]
                    if members:
                        made = grad_buffer(members, ranks, distributed=self.distributed, bucket=bucket)
                        found.append(replace(made, element=self._eight_element if eight else self.element))
        return tuple(found)

    def _in_eight(self, parameter: Parameter) -> bool:
        """Return whether a parameter itself is in 8 bits."""
        return parameter.multiplies and self.eight is not None and self.gathers_eight

    def made_bytes(self, parameter: Parameter) -> int:
        """Return the bytes of a parameter as the model is made, before it moves into its buffer."""
        return (self._eight_element if self._in_eight(parameter) else self.element) * parameter.numel

    @property
    def _eight_element(self) -> int:
        """Bytes of one parameter of 8 bits in its buffer: none by blocks of 32, which are gathered by way of the gradients'.

        Source: megatron/core/distributed/param_and_grad_buffer.py (``reuse_grad_buf_for_mxfp8_param_ag``)
        """
        return 0 if self.eight is not None and self.eight.recipe is Float8Recipe.MXFP8 else 1

    @cached_property
    def element(self) -> int:
        """Bytes of one parameter."""
        return self.workload.numerics.dtype.bytes

    @cached_property
    def grad_element(self) -> int:
        """Bytes of one gradient in its buffer."""
        return self.element if self.reduces_in_half else DType.FP32.bytes

    @cached_property
    def held(self) -> int:
        """Elements of this rank's trained parameters."""
        return sum(p.numel for chunk in self.chunks for p in chunk)

    @cached_property
    def buffered(self) -> int:
        """Elements of the gradient buffers, padding included."""
        return sum(buffer.numel for buffer in self.buffers)

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of the parameters' memory: that of the buffers under the distributed optimizer, else their own."""
        if not self.distributed:
            return self.element * self.held
        return sum(buffer.element * buffer.numel for buffer in self.buffers)

    @cached_property
    def quantized(self) -> tuple[int, ...]:
        """Bytes of the copies in 8 bits of each matrix that the layers multiply with, beside the parameters' memory."""
        if self.eight is None:
            return ()
        beside = self.eight.directions - (self._eight_element if self.gathers_eight else 0)
        matrices = (p.numel for chunk in self.chunks for p in chunk if p.multiplies)
        return tuple(beside * self.eight.size(numel) for numel in matrices) if beside else ()

    @cached_property
    def history_bytes(self) -> int:
        """Bytes of the largest elements of earlier steps: three tensors' of a layer's forward, two of its backward, in fp32.

        Source: transformer_engine/pytorch/quantization.py (``DelayedScalingRecipeState``)
        """
        if self.eight is None or self.eight.recipe is not Float8Recipe.DELAYED or self.shapes is None:
            return 0
        layers = sum(p.multiplies for chunk in self.chunks for p in chunk)
        return 5 * DType.FP32.bytes * layers * self.shapes.model.fp8_amax_history_len

    @cached_property
    def quantized_bytes(self) -> int:
        """Bytes of all these copies."""
        return sum(self.quantized)

    @cached_property
    def stepped(self) -> int:
        """Elements that this rank's optimizer steps."""
        return sum(sum(buffer.shards) for buffer in self.buffers)

    @cached_property
    def masters(self) -> int:
        """Elements of fp32 masters: those that the optimizer steps, unless the parameters are in fp32 themselves."""
        return self.stepped if self.element < DType.FP32.bytes else 0

    @cached_property
    def grad_copies(self) -> int:
        """Elements of gradients that the step copies to fp32, since their buffer is not."""
        return self.masters if self.grad_element < DType.FP32.bytes else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one element of an optimizer state."""
        return DType.FP32.bytes

    @property
    def rest(self) -> int:
        """Elements that an optimizer of matrices leaves to another: none is modelled."""
        return 0

    @property
    def matrix(self) -> int:
        """Elements of matrices that an optimizer takes itself: none is modelled."""
        return 0

    # --- buffers that live for the whole run ------------------------------------------------------------------------------

    @cached_property
    def kept(self) -> dict[str, int]:
        """Bytes of each kind of buffer that the layers make once: the shared one, stand-ins for gradients, rotary angles, what
        dispatchers hold.
        """
        from zeroplan.engines.megatron.chunk import chunk_tape

        found: dict[tuple[str, tuple[int, ...]], int] = {}
        for part in self.parts if self.shapes is not None else ():
            assert self.shapes is not None
            for key, size in chunk_tape(self.shapes, part).kept.items():
                found[key] = max(size, found.get(key, 0))
        totals: dict[str, int] = {}
        for (kind, _), size in found.items():
            totals[kind] = totals.get(kind, 0) + size
        return totals

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of the buffer that Megatron's own layers share for what they gather and for scores."""
        return self.kept.get("shared", 0)

    @cached_property
    def stand_in_bytes(self) -> int:
        """Bytes of TransformerEngine's stand-ins for the gradients of weights, one for each shape."""
        return self.kept.get("stand-in", 0)

    @cached_property
    def rotary_bytes(self) -> int:
        """Bytes of the angles of rotary positions, in fp32."""
        return self.kept.get("rotary", 0)

    @cached_property
    def dispatcher_bytes(self) -> int:
        """Bytes of the probabilities and maps that dispatchers of tokens hold, one for each layer with experts."""
        return self.kept.get("dispatcher", 0)

    @cached_property
    def engine_workspace(self) -> int:
        """Bytes of TransformerEngine's workspace for matrix products."""
        if self.shapes is None or not self.shapes.model.uses_engine:
            return 0
        return _ENGINE_WORKSPACE if self.capability >= (9, 0) else _OLDER_WORKSPACE
