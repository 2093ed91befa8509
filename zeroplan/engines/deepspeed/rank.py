"""One rank of a job under DeepSpeed: what it holds of every parameter, derived once for the ledger and the schedules.

Counts are elements, and ``bytes`` in a name means bytes an element, unless a docstring says otherwise. Parameters are indices
into :class:`~zeroplan.core.parameters.Parameters`. Paths of sources are those of DeepSpeed 0.19.8 under ``deepspeed/runtime/``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from zeroplan.core.buffers import Buffer, Place
from zeroplan.core.gpus import Gpu
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.parameters import Parameters
from zeroplan.core.quantization import Quantization
from zeroplan.core.workload import DType, OptimizerKind, Precision, Reference, Workload
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.engines.deepspeed.groups import padded, persistent
from zeroplan.engines.deepspeed.resolved_config import resolve_config
from zeroplan.engines.deepspeed.stepped_groups import SteppedGroups
from zeroplan.engines.deepspeed.versions import Knob
from zeroplan.engines.quantized_base import stored
from zeroplan.ledger.derive import pow2, shard
from zeroplan.ledger.line import means

#: The first version with ``bf16.check_grad_overflow``.
CHECK_GRAD_OVERFLOW = (0, 17, 1)
#: Cached properties that differ among the ranks of a job.
OF_ONE_RANK = frozenset({"accum_blocks", "momentum", "touched_matrices"})

if TYPE_CHECKING:
    from zeroplan.core.pipeline import Stage
    from zeroplan.engines.deepspeed.muon import MatrixGathers


@dataclass(frozen=True, kw_only=True)
class DeepSpeedRank(SteppedGroups):
    """One rank, and what it holds.

    Attributes:
        device_memory: bytes of the GPU, which decides whether stages 1 and 2 flatten parameters there; None for enough.
        pipeline_stage: the stage of a ``PipelineModule`` that it has; None without one.
        fetches_wrapper: peft's wrapper is fetched by itself, as any module; see ``passed_through`` in outside_reads.py.
    """

    device_memory: int | None = None
    saved_weights: int = means("elements of linear layers' weights that autograd keeps until their backward", default=0)
    pipeline_stage: Stage | None = None
    hidden: int = means("bytes of one micro batch's hidden states, which pipeline stages send each other", default=0)
    checkpoint: int = means("bytes of the input of a recomputed block, where inputs wait on the host", default=0)
    offloaded_inputs: int = means(
        "inputs of recomputed blocks that are copied to the host: all but the last block's", default=0
    )
    fetches_wrapper: bool = True

    def at(self, rank: int) -> DeepSpeedRank:
        """Return another rank of the same job, with what was derived for this one and is the same on all."""
        if rank == self.rank:
            return self
        other = replace(self, rank=rank)
        vars(other).update({name: value for name, value in vars(self).items() if name not in OF_ONE_RANK | vars(other).keys()})
        return other

    # --- the configuration ------------------------------------------------------------------------------------------------

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """The way in which the optimizer walks its tensors."""
        return self.workload.numerics.optimizer_kind

    @property
    def fp16(self) -> bool:
        """Whether the loss is scaled."""
        return self.param_bytes == 2 and self.workload.numerics.dtype is DType.FP16

    def looks_for_overflow(self, *, offloaded: bool = False) -> bool:
        """Return whether stages 1 and 2 look for inf and nan in gradients through copies of them.

        `offloaded` asks for those on their way to the host, in which every version looks.
        """
        if self.does(Knob.OVERFLOW_BY_EXTREMES) or self.stage not in (1, 2):
            return False
        if offloaded or self.fp16 or not self.does(Knob.OVERFLOW_FP16_ONLY):
            return True
        bf16 = self.workload.numerics.dtype is DType.BF16 and self.param_bytes == 2
        return bf16 and self.zero.step.check_grad_overflow and self.version >= CHECK_GRAD_OVERFLOW

    @property
    def looks_at_flat_gradients(self) -> bool:
        """Whether stage 3 looks for inf and nan in all its gradients at once, where they lie.

        Source: stage3.py, has_overflow
        """
        return self.stage == 3 and (self.fp16 or not self.does(Knob.OVERFLOW_FP16_ONLY))

    @property
    def device_lags(self) -> bool:
        """Whether stage 3's freed parameters wait for a device that nothing makes the host wait for (coordinator.py).

        The host waits at every fetch for a single rank. Of several ranks it waits for nothing that computes, but with offload
        to memory that is not pinned for each gradient's copy: the call returns once the copy has completed.

        Source: stage3.py, partition_grads; partition_parameters.py, NoGatherHandle, _all_gather_dtype; CUDA Runtime API, "API
        synchronization behavior"
        """
        waited_for = self.ranks == 1 or (self.offloads_optimizer and not self.pin_optimizer)
        return self.zero.stage == 3 and self.zero.overlaps_comm and not waited_for

    @property
    def pin_optimizer(self) -> bool:
        """Whether the offloaded optimizer's buffers are pinned."""
        return self.zero.offload_optimizer.pin_memory

    @property
    def pin_param(self) -> bool:
        """Whether offloaded parameters are pinned."""
        return self.zero.offload_param.pin_memory

    @property
    def pinned(self) -> Place:
        """The memory in which the offloaded optimizer's transfer buffers lie."""
        return Place.PINNED if self.pin_optimizer else Place.DRAM

    # --- the parameters ---------------------------------------------------------------------------------------------------

    @cached_property
    def reference(self) -> int:
        """This rank's elements of a reference model beside the trained one: all, and at stage 3 parts of each parameter."""
        if self.workload.objective.reference is not Reference.MODEL:
            return 0
        return sum(self.shards) if self.stage == 3 else sum(self.numel)

    def of_reference(self) -> DeepSpeedRank:
        """Return the rank as the reference's engine at stage 3 sees it, whose config lacks what training fills in.

        Source: TRL 1.16, models/utils.py, prepare_deepspeed, whose own ``zero_optimization.*`` keys no DeepSpeed reads
        """
        return replace(self, zero=self.zero.before_training)

    @cached_property
    def frozen_numel(self) -> list[int]:
        """Elements of each parameter without gradient."""
        return [count for count, on in zip(self.numel, self.parameters.trainable, strict=True) if not on]

    @cached_property
    def built_for(self) -> list[int]:
        """The module's own parameters for which the optimizer makes states when it is built. ZeRO then gives it others to step,
        and makes a second optimizer for them; the engine keeps the first.

        At stage 3 those that are split already are empty. Source: engine.py, basic_optimizer; zero/stage_1_and_2.py and
        stage3.py, initialize_optimizer_states
        """
        own = self.optimizer.torch
        if own is None or not own.states_when_built or self.offloads_optimizer or not self.stage:
            return []
        whole = self.stage < 3 or not self.zero_init
        return [p for p in self.trained if whole or self.parameters.adapters[p]]

    @cached_property
    def built_numel(self) -> int:
        """Elements of the module's own parameters for which the optimizer made states when it was built."""
        return sum(self.numel[p] for p in self.built_for)

    @cached_property
    def comm_of(self) -> tuple[int, ...]:
        """Bytes an element of each parameter's gradient while it is reduced."""
        return self._travelling(self.comm_bytes)

    @cached_property
    def other_half(self) -> bool:
        """Whether gradients are reduced in the 16-bit dtype that is not the model's: as wide, and cast all the same."""
        sent = self.zero.step.communication_data_type
        return self.param_bytes == 2 and sent not in (None, DType.FP32, self.workload.numerics.dtype)

    @cached_property
    def gather_of(self) -> tuple[int, ...]:
        """Bytes an element of each parameter while stage 3 gathers it."""
        return self._travelling(self.param_bytes)

    def _travelling(self, otherwise: int) -> tuple[int, ...]:
        """Return each parameter's bytes an element in communication: under ``torch_autocast``, 16-bit ones for linear layers
        and convolutions.

        Source: torch_autocast.py, init_autocast_params, whose attribute outranks ``communication_data_type``
        """
        if self.workload.numerics.precision is not Precision.AUTOCAST:
            return (otherwise,) * len(self.parameters)
        narrow, own = self.workload.numerics.dtype.bytes, self.workload.numerics.param_bytes
        return tuple(narrow if on else own for on in self.parameters.autocast)

    @cached_property
    def comm_widths(self) -> list[int]:
        """Every width in which gradients are reduced, ascending. Stages 1 to 3 have a bucket for each."""
        return sorted({self.comm_of[p] for p in self.trained})

    @property
    def bucket_widths(self) -> list[int]:
        """Bytes an element of each bucket of stage 3."""
        return self.comm_widths if self.does(Knob.STAGE3_BUCKET_DTYPE) else [self.param_bytes] * bool(self.comm_widths)

    @cached_property
    def persistent_params(self) -> list[int]:
        """The parameters that stage 3 keeps gathered."""
        return persistent(
            self.numel, self.zero.stage3.param_persistence_threshold, self.zero.stage3.model_persistence_threshold
        )

    @cached_property
    def graph_weights(self) -> int:
        """Elements of the quantised weights that products keep, as they were gathered, in the graph of a micro batch."""
        alone = self.ranks == 1 and not self.zero.offloads_param  # a shard is the whole
        if self.stage < 3 or alone or not isinstance(self.workload.quantize, Quantization):
            return 0
        return sum(self.shards[p] * self.ranks for p in self.parameters.packed)

    @cached_property
    def secondary_shards(self) -> tuple[int, ...]:
        """This rank's elements of each parameter's second part (hpZ); empty where there is none.

        Source: ../utils/groups.py, _create_zero_param_parallel_group; zero/partition_parameters.py, _partition_param_sec
        """
        group = self.zero.stage3.zero_hpz_partition_size
        if self.stage < 3 or group <= 1:
            return ()
        group = self.layout.secondary_group(group)
        return tuple(part * self.ranks // group for part in self.shards)

    @cached_property
    def matrix_gathers(self) -> MatrixGathers:
        """Memory that Muon's updates of whole matrices take on the GPU."""
        from zeroplan.engines.deepspeed.muon import matrix_gathers

        return matrix_gathers(self)

    # --- the names in the ledger's formulas -------------------------------------------------------------------------------
    # The first sentence of each docstring is what `explain` says of the name.

    @cached_property
    def flat_group(self) -> int:
        """Trainable elements, padded to a multiple of 2 × ranks."""
        if self.zero.buckets.parameter_alignment:
            return self.flat.numel
        return self._flattened(experts=False) + self._flattened(experts=True)

    @cached_property
    def dense_group(self) -> int:
        """Trainable elements that are no experts', padded to a multiple of 2 × ranks."""
        return self._flattened(experts=False)

    @cached_property
    def expert_group(self) -> int:
        """Trainable elements of this rank's experts, padded to a multiple of 2 × the ranks that hold the same."""
        return self._flattened(experts=True)

    def _flattened(self, *, experts: bool) -> int:
        groups = zip(self.param_groups, self.group_ranks, strict=True)
        return sum(
            padded(sum(self.numel[p] for p in group), ranks)
            for (_, group), ranks in groups
            if (not group or group[0] in self.experts) is experts
        )

    @cached_property
    def kept_on_gpu(self) -> int:
        """Elements that a partial offload updates on the GPU."""
        return sum(self.stepped_at_once[: self.staying])

    @cached_property
    def stepped_nvme(self) -> int:
        """Elements whose optimizer states are on disk."""
        if self.optimizer_device is not OffloadDevice.NVME:
            return 0
        return sum(count for count in self.stepped_at_once if count * self.master_bytes >= self.least_swapped)

    @cached_property
    def sharded(self) -> int:
        """Elements of this rank's parts of the trainable parameters, each padded."""
        return sum(self.shards[p] for p in self.trained)

    @cached_property
    def frozen_sharded(self) -> int:
        """Elements of this rank's parts of the frozen parameters, each padded."""
        return sum(self.shards) - self.sharded

    @cached_property
    def persistent(self) -> int:
        """Elements of parameters at or below stage3_param_persistence_threshold, each padded."""
        alone = self.ranks > 1 and not self.zero.offloads_param  # of experts that no other rank has, the part is the whole
        return sum(self.whole[p] for p in self.persistent_params if not (alone and self.ranks_of[p] == 1))

    @cached_property
    def secondary(self) -> int:
        """Elements of this rank's second parts of all parameters (zero_hpz_partition_size)."""
        return sum(self.secondary_shards)

    @cached_property
    def secondary_blocks(self) -> int:
        """Bytes of one pinned block for each parameter's second part, each rounded to a power of two."""
        return sum(pow2(count * self.param_bytes) for count in self.secondary_shards)

    @cached_property
    def largest_param(self) -> int:
        """Elements of the largest trainable parameter."""
        return self.parameters.largest_trained

    @cached_property
    def sub_group(self) -> int:
        """This rank's elements of the largest sub-group (sub_group_size)."""
        return max(self.stepped_at_once, default=0)

    @cached_property
    def muon_gathers(self) -> int:
        """Bytes of the buffers through which whole matrices are gathered, the most recently used 256 MiB of them."""
        return self.matrix_gathers.kept if self.optimizer.rest else 0

    @cached_property
    def muon_together(self) -> int:
        """Bytes of whole gradients, momentum and updates of the matrices that Muon updates together."""
        return max(self.matrix_gathers.passing, default=0) if self.optimizer.rest else 0

    @cached_property
    def bucket_bytes(self) -> int:
        """Bytes of one element of the gradient buckets, one for each dtype that travels.

        Source: zero/stage_1_and_2.py, setup_buckets (all buckets have one dtype); zero/stage3.py, ipg_buckets
        """
        if self.stage == 3:
            return sum(self.bucket_widths)
        return len(self.comm_widths) * (self.accum_bytes if self.uses_grad_accum_attribute else self.param_bytes)

    @cached_property
    def reduce_bucket(self) -> int:
        """``reduce_bucket_size``, elements."""
        return self.zero.buckets.reduce_bucket_size

    @cached_property
    def buckets(self) -> int:
        """Buckets at once: two with overlap_comm. On pipeline stages the reduction adds a second one."""
        return 2 if self.zero.overlaps_comm or self.pipeline_stage is not None else 1

    @cached_property
    def pinned_grad_block(self) -> int:
        """Bytes of the fp32 gradients' pinned blocks, each sub-group's rounded to a power of two."""
        return sum(pow2(count * self.master_bytes) for count in self.stepped_at_once[self.staying :])

    @cached_property
    def small_param_blocks(self) -> int:
        """Bytes of one block for each trainable part not in a file, a tied one's twin included, rounded to a power of two."""
        every = sum(self._param_block(p) for owned in self.parameters.modules for p in owned)
        return every - self.frozen_blocks

    @cached_property
    def frozen_blocks(self) -> int:
        """Bytes of one block for each frozen parameter's part not in a file, rounded to a power of two."""
        return sum(self._param_block(p) for p, on in enumerate(self.parameters.trainable) if not on)

    def _param_block(self, param: int) -> int:
        """Return the bytes of the pinned block of this rank's part; 0 for a part that goes to a file."""
        count, width = self.shards[param], self.param_bytes
        in_file = self.param_device is OffloadDevice.NVME and self.swapping.swaps(count, width)
        return 0 if in_file else pow2(count * width)

    @cached_property
    def accum_blocks(self) -> int:
        """Bytes of one block for each parameter that this rank's partition touches, in which its gradients accumulate.

        16-bit masters' gradients accumulate in place.
        Source: zero/stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu
        """
        on_host = self.stage in (1, 2) and self.optimizer_device is OffloadDevice.CPU
        if not on_host or self.grad_accum == 1 or self.master_bytes != DType.FP32.bytes:
            return 0
        counts = [self.param_bytes * self.numel[p] for p, _ in self.flat.owned(self.rank)]
        return sum(pow2(count) if self.pin_optimizer else count for count in counts)

    @cached_property
    def swap_buffers(self) -> int:
        """``offload_optimizer.buffer_count``."""
        return self.zero.offload_optimizer.buffer_count

    @cached_property
    def swap_buffer(self) -> int:
        """Elements of one swap buffer: the largest sub-group, aligned."""
        return self.swapping.whole(self.sub_group, self.master_bytes) if self._swaps_optimizer else 0

    @cached_property
    def states_in_files(self) -> int:
        """Elements of the sub-groups whose states are in files, each aligned."""
        return self.swapping.state_files(self.stepped_at_once, self.master_bytes) if self._swaps_optimizer else 0

    @cached_property
    def grads_in_files(self) -> int:
        """Elements of gradients in files: of parameters large enough, without what is not aligned."""
        return self.swapping.gradient_files(self._group_shards, self.master_bytes) if self._swaps_optimizer else 0

    @cached_property
    def params_in_files(self) -> int:
        """Elements of parameters in files: of those large enough, each aligned."""
        return self.swapping.param_files(self.shards, self.param_bytes) if self._swaps_params else 0

    @cached_property
    def swap_reserve(self) -> int:
        """Elements of the largest sub-group's parameters, each aligned, where not all fit into max_in_cpu."""
        return self.swapping.reserve(self._group_shards, self.param_bytes) if self._swaps_params else 0

    @cached_property
    def param_swap_buffers(self) -> int:
        """``offload_param.buffer_count``."""
        return self.zero.offload_param.buffer_count

    @cached_property
    def param_swap_buffer(self) -> int:
        """``offload_param.buffer_size``, elements, aligned."""
        return self.swapping.whole(self.zero.offload_param.buffer_size, self.param_bytes) if self._swaps_params else 0

    @cached_property
    def params_in_cpu(self) -> int:
        """Elements of parameters that stay in host memory (max_in_cpu)."""
        return min(self.sharded, self.zero.offload_param.max_in_cpu)

    @property
    def _swaps_params(self) -> bool:
        return self.param_device is OffloadDevice.NVME

    @cached_property
    def _group_shards(self) -> list[list[int]]:
        return [[self.shards[p] for p in group] for group in self.sub_groups]

    @property
    def second_moment_always(self) -> bool:
        """Whether the optimizer's class for the host keeps a second moment that the optimizer does not have."""
        return self.offloads_optimizer and Buffer.OPTIM_EXP_AVG_SQ in self.optimizer.host_states

    @property
    def stepped(self) -> int:
        """Elements that this rank's optimizer updates."""
        if self.stage == 0:
            return self.trainable
        if self.stage == 3:
            return self.sharded
        if self.experts:
            return shard(self.dense_group, self.ranks) + shard(self.expert_group, self.expert_ranks)
        return shard(self.flat_group, self.ranks)

    @property
    def stepped_hbm(self) -> int:
        """Elements that the optimizer steps on the GPU."""
        return self.stepped if self.optimizer_device is OffloadDevice.NONE else self.kept_on_gpu

    @property
    def stepped_host(self) -> int:
        """Elements that the optimizer steps on the host."""
        if self.optimizer_device is OffloadDevice.NONE:
            return 0
        elsewhere = self.kept_on_gpu + self.stepped_nvme
        return self.stepped - elsewhere if elsewhere else self.stepped


def deepspeed_rank(
    parameters: Parameters, workload: Workload, zero: ZeroConfig, layout: ParallelLayout, *, gpu: Gpu | None = None, **more: Any
) -> DeepSpeedRank:
    """Derive one rank of a job; without a `gpu` cuBLAS takes no workspace. `more` are further fields of the rank."""
    pipeline = more.get("pipeline_stage") is not None
    return DeepSpeedRank(
        **resolve_config(workload, zero, pipeline=pipeline).values(),
        workload=workload,
        zero=zero,
        parameters=stored(parameters, workload),
        layout=layout,
        cublas_workspace=gpu.workspace if gpu is not None else 0,
        **more,
    )
