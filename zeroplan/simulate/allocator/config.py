"""Settings of torch's CUDA caching allocator, as PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF) holds them.

Rules read from torch 2.13's ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDAAllocatorConfig.h``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.sizes import MIB

#: No limit. Fits the compiled allocator's signed 64-bit integers.
UNLIMITED = (1 << 63) - 1

MIN_BLOCK = 512  # sizes are rounded up to a multiple of this
SMALL_SIZE = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB  # a segment of the small pool
LARGE_SEGMENT = 20 * MIB  # a segment for requests of more than 1 MiB and less than MIN_LARGE_ALLOC
MIN_LARGE_ALLOC = 10 * MIB  # from here on a request gets a segment of its own...
ROUND_LARGE = 2 * MIB  # ...rounded up to a multiple of this

#: Intervals of `roundup_power2_divisions`: [0, 2 MiB), [2, 4 MiB), ..., [32 GiB, ∞).
ROUNDUP_INTERVALS = 16

#: Keys that torch knows and that do not change how device memory is laid out. The pinned ones are read by PinnedConfig.
WITHOUT_EFFECT = frozenset(
    {
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
WITH_EFFECT = frozenset(
    {
        "expandable_segments",
        "garbage_collection_threshold",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "roundup_power2_divisions",
    }
)
_WHERE = "PYTORCH_ALLOC_CONF"
#: The variables that hold them. torch 2.9 added the second, and takes the first where both are set (tried on 2.13).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings that decide where blocks lie.

    Attributes:
        max_split_size: bytes; blocks of at least this size are never split.
        max_non_split_rounding: bytes by which an unsplit block may exceed a request of at least `max_split_size`.
        garbage_collection_threshold: share of the allowed memory above which old cached segments are returned. Like torch,
            it takes effect only together with a memory fraction below 1.
        memory_fraction: share of the device's memory that the allocator may reserve.
        roundup_power2_divisions: per interval (see ROUNDUP_INTERVALS), into how many steps the way from one power of two
            to the next is divided; 0 rounds to 512 bytes.
        expandable_segments: one segment a pool and stream, which grows by pages.
        large_segment_size: bytes of a segment for requests of 1 to 10 MiB, and of a large page of an expandable segment.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT

    def allowed(self, device_memory: int) -> int:
        """Bytes that may be reserved on a device of so many bytes."""
        return int(self.memory_fraction * device_memory) if self.memory_fraction < 1 else UNLIMITED

    def collect_above(self, device_memory: int) -> int:
        """Bytes reserved beyond which old segments are returned."""
        allowed = self.allowed(device_memory)
        if not self.garbage_collection_threshold or allowed == UNLIMITED:
            return UNLIMITED
        return int(self.garbage_collection_threshold * allowed)

    @staticmethod
    def parse(text: str, *, where: str = _WHERE) -> AllocatorConfig:
        """The settings in ``"expandable_segments:True,max_split_size_mb:128"``; an empty text gives the defaults.

        Raises:
            BadInput: on a key that torch does not know (it would ignore it silently), a value that it refuses, or the
                cudaMallocAsync backend, whose pools are the driver's.
        """
        config = AllocatorConfig()
        # The size of a large segment comes first, wherever it stands: others are held against it.
        for key, value in sorted(split_settings(text, where=where), key=lambda item: item[0] != "large_segment_size_mb"):
            config = _apply(config, key, value, f"{where}: {key}")
        return config


def split_settings(text: str, *, where: str = _WHERE) -> Iterator[tuple[str, str]]:
    """``"a:1,b:[2:3,4:5]"`` as (key, value) pairs, blanks removed; keys are checked against those that torch knows."""
    text = "".join(text.split())
    depth = start = 0
    items = []
    for at, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            items.append(text[start:at])
            start = at + 1
    items.append(text[start:])
    for item in items if text else ():
        key, colon, value = item.partition(":")
        if key not in WITH_EFFECT and key not in WITHOUT_EFFECT:
            remedy = did_you_mean(key, WITH_EFFECT | WITHOUT_EFFECT) or f"known are {', '.join(sorted(WITH_EFFECT))}"
            raise BadInput(f"unknown option {key[:60]!r}", where=where, remedy=remedy)
        if not colon or not value:
            raise BadInput(f"option {key!r} has no value", where=where, remedy=f"write {key}:VALUE")
        yield key, value


def parse_mib(value: str, where: str, *, least: int) -> int:
    """Bytes from a whole number of MiB, at least `least` of them; values that 64 bits cannot hold mean no limit."""
    if not value.isdecimal() or int(value) < least:
        raise BadInput(
            f"{value[:40]!r} is not a whole number of at least {least}", where=where, remedy="give MiB as an integer"
        )
    return min(int(value) * MIB, UNLIMITED)


def _apply(config: AllocatorConfig, key: str, value: str, where: str) -> AllocatorConfig:
    match key:
        case "max_split_size_mb":
            return replace(config, max_split_size=parse_mib(value, where, least=config.large_segment_size // MIB))
        case "max_non_split_rounding_mb":
            return replace(config, max_non_split_rounding=parse_mib(value, where, least=config.large_segment_size // MIB))
        case "large_segment_size_mb":
            return replace(config, large_segment_size=parse_mib(value, where, least=11))
        case "garbage_collection_threshold":
            return replace(config, garbage_collection_threshold=_fraction(value, where, whole=False))
        case "per_process_memory_fraction":
            return replace(config, memory_fraction=_fraction(value, where, whole=True))
        case "expandable_segments":
            if value not in ("True", "False"):
                raise BadInput(f"{value[:40]!r} is neither True nor False", where=where, remedy="capitals matter to torch")
            return replace(config, expandable_segments=value == "True")
        case "roundup_power2_divisions":
            return replace(config, roundup_power2_divisions=_divisions(value, where))
        case "backend" if value != "native":
            raise BadInput(f"the {value[:40]!r} backend is not simulated", where=where, remedy="remove it or use native")
    return config


def _fraction(value: str, where: str, *, whole: bool) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (0.0 < number < 1.0 or (whole and number == 1.0)):
        raise BadInput(f"{value[:40]!r} is not a number between 0 and 1", where=where, remedy="such as 0.8")
    return number


def _divisions(value: str, where: str) -> tuple[int, ...]:
    """The sixteen intervals' divisions from ``"4"`` or ``"[256:1,512:2,>:8]"``, whose keys are MiB."""
    if not value.startswith("["):
        return (_power_of_two(value, where),) * ROUNDUP_INTERVALS
    if not value.endswith("]"):
        raise BadInput("the list is not closed", where=where, remedy="write it as [256:1,512:2,>:8]")
    divisions = [0] * ROUNDUP_INTERVALS
    last = -1
    for item in value[1:-1].split(","):
        bound, colon, count_text = item.partition(":")
        if not colon:
            raise BadInput(f"{item[:40]!r} is not MIB:DIVISIONS", where=where, remedy="write it as [256:1,512:2,>:8]")
        count = 0 if count_text == "0" else _power_of_two(count_text, where)
        if bound == ">":
            at = max(last, 0) + 1
            divisions[at:] = [count] * (ROUNDUP_INTERVALS - at)
            continue
        at = min(_power_of_two(bound, where).bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if last < 0:  # the first entry holds for all smaller sizes as well
            divisions[:at] = [count] * at
        divisions[at] = count
        last = at
    return tuple(divisions)


def _power_of_two(value: str, where: str) -> int:
    number = int(value) if value.isdecimal() and len(value) < 20 else 0
    if number < 1 or number & (number - 1):
        raise BadInput(f"{value[:40]!r} is not a power of two", where=where, remedy="such as 4")
    return number
