"""One rank under FSDP2: a chunk of every parameter, whole units gathered for a while.

Note [CPUOffloadPolicy]
    Each sharded parameter is pinned, and so is each gradient, because a copy to the host that does not block gets pinned
    memory; the optimizer's states are pageable. torch's fused and single-tensor optimizers need nothing more that lasts.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, reset_sharded_param; _fsdp_collectives.py, foreach_reduce

Note [FSDP2's saves]
    The sharded form holds references. accelerate, which the HF Trainer calls, first copies every shard to the host; the model's
    copies are gone before the optimizer's are made (accelerate 1.15, utils/fsdp_utils.py, save_fsdp_model and
    save_fsdp_optimizer, with ``ShardedStateDictConfig(offload_to_cpu=True)``). A loop of one's own hands the references to
    torch's distributed checkpoint, which copies all into pinned memory. With adapters the Trainer hands over those alone,
    on the GPU (_get_model_state_dict).
    A tied weight is gathered and copied once for each name that it has in the state dict.
    The full form gathers one tensor after another, with the padding of its first dimension, on every GPU; the first rank copies
    it to pageable memory, the others drop it (torch 2.13, distributed/_state_dict_utils.py, _gather_state_dict;
    distributed/tensor/placement_types.py, Shard._to_replicate_tensor). Parts on the host pass over the GPU. A loop of one's own
    has weights and states of one checkpoint together; accelerate and the Trainer, one after the other.
    The Trainer gathers the weights also for ``save_pretrained``, the frozen ones included (accelerator.py, get_state_dict).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from zeroplan.core.buffers import Buffer, Phase, Place
from zeroplan.core.expert_parallel import experts_of, is_expert, sharded_dimension
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.core.tensor_parallel import EMBEDDING
from zeroplan.core.workload import DType
from zeroplan.engines.saved_files import Written, pinned_copies
from zeroplan.engines.torch_rank import TorchRank
from zeroplan.ledger.derive import pow2

if TYPE_CHECKING:
    from zeroplan.core.pipeline import Stage
    from zeroplan.engines.simulation import HostPhase


@dataclass(frozen=True, kw_only=True)
class Fsdp2Rank(TorchRank):
    """Rank 0, which holds the largest chunks.

    Attributes:
        reshard: blocks are resharded after their forward (``reshard_after_forward``).
        offload: chunks, gradients and optimizer states are on the host (``CPUOffloadPolicy``).
        pipeline_chunks: the pipeline's stages that it has, one for each of its chunks; none without pipeline parallelism.
        pipeline: the order of its micro batches (:class:`~zeroplan.core.pipeline_order.PipelineSchedule`).
        pp_rank: its place in the pipeline, counted from 0.
        holds_sent: sends between stages hold what they send (:attr:`~zeroplan.core.gpus.Gpu.holds_sent`).
        hidden_size: elements of one token's hidden state.
    """

    reshard: bool = True
    offload: bool = False
    pipeline_chunks: tuple[Stage, ...] = ()
    pipeline: str = "1f1b"
    pp_rank: int = 0
    holds_sent: bool = False
    hidden_size: int = 0

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro batch's hidden states, which pipeline stages send each other."""
        from zeroplan.core.pipeline import hidden_bytes_of

        return hidden_bytes_of(self.workload, self.layout, self.hidden_size)

    @property
    def received(self) -> int:
        """Tensors that a pipeline rank receives for each micro batch."""
        if not self.pipeline_chunks:
            return 0
        from zeroplan.core.pipeline import received_of

        return received_of(self.pipeline_chunks)

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients add up before they are reduced: with several micro batches a step, and on every stage."""
        return self.leaves_whole_gradients or bool(self.pipeline_chunks)

    @property
    def shares_matrices(self) -> bool:
        """Whether tensor-parallel ranks share each matrix."""
        return self.layout.tp > 1

    @cached_property
    def accumulated(self) -> int:
        """Elements of whole gradients that add up; a tensor-parallel rank has the embedding's over all words."""
        table = next((p for p in self.trained if self.parameters.names[p].endswith(f"{EMBEDDING}.weight")), None)
        if table is None:
            return self.reached
        return self.reached + (self.layout.tp - 1) * self.numel[table]

    @cached_property
    def shared_experts(self) -> frozenset[int]:
        """The parameters of experts that expert-parallel ranks share; none without expert parallelism."""
        if self.layout.ep == 1:
            return frozenset()
        return frozenset(p for p, name in enumerate(self.parameters.names) if is_expert(name))

    @cached_property
    def expert_dimension(self) -> int:
        """The dimension in which the shared experts are sharded."""
        return sharded_dimension(self.layout, experts_of(self.parameters) * self.layout.ep)

    @cached_property
    def ignored(self) -> frozenset[int]:
        """The parameters that no unit holds: quantised weights that are stored in bytes (``ignored_params``)."""
        return frozenset(self.parameters.packed if self.workload.quantize is not None and self.workload.whole_base else ())

    def group_of(self, param: int) -> int:
        """Return the number of ranks over which a parameter is sharded."""
        return self.layout.expert_shard_group if param in self.shared_experts else self.ranks

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """This rank's elements of each parameter, which is split evenly along its first dimension and padded.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param
        """
        return tuple(self._chunk(p, shape) for p, shape in enumerate(self.parameters.shapes))

    def _chunk(self, param: int, shape: tuple[int, ...]) -> int:
        ranks, count = self.group_of(param), self.numel[param]
        if param in self.ignored:
            return count
        if param in self.shared_experts and self.expert_dimension:
            return count // ranks  # only even splits of other dimensions are allowed
        return -(-shape[0] // ranks) * (count // shape[0]) if shape and shape[0] else count

    def padded(self, param: int) -> int:
        """Return the elements of a gathered parameter, padding included."""
        return max(self.numel[param], self.chunks[param] * self.group_of(param))

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of one gathered parameter."""
        return self.workload.numerics.dtype.bytes

    @cached_property
    def reduce_bytes(self) -> int:
        """Bytes of one gradient element in the reduction: fp32, unless the program's policy says another or there is none."""
        work = self.workload
        if work.numerics.reduce_dtype is not None:
            return work.numerics.reduce_dtype.bytes
        return self.original_bytes if work.quantize is None else DType.FP32.bytes

    @cached_property
    def sharded(self) -> int:
        """Elements of this rank's chunks, each parameter padded along its first dimension."""
        return sum(self.chunks)

    @cached_property
    def sharded_reached(self) -> int:
        """Elements of this rank's chunks of the parameters that a micro batch gives a gradient."""
        return sum(self.chunks[p] for p in self.trained)

    @property
    def sharded_graded(self) -> int:
        """Elements of sharded gradients: those of all trained parameters, unless some get none."""
        return self.sharded_reached if self.parameters.unreached else self.sharded_trainable

    @cached_property
    def sharded_frozen(self) -> int:
        """Elements of this rank's chunks of frozen parameters."""
        return self.sharded - self.sharded_trainable

    @cached_property
    def _units(self) -> dict[str, int]:
        """Elements of each block, and of the root under an empty name."""
        found: dict[str, int] = {}
        for p, block in enumerate(self.parameters.blocks):
            if self.workload.loop.one_unit:
                block = ""
            if p not in self.ignored:
                found[block] = found.get(block, 0) + self.numel[p]
        return found

    @cached_property
    def largest_unit(self) -> int:
        """Elements of the largest block."""
        return max((count for block, count in self._units.items() if block), default=0)

    @cached_property
    def root_unit(self) -> int:
        """Elements of the root: embedding, final norm, head."""
        return self._units.get("", 0)

    @cached_property
    def param_blocks(self) -> int:
        """Bytes of the pinned blocks that hold this rank's chunks, each rounded to a power of two."""
        return sum(pow2(self.width(p) * count) for p, count in enumerate(self.chunks)) if self.offload else 0

    @cached_property
    def grad_blocks(self) -> int:
        """Bytes of the pinned blocks that hold the chunks' gradients, each rounded to a power of two."""
        return sum(pow2(self.original_bytes * self.chunks[p]) for p in self.trained) if self.offload else 0

    @cached_property
    def largest_chunk(self) -> int:
        """Elements of this rank's chunk of the largest parameter."""
        return max(self.chunks, default=0)

    def host_phases(self) -> tuple[HostPhase, ...]:
        """Return the host's peaks by phase. See Note [CPUOffloadPolicy]."""
        if not self.offload:
            return ()
        from zeroplan.engines.simulation import HostPhase
        from zeroplan.simulate.allocator.pinned_host import pinned_bytes

        params = pinned_bytes(self.width(p) * count for p, count in enumerate(self.chunks))
        grads = pinned_bytes(self.original_bytes * self.chunks[p] for p in self.trained)
        loaded = {(Buffer.PARAM_SHARD, Place.PINNED): params}
        with_states = loaded | {(Buffer.GRAD_SHARD, Place.PINNED): grads} | self.states_on_host()
        return (
            *(HostPhase.of(phase, loaded) for phase in (Phase.LOAD, Phase.INIT)),
            # From the second step on, states are there throughout, and torch keeps the gradients' pinned blocks.
            *(HostPhase.of(phase, with_states) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)),
        )

    def parts_of_save(self, saving: Saving) -> tuple[Written, ...]:
        """Return the host's bytes while the model is written, and then the optimizer's states. See Note [FSDP2's saves]."""
        if saving.state_dict is StateDict.FULL:
            model = sum(self.width(p) * self.numel[p] for p in self.parameters.entries)
            optimizer = sum(self.whole_states_of(p) for p in self.trained) if saving.optimizer else 0
            firsts = (model + optimizer,) if saving.saver is Saver.LOOP else (model, optimizer)
            return tuple(Written(0, first) for first in firsts)
        adapters = self.parameters.adapters
        only_adapters = saving.saver is Saver.TRAINER and any(adapters)
        weights = [self.width(p) * self.chunks[p] for p in self.parameters.entries if adapters[p] or not only_adapters]
        stepped = self.stepped() if saving.optimizer else []
        states = [nbytes for domain, p in stepped for _, nbytes in self.states(domain, p)]
        if self.offload:  # on the host already; a shard with padding is copied when it is written
            needs = [max([*weights, *states], default=0)]
        elif saving.saver is Saver.LOOP:
            needs = [pinned_copies([*weights, *states])]
        else:
            needs = [pinned_copies(weights) if only_adapters else sum(weights), sum(states)]
        return tuple(Written(every, every) for every in needs)

    def gathered(self, saving: Saving) -> Iterator[tuple[int, int]]:
        """Yield, tensor by tensor, the bytes that come from the host and those that are gathered; none in the sharded form."""
        if saving.state_dict is not StateDict.FULL or self.ranks == 1:
            return
        for p in self.parameters.entries:
            yield (self.width(p) * self.chunks[p] if self.offload else 0), self.width(p) * self.padded(p)
        for domain, p in self.stepped() if saving.optimizer else ():
            for _, nbytes in self.states(domain, p):
                yield (nbytes if self.offload else 0), nbytes * self.ranks
