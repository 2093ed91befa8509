"""Checkpointed inputs in host memory (``activation_checkpointing.cpu_checkpointing``), copied back ahead of the backward, or
divided among the ranks that hold them alike (``partition_activations``).

Gradient checkpointing keeps each block's input until the backward. Here the input is copied to pinned memory while the next
block computes, and copied back while the backward of the following block runs.

Note [Which tensors]
    A saved-tensor hook sees every tensor that autograd saves, but not why. The order of events tells what a checkpoint saves:
    ``torch.utils.checkpoint`` saves a block's arguments just before it calls the block (the reentrant kind just after, and
    calls the block with gradients off). So a saved tensor is a checkpoint's if a block is entered with it next, or was entered
    with it with gradients off. Only arguments that require a gradient count: the others (masks, position tables) are the same
    for all blocks. Tensors whose device memory would not be freed are not copied: a leaf, which autograd keeps for its gradient
    (the embedding's output under LoRA), and an argument that the next or the previous block takes too (an encoder's output,
    a position bias). Nothing else is moved, so a model that does not checkpoint is not affected.

Note [Two on the device]
    The copy of an input begins when the next block is entered, and its device memory is freed when the block after that is
    entered: the compute stream then waits for the copy, the host does not. So at most two blocks' inputs are on the device in
    the forward, the last ones stay for the start of the backward, and at most two blocks' inputs are copied back at a time.

Note [Parts of inputs]
    Tensor-parallel ranks hold the inputs of blocks alike, unless sequence parallelism divides them. Each then keeps its part
    from the next block's entry on, on the device or on the host; the whole is gathered when the block is computed again. The
    last block's stays whole, as with copies to the host. What the ranks do not divide evenly stays whole, too.
    Source: DeepSpeed, runtime/activation_checkpointing/checkpointing.py (``partition_activations``,
    ``gather_partitioned_activations``), which divides the input of every block.

`zeroplan.engines.runtime.checkpoints` simulates the same on a tape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroplan.core.arena.layout import LEAST_MOVED_BYTES
from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.errors import BadInput
from zeroplan_runtime.arena import Arena
from zeroplan_runtime.comm import Communicator
from zeroplan_runtime.local_tensors import is_distributed
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.streams import Event, Stream

#: Norms of one tensor on several ranks that differ by more are not of one tensor.
TOLERANCE = 1e-2

_Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class PinnedPool:
    """Pinned buffers that are reused for saved inputs; never more than were in use at the same time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free: list[PinnedBuffer] = []
        self._made = 0

    def take(self, numel: int, dtype: torch.dtype) -> PinnedBuffer:
        """Returns a buffer for `numel` elements: the smallest free one that fits, else a new one that replaces the largest free
        one.
        """
        nbytes = numel * dtype.itemsize
        fitting = [one for one in self._free if one.memory.numel() >= nbytes]
        if fitting:
            found = min(fitting, key=lambda one: one.memory.numel())
            self._free.remove(found)
            return found
        if self._free:
            small = max(self._free, key=lambda one: one.memory.numel())
            self._free.remove(small)
            name = small.name
            small.read.synchronize()
            self._arena.free(small.memory)
        else:
            name, self._made = f"checkpoint.{self._made}", self._made + 1
        memory = self._arena.empty(Buffer.ACTIVATION_CHECKPOINT, nbytes, torch.uint8, unit=name, place=Place.PINNED)
        return PinnedBuffer(name, memory, Event(self._arena.device))

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Makes `buffer` free for reuse."""
        self._free.append(buffer)


class PinnedBuffer:
    """Bytes of pinned memory; the event `read` is recorded after the last copy from them."""

    __slots__ = ("memory", "name", "read")

    def __init__(self, name: str, memory: torch.Tensor, read: Event) -> None:
        self.name, self.memory, self.read = name, memory, read

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the start of the buffer as a contiguous tensor of `tensor`'s shape and dtype."""
        return self.memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)


