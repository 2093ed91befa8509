"""What each optimizer keeps for every parameter: the K of the ZeRO paper, buffer by buffer.

A state's bytes follow the master's dtype (``per_master`` elements) or are fixed (``numerator/denominator`` bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.zero_config import DEEPSPEED_VERSION


@dataclass(frozen=True, slots=True)
class State:
    """One optimizer state: so many master-wide elements a parameter, or a fixed rational number of bytes.

    `domain` is which elements have it: all, those that Muon updates (``matrix``) or the others (``rest``).
    """

    buffer: Buffer
    per_master: int = 0
    numerator: int = 0
    denominator: int = 1
    domain: str = "all"

    def bytes_of(self, count: int, width: int) -> int:
        """Bytes for `count` elements whose masters have `width` bytes each."""
        return self.per_master * width * count + self.numerator * count // self.denominator


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer by its memory.

    Attributes:
        name: its name on the command line.
        states: what it keeps.
        source: the paper, or the file that allocates it.
        zero: False for those that DeepSpeed refuses to combine with ZeRO.
        deepspeed_type: its name in a ds_config; empty where DeepSpeed does not build it from one.
        warning: what whoever plans with it should know.
    """

    name: str
    states: tuple[State, ...]
    source: str
    zero: bool = True
    deepspeed_type: str = ""
    warning: str = ""

    @property
    def bytes_per_element(self) -> int:
        """Bytes of all states of one element with fp32 masters, rounded."""
        return round(sum(4 * state.per_master + state.numerator / state.denominator for state in self.states))


_ADAM = (State(Buffer.OPTIM_EXP_AVG, 1), State(Buffer.OPTIM_EXP_AVG_SQ, 1))
#: bitsandbytes keeps one fp32 scale for every 256 elements of each 8-bit state.
_EIGHT_BIT = (
    State(Buffer.OPTIM_EXP_AVG, numerator=1),
    State(Buffer.OPTIM_EXP_AVG_SQ, numerator=1),
    State(Buffer.OPTIM_SCALE, numerator=8, denominator=256),
)

OPTIMIZERS: dict[str, Optimizer] = {
    opt.name: opt
    for opt in (
        Optimizer("adamw", _ADAM, "Loshchilov & Hutter 2019, algorithm 2", deepspeed_type="AdamW"),
        Optimizer("adam", _ADAM, "Kingma & Ba 2015, algorithm 1", deepspeed_type="Adam"),
        Optimizer("adamw8bit", _EIGHT_BIT, "Dettmers et al. 2022, section 2; bitsandbytes blocksize 256"),
        Optimizer("lamb", _ADAM, "You et al. 2020, algorithm 2", deepspeed_type="Lamb"),
        Optimizer(
            "onebitadam",
            (*_ADAM, State(Buffer.OPTIM_ERROR_FEEDBACK, 1)),
            "Tang et al. 2021, algorithm 1",
            zero=False,
            warning=f"DeepSpeed {DEEPSPEED_VERSION} no longer has 1-bit Adam: planned is what earlier ones allocated",
        ),
        Optimizer("lion", (State(Buffer.OPTIM_EXP_AVG, 1),), "Chen et al. 2023, algorithm 2", deepspeed_type="Lion"),
        Optimizer("adagrad", (State(Buffer.OPTIM_SUM, 1),), "Duchi et al. 2011", deepspeed_type="Adagrad"),
        Optimizer("adafactor", (State(Buffer.OPTIM_FACTORED, 1),), "Shazeer & Stern 2018, algorithm 4"),
        Optimizer(
            "muon",
            (
                State(Buffer.OPTIM_MOMENTUM, 1, domain="matrix"),
                State(Buffer.OPTIM_EXP_AVG, 1, domain="rest"),
                State(Buffer.OPTIM_EXP_AVG_SQ, 1, domain="rest"),
            ),
            "Jordan et al. 2024; embeddings, head and vectors are left to Adam",
            deepspeed_type="Muon",
        ),
        Optimizer("nadam", _ADAM, "Dozat 2016; torch/optim/nadam.py", deepspeed_type="NAdam"),
        Optimizer("radam", _ADAM, "Liu et al. 2020; torch/optim/radam.py", deepspeed_type="RAdam"),
        Optimizer("adamax", _ADAM, "Kingma & Ba 2015, algorithm 2; torch/optim/adamax.py", deepspeed_type="Adamax"),
        Optimizer(
            "rmsprop",
            (State(Buffer.OPTIM_EXP_AVG_SQ, 1),),
            "Hinton 2012, lecture 6e; torch/optim/rmsprop.py",
            deepspeed_type="RMSprop",
        ),
        Optimizer(
            "adadelta",
            (State(Buffer.OPTIM_EXP_AVG_SQ, 1), State(Buffer.OPTIM_SUM, 1)),
            "Zeiler 2012; torch/optim/adadelta.py",
            deepspeed_type="Adadelta",
        ),
        Optimizer("sgd", (), "Robbins & Monro 1951", deepspeed_type="SGD"),
        Optimizer("sgd_momentum", (State(Buffer.OPTIM_MOMENTUM, 1),), "Polyak 1964", deepspeed_type="SGD"),
    )
}

_ALIASES = {
    "fusedadam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adam8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit",
    "8bit-adam": "adamw8bit",
    "fusedlamb": "lamb",
    "fusedlion": "lion",
    "1bitadam": "onebitadam",
    "1-bit-adam": "onebitadam",
    "sgdm": "sgd_momentum",
}


def find_optimizer(name: str, *, where: str = "--optimizer") -> Optimizer:
    """The optimizer of that name, in any case, or one of its other names.

    Raises:
        BadInput: with the nearest names.
    """
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    found = OPTIMIZERS.get(key)
    if found is None:
        near = did_you_mean(key, OPTIMIZERS)
        raise BadInput(f"unknown optimizer {name[:60]!r}", where=where, remedy=near or f"use one of {', '.join(OPTIMIZERS)}")
    return found
