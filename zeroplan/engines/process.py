"""Memory that a rank's process takes beside torch's allocator: the rest of the device, and the interpreter on the host.

Note [Measured, not derived]
    These are properties of the driver, of CUDA's libraries and of NCCL, which no config decides. They were read off
    dozens of runs of torch 2.11 (CUDA 13.0, NCCL 2.28) on H100 and H200 GPUs (benchmarks/ground_truth): the same to a few
    MiB in every run of an engine, whatever the model. On GPUs of another generation, and for engines that were not measured,
    they are a guess, and the interval of the plan says so.

What every process has stands here. What only one engine's process has stands in that engine's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.sizes import MIB
from zeroplan.core.workload import Attention, DType, Workload
from zeroplan.core.zero_config import ZeroConfig

#: Bytes in use on the device after the first CUDA call: the context itself.
CONTEXT = 618 * MIB
#: CUDA loads kernels as they are first called: cuBLAS's, torch's own, the optimizer's. Flash attention's come on top.
KERNELS = 136 * MIB
FLASH_KERNELS = 16 * MIB
#: What a process' first collective takes, in a group of its own alone: NCCL's kernels and a communicator.
FIRST_COMMUNICATOR = 558 * MIB
#: What one communicator of several ranks takes beyond that, with two collectives, as FSDP2 has; on 2, 4 and 8 ranks alike.
ONE_COMMUNICATOR = 282 * MIB
#: Each further one of several ranks where the process is bound to its GPU, so that torch splits it off the first (R04, R05,
#: R10, R11, R18, R19 in benchmarks/results/mesh.jsonl), and what stages that send in theirs take beyond it (R06 to R09).
SPLIT_COMMUNICATOR = 446 * MIB
SENDING = 157 * MIB
#: Each further one of a process that is not bound, made at its first collective: of several ranks, of one, of pairs that send
#: both ways. One of which all-to-all alone is asked takes as much as pairs do (benchmarks/mesh/communicators.py, two GPUs).
FURTHER_COMMUNICATOR = 486 * MIB
FURTHER_ALONE = 388 * MIB
PAIRS = 640 * MIB
#: The context of another rank's process, which runs nothing there (R12, R13, A00 and A01 in benchmarks/results).
OTHER_CONTEXT = 524 * MIB
#: The device maps pinned host memory by pages of 4 KiB with entries of 8 bytes: 1/512 of the bytes pinned.
PINNED_PER_TABLE_BYTE = 512

#: How far the sum was off on the measured generation, and how far it may be on others and for engines not measured.
MEASURED_SPREAD = 24 * MIB
GUESSED_SPREAD = 512 * MIB
_MEASURED_CAPABILITY = (9, 0)
#: The same of cards that CUDA 13 no longer runs on: a V100 under CUDA 11 held 1.34 GiB before the model, 0.75 are planned.
OLDER_SPREAD = 640 * MIB
_OLDEST, _OLDEST_OF_CUDA_13 = (1, 0), (7, 5)  # ROCm's cards have none

#: Resident MiB of a rank by the end of each phase, without the engine's buffers: interpreter, torch, transformers, and what
#: CUDA's and NCCL's libraries map as they come into use. Measured with FSDP2, bf16 and fused attention.
TORCH_RSS = {Phase.LOAD: 1315, Phase.INIT: 1315, Phase.FORWARD: 1790, Phase.BACKWARD: 1860, Phase.STEP: 1970}

#: MiB by phase.
Change = Mapping[Phase, int]
#: CUDA keeps a copy of every kernel's module on the host once it is called. What other kernels mean for that, in MiB, each
#: from measured runs that differ in little else: no 16-bit products, casts or flash attention (fp32: rows a8 and a4);
#: matrix products and a softmax in place of fused attention (a10 and a5).
_FP32: Change = {Phase.FORWARD: -60, Phase.BACKWARD: -75, Phase.STEP: -110}
_EAGER: Change = {Phase.FORWARD: -15, Phase.BACKWARD: -30, Phase.STEP: -64}
#: Experts: torch's grouped matrix products and the sorting of tokens (F16, F17).
EXPERTS: Change = {Phase.FORWARD: 225, Phase.BACKWARD: 271, Phase.STEP: 173}
#: A model without rotary embeddings raises nothing to a power on the GPU when it is built (E21, E09, E13, E15, F15).
NO_ROTARY: Change = {Phase.LOAD: -100, Phase.INIT: -85, Phase.FORWARD: -85, Phase.BACKWARD: -85, Phase.STEP: -85}
#: peft with its layers' kernels, from the initialisation on (E01).
ADAPTERS = 20


def arithmetic_change(workload: Workload) -> Change:
    """Return how the workload's dtype and attention change the host's copies of kernels, in MiB by phase."""
    return _FP32 if workload.numerics.dtype is DType.FP32 else _EAGER if workload.numerics.attn is Attention.EAGER else {}


def changed(base: Mapping[Phase, int], changes: Iterable[Change]) -> dict[Phase, int]:
    """Return `base` with every change added; MiB by phase."""
    found = dict(base)
    for change in changes:
        for phase, more in change.items():
            found[phase] += more
    return found


def in_bytes(found: Mapping[Phase, int], adapters: int = 0) -> dict[Phase, int]:
    """MiB by phase as bytes; `adapters` MiB are added from the initialisation on, before which peft is not there."""
    return {phase: (size + (adapters if phase is not Phase.LOAD else 0)) * MIB for phase, size in found.items()}


def host_rss(
    base: Mapping[Phase, int], workload: Workload, zero: ZeroConfig, *, rotary: bool, experts: bool
) -> dict[Phase, int]:
    """Return the resident bytes of one rank that steps a plain torch optimizer. See Note [Measured, not derived].

    Args:
        base: MiB by the end of each phase with bf16 and fused attention.
        workload: decides which kernels the process loads.
        zero: with the optimizer on the host, the optimizer's kernels are never loaded.
        rotary: whether the model has rotary position embeddings.
        experts: whether the model is a mixture of experts.
    """
    found = changed(base, (arithmetic_change(workload), {} if rotary else NO_ROTARY, EXPERTS if experts else {}))
    if zero.offloads_optimizer:
        found[Phase.STEP] = found[Phase.BACKWARD]
    return in_bytes(found, ADAPTERS if workload.lora_rank else 0)


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes of one rank's device memory outside torch's allocator; `spread` is how far off the sum may be.

    `rollout` is what an engine takes that generates on the same GPU while the model trains. `others` are contexts that other
    ranks' processes have there.
    """

    context: int
    kernels: int
    nccl: int
    page_tables: int
    spread: int
    rollout: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Bytes of one rank's device memory outside torch's allocator."""
        return self.context + self.kernels + self.nccl + self.page_tables + self.rollout + self.others


def outside_torch(
    workload: Workload,
    *,
    nccl: int,
    capability: tuple[int, int],
    pinned: int = 0,
    measured: bool = True,
    collectives: bool = True,
    other_contexts: int = 0,
) -> Outside:
    """Return the bytes that NVML shows beyond the allocator's reserved ones.

    Args:
        workload: decides which kernels the process loads.
        nccl: bytes of NCCL's buffers and kernels beyond a first communicator of one rank.
        capability: the GPU's compute capability.
        pinned: bytes of host memory that the rank pins.
        measured: whether the engine's own part was measured.
        collectives: whether the process calls any.
        other_contexts: ranks whose processes have a context on the GPU beside this one's.
    """
    flash = workload.numerics.attn is not Attention.EAGER and workload.numerics.dtype is not DType.FP32
    known = measured and capability == _MEASURED_CAPABILITY
    return Outside(
        context=CONTEXT,
        kernels=KERNELS + (FLASH_KERNELS if flash else 0) + (FIRST_COMMUNICATOR if collectives else 0),
        nccl=nccl,
        page_tables=pinned // PINNED_PER_TABLE_BYTE,
        spread=OLDER_SPREAD if _OLDEST <= capability < _OLDEST_OF_CUDA_13 else MEASURED_SPREAD if known else GUESSED_SPREAD,
        others=OTHER_CONTEXT * other_contexts,
    )
