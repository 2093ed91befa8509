"""Checkpointed inputs in host memory (``activation_checkpointing.cpu_checkpointing``), brought back ahead of the backward.

Gradient checkpointing keeps each block's input until the backward. Here the input leaves for pinned memory while the next
block computes, and returns while the backward of the block after it runs.

Note [Which tensors]
    A saved-tensor hook sees every tensor that autograd saves, and cannot tell what for. What a checkpoint saves is told by
    the order of events: ``torch.utils.checkpoint`` saves a block's arguments just before it calls the block (or, reentrant,
    just after, with gradients off inside). So a saved tensor is a checkpoint's when a block is entered with it next, or was
    entered with it without gradients. Of a block's arguments only those with a gradient count: others (masks, tables of
    positions) are the same for all blocks. What would not leave the device is not copied: a leaf, which autograd keeps for
    its gradient (the embedding's output under LoRA), and what the next block or the one before takes as well (an encoder's
    output, a bias of positions). Nothing else is moved, so a model that does not checkpoint is left as it is.

Note [Two on the device]
    The copy of an input begins when the next block is entered, and its memory is given up when the one after is: the model's
    stream then waits for the copy, not the host. So two blocks' inputs at most are on the device in the forward, the newest
    stay for the backward's beginning, and two blocks' at most return at a time.

`zeroplan.engines.runtime.checkpoints` lays the same over a tape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.layout import LEAST_MOVED_BYTES
from zeroplan_runtime.arena import Arena
from zeroplan_runtime.pytree import tensors_of
from zeroplan_runtime.streams import Event, Stream

_Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class PinnedPool:
    """Pinned buffers that saved inputs take turns in. There are never more than were in use at once."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free: list[PinnedBuffer] = []
        self._made = 0

    def take(self, numel: int, dtype: torch.dtype) -> PinnedBuffer:
        """A buffer for `numel` elements: the smallest free one that holds them, else a new one in place of the largest."""
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
        """Its content is not needed any more."""
        self._free.append(buffer)


class PinnedBuffer:
    """Bytes in pinned memory; `read` marks the last copy out of them."""

    __slots__ = ("memory", "name", "read")

    def __init__(self, name: str, memory: torch.Tensor, read: Event) -> None:
        self.name, self.memory, self.read = name, memory, read

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The buffer's beginning as a contiguous tensor of `tensor`'s shape and dtype."""
        return self.memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)


class SavedTensor:
    """One saved tensor: on the device (`tensor`), or in the host's `buffer`, or on its way back (`returning`)."""

    __slots__ = ("before", "buffer", "copied", "pool", "ready", "returning", "shape_of", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, pool: PinnedPool) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version
        self.pool = pool
        self.buffer: PinnedBuffer | None = None
        self.shape_of = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
        self.copied = self.ready = Event(tensor.device)
        self.returning: torch.Tensor | None = None
        self.before: Sequence[SavedTensor] = ()  # those of the block before, which needs them next in the backward

    @property
    def on_device(self) -> torch.Tensor:
        """The tensor that has not left yet."""
        assert self.tensor is not None
        return self.tensor

    def __del__(self) -> None:
        if self.buffer is not None:
            self.pool.give_back(self.buffer)


