"""Which elements a dropout keeps: Philox4x32-10, so that a mask follows from a seed and is made anew where it is needed.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", figure 6 and table 2. Eight elements take their 16 bits from
the four words of one counter. `csrc/cuda/layer.cu` computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
#: Elements that share a counter.
GROUP = 8
#: What 16 bits can tell apart.
_LEVELS = 1 << 16


@dataclass(frozen=True, slots=True)
class Dropout:
    """One dropout of one forward.

    Attributes:
        ratio: the share of elements that become 0; it is rounded to a multiple of 2⁻¹⁶.
        seed: one int64 element on the device of what is dropped; the lower and the upper word are Philox's key.
        salt: any number of 32 bits; another one gives another mask.
        stream: tells the dropouts of one seed apart.
    """

    ratio: float
    seed: torch.Tensor
    salt: int = 0
    stream: int = 0

    @property
    def threshold(self) -> int:
        """Elements whose 16 bits are below it become 0."""
        return round(self.ratio * _LEVELS)

    @property
    def scale(self) -> float:
        """What the others are multiplied by: one over their share, so that the mean stays."""
        return _LEVELS / (_LEVELS - self.threshold)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns the four words of each counter.

    Args:
        counter: four int64 tensors that hold 32 bits an element.
        key: two such tensors.
    """
    one, two, three, four = counter
    first, second = key
    for _ in range(_ROUNDS):
        upper, lower = _product(one, _MULTIPLIERS[0]), _product(three, _MULTIPLIERS[1])
        one, two, three, four = lower[0] ^ two ^ first, lower[1], upper[0] ^ four ^ second, upper[1]
        first, second = (first + _WEYL[0]) & _MASK, (second + _WEYL[1]) & _MASK
    return one, two, three, four


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and the lower 32 bits of a product; int64 wraps, which leaves the bits as they are."""
    whole = word * factor
    return (whole >> 32) & _MASK, whole & _MASK


def kept(dropout: Dropout, shape: torch.Size) -> torch.Tensor:
    """Returns which elements the dropout keeps, bool of this shape, whose memory order counts the elements."""
    count = shape.numel()
    groups = torch.arange(-(-count // GROUP), dtype=torch.int64, device=dropout.seed.device)
    rest = torch.full_like(groups, dropout.stream), torch.full_like(groups, dropout.salt & _MASK)
    key = dropout.seed & _MASK, (dropout.seed >> 32) & _MASK
    words = torch.stack(philox((groups & _MASK, groups >> 32, *rest), key), dim=1)
    bits = torch.stack((words & (_LEVELS - 1), words >> 16), dim=2)
    return (bits.view(-1)[:count] >= dropout.threshold).view(shape)
