"""GPU presets: what the vendor's data sheet says, and what a process finds usable.

Every row names its source. `memory` is what the driver reports as total (binary), not the marketing figure. Rates are
dense (no sparsity), in units of 10^12 operations and 10^9 bytes a second. `link` is one direction between GPUs of a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.sizes import GIB, MIB

#: What the driver keeps of a card before a process starts. It shows as used with no process running.
DRIVER_RESERVE = 600 * MIB
_OLD_WORKSPACE = 8_519_680
_HOPPER_WORKSPACE = 32 * MIB
#: GPUs of a usual node, and the most that a node of PCIe cards has.
NODE_GPUS, WIDEST_NODE = 8, 16
#: Cards on NVSwitches that stand sixteen in a node: DGX-2, and Google Cloud's a2-megagpu-16g.
_SIXTEEN = ("V100-32G", "A100-40G")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model. `workspace` is cuBLAS's default workspace for one handle and stream, in bytes.

    `reserve` is what the driver keeps of `memory`; a row that has its own is held to the least total that torch reports in
    public errors of that card, since drivers differ. `domain` is the number of GPUs in one NVLink domain of several nodes, 0
    where a node is one. `switched` cards reach each other through NVSwitches. `fp8_tflops` is None where the card has no such
    products.
    """

    name: str
    memory: int
    bf16_tflops: float
    bandwidth_gbs: float
    link_gbs: float
    pcie_gbs: float
    capability: tuple[int, int]
    source: str
    bf16: bool = True
    reserve: int = DRIVER_RESERVE
    fp8_tflops: float | None = None
    domain: int = 0

    @property
    def switched(self) -> bool:
        """Whether the GPUs of a node reach each other through NVSwitches: the SXM modules since the A100."""
        return self.capability >= (8, 0) and self.link_gbs >= 200

    @property
    def amd(self) -> bool:
        """Whether the card runs ROCm: what its runtime and RCCL take beside torch's allocator was measured on none."""
        return self.source.startswith("AMD")

    @property
    def node(self) -> int:
        """GPUs of a usual node of such cards; a compute tray of GB200 NVL72 has four."""
        return 4 if self.domain else NODE_GPUS

    @property
    def widest_node(self) -> int:
        """The most GPUs that reach each other without a network: those of a node, or of an NVLink domain."""
        single = (self.switched or self.amd) and self.name not in _SIXTEEN
        return self.domain or (NODE_GPUS if single else WIDEST_NODE)

    @property
    def workspace(self) -> int:
        """Bytes. Source: aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize (32 MiB on sm_90 and later)."""
        return _HOPPER_WORKSPACE if self.capability >= (9, 0) else _OLD_WORKSPACE

    @property
    def holds_sent(self) -> bool:
        """Whether ranks hold what they send each other until they wait for it. NCCL does not; gloo does, on a CPU."""
        return False

    @property
    def usable(self) -> int:
        """Bytes that processes can have: all but the driver's reserve."""
        return self.memory - self.reserve


def _mib(count: int) -> int:
    return count * MIB


_TOTAL, _BRIDGE = "total as the driver reports it", "a bridge joins two cards alone"

