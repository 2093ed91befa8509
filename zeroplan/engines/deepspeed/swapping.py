"""Tensors that NVMe offload keeps in files, in locked buffers and in memory on one rank (stage 3).

Note [Swapping]
    A tensor of fewer than max(1 MiB, ``aio.block_size``) bytes is not worth a file. Files and buffers hold whole multiples of
    ``1024 × aio.intra_op_parallelism`` bytes. Buffers are allocated to the page and locked by ``mlock``, not by CUDA
    (``new_cpu_locked_tensor``), so nothing is rounded to a power of two and the device maps nothing.

    Parameters go to files one by one when they are made (``zero.Init``), small ones to pinned memory; the files stay. Then
    sub-groups move to one flat pinned buffer of at most ``max_in_cpu`` elements, as long as each fits whole. Where one did
    not, a buffer as large as the largest sub-group collects what the step updated on its way to the files.

    A sub-group's masters, states and gradients have files of their own, gradients one a parameter, without the rest that is
    not aligned: that and small ones stay on the GPU until the step.

Paths of sources are those of DeepSpeed 0.19.8 under ``deepspeed/runtime/``: swap_tensor/utils.py, optimizer_utils.py and
partitioned_param_swapper.py; zero/partition_parameters.py, _partition_param; zero/stage3.py,
_create_param_groups_fp16_flat_cpu_memory, _create_fp16_partitions_with_defragmentation. Counts are elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.deepspeed.resolved_config import ResolvedConfig

#: swap_tensor/utils.py, AIO_ALIGNED_BYTES: for each of a request's threads.
_ALIGNED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Swapping:
    """The rule by which tensors of one configuration go to files, and their alignment there.

    Attributes:
        least: bytes from which on a tensor goes to a file.
        aligned: bytes that files and buffers are multiples of.
    """

    zero: ZeroConfig
    least: int
    aligned: int

    @classmethod
    def of(cls, zero: ZeroConfig, resolved: ResolvedConfig) -> Swapping:
        """Return the rules that a ZeRO config and its resolved widths give."""
        return cls(zero, resolved.least_swapped, _ALIGNED_BYTES * zero.aio.intra_op_parallelism)

    def whole(self, count: int, width: int) -> int:
        """Round `count` elements up to the alignment."""
        step = self.aligned // width
        return -(-count // step) * step

    def swaps(self, count: int, width: int) -> bool:
        """Return whether a tensor goes to a file."""
        return count * width >= self.least

    # --- parameters -----------------------------------------------------------------------------------------------------

    def param_files(self, shards: Iterable[int], width: int) -> int:
        """Elements of all parameters in files; `shards` are this rank's elements of each parameter."""
        return sum(self.whole(count, width) for count in shards if self.swaps(count, width))

    def flat(self, total: int) -> int:
        """Elements of the flat buffer of parameters in host memory; `total` are this rank's elements of all trained ones."""
        away = self.zero.offload_param
        return total if away.device is OffloadDevice.CPU else min(total, away.max_in_cpu)

    def in_flat(self, counts: Sequence[int]) -> list[bool]:
        """Return which sub-groups fit whole into the flat buffer; `counts` are the elements of each."""
        room, offset, found = self.flat(sum(counts)), 0, []
        for count in counts:
            found.append(offset + count <= room)
            offset += count
        return found

    def reserve(self, groups: Sequence[Sequence[int]], width: int) -> int:
        """Return the number of elements of the buffer in which updated parameters wait for their files; `groups` lists each
        sub-group's shards.
        """
        if self.zero.offload_param.device is not OffloadDevice.NVME or all(self.in_flat([sum(group) for group in groups])):
            return 0
        return sum(self.whole(count, width) for count in max(groups, key=sum))

    # --- the optimizer --------------------------------------------------------------------------------------------------

    def state_files(self, counts: Iterable[int], width: int) -> int:
        """Elements in files of the masters, and again of each state; `counts` are the elements of each sub-group."""
        return sum(self.whole(count, width) for count in counts if self.swaps(count, width))

    def gradient_files(self, groups: Iterable[Sequence[int]], width: int) -> int:
        """Return the number of elements of gradients in files; `groups` lists each sub-group's shards."""
        step = self.aligned // width
        floors = [count // step * step for group in groups if self.swaps(sum(group), width) for count in group]
        return sum(count for count in floors if self.swaps(count, width))