class SavedTensor:
    """One saved tensor: on the device (`tensor`), in host memory (`buffer`), or being copied back (`returning`).

    Attributes:
        version: the tensor's autograd version when it was saved.
        copied: recorded after the copy to the host.
        ready: recorded after the copy back.
        part: this rank's part on the device, 1-D, where the ranks divide the tensor and it is there.
        divided: the ranks divide it.
        before: the saved tensors of the previous block, which the backward needs next.
    """

    __slots__ = (
        "before",
        "buffer",
        "copied",
        "divided",
        "part",
        "pool",
        "ready",
        "returning",
        "shape_of",
        "tensor",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, pool: PinnedPool) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version
        self.pool = pool
        self.buffer: PinnedBuffer | None = None
        self.shape_of = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
        self.copied = self.ready = Event(tensor.device)
        self.returning: torch.Tensor | None = None
        self.part: torch.Tensor | None = None
        self.divided = False
        self.before: Sequence[SavedTensor] = ()

    @property
    def on_device(self) -> torch.Tensor:
        """The tensor, which must still be on the device."""
        assert self.tensor is not None
        return self.tensor

    def __del__(self) -> None:
        if self.returning is not None:  # for a backward that ended before it; its memory is free now
            self.ready.wait(Stream.current(self.returning.device))
        if self.buffer is not None:
            self.pool.give_back(self.buffer)


