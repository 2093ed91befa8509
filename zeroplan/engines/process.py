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
from zeroplan.core.workload import Attention, DType, Workload
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
#: engine, and what CUDA's and NCCL's libraries map as they come into use. MiB.
HOST_RSS = {
    "deepspeed": {Phase.LOAD: 1400, Phase.INIT: 1480, Phase.FORWARD: 1870, Phase.BACKWARD: 1930, Phase.STEP: 2130},
    "fsdp2": {Phase.LOAD: 1315, Phase.INIT: 1315, Phase.FORWARD: 1790, Phase.BACKWARD: 1860, Phase.STEP: 1970},
    "ddp": {Phase.LOAD: 1390, Phase.INIT: 1390, Phase.FORWARD: 1780, Phase.BACKWARD: 1840, Phase.STEP: 1935},
    "zeroplan": {Phase.LOAD: 1315, Phase.INIT: 1315, Phase.FORWARD: 1790, Phase.BACKWARD: 1860, Phase.STEP: 1970},
}


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
