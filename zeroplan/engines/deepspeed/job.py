"""What a DeepSpeed schedule reads: one rank's job with every width, knob and list of parameters resolved."""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.optimizer_row import Optimizer, State
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.tape import ExpandedTape
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.deepspeed.resolution import Resolution, muon_updates, resolution

#: Streams of the simulated device. Blocks are reused only on the stream that allocated them.
COMPUTE, GATHER, REDUCE = 0, 1, 2

#: engine.py, MEMORY_OPT_ALLREDUCE_SIZE: elements in a bucket of stage 0's gradient all-reduce.
STAGE0_BUCKET = 500_000_000

#: torch_autocast.py, LOWER_PRECISION_SAFE_MODULES.
AUTOCAST_SAFE = frozenset({"Linear", "Conv1d", "Conv2d", "Conv3d"})

#: Bytes of a scalar on the device; the allocator rounds it to 512.
SCALAR = 4

#: Optimizer steps until peaks repeat: the first makes the states, the second runs with them (and at stage 3 with the
#: complete trace), the third meets the blocks that the second left in the allocator's cache.
STEPS_UNTIL_STEADY = 3


@dataclass(frozen=True, slots=True)
class Job(Resolution):
    """One rank's training job under DeepSpeed.

    Counts are elements. Lists are in the order of ``module.parameters()``, with tied
    parameters once.

    Attributes:
        numel: elements of each parameter.
        trainable: which parameters receive a gradient.
        adapter: which parameters were added to the built model (LoRA).
        modules: for each module of the tape, the parameters that it owns; tied ones appear in every owner.
        zero_init: the model is built under ``deepspeed.zero.Init`` (stage 3), else whole on the GPU.
        comm_of: bytes an element of each parameter's gradient while it is reduced.
        gather_of: bytes an element of each parameter while stage 3 gathers it.
        matrix_share: part of the trainable elements that Muon updates.
        skipped_steps: leading optimizer steps that fp16's falling loss scale discards; data decide, so it is an input.
        cublas_workspace: bytes of one cuBLAS workspace.
        device_memory: bytes of the GPU; None for no limit. Flattening goes through the host where it does not fit.
    """

    zero: ZeroConfig
    workload: Workload
    optimizer: Optimizer
    ranks: int
    rank: int
    numel: tuple[int, ...]
    trainable: tuple[bool, ...]
    adapter: tuple[bool, ...]
    modules: tuple[tuple[int, ...], ...]
    comm_of: tuple[int, ...]
    gather_of: tuple[int, ...]
    steps: int
    matrix_share: float = 0.0
    skipped_steps: int = 0
    zero_init: bool = True
    cublas_workspace: int = 0
    device_memory: int | None = None

    @property
    def device_lags(self) -> bool:
        """Whether stage 3's freed parameters wait for a device that nothing makes the host wait for (coordinator.py).

        A single rank, or one that copies from the host, is waited for at every fetch.
        """
        waited_for = self.ranks == 1 or self.offloads_optimizer or self.zero.offloads_param
        return self.zero.stage == 3 and self.zero.overlaps_comm and not waited_for

    @property
    def fp16(self) -> bool:
        """Whether the loss is scaled."""
        return self.param_bytes == 2 and self.workload.dtype is DType.FP16

    @property
    def trained(self) -> list[int]:
        """Indices of the parameters that the optimizer owns (runtime/utils.py, is_optimized_parameter)."""
        return [i for i, on in enumerate(self.trainable) if on and self.numel[i]]

    def state_size(self, state: State, count: int) -> int:
        """Bytes of an optimizer state for `count` stepped elements; of those, the model's share is in the state's domain."""
        share = {"matrix": self.matrix_share, "rest": 1 - self.matrix_share}.get(state.domain, 1.0)
        held = count if share == 1.0 else round(count * share)
        return state.bytes_of(held, self.state_bytes)


def resolve(
    tape: ExpandedTape,
    workload: Workload,
    zero: ZeroConfig,
    layout: ParallelLayout,
    *,
    rank: int = 0,
    cublas_workspace: int = 0,
    device_memory: int | None = None,
    steps: int | None = None,
    skipped_steps: int = 0,
    zero_init: bool = True,
) -> Job:
    """The job of `rank`. `steps` None means until peaks repeat."""
    resolved = resolution(workload, zero)
    return Job(
        **resolved.values(),
        zero=zero,
        workload=workload,
        optimizer=find_optimizer(workload.optimizer),
        ranks=layout.shard_group,
        rank=rank,
        numel=tuple(_count(p.shape) for p in tape.params),
        trainable=tuple(p.trainable for p in tape.params),
        adapter=tuple(".lora_" in p.name for p in tape.params),
        modules=tuple(module.params for module in tape.modules),
        comm_of=_travelling(tape, workload, resolved.comm_bytes),
        gather_of=_travelling(tape, workload, resolved.param_bytes),
        steps=(STEPS_UNTIL_STEADY if steps is None else steps) + (skipped_steps if steps is None else 0),
        matrix_share=_matrix_share(tape),
        skipped_steps=skipped_steps,
        zero_init=zero_init,
        cublas_workspace=cublas_workspace,
        device_memory=device_memory,
    )


def _travelling(tape: ExpandedTape, workload: Workload, otherwise: int) -> tuple[int, ...]:
    """Under ``torch_autocast`` parameters of linear layers and convolutions travel in 16 bits, all others in their own dtype.

    Source: runtime/torch_autocast.py, init_autocast_params, whose attribute outranks `communication_data_type`
    """
    if workload.precision is not Precision.AUTOCAST:
        return (otherwise,) * len(tape.params)
    safe = {p for module in tape.modules if module.type in AUTOCAST_SAFE for p in module.params}
    return tuple(workload.dtype.bytes if p in safe else workload.param_bytes for p in range(len(tape.params)))


def _matrix_share(tape: ExpandedTape) -> float:
    trainable = [p for p in tape.params if p.trainable]
    matrices = [p for p in trainable if muon_updates(p.name, len(p.shape))]
    return sum(_count(p.shape) for p in matrices) / max(1, sum(_count(p.shape) for p in trainable))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