class ActivationOffload:
    """Copies the checkpointed inputs of `blocks` to the host and back. Training gives the same bits as without it.

    Args:
        blocks: the modules that the model may checkpoint.
        arena: allocates the pinned memory.
        to_host: they leave the device; else they are divided only.
        alike: the ranks that hold them alike and divide them; None where they stay whole.
        least_bytes: smaller tensors stay on the device.

    Raises:
        BadInput: in the first forward, where the inputs of these ranks differ.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        arena: Arena,
        *,
        to_host: bool = True,
        alike: Communicator | None = None,
        least_bytes: int = LEAST_MOVED_BYTES,
    ) -> None:
        device = arena.device
        self._to_host, self._alike, self._compared = to_host, alike, False
        self.pool = PinnedPool(arena)
        self._compute_stream = Stream.current(device)
        self._d2h_stream, self._h2d_stream = Stream(device), Stream(device)
        self._device, self._least = device, least_bytes
        self._saving = False
        self._fresh: dict[_Key, SavedTensor] = {}  # saved since the last block was entered
        self._entered: set[_Key] = set()  # arguments of the last block, if it was entered with gradients off
        self._inputs: set[_Key] | None = None  # arguments of the last block, until the first of them is claimed
        self._newest: list[SavedTensor] = []  # of the last checkpointed block
        self._shared: set[_Key] = set()  # of those, the ones that the previous block took too
        self._leaving: list[SavedTensor] = []  # of the previous block, being copied to the host
        self._handles = [block.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True) for block in blocks]

    def remove(self) -> None:
        """Removes the hooks from the blocks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context for a forward, whose checkpoints' inputs are copied to the host."""
        if not torch.is_grad_enabled():
            yield
            return
        self._saving = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
            self._compared = True
        finally:
            self._saving = False
            self._free_copied()
            self._newest = []
            self._shared, self._inputs = set(), None
            self._fresh.clear()
            self._entered.clear()

    # ------------------------------------------------------------------ forward

    def _pack(self, tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
        if tensor.device != self._device or not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
            return tensor
        if is_distributed(tensor):  # within a block; what tensor-parallel blocks are given is plain
            return tensor
        if tensor.numel() * tensor.element_size() < self._least:
            return tensor
        key = _key(tensor)
        saved = self._fresh.get(key)
        if saved is None:
            saved = self._fresh[key] = SavedTensor(tensor, self.pool)
            if key in self._entered:
                self._claim(saved)
        return saved

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._saving:
            return  # a recomputation in the backward, or a forward without gradients
        inputs = [one for one in tensors_of((args, dict(kwargs))) if not is_distributed(one)]
        keys = {_key(tensor) for tensor in inputs if tensor.requires_grad and not tensor.is_leaf}
        fresh, self._fresh = self._fresh, {}  # addresses identify tensors only while they are alive
        self._entered, self._inputs = set(), keys
        if not torch.is_grad_enabled():
            self._entered = keys
            return
        for key, saved in fresh.items():
            if key in keys:
                self._claim(saved)

    def _claim(self, saved: SavedTensor) -> None:
        """Takes `saved` as a checkpoint's input: see Note [Two on the device]."""
        if self._inputs is not None:  # the first of its block
            self._free_copied()
            keys = {_key(one.on_device) for one in self._newest}
            stays, self._shared = self._shared | self._inputs, keys & self._inputs
            self._leaving = [one for one in self._newest if _key(one.on_device) not in stays]
            for one in self._leaving:
                self._leave(one)
            self._newest, self._inputs = [], None
        saved.before = self._leaving
        self._newest.append(saved)

    def _leave(self, saved: SavedTensor) -> None:
        tensor = saved.on_device
        if tensor._version != saved.version:
            raise RuntimeError("the input of a checkpointed block was changed in place after it was saved")
        if self._alike is not None and tensor.numel() % self._alike.world_size == 0:
            self._require_alike(tensor, self._alike)
            saved.part = tensor.detach().reshape(self._alike.world_size, -1)[self._alike.rank].clone()
            saved.divided, saved.tensor = True, None
        if self._to_host:
            self._copy_to_host(saved, saved.part if saved.part is not None else tensor)

    def _require_alike(self, tensor: torch.Tensor, ranks: Communicator) -> None:
        """Compares an input over the ranks that are to divide it, in the first forward."""
        if self._compared:
            return
        values = tensor.detach().double()
        digests = ranks.all_gather_object((float(values.square().sum().sqrt()), float(values.sum())))
        norm, total = digests[0]
        if any(abs(other - norm) > TOLERANCE * norm or abs(others - total) > norm for other, others in digests):
            raise BadInput(
                "the ranks of tp give their blocks other inputs, as with split tokens",
                where="activation_checkpointing.partition_activations",
                remedy="leave the key out: sequence parallelism has divided them already",
            )

    def _copy_to_host(self, saved: SavedTensor, tensor: torch.Tensor) -> None:
        saved.buffer = self.pool.take(tensor.numel(), tensor.dtype)
        produced = Event(self._device)
        produced.record(self._compute_stream)
        produced.wait(self._d2h_stream)
        saved.buffer.read.wait(self._d2h_stream)
        with self._d2h_stream.as_current():
            saved.buffer.like(tensor).copy_(tensor.detach(), non_blocking=True)
        saved.copied = Event(self._device)
        saved.copied.record(self._d2h_stream)

    def _free_copied(self) -> None:
        """Frees the device memory of the tensors that have been copied."""
        for saved in self._leaving:
            if self._to_host:
                saved.copied.wait(self._compute_stream)
                saved.tensor = saved.part = None
        self._leaving = []

    # ------------------------------------------------------------------ backward

    def _unpack(self, saved: SavedTensor | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        found = saved.tensor
        if found is None:
            if saved.part is None:
                self._copy_back(saved)
                saved.ready.wait(self._compute_stream)
                found, saved.returning = saved.returning, None
            else:
                found = saved.part
            assert found is not None
            if saved.divided:
                found = self._gathered(saved, found)
        for before in saved.before:
            if before.tensor is None and before.part is None:
                self._copy_back(before)
        return found

    def _gathered(self, saved: SavedTensor, part: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor of which `part` is this rank's. A collective of the ranks that hold it alike."""
        assert self._alike is not None
        whole = torch.empty_like(saved.shape_of, device=self._device)
        self._alike.all_gather(whole.view(-1), part)
        return whole

    def _copy_back(self, saved: SavedTensor) -> None:
        """Starts to copy a tensor back, unless that has begun."""
        if saved.returning is not None:
            return
        assert saved.buffer is not None
        shape = saved.shape_of
        if saved.divided:
            assert self._alike is not None
            shape = shape.view(self._alike.world_size, -1)[0]
        target = torch.empty_like(shape, device=self._device)  # torch's own memory, as without offload
        allocated = Event(self._device)
        allocated.record(self._compute_stream)  # earlier work may still use the memory
        allocated.wait(self._h2d_stream)
        saved.copied.wait(self._h2d_stream)
        with self._h2d_stream.as_current():
            target.copy_(saved.buffer.like(shape), non_blocking=True)
        saved.buffer.read.record(self._h2d_stream)
        saved.ready = Event(self._device)
        saved.ready.record(self._h2d_stream)
        saved.returning = target


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