GPUS: dict[str, Gpu] = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("T4", _mib(15360), 65, 320, 8, 12, (7, 5), "NVIDIA T4 data sheet (fp16; the chip has no bf16)", bf16=False),
        Gpu("V100-16G", _mib(16384), 125, 900, 150, 12, (7, 0), "NVIDIA V100 SXM2 data sheet (fp16; no bf16)", bf16=False),
        Gpu("V100-32G", _mib(32768), 125, 900, 150, 12, (7, 0), "NVIDIA V100 SXM2 data sheet (fp16; no bf16)", bf16=False),
        Gpu("A10G", _mib(23028), 70, 600, 25, 25, (8, 6), "AWS G5 page; GA102 at 70 TFLOP/s dense bf16"),
        Gpu("L4", _mib(23034), 121, 300, 25, 25, (8, 9), "NVIDIA L4 data sheet (242 with sparsity)", fp8_tflops=242),
        Gpu("L40", _mib(46068), 181, 864, 25, 25, (8, 9), "NVIDIA L40 data sheet (362 with sparsity)", fp8_tflops=362),
        Gpu("L40S", _mib(46068), 362, 864, 25, 25, (8, 9), "NVIDIA L40S data sheet (733 with sparsity)", fp8_tflops=733),
        Gpu("RTX3090", _mib(24576), 71, 936, 56, 25, (8, 6), "NVIDIA GA102 white paper, fp32 accumulation; NVLink bridge"),
        Gpu("RTX4090", _mib(24564), 165, 1008, 25, 25, (8, 9), "NVIDIA Ada white paper, fp32 accumulation", fp8_tflops=330),
        Gpu(
            *("RTX5090", _mib(32607), 210, 1792, 50, 50, (12, 0), "NVIDIA Blackwell RTX white paper, fp32 accumulation"),
            fp8_tflops=419,
        ),
        Gpu(
            *("RTXPro6000", _mib(97887), 503, 1792, 50, 50, (12, 0), "NVIDIA RTX PRO 6000 Blackwell data sheet"),
            reserve=_mib(650),
            fp8_tflops=1007,
        ),
        Gpu("RTX6000Ada", _mib(49140), 364, 960, 25, 25, (8, 9), "NVIDIA RTX 6000 Ada data sheet, no ECC", fp8_tflops=728),
        Gpu("TitanRTX", _mib(24220), 130, 672, 50, 12, (7, 5), "NVIDIA Turing white paper (fp16; no bf16)", bf16=False),
        Gpu("A30", _mib(24576), 165, 933, 25, 25, (8, 0), "NVIDIA A30 data sheet; a bridge joins two cards alone"),
        Gpu("A40", _mib(46068), 150, 696, 56, 25, (8, 6), "NVIDIA A40 data sheet, with ECC; NVLink bridge"),
        Gpu("A6000", _mib(49140), 155, 768, 56, 25, (8, 6), "NVIDIA RTX A6000 data sheet, without ECC; NVLink bridge"),
        Gpu("A100-40G", _mib(40960), 312, 1555, 300, 25, (8, 0), "NVIDIA A100 data sheet, SXM4 40 GB", reserve=_mib(640)),
        Gpu("A100-80G", _mib(81920), 312, 2039, 300, 25, (8, 0), "NVIDIA A100 data sheet, SXM4 80 GB", reserve=_mib(871)),
        Gpu("A800-80G", _mib(81920), 312, 2039, 200, 25, (8, 0), "NVIDIA A800 data sheet, SXM4 80 GB", reserve=_mib(871)),
        Gpu("H100", _mib(81559), 989, 3352, 450, 55, (9, 0), f"NVIDIA H100 data sheet, SXM5; {_TOTAL}", fp8_tflops=1979),
        Gpu(
            *("H100-PCIe", _mib(81559), 756, 2039, 55, 55, (9, 0), f"NVIDIA H100 data sheet, PCIe; {_TOTAL}; {_BRIDGE}"),
            fp8_tflops=1513,
        ),
        Gpu(
            *("H100-NVL", _mib(95830), 835, 3938, 55, 55, (9, 0), f"NVIDIA H100 NVL data sheet; {_TOTAL}; {_BRIDGE}"),
            fp8_tflops=1671,
        ),
        Gpu("H800", _mib(81559), 989, 3352, 200, 55, (9, 0), f"NVIDIA H800 data sheet, SXM5; {_TOTAL}", fp8_tflops=1979),
        Gpu("H200", _mib(143771), 989, 4800, 450, 55, (9, 0), f"NVIDIA H200 data sheet, SXM; {_TOTAL}", fp8_tflops=1979),
        Gpu("H20", _mib(97871), 148, 4000, 450, 55, (9, 0), f"NVIDIA H20 data sheet, 96 GB; {_TOTAL}", fp8_tflops=296),
        Gpu(
            *("GH200", _mib(97871), 989, 4000, 450, 450, (9, 0), "NVIDIA GH200 data sheet, 96 GB; its host by NVLink-C2C"),
            fp8_tflops=1979,
        ),
        Gpu("B200", _mib(183359), 2250, 8000, 900, 55, (10, 0), "NVIDIA DGX B200 data sheet (180 GB a GPU)", fp8_tflops=4500),
        Gpu("B300", _mib(275040), 2250, 8000, 900, 55, (10, 3), f"NVIDIA DGX B300 data sheet; {_TOTAL}", fp8_tflops=4500),
        Gpu(
            *("GB200", _mib(189471), 2500, 8000, 900, 450, (10, 0), f"NVIDIA GB200 NVL72 page, 186 GB; {_TOTAL}"),
            *(True, DRIVER_RESERVE, 5000, 72),
        ),
        Gpu(
            *(
                "GB300",
                _mib(284208),
                2500,
                8000,
                900,
                450,
                (10, 3),
                "NVIDIA GB300 NVL72 page; Google Cloud A4X Max: about 279 GB",
            ),
            *(True, DRIVER_RESERVE, 5000, 72),
        ),
        Gpu("MI300X", 192 * GIB, 1307, 5300, 448, 55, (0, 0), "AMD Instinct MI300X data sheet", fp8_tflops=2615),
        Gpu("MI325X", 256 * GIB, 1307, 6000, 448, 55, (0, 0), "AMD Instinct MI325X data sheet", fp8_tflops=2615),
        Gpu("MI355X", 288 * GIB, 2516, 8000, 538, 55, (0, 0), "AMD Instinct MI355X data sheet", fp8_tflops=5033),
    )
}

