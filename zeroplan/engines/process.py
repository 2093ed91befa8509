"""What a rank's process takes beside torch's allocator: the rest of the device, and the interpreter on the host.

Note [Measured, not derived]
    These are properties of the driver, of CUDA's libraries and of NCCL, which no config decides. They were read off
    dozens of runs of torch 2.11 (CUDA 13.0, NCCL 2.28) on H100 and H200 GPUs (benchmarks/ground_truth): the same to a few
    MiB in every run of an engine, whatever the model. On GPUs of another generation they are a guess, and the interval
    of the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Phase
from zeroplan.core.units import MIB
from zeroplan.core.workload import Attention, DType, OptimizerKind, Workload
from zeroplan.core.zero_config import ZeroConfig

#: Used on the device after the first CUDA call: the context itself.
CONTEXT = 618 * MIB
#: CUDA loads kernels as they are first called: cuBLAS, torch's own, the optimizer's. With and without flash attention's.
KERNELS = 694 * MIB
FLASH_KERNELS = 16 * MIB
#: NCCL's buffers and kernels. torch's engines use one communicator; DeepSpeed's barriers, broadcasts and reductions of
#: scalars open more channels and kernels than FSDP2's and DDP's two collectives.
NCCL = {"deepspeed": 482 * MIB, "fsdp2": 282 * MIB, "ddp": 283 * MIB, "zeroplan": 282 * MIB}
#: A single rank calls no collective, except that fp16 at stage 3 all-reduces its overflow flag.
NCCL_ALONE = 390 * MIB
#: The device maps pinned host memory by pages of 4 KiB with entries of 8 bytes: 1/512 of the bytes pinned.
PINNED_PER_TABLE_BYTE = 512

#: How far the sum was off on the measured generation, and how far it may be on others.
MEASURED_SPREAD = 24 * MIB
GUESSED_SPREAD = 512 * MIB
_MEASURED_CAPABILITY = (9, 0)

#: Resident memory of a rank by the end of each phase, without the engine's buffers: interpreter, torch, transformers, the
#: engine, and what CUDA's and NCCL's libraries map as they come into use. MiB; bf16, fused attention; DeepSpeed's stage 2.
_HOST_RSS = {
    "deepspeed": {Phase.LOAD: 1400, Phase.INIT: 1480, Phase.FORWARD: 1870, Phase.BACKWARD: 1920, Phase.STEP: 2147},
    "fsdp2": {Phase.LOAD: 1315, Phase.INIT: 1315, Phase.FORWARD: 1790, Phase.BACKWARD: 1860, Phase.STEP: 1970},
    "ddp": {Phase.LOAD: 1390, Phase.INIT: 1390, Phase.FORWARD: 1780, Phase.BACKWARD: 1840, Phase.STEP: 1935},
    "zeroplan": {Phase.LOAD: 1315, Phase.INIT: 1315, Phase.FORWARD: 1790, Phase.BACKWARD: 1860, Phase.STEP: 1970},
}
#: CUDA keeps a copy of every kernel's module on the host once it is called. What other kernels mean for that, in MiB, each
#: from measured runs that differ in little else: no 16-bit products, casts or flash attention (fp32: rows a8 and a4);
#: matrix products and a softmax in place of fused attention (a10 and a5).
_FP32 = {Phase.FORWARD: -60, Phase.BACKWARD: -75, Phase.STEP: -110}
_EAGER = {Phase.FORWARD: -15, Phase.BACKWARD: -30, Phase.STEP: -64}
#: DeepSpeed's step beside that of stages 1 and 2: neither stage 0 nor stage 3 takes norms of slices in double precision and
#: flattens them (a4 and a5; D04 and D03); torch's multi-tensor AdamW has kernels for lists of tensors (E17 and a5).
_STEP_OF_STAGE = {0: -120, 3: -88}
_FOREACH_STEP = 50
#: With the optimizer on the host, stages 1 and 2 take the norms of gradients as the backward makes them, and the GPU runs no
#: optimizer (K02, K09, K25 and E06); stage 3 leaves the norms to the step.
_OFFLOADED = {Phase.BACKWARD: 100, Phase.STEP: -124}
#: Experts: torch's grouped matrix products and the sorting of tokens (F16, F17). The step's norms need some of the same
#: kernels, so that stage 3, which has none, ends where stage 2 does (F18).
_EXPERTS = {Phase.FORWARD: 225, Phase.BACKWARD: 271, Phase.STEP: 173}
#: A model without rotary embeddings raises nothing to a power on the GPU when it is built (E21, E09, E13, E15, F15). The
#: norms of stages 1 and 2 need that kernel, too.
_NO_ROTARY = {Phase.LOAD: -100, Phase.INIT: -85, Phase.FORWARD: -85, Phase.BACKWARD: -85, Phase.STEP: -85}
#: peft with its layers' kernels (E01); stage 3 also partitions the adapters itself, made after zero.Init (E08, E107).
_ADAPTERS, _ADAPTERS_STAGE3 = 20, 105


def host_rss(
    engine: str, workload: Workload, zero: ZeroConfig, *, rotary: bool = True, experts: bool = False
) -> dict[Phase, int]:
    """Resident bytes of one rank by the end of each phase, without the engine's own buffers. See Note [Measured, not derived].

    Args:
        engine: its name.
        workload: decides, with `zero`, which kernels are loaded.
        zero: the stage and the offload, which only DeepSpeed's step depends on.
        rotary: whether the model has rotary position embeddings.
        experts: whether it is a mixture of experts.
    """
    found = dict(_HOST_RSS[engine])
    sliced_norms = engine == "deepspeed" and zero.stage in (1, 2)
    changes = [_FP32 if workload.dtype is DType.FP32 else _EAGER if workload.attn is Attention.EAGER else {}]
    if not rotary:
        changes.append({phase: change for phase, change in _NO_ROTARY.items() if phase is not Phase.STEP or not sliced_norms})
    if experts:
        changes.append(_EXPERTS)
    if sliced_norms and zero.offloads_optimizer:
        changes.append(_OFFLOADED)
    for change in changes:
        for phase, more in change.items():
            found[phase] += more
    if engine == "deepspeed":
        shared = experts and zero.stage == 3
        found[Phase.STEP] += 0 if shared else _STEP_OF_STAGE.get(zero.stage, 0)
        if workload.optimizer_kind is OptimizerKind.FOREACH and not zero.offloads_optimizer:
            found[Phase.STEP] += _FOREACH_STEP
    elif zero.offloads_optimizer:  # its kernels are never loaded
        found[Phase.STEP] = found[Phase.BACKWARD]
    if workload.lora_rank:
        more = _ADAPTERS_STAGE3 if engine == "deepspeed" and zero.stage == 3 else _ADAPTERS
        for phase in found:
            found[phase] += more if phase is not Phase.LOAD else 0
    return {phase: size * MIB for phase, size in found.items()}


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes of one rank's device memory outside torch's allocator; `spread` is how far off the sum may be."""

    context: int
    kernels: int
    nccl: int
    page_tables: int
    spread: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.context + self.kernels + self.nccl + self.page_tables


def outside_torch(
    engine: str, workload: Workload, zero: ZeroConfig, *, ranks: int, capability: tuple[int, int], pinned: int = 0
) -> Outside:
    """What NVML shows beyond the allocator's reserved bytes.

    Args:
        engine: its name.
        workload: decides which kernels are loaded.
        zero: decides whether a single rank needs NCCL.
        ranks: data-parallel ranks.
        capability: the GPU's compute capability.
        pinned: bytes of host memory that the rank pins.
    """
    flash = workload.attn is not Attention.EAGER and workload.dtype is not DType.FP32
    nccl = NCCL[engine] if ranks > 1 else 0
    if ranks == 1 and engine == "deepspeed" and zero.stage == 3 and workload.dtype is DType.FP16:
        nccl = NCCL_ALONE
    return Outside(
        context=CONTEXT,
        kernels=KERNELS + (FLASH_KERNELS if flash else 0),
        nccl=nccl,
        page_tables=pinned // PINNED_PER_TABLE_BYTE,
        spread=MEASURED_SPREAD if capability == _MEASURED_CAPABILITY else GUESSED_SPREAD,
    )