class ActivationOffload:
    """Moves the checkpointed inputs of `blocks` to the host and back. Its results are bitwise those without it."""

    def __init__(self, blocks: Sequence[nn.Module], arena: Arena, *, least_bytes: int = LEAST_MOVED_BYTES) -> None:
        device = arena.device
        self.pool = PinnedPool(arena)
        self._compute_stream = Stream.current(device)
        self._d2h_stream, self._h2d_stream = Stream(device), Stream(device)
        self._device, self._least = device, least_bytes
        self._saving = False
        self._fresh: dict[_Key, SavedTensor] = {}  # saved since the last block was entered
        self._entered: set[_Key] = set()  # what the last block was entered with, gradients off
        self._inputs: set[_Key] | None = None  # what the last block was entered with, until the first of them is claimed
        self._newest: list[SavedTensor] = []  # of the last checkpointed block
        self._shared: set[_Key] = set()  # of those, what the block before it had taken, too
        self._leaving: list[SavedTensor] = []  # of the one before, on their way to the host
        self._handles = [block.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True) for block in blocks]

    def remove(self) -> None:
        """Takes the hooks off the blocks."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward: what its checkpoints save goes to the host."""
        if not torch.is_grad_enabled():
            yield
            return
        self._saving = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._saving = False
            self._let_go()
            self._newest = []
            self._shared, self._inputs = set(), None
            self._fresh.clear()
            self._entered.clear()

    # ------------------------------------------------------------------ forward

    def _pack(self, tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
        if tensor.device != self._device or not tensor.is_floating_point() or isinstance(tensor, nn.Parameter):
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
            return  # a forward again in the backward, or one without gradients
        inputs = tensors_of((args, dict(kwargs)))
        keys = {_key(tensor) for tensor in inputs if tensor.requires_grad and not tensor.is_leaf}
        fresh, self._fresh = self._fresh, {}  # addresses tell tensors apart only while the tensors live
        self._entered, self._inputs = set(), keys
        if not torch.is_grad_enabled():
            self._entered = keys
            return
        for key, saved in fresh.items():
            if key in keys:
                self._claim(saved)

    def _claim(self, saved: SavedTensor) -> None:
        """`saved` is a checkpoint's: see Note [Two on the device]."""
        if self._inputs is not None:  # the first of its block
            self._let_go()
            keys = {_key(one.on_device) for one in self._newest}
            stays, self._shared = self._shared | self._inputs, keys & self._inputs
            self._leaving = [one for one in self._newest if _key(one.on_device) not in stays]
            for one in self._leaving:
                self._send(one)
            self._newest, self._inputs = [], None
        saved.before = self._leaving
        self._newest.append(saved)

    def _send(self, saved: SavedTensor) -> None:
        tensor = saved.on_device
        if tensor._version != saved.version:
            raise RuntimeError("the input of a checkpointed block was changed in place after the block saved it")
        saved.buffer = self.pool.take(tensor.numel(), tensor.dtype)
        produced = Event(self._device)
        produced.record(self._compute_stream)
        produced.wait(self._d2h_stream)
        saved.buffer.read.wait(self._d2h_stream)
        with self._d2h_stream.as_current():
            saved.buffer.like(tensor).copy_(tensor.detach(), non_blocking=True)
        saved.copied = Event(self._device)
        saved.copied.record(self._d2h_stream)

    def _let_go(self) -> None:
        """Gives up the memory of what has been copied."""
        for saved in self._leaving:
            saved.copied.wait(self._compute_stream)
            saved.tensor = None
        self._leaving = []

    # ------------------------------------------------------------------ backward

    def _unpack(self, saved: SavedTensor | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        found = saved.tensor
        if found is None:
            self._fetch(saved)
            saved.ready.wait(self._compute_stream)
            found, saved.returning = saved.returning, None
            assert found is not None
        for before in saved.before:
            if before.tensor is None:
                self._fetch(before)
        return found

    def _fetch(self, saved: SavedTensor) -> None:
        """Starts to bring a tensor back, unless it is on its way."""
        if saved.returning is not None:
            return
        assert saved.buffer is not None
        target = torch.empty_like(saved.shape_of, device=self._device)  # autograd's, as without offload
        allocated = Event(self._device)
        allocated.record(self._compute_stream)  # its memory may still be in use by what was freed there
        allocated.wait(self._h2d_stream)
        saved.copied.wait(self._h2d_stream)
        with self._h2d_stream.as_current():
            target.copy_(saved.buffer.like(saved.shape_of), non_blocking=True)
        saved.buffer.read.record(self._h2d_stream)
        saved.ready = Event(self._device)
        saved.ready.record(self._h2d_stream)
        saved.returning = target


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
