"""Rates of a machine for each kind of work: step times are work divided by them.

Note [Rates]
    A :class:`Rates` is what a GPU *attains*, not what its data sheet promises: the sheet's figures (core/gpus.py) times the
    fractions below. ``zeroplan doctor --calibrate`` measures the same fields and stores them as a profile, which then takes
    their place. Each default has a cause that can be measured alone; none is fitted to one model.

Note [Host-bound steps]
    Training in eager mode at small micro batches is bound by the host: Python and the dispatcher issue kernels more slowly
    than the GPU runs them. So a step's time needs the host's rates too: so many µs a kernel issued from a module's Python, by
    autograd's engine or in a loop over tensors, a parameter's gradient hook, a module's gather and release. ``python -m
    benchmarks.recommend.speeds --fit`` derives them from measured runs of all models, stages and offloads together, and
    prints how far they carry to runs that it left out. They are those of hosts with H100 and H200 GPUs.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.gpus import Gpu
from zeroplan.core.network import Network, usual_network
from zeroplan.core.plumbing.documents import CONFIG, parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes

#: Of the data sheet's dense rate, what large 16-bit matrix products attain (cuBLAS, 8192³), by architecture. Hopper's: 727.6 of
#: 989 on an H200 while three others of its node were at work (benchmarks/results/recommend_blind/profile_4_ranks.json). One by
#: itself ran them at 780 (profile.json), until its power limit holds it. Blackwell's is taken to be alike.
MATMUL_FRACTION = {(7, 0): 0.72, (7, 5): 0.45, (8, 0): 0.80, (9, 0): 0.735, (10, 0): 0.735, (10, 3): 0.735}
#: Consumer and inference cards, whose power limit holds them lower.
OTHER_MATMUL_FRACTION = 0.75
#: Flash attention's forward and backward against the same sheet (Dao 2023, "FlashAttention-2", figures 4 and 6).
ATTENTION_FRACTION = 0.40
#: fp32 products run on tensor cores only when TF32 is switched on, which torch does not: the CUDA cores' share of the
#: 16-bit rate (67 of 989 TFLOP/s on an H100's sheet), three quarters of which large products attain.
FP32_FRACTION = 0.051
#: Plain kernels move this much of the sheet's memory bandwidth (2.96 of 3.35 TB/s for a copy on an H100).
HBM_FRACTION = 0.88
#: GB/s that torch's fused AdamW reads and writes at most: as measured on an H200, where a copy moves 4,253.
ADAM_GBS = 2839.0
#: Rings attain this much of a link's one-way figure; the protocol takes about a fifth (NVIDIA/nccl-tests issue 212, NCCL's
#: maintainers; 369 of 450 GB/s measured without NVLink SHARP in issue 309).
LINK_FRACTION = 0.80


#: µs of the slowest of the hosts that were calibrated, with 16 cores a GPU each: the slower of one process and of two
#: (benchmarks/results/layouts_two_h200_contention.jsonl). DeepSpeed's modules took the last two there in a step of Llama 3.2 1B
#: (layouts_two_h200_steps_sixth.jsonl: what the slower rank's host took beyond issuing kernels). The defaults of
#: :class:`Rates` are of the fastest host.
_SLOW_HOST = {"launch_us": 48.5, "autograd_us": 38.0, "dispatch_us": 87.4, "unit_hook_us": 267.5}
_SLOW_MODULES = {"gather_hook_us": 608.0, "release_hook_us": 886.0}
_DEEPSPEED_HOOKS = (
    *("operation_us", "await_us", "checkpoint_us", "gradient_hook_us", "gather_hook_us", "release_hook_us"),
    "upload_hook_us",
)
_MAY_BE_ZERO = ("network_us", "fp8_tflops")


@dataclass(frozen=True, slots=True)
class Rates:
    """One machine. ``*_tflops`` in 10^12 operations a second, ``*_gbs`` in 10^9 bytes a second, ``*_us`` in µs each.

    Attributes:
        matmul_tflops: large 16-bit matrix products.
        fp8_tflops: large products of 8-bit floats; 0 on a card that has none.
        fp32_tflops: fp32 ones.
        attention_tflops: the fused attention kernels.
        hbm_gbs: memory-bound kernels, bytes read and written together.
        kernel_us: the least time that a kernel takes on the GPU.
        launch_us: host time to issue one kernel of the forward from eager Python, the modules' own code included.
        autograd_us: host time to issue one kernel of the backward, whose engine is compiled.
        operation_us: host time of one operation in a loop over tensors, outside any module.
        await_us: round trip of a small result that the host waits for, beside the operations that compute it.
        checkpoint_us: host time of one recomputed segment beside its kernels.
        gradient_hook_us: host time of DeepSpeed stages 1 and 2 for one parameter's gradient and its share of the step.
        gather_hook_us: host time of stage 3 for one module entered: fetch, wait, prefetch.
        release_hook_us: host time of stage 3 for one module passed in the backward.
        upload_hook_us: host time of stage 3 for one parameter that comes from the host.
        dispatch_us: host time of eager Python for one operation on DTensors, with what their modules' hooks and collectives
            take: 3.4 times that of a kernel of the forward, by CPU time of torch 2.13 in a Llama's block on two ranks.
        unit_hook_us: host time of FSDP2 for one parameter: gather, copy out, reduce. The included runtime's for one unit is
            taken to be the same.
        link_gbs: between GPUs of a node (or of an NVLink domain), one way, as a ring attains it.
        adapter_gbs: from a GPU to another node while its neighbours send, too, one way.
        ring_gbs: bus bandwidth of a ring between nodes in which all their GPUs take part, so that it uses every adapter.
        network_us: what the network adds to each step between nodes.
        collective_us: latency of one collective, for each rank on its way.
        pinned_gbs: between the GPU and pinned host memory, one way.
        pageable_gbs: between the GPU and pageable host memory.
        cpu_adam_gbs: bytes that DeepSpeedCPUAdam reads and writes a second, all ranks of a node together.
        dram_gbs: bytes that torch's elementwise operations on the host read and write a second, a node.
        fresh_gbs: bytes a second that one process casts into newly allocated host memory and copies from there to its GPU: page
            faults decide.
        read_gbs, write_gbs: the disk's, a node.
        segment_us: one ``cudaMalloc`` or ``cudaFree``, during which the GPU idles.
        mapping_gbs: bytes of device memory that they map or unmap a second.
        source: where the figures come from.
    """

    matmul_tflops: float
    fp32_tflops: float
    attention_tflops: float
    hbm_gbs: float
    link_gbs: float
    pinned_gbs: float
    fp8_tflops: float = 0.0
    kernel_us: float = 3.0
    launch_us: float = 24.1
    autograd_us: float = 5.0
    operation_us: float = 6.5
    await_us: float = 19.7
    checkpoint_us: float = 849.0
    gradient_hook_us: float = 101.0
    gather_hook_us: float = 75.0
    release_hook_us: float = 463.0
    upload_hook_us: float = 318.0
    dispatch_us: float = 82.0
    unit_hook_us: float = 115.0
    adapter_gbs: float = 48.0
    ring_gbs: float = 360.0
    network_us: float = 0.0
    collective_us: float = 12.0
    pageable_gbs: float = 9.0
    cpu_adam_gbs: float = 289.0
    dram_gbs: float = 76.0
    fresh_gbs: float = 3.8
    read_gbs: float = 5.0
    write_gbs: float = 3.0
    segment_us: float = 200.0
    mapping_gbs: float = 1000.0
    source: str = "data sheet and measured fractions"

    #: The driver's µs for a page of an expandable segment, one way: as measured on pages of 2 MiB, 29 to create, 2 to map and
    #: 38 to make accessible; 34 to unmap and 23 to release (Prabhu et al. 2024, "vAttention", table of the driver's latencies).
    page_us = 63.0

    @property
    def adam_gbs(self) -> float:
        """What torch's fused AdamW reads and writes, in 10^9 bytes a second."""
        return min(ADAM_GBS, self.hbm_gbs)

    def with_profile(self, values: dict[str, Any], source: str) -> Rates:
        """Return these rates with a profile's measured values in their place.

        Raises:
            BadInput: an unknown name, or a value that is no positive number.
        """
        known = {f.name for f in fields(self)} - {"source"}
        for name, value in values.items():
            if name not in known:
                raise BadInput(f"unknown rate {name[:60]!r}", where=source, remedy=did_you_mean(name, known) or "leave it out")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or value >= 1e9 or (value < 0 if name in _MAY_BE_ZERO else value <= 0):
                raise BadInput(f"{str(value)[:40]!r} is no rate", where=f"{source}: {name}", remedy="give a number above zero")
        return replace(self, **{name: float(value) for name, value in values.items()}, source=source)

    def on_slow_host(self) -> Rates:
        """Return these rates with the slowest host's in the place of those that are no measured ones."""
        usual, slow = _defaults(), _SLOW_HOST | deepspeed_hooks(_SLOW_HOST["launch_us"]) | _SLOW_MODULES
        changed: dict[str, Any] = {name: value for name, value in slow.items() if getattr(self, name) == usual[name]}
        return replace(self, **changed)

    def as_dict(self) -> dict[str, Any]:
        """Return the rates as a plain dict for JSON."""
        return asdict(self)


