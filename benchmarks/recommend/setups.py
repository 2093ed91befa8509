"""The measured grids: a model on a machine of some size, and the candidates that are measured there.

Near misses belong in a grid: what just fits, what just does not, and what only an allocator that empties its cache fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.measure.spec import Spec
from zeroplan.core.cluster import Cluster
from zeroplan.core.sizes import GIB
from zeroplan.core.workload import Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.registry import find_engine
from zeroplan.run.ask import Ask

_CPU = {"device": "cpu", "pin_memory": True}
_OFFLOAD: dict[str, dict[str, Any]] = {
    "": {},
    "o": {"offload_optimizer": _CPU},
    "op": {"offload_optimizer": _CPU, "offload_param": _CPU},
}
#: A tenth of the default's elements: two buckets of 1 GB become 100 MB each.
_SMALL = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
_BUCKETS: dict[str, dict[str, Any]] = {
    "": {},
    "small": _SMALL,
    "overlap": {"overlap_comm": True, "reduce_bucket_size": 100_000_000, "allgather_bucket_size": 100_000_000},
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate. `offload`: ``o`` the optimizer, ``op`` the parameters too; `again`: with checkpointing."""

    stage: int
    offload: str
    micro: int
    again: bool
    buckets: str = ""
    expandable: bool = False

    @property
    def zero(self) -> dict[str, Any]:
        """The overrides of ``zero_optimization``."""
        return _OFFLOAD[self.offload] | _BUCKETS[self.buckets]

    @property
    def alloc_conf(self) -> str:
        """``PYTORCH_ALLOC_CONF``."""
        return "expandable_segments:True" if self.expandable else ""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on a machine, and the candidates. `vram` in GiB."""

    model: str
    gpus: int
    vram: int
    seq_len: int
    grid: tuple[Choice, ...]


def _each(stage: int, offload: str, again: bool, *micros: int) -> tuple[Choice, ...]:
    return tuple(Choice(stage, offload, micro, again) for micro in micros)


SETUPS = {
    "llama1b_1x24": Setup(
        "meta-llama/Llama-3.2-1B",
        1,
        24,
        1024,
        (
            *_each(2, "o", True, 8, 4, 10, 12, 16),
            *_each(2, "o", False, 1, 4, 6, 8),
            *_each(3, "op", True, 8, 4, 12),
            *_each(3, "o", True, 8),
            *_each(1, "o", True, 8),
            Choice(2, "o", 8, True, "small"),
            Choice(2, "o", 10, True, expandable=True),
            Choice(2, "o", 12, True, expandable=True),
            *_each(2, "", True, 1),
            *_each(3, "", True, 1),
        ),
    ),
    "qwen05b_1x24": Setup(
        "Qwen/Qwen2.5-0.5B",
        1,
        24,
        1024,
        (
            *_each(0, "", False, 2, 4, 6),
            *_each(0, "", True, 4, 6, 8, 12),
            *_each(2, "", False, 2, 4, 8),
            *_each(2, "", True, 4, 8, 12),
            *_each(3, "", False, 4),
            *_each(2, "o", True, 8),
            Choice(0, "", 4, False, expandable=True),
            Choice(0, "", 8, True, expandable=True),
            Choice(2, "", 4, False, "small"),
        ),
    ),
    "llama1b_4x24": Setup(
        "meta-llama/Llama-3.2-1B",
        4,
        24,
        1024,
        (
            *_each(2, "", False, 2, 4, 6, 8),
            *_each(2, "", True, 4, 6, 8, 12),
            *_each(1, "", False, 4),
            *_each(1, "", True, 8),
            *_each(3, "", False, 2, 4),
            *_each(3, "", True, 4, 12),
            *_each(2, "o", True, 8),
            Choice(2, "", 4, False, "small"),
            Choice(2, "", 4, False, "overlap"),
            Choice(2, "", 8, True, expandable=True),
            *_each(0, "", True, 1),
        ),
    ),
    "qwen05b_4x24": Setup(
        "Qwen/Qwen2.5-0.5B",
        4,
        24,
        1024,
        (
            *_each(0, "", False, 2, 4, 6),
            *_each(0, "", True, 6, 8, 12),
            *_each(1, "", False, 4, 6),
            *_each(1, "", True, 8, 12),
            *_each(2, "", False, 4, 6, 8),
            *_each(2, "", True, 8),
            *_each(3, "", False, 4),
            Choice(2, "", 4, False, "overlap"),
            Choice(0, "", 4, False, expandable=True),
        ),
    ),
    "llama3b_4x40": Setup(
        "meta-llama/Llama-3.2-3B",
        4,
        40,
        1024,
        (
            *_each(2, "", True, 8, 4, 12, 16),
            *_each(2, "", False, 2, 4),
            *_each(1, "", True, 8),
            *_each(1, "", False, 4),
            *_each(3, "", True, 8, 16),
            *_each(3, "", False, 2, 4),
            Choice(2, "", 8, True, "overlap"),
            Choice(2, "", 12, True, expandable=True),
        ),
    ),
    # Predicted before it was measured, on other lengths and another card than those above.
    "qwen15b_4x32": Setup(
        "Qwen/Qwen2.5-1.5B",
        4,
        32,
        2048,
        (
            *_each(0, "", True, 1),
            *_each(1, "", True, 2, 4),
            *_each(2, "", False, 1, 2),
            *_each(2, "", True, 2, 4, 5, 6),
            *_each(3, "", False, 1, 2),
            *_each(3, "", True, 4, 6),
            *_each(2, "o", True, 6),
            Choice(2, "", 2, False, "overlap"),
            Choice(2, "", 4, True, "small"),
            Choice(3, "", 4, True, "overlap"),
            Choice(2, "", 4, True, expandable=True),
        ),
    ),
}


def request_of(setup: Setup, gpu: str = "H100") -> Ask:
    """Return the request that a user would make. The machine has 128 GiB of host memory for each GPU."""
    return Ask(
        model=setup.model,
        gpus=setup.gpus,
        gpu=gpu,
        vram=setup.vram * GIB,
        cpu_ram=128 * GIB * setup.gpus,
        seq_len=setup.seq_len,
    )


def specs(name: str, setup: Setup) -> Iterator[Spec]:
    """Yield one measured run a candidate.

    A cap on torch's allocator stands for a smaller card: what its driver leaves, less what lies outside torch.
    """
    cluster = Cluster.of(gpus=setup.gpus, gpu="H100", vram=setup.vram * GIB)
    for index, choice in enumerate(setup.grid):
        zero = ZeroConfig.of(choice.stage, "cpu" if choice.offload else "none", "cpu" if choice.offload == "op" else "none")
        outside = find_engine("deepspeed").outside_torch(Workload(), zero, cluster)
        yield Spec(
            id=f"{name}-{index:02d}",
            model=setup.model,
            stage=choice.stage,
            world=setup.gpus,
            micro_batch=choice.micro,
            seq_len=setup.seq_len,
            checkpointing=choice.again,
            zero=choice.zero,
            cap=(cluster.usable_vram or 0) - outside.total,
            gib=float(setup.vram),
            env={"PYTORCH_ALLOC_CONF": choice.alloc_conf} if choice.expandable else {},
        )
