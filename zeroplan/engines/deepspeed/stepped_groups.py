"""The groups that one rank's optimizer steps: DeepSpeed's parameter groups, flat partitions and sub-groups, and the states of
each.

Note [Muon's groups]
    DeepSpeed's Muon has two parameter groups: the matrices, whose momentum Muon keeps, and the rest, which an Adam steps.
    Orthogonalising needs whole matrices. BF16_Optimizer and an offloaded optimizer gather them in the step and keep momentum
    for a rank's partition. Stages 1 and 2 otherwise orthogonalise, when the backward ends, the matrices that a rank's
    partition touches; their momentum is of those matrices whole, as wide as their gradients, and stands twice: a step whose
    gradients overflow must leave it as it was. Stage 3 gathers whole matrices in the step and keeps momentum for a rank's
    parts, as wide as a gradient on its way.

Counts are elements. Paths of sources are those of DeepSpeed 0.19.8 under ``deepspeed/runtime/``.

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

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroplan.core.auto_ep import is_auto_ep_expert, is_auto_ep_router
from zeroplan.core.buffers import Buffer
from zeroplan.core.optimizer_row import Domain
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.deepspeed.groups import FlatGroup, flat_groups, padded, sub_groups
from zeroplan.engines.deepspeed.moe import expert_groups, is_expert
from zeroplan.engines.deepspeed.resolved_config import ResolvedConfig, groups_on_gpu, muon_updates
from zeroplan.engines.rank import Rank

#: swap_tensor/utils.py, AIO_ALIGNED_BYTES: for each of a request's threads.
_ALIGNED_BYTES = 1024
#: Names of the parameters that transformers' Trainer lets not decay.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


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


@dataclass(frozen=True, kw_only=True)
class SteppedGroups(ResolvedConfig, Rank):
    """One rank's parameters as its optimizer sees them. See Note [Muon's groups].

    Attributes:
        zero: how the job is sharded and offloaded.
        rank: this one's number among the ranks.
        zero_init: stage 3 builds the model under ``deepspeed.zero.Init``, else whole on the GPU.
    """

    zero: ZeroConfig
    rank: int = 0
    zero_init: bool = True

    @property
    def stage(self) -> int:
        """ZeRO's stage; 1 where BF16_Optimizer shards at stage 0, as it does on pipeline stages."""
        return max(1, self.zero.stage) if self.full_fp32_grads else self.zero.stage

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """This rank's elements of each parameter at stage 3, where every parameter is padded by itself."""
        return tuple(-(-count // ranks) for count, ranks in zip(self.numel, self.ranks_of, strict=True))

    @cached_property
    def routers(self) -> frozenset[int]:
        """The routers of AutoEP's layers where stage 3 shards them by themselves: the engine makes them in a process group of
        its own, and ``zero.Init`` all others in torch's.

        Source: engine.py, _resolve_zero3_param_placement; zero/partition_parameters.py, ds_process_group
        """
        if not (self.layout.auto_ep and self.stage == 3 and self.zero_init):
            return frozenset()
        names = self.parameters.names
        return frozenset(p for p in self.parameters.trained if is_auto_ep_router(names[p]))

    @cached_property
    def kept(self) -> frozenset[int]:
        """What AutoTP leaves as it is at stage 3: ``zero.Init`` has sharded it over all ranks, before the engine makes the
        groups of those that read different samples, which share what AutoTP divides.

        Source: zero/stage3.py, _grad_norm_counts_every_rank; engine.py, _resolve_zero3_param_placement
        """
        if not (self.layout.tp > 1 and self.stage == 3 and self.zero_init):
            return frozenset()
        from zeroplan.core.tensor_parallel import auto_tp_divides

        return frozenset(p for p, name in enumerate(self.parameters.names) if not auto_tp_divides(name))

    @cached_property
    def partition_group(self) -> tuple[int, ...]:
        """A number for the process group in which stage 3 shards each parameter."""
        return tuple(1 if p in self.experts else 2 * (p in self.routers or p in self.kept) for p in range(len(self.numel)))

    @cached_property
    def before_sharing(self) -> int:
        """Elements of the model that each rank loads, which has every rank's experts where AutoEP takes some of them."""
        shared = sum(self.numel[p] for p in self.experts) if self.layout.auto_ep else 0
        return sum(self.numel) + shared * (self.layout.ep - 1)

    @cached_property
    def ranks_of(self) -> tuple[int, ...]:
        """The ranks among which stage 3 divides each parameter: for an expert's, those that hold the same experts."""
        every = self.ranks * self.layout.tp
        return tuple(
            self.expert_ranks if p in self.experts else every if p in self.kept else self.ranks for p in range(len(self.numel))
        )

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Elements of each parameter as stage 3 gathers it: every rank's part."""
        return tuple(part * ranks for part, ranks in zip(self.shards, self.ranks_of, strict=True))

    @cached_property
    def swapping(self) -> Swapping:
        """The rules of NVMe offload."""
        return Swapping.of(self.zero, self)

    @property
    def _swaps_optimizer(self) -> bool:
        return self.stage == 3 and self.optimizer_device is OffloadDevice.NVME

    @cached_property
    def experts(self) -> frozenset[int]:
        """The trained parameters of experts of DeepSpeed's MoE layers or AutoEP's. See Note [Groups of experts]."""
        names = self.parameters.names
        own = is_auto_ep_expert if self.layout.auto_ep else is_expert
        return frozenset(p for p in self.parameters.trained if own(names[p]))

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return self.ranks // self.layout.ep

    @cached_property
    def group_ranks(self) -> tuple[int, ...]:
        """The ranks among which stages 1 and 2 divide each parameter group."""
        return tuple(self.expert_ranks if group and group[0] in self.experts else self.ranks for _, group in self.param_groups)

    @cached_property
    def param_groups(self) -> tuple[tuple[Domain, tuple[int, ...]], ...]:
        """The optimizer's groups of parameters: all trained ones (in two by a Trainer), or Muon's matrices before the rest, or
        experts behind them.

        Source: utils.py, is_optimized_parameter; engine.py, _muon_param_groups
        """
        trained, names, shapes = self.parameters.trained, self.parameters.names, self.parameters.shapes
        if not self.optimizer.rest:
            if not self.experts:
                found: list[tuple[int, ...]] = []
                for own in self._decayed(trained):
                    groups = [tuple(p for p in own if p in self.kept), tuple(p for p in own if p not in self.kept)]
                    found += sorted(groups, key=lambda group: group[:1])  # as _get_trainable_parameter_groups meets them
                return tuple((Domain.ALL, group) for group in found if group)
            dense = tuple(p for p in trained if p not in self.experts | self.routers)
            if (
                self.layout.auto_ep and self.workload.loop.in_trainer
            ):  # engine.py, _remap_model_parameters_after_module_replacement
                dense = tuple(sorted(dense, key=lambda p: is_auto_ep_router(names[p])))
            apart = (tuple(sorted(self.routers)),) if self.routers else ()  # stage3.py, _get_trainable_parameter_groups
            together = (dense, *apart, *expert_groups(sorted(self.experts), self.numel))
            return tuple((Domain.ALL, group) for group in together)
        matrices = tuple(p for p in trained if muon_updates(names[p], len(shapes[p])))
        rest = tuple(sorted(set(trained) - set(matrices)))
        return tuple((domain, own) for domain, own in ((Domain.MATRIX, matrices), (Domain.REST, rest)) if own)

    def _decayed(self, trained: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of the program's own: transformers' Trainer has biases and norms, which do not decay, in a second.

        Its rule goes by names, and by the class of LayerNorm, which are the only weights of one dimension without such a name.
        Source: transformers/trainer.py, get_decay_parameter_names, create_optimizer
        """
        if not self.workload.loop.in_trainer:
            return (trained,)
        names, shapes = self.parameters.names, self.parameters.shapes
        spared = {
            p for p in trained if _UNDECAYED.search(names[p].lower()) or (names[p].endswith("weight") and len(shapes[p]) == 1)
        }
        return tuple(p for p in trained if p not in spared), tuple(p for p in trained if p in spared)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The parameters that the optimizer owns, group by group."""
        return tuple(p for _, group in self.param_groups for p in group)

    @cached_property
    def flat(self) -> FlatGroup:
        """Stages 1 and 2: the trained parameters as one flat tensor, cut among the ranks."""
        return flat_groups(
            tuple(group for _, group in self.param_groups),
            self.numel,
            self.group_ranks,
            width=self.param_bytes,
            round_robin=self.zero.buckets.round_robin_gradients,
            aligned=self.zero.buckets.parameter_alignment,
        )

    @cached_property
    def sub_groups(self) -> list[list[int]]:
        """Stage 3: the parameters of each sub-group, which the optimizer steps one after another."""
        return [sub for _, subs in self._sub_groups_of for sub in subs]

    @cached_property
    def _sub_groups_of(self) -> list[tuple[Domain, list[list[int]]]]:
        size = self.zero.stage3.sub_group_size
        return [(domain, sub_groups(group, self.shards, size)) for domain, group in self.param_groups]

    @cached_property
    def stepped_at_once(self) -> list[int]:
        """This rank's elements of each group that the optimizer steps at once.

        A parameter at stage 0, all of them if they are flattened; a group's partition at stages 1 and 2; a sub-group at
        stage 3.
        """
        if self.stage == 0:
            counts = [self.numel[p] for p in self.trained]
            return [sum(self.numel[p] for p in group) for _, group in self.param_groups] if self.flattens else counts
        if self.stage == 3:
            return [sum(self.shards[p] for p in group) for group in self.sub_groups]
        if not self.zero.buckets.parameter_alignment:
            groups = zip(self.param_groups, self.group_ranks, strict=True)
            return [padded(sum(self.numel[p] for p in group), ranks) // ranks for (_, group), ranks in groups]
        return list(self.flat.partitions)

    @cached_property
    def domains(self) -> list[Domain]:
        """The domain of optimizer states that each entry of :attr:`stepped_at_once` has."""
        if self.stage == 3:
            return [domain for domain, subs in self._sub_groups_of for _ in subs]
        one_by_one = self.stage == 0 and not self.flattens
        return [domain for domain, group in self.param_groups for _ in (group if one_by_one else (0,))]

    @property
    def flattens(self) -> bool:
        """Whether stage 0 keeps one flat master: with 16-bit parameters and FusedAdam. Source: fp16/fused_optimizer.py."""
        return self.stage == 0 and self.own_masters and self.fused_adam

    @cached_property
    def staying(self) -> int:
        """Groups that a partial offload leaves on the GPU: the first ones."""
        return groups_on_gpu(len(self.stepped_at_once), self.zero) if self.stage == 3 else 0

    @property
    def cast_on_host(self) -> range:
        """The groups whose masters are on the GPU and parameters on the host, as places in :attr:`stepped_at_once`.

        A blocking copy between the two casts on the host.
        """
        casts = self.stage == 3 and self.param_device is OffloadDevice.CPU and self.master_bytes != self.param_bytes
        on_gpu = self.staying if self.offloads_optimizer else len(self.stepped_at_once)
        return range(on_gpu if casts else 0)

    @cached_property
    def stepped_in_memory(self) -> list[int]:
        """Elements of the groups whose optimizer state stays in host memory between steps, where the optimizer is offloaded."""
        return [self.stepped_at_once[at] for at in self.in_memory]

    @cached_property
    def in_memory(self) -> list[int]:
        """Those groups, as places in :attr:`stepped_at_once`."""
        if self.optimizer_device is OffloadDevice.NVME:
            return [at for at in range(len(self.stepped_at_once)) if not self.is_swapped(at)]
        return list(range(self.staying, len(self.stepped_at_once)))

    def is_swapped(self, at: int) -> bool:
        """Return whether the optimizer's states of a group, by its place in :attr:`stepped_at_once`, are in files between
        steps.
        """
        on_disk = self.optimizer_device is OffloadDevice.NVME
        return on_disk and self.stepped_at_once[at] * self.master_bytes >= self.least_swapped

    def states(self, at: int) -> list[tuple[Buffer, int]]:
        """Return the bytes of the optimizer's states of a group, by its place in :attr:`stepped_at_once`."""
        count, domain = self.stepped_at_once[at], self.domains[at]
        if domain is Domain.MATRIX and self.stages_momentum:
            count = self.momentum
        width = self.momentum_bytes if domain is Domain.MATRIX else self.state_bytes
        return [(state.buffer, state.bytes_of(count, width)) for state in self.optimizer.states if state.domain is domain]

    # --- Muon ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def matrix(self) -> int:
        """Elements of this rank's parts of the matrices that Muon updates."""
        return self._stepped(Domain.MATRIX, range(len(self.stepped_at_once)))

    @cached_property
    def rest(self) -> int:
        """Elements of this rank's parts of what Muon leaves to Adam."""
        return self._stepped(Domain.REST, range(len(self.stepped_at_once)))

    @cached_property
    def matrix_in_memory(self) -> int:
        """Elements of the matrices' parts whose offloaded momentum is in host memory."""
        return self._stepped(Domain.MATRIX, self.in_memory)

    @cached_property
    def rest_in_memory(self) -> int:
        """Elements of what Muon leaves to Adam whose offloaded states are in host memory."""
        return self._stepped(Domain.REST, self.in_memory)

    @cached_property
    def matrix_in_files(self) -> int:
        """Elements of the matrices' parts whose momentum is in files, each sub-group aligned."""
        return self._in_files(Domain.MATRIX)

    @cached_property
    def rest_in_files(self) -> int:
        """Elements of what Muon leaves to Adam whose states are in files, each sub-group aligned."""
        return self._in_files(Domain.REST)

    def _stepped(self, domain: Domain, places: Iterable[int]) -> int:
        return sum(self.stepped_at_once[at] for at in places if self.domains[at] is domain)

    def _in_files(self, domain: Domain) -> int:
        own = [count for count, one in zip(self.stepped_at_once, self.domains, strict=True) if one is domain]
        return self.swapping.state_files(own, self.master_bytes) if self._swaps_optimizer else 0

    @property
    def stages_momentum(self) -> bool:
        """Whether Muon's momentum is of whole matrices, and staged in a copy until the step is known to be good.

        So it is where stages 1 and 2 orthogonalise a rank's gradients when the backward ends.
        Source: zero/stage_1_and_2.py, _muon_momentum_buffer, _muon_staging_momentum
        """
        here = self.stage in (1, 2) and not self.offloads_optimizer and not self.full_fp32_grads
        return here and bool(self.optimizer.rest)

    @property
    def momentum_precedes(self) -> bool:
        """Whether Muon's momentum is there before the first step: from the first backward's end, or from initialisation.

        Source: zero/stage_1_and_2.py, get_flat_partition; zero/stage3.py, _create_fp32_partitions
        """
        return bool(self.optimizer.rest) and (self.stages_momentum or self.stage == 3)

    @property
    def momentum_bytes(self) -> int:
        """Bytes of one element of Muon's momentum: the gradient's where it is staged, at stage 3 those of one on its way.

        Source: zero/stage_1_and_2.py, _muon_momentum_buffer; zero/stage3.py, _create_momentum_buffer
        """
        if self.stage == 3:
            return self.comm_bytes
        if self.stages_momentum:
            return self.accum_bytes if self.uses_grad_accum_attribute else self.param_bytes
        return self.master_bytes

    @cached_property
    def touched_matrices(self) -> list[int]:
        """Elements of each matrix that this rank's partition touches, whole; empty unless :attr:`stages_momentum`."""
        return self._touched.get(self.rank, [])

    @cached_property
    def momentum(self) -> int:
        """Elements of the matrices that this rank's partition touches, whole."""
        return sum(self.touched_matrices)

    @cached_property
    def most_momentum(self) -> int:
        """Elements of the matrices that a rank's partition touches, whole, on the rank where they are the most."""
        return max(map(sum, self._touched.values()), default=0)

    @cached_property
    def _touched(self) -> dict[int, list[int]]:
        """The elements of each matrix that a rank's partition touches, by rank."""
        found: dict[int, list[int]] = {}
        for domain, group in self.param_groups if self.stages_momentum else ():
            for p in group if domain is Domain.MATRIX else ():
                for part in self.flat.slices[p]:
                    found.setdefault(part.rank, []).append(self.numel[p])
        return found