def _defaults() -> dict[str, Any]:
    return {one.name: one.default for one in fields(Rates)}


def deepspeed_hooks(launch_us: float) -> dict[str, float]:
    """Return the host's rates of DeepSpeed's loops and hooks: they are Python like the rest of the step, so as much slower."""
    usual = _defaults()
    return {name: usual[name] * launch_us / usual["launch_us"] for name in _DEEPSPEED_HOOKS}


def rates_of(gpu: Gpu, network: Network | None = None, gpus: int = 8) -> Rates:
    """Return the default rates of a GPU preset in nodes of `gpus` cards on a network, by default its usual one.

    See Note [Rates], and Note [Network] in core/network.py.
    """
    fraction = MATMUL_FRACTION.get(gpu.capability, OTHER_MATMUL_FRACTION)
    network = network or usual_network(gpu, gpus)
    link = gpu.link_gbs * LINK_FRACTION
    return Rates(
        matmul_tflops=gpu.bf16_tflops * fraction,
        fp8_tflops=(gpu.fp8_tflops or 0.0) * fraction,
        fp32_tflops=gpu.bf16_tflops * FP32_FRACTION,
        attention_tflops=gpu.bf16_tflops * ATTENTION_FRACTION,
        hbm_gbs=gpu.bandwidth_gbs * HBM_FRACTION,
        link_gbs=link,
        adapter_gbs=network.adapter_gbs(gpus),
        ring_gbs=min(network.node_gbs, link) if gpus > 1 else network.node_gbs,
        network_us=network.latency_us,
        pinned_gbs=gpu.pcie_gbs,
    )


def profile_path() -> Path:
    """Return the path of this machine's profile, which ``zeroplan doctor --calibrate`` measures."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "zeroplan" / "profile.json"


def read_profile(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a profile's object: ``{"schema": 1, "gpu": …, "rates": {…}}``.

    Raises:
        BadInput: when it cannot be read or is no profile.
    """
    name = os.fspath(path)
    remedy = "run zeroplan doctor --calibrate"
    data = parse_json(text_of(read_bytes(name, CONFIG.size, remedy=remedy), name), name)
    if not isinstance(data, dict) or not isinstance(data.get("rates"), dict):
        raise BadInput("is no profile", where=name, remedy=remedy)
    return data