_ALIASES = {
    "v100": "v100-16g",
    "v100-16gb": "v100-16g",
    "v100-32gb": "v100-32g",
    "a100": "a100-80g",
    "a100-40": "a100-40g",
    "a100-40gb": "a100-40g",
    "a100-80": "a100-80g",
    "a100-80gb": "a100-80g",
    "a800": "a800-80g",
    "a800-80gb": "a800-80g",
    "rtxa6000": "a6000",
    "rtx6000-ada": "rtx6000ada",
    "6000-ada": "rtx6000ada",
    "rtxpro-6000": "rtxpro6000",
    "titan-rtx": "titanrtx",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "h100-80gb": "h100",
    "h200-141gb": "h200",
    "a10": "a10g",
}

#: When neither a GPU nor a size is named, rates and workspaces are those of this card, and nothing is said to fit.
DEFAULT_GPU = GPUS["h100"]


def find_gpu(name: str) -> Gpu:
    """Return the preset of a GPU's name: ``h100``, ``A100-80GB``, ``RTX 4090``, ``NVIDIA H200``.

    Raises:
        BadInput: with the nearest names.
    """
    key = name.strip().lower().replace("nvidia", "").replace("geforce", "").replace("amd", "").replace("instinct", "")
    for other in ("generation", "tesla", "sxm4-", "sxm5-", "pcie-", "blackwell"):
        key = key.replace(other, "")
    key = key.strip().replace("rtx ", "rtx").replace(" ", "-").replace("_", "-")
    found = GPUS.get(_ALIASES.get(key, key))
    if found is None:
        card, times, count = key.rpartition("x" if "x" in key[3:] else ":")
        if times and count.isdigit():
            raise BadInput(f"{name[:60]!r} has the count behind", where="--gpu", remedy=f"write {count}x{card.upper()}")
        near = did_you_mean(key, [gpu.name for gpu in GPUS.values()])
        names = ", ".join(gpu.name for gpu in GPUS.values())
        raise BadInput(f"unknown GPU {name[:60]!r}", where="--gpu", remedy=near or f"use one of {names}, or --vram 24G")
    return found


def by_drivers_name(name: str) -> Gpu | None:
    """Return the preset that a driver's name such as ``NVIDIA H100 80GB HBM3`` or ``NVIDIA A100-SXM4-40GB`` means, if any."""
    makes = ("NVIDIA", "GeForce", "Tesla", "AMD", "Instinct")
    plain = name.replace("-SXM4", " ").replace("-SXM2", " ").replace("-SXM3", " ").replace("-PCIE", " ").replace("-PCIe", " ")
    words = [word for word in plain.partition(" MIG ")[0].split() if word not in makes]
    for count in range(len(words), 0, -1):
        for joint in ("-", ""):
            try:
                return find_gpu(joint.join(words[:count]))
            except BadInput:
                continue
    return None
