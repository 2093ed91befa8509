"""The messages of momentum that is sent with one bit an element (1-bit Adam and its relatives). Integers only.

Note [Messages]
    A unit's flat is cut into as many *chunks* as there are ranks: its shards. Each rank sends every other rank the signs of
    that rank's chunk, adds up what it receives for its own, and sends the signs of the mean to all. Every
    :data:`SCALE_BLOCK` elements of a chunk share one fp32 scale, the mean of their absolute values (EF-SGD: Karimireddy et
    al. 2019, section 4; 0/1 Adam: Lu et al. 2022, section 4.1). DeepSpeed had one scale for a whole tensor or all of them,
    so that tensors of small gradients got those of large ones.

    A message is one chunk: a bit an element, element i at bit i mod 8 of byte i / 8, 1 for zero and above; then the scales.
    It is a whole number of 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

#: Elements that share one scale: what one block of 1024 GPU threads works on. Scales add 0.4 % to the bits.
SCALE_BLOCK = 8192

_WORDS_16_BYTES = 4


class OneBitRefusal(NamedTuple):
    """What a 1-bit optimizer cannot do, and what to do instead."""

    what: str
    remedy: str


#: Why stages 2 and 3 are refused.
NOT_SHARDED = OneBitRefusal(
    "1-bit optimizers compress each rank's own momentum, and from stage 2 on no rank keeps gradients of its own",
    "use stage 0, or stage 1, whose parameters still travel in 16 bits",
)
#: Why an optimizer on the host is refused.
NOT_OFFLOADED = OneBitRefusal(
    "1-bit optimizers exchange momentum between GPUs, and cannot be offloaded", "use AdamW, or keep the optimizer on the device"
)
#: Why 0/1 Adam's local steps are refused at stage 1.
LOCAL_ALONE = OneBitRefusal(
    "local steps let each rank have other parameters, of which stage 1 gives each rank a part", "use stage 0, or set it to 1"
)


def local_steps(optimizer_params: Mapping[str, Any]) -> int:
    """Return the most steps of 0/1 Adam between two that synchronise (``local_step_clipper``); 0 where all do."""
    most = optimizer_params.get("local_step_clipper", 1)
    return int(most) if isinstance(most, int | float) and 1 < most < math.inf else 0


#: Why a mesh of model-parallel ranks is refused.
NOT_SPLIT = OneBitRefusal(
    "1-bit optimizers would round what ranks of tp or pp hold alike in different ways", "use AdamW, or data parallelism alone"
)
#: Why shared experts are refused.
NOT_EXPERTS = OneBitRefusal(
    "1-bit optimizers exchange momentum over all data-parallel ranks, and those of ep have other experts",
    "use AdamW, or leave ep at 1",
)


def scales_of(shard: int) -> int:
    """Return the number of scales of a chunk of `shard` elements."""
    return -(-shard // SCALE_BLOCK)


def message_words(shard: int) -> int:
    """Return the words of 4 bytes of a message of `shard` elements, a multiple of 64."""
    words = shard // 32 + scales_of(shard)
    return -(-words // _WORDS_16_BYTES) * _WORDS_16_BYTES
