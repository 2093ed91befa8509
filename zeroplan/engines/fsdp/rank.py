"""One rank under FSDP 1: an even part of each unit's flat parameter, whole units gathered for a while.

A unit is what the wrapping policy wraps: a block, or the root, which holds all that no block does. Adapters' matrices are units
of their own (peft's ``fsdp_auto_wrap_policy``, which the HF Trainer sets), so that no flat parameter mixes them with frozen
weights.

Note [Units that mix trained and frozen weights]
    With ``use_orig_params`` a policy may wrap a block with the adapters in it, as Lightning's does for LitGPT. Their flat
    parameter requires a gradient as soon as one of them does, and what the block computes with are views of it: so the backward
    makes a gradient for each frozen weight, too, joins them all into the flat gradient, keeps that whole between micro batches
    that are not synchronised, and reduces all of it. Only then are frozen parameters left without: the optimizer steps the
    adapters alone.
    Source: torch 2.13 (2.1 is alike), fsdp/_flat_param.py (_validate_tensors_to_flatten, _use_unsharded_views,
    _use_sharded_grad_views)

Note [CPUOffload of FSDP 1]
    Each unit's part is pinned on the host, and with it a gradient of the same size, for frozen units, too. To unshard a unit
    its part is copied to the GPU, and cast there where the arithmetic has another dtype; a copy that is not cast stays until
    the unit is freed, since the optimizer's parameters are views of it (``use_orig_params``). Reduced gradients stay on the GPU
    until the backward's end, beside their copies on the host, where the optimizer steps. A quantised base waits on the host
    until its units are sharded, since whole it is what the GPU has no room for.
    Source: torch 2.11, fsdp/_flat_param.py (init_flat_param_attributes, pre_unshard, flat_param_to, _use_low_precision_shard,
    prepare_gradient_for_optim), fsdp/_runtime_utils.py (_accumulate_sharded_grad, _offload_grad)
Source: torch/distributed/fsdp/_flat_param.py of torch 2.11, _init_flat_param_and_metadata and shard
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.optimizer_row import Domain
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.engines.saved_files import Written
from zeroplan.engines.torch_rank import TorchRank
from zeroplan.ledger.derive import pow2

if TYPE_CHECKING:
    from zeroplan.engines.simulation import HostPhase

#: With ``use_orig_params`` each parameter begins at a multiple of so many bytes of the flat parameter.
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class FsdpRank(TorchRank):
    """Rank 0.

    Attributes:
        sharded: parameters, gradients and states are sharded; not so under NO_SHARD, nor with one rank.
        reshard: blocks are freed after their forward (FULL_SHARD).
        offload: shards, their gradients and optimizer states are on the host (CPUOffload).
    """

    sharded: bool = True
    reshard: bool = True
    offload: bool = False

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of one gathered parameter."""
        return self.workload.numerics.dtype.bytes

    def casts(self, unit: str) -> bool:
        """Return whether a unit is gathered in another dtype than it is kept in."""
        return self.bytes_of(unit) != self.param_bytes

    @cached_property
    def casts_root(self) -> bool:
        """Whether the root is gathered in another dtype than it is kept in."""
        return "" in self.units and self.casts("")

    @cached_property
    def casts_blocks(self) -> bool:
        """Whether a block is gathered in another dtype than it is kept in."""
        return any(self.casts(unit) for unit in self.units if unit)

    @property
    def trained(self) -> tuple[int, ...]:
        """The parameters that the optimizer steps."""
        found, mixed = self.parameters.trained, self.workload.loop.mixed_units
        if self.parameters.unreached:
            found = tuple(p for p in found if p in self._with_gradients)
        return tuple(p for p in found if self.parameters.adapters[p]) if mixed else found

    @cached_property
    def _with_gradients(self) -> frozenset[int]:
        """The parameters of units that get a gradient: one of a flat parameter's views is enough, zeros stand for the others.

        Source: torch/distributed/fsdp/_flat_param.py, _is_grad_none_mask and _reset_is_grad_none
        """
        reached = set(self.parameters.reached)
        return frozenset(p for params in self.units.values() if reached.intersection(params) for p in params)

    @cached_property
    def with_gradient(self) -> tuple[int, ...]:
        """The parameters that get a gradient. See Note [Units that mix trained and frozen weights]."""
        if not self.workload.loop.mixed_units:
            return self.trained
        return tuple(sorted(p for unit in self.trained_units for p in self.units[unit] if self.numel[p]))

    @cached_property
    def units(self) -> dict[str, list[int]]:
        """The parameters of each block, of each adapter's matrix, and of the root under an empty name."""
        found: dict[str, list[int]] = {}
        for p, block in enumerate(self.parameters.blocks):
            if self.workload.loop.one_unit:
                block = ""
            own = self.parameters.adapters[p] and not self.workload.loop.mixed_units
            found.setdefault(self.parameters.names[p].rpartition(".")[0] if own else block, []).append(p)
        return found

    @cached_property
    def trained_units(self) -> tuple[str, ...]:
        """The units that hold a trained parameter."""
        trained = self.parameters.trainable
        return tuple(unit for unit, params in self.units.items() if any(trained[p] for p in params))

    def flat(self, unit: str) -> int:
        """Return the elements of a unit's flat parameter, alignment included and the ranks' padding not."""
        step = max(1, _ALIGNMENT // self.param_bytes)
        *first, last = (self.numel[p] for p in self.units[unit])
        return sum(-(-count // step) * step for count in first) + last

    def shard(self, unit: str) -> int:
        """Return the elements of one rank's part of a unit."""
        return -(-self.flat(unit) // self.ranks) if self.sharded else self.flat(unit)

    def padded(self, unit: str) -> int:
        """Return the elements of a gathered unit, the ranks' padding included."""
        return self.shard(unit) * self.ranks if self.sharded else self.flat(unit)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """This rank's elements of each parameter: what of it lies in the first part of its unit's flat parameter.

        Source: torch/distributed/fsdp/_flat_param.py, _get_shard_metadata
        """
        found = [0] * len(self.numel)
        step = max(1, _ALIGNMENT // self.param_bytes)
        for unit, params in self.units.items():
            ends = accumulate(-(-self.numel[p] // step) * step for p in params)
            end = self.shard(unit)
            for p, begin in zip(params, (0, *ends), strict=False):
                found[p] = max(0, min(self.numel[p], end - begin))
        return tuple(found)

    def chunk_of(self, param: int) -> int:
        """Return the elements of the first rank's chunk of a parameter in a sharded state dict: of its first dimension.

        Source: torch/distributed/fsdp/_shard_utils.py, _create_chunk_sharded_tensor
        """
        shape = self.parameters.shapes[param]
        return -(-shape[0] // self.ranks) * (self.numel[param] // shape[0]) if shape and shape[0] else self.numel[param]

    def stepped(self) -> list[tuple[Domain, int]]:
        """Return the parameters of which this rank holds a part, in the order in which they are stepped."""
        return [(domain, p) for domain, p in super().stepped() if self.chunks[p]]

    def bytes_of(self, unit: str) -> int:
        """Return the bytes an element of a unit's part as it is kept."""
        return self.width(self.units[unit][0])

    @cached_property
    def part_trained(self) -> int:
        """Elements of this rank's parts of trained flat parameters, padding included."""
        return sum(self.shard(unit) for unit in self.trained_units)

    @cached_property
    def part_frozen(self) -> int:
        """Elements of this rank's parts of frozen flat parameters, padding included."""
        return sum(self.shard(unit) for unit in self.units) - self.part_trained

    @cached_property
    def host_blocks(self) -> int:
        """Bytes of the pinned blocks of this rank's parts on the host, each rounded to a power of two."""
        return sum(pow2(self.bytes_of(unit) * self.shard(unit)) for unit in self.units) if self.offload else 0

    @cached_property
    def largest_part(self) -> int:
        """Bytes of this rank's part of the largest unit."""
        return max((self.bytes_of(unit) * self.shard(unit) for unit in self.units), default=0)

    @cached_property
    def trained_whole(self) -> int:
        """Elements of the trained flat parameters of all ranks."""
        return sum(self.flat(unit) for unit in self.trained_units)

    @cached_property
    def stepped_part(self) -> int:
        """Elements that this rank's optimizer steps: its parts without padding."""
        return sum(self.chunks[p] for p in self.trained)

    @cached_property
    def root_unit(self) -> int:
        """Elements of the root's flat parameter: embedding, final norm, head."""
        return self.padded("") if "" in self.units else 0

    @cached_property
    def largest_unit(self) -> int:
        """Elements of the largest block's flat parameter."""
        return max((self.padded(unit) for unit in self.units if unit), default=0)

    @cached_property
    def largest_trained_unit(self) -> int:
        """Elements of the largest trained flat parameter but the root's."""
        return max((self.padded(unit) for unit in self.trained_units if unit), default=0)

    @cached_property
    def gathered_blocks(self) -> int:
        """Elements of all blocks' flat parameters."""
        return sum(self.padded(unit) for unit in self.units if unit)

    def host_phases(self) -> tuple[HostPhase, ...]:
        """Return the host's peaks by phase. Parts are pinned at the first forward. See Note [CPUOffload of FSDP 1]."""
        if not self.offload:
            return ()
        from zeroplan.engines.simulation import HostPhase
        from zeroplan.simulate.allocator.pinned_host import pinned_bytes

        parts = [self.bytes_of(unit) * self.shard(unit) for unit in self.units]
        pinned = pinned_bytes(parts)
        running = {(Buffer.PARAM_SHARD, Place.PINNED): pinned, (Buffer.GRAD_SHARD, Place.PINNED): pinned}
        running |= self.states_on_host()
        wrapped = HostPhase.of(Phase.INIT, {(Buffer.PARAM_SHARD, Place.DRAM): sum(parts)})
        return (wrapped, *(HostPhase.of(phase, running) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)))

    def parts_of_save(self, saving: Saving) -> tuple[Written, ...]:
        """Return the host's bytes while the model is written, and then the optimizer's states (saving.py)."""
        stepped = self.trained if saving.optimizer else ()
        if not self.sharded:  # torch.save, one storage after another
            tensors = [self.width(p) * count for p, count in enumerate(self.numel)]
            tensors += [self.whole_states_of(p) // max(1, len(self.optimizer.states)) for p in stepped]
            return (Written(0, max(tensors)),)
        if saving.state_dict is not StateDict.SHARDED:
            weights = sum(self.width(p) * self.numel[p] for p in self.parameters.entries)
            if saving.state_dict is StateDict.FULL_GPU:
                return (Written(0, weights),)  # copied to the host once all are there
            with_root = weights + (self.bytes_of("") * self.flat("") if "" in self.units else 0)
            states = sum(self.whole_states_of(p) for p in stepped)
            together = weights + states if saving.saver is Saver.LOOP else states
            return Written(0, with_root), Written(0, together)
        weights = sum(self.width(p) * self.chunk_of(p) for p in self.parameters.entries)
        states = sum(self.whole_states_of(p) // self.numel[p] * self.chunk_of(p) for p in stepped)
        needs = (weights + states,) if saving.saver is Saver.LOOP else (weights, states)
        return tuple(Written(every, every) for every in needs)
