"""Saving between training steps: in which form states leave the GPUs, and which program's code writes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StateDict(StrEnum):
    """The form of what is saved; torch's and accelerate's names (``FULL_STATE_DICT``) are understood as well."""

    SHARDED = "sharded"  # every rank writes its own part
    FULL = "full"  # the first rank gathers all and writes it
    FULL_GPU = "full-gpu"  # every rank gathers all and keeps it on its GPU: FSDP 1's ``state_dict()`` without a StateDictConfig

    @classmethod
    def _missing_(cls, value: object) -> StateDict | None:
        plain = str(value).strip().lower().removeprefix("statedicttype.").removesuffix("_state_dict")
        return next((one for one in cls if one.value == plain), None)


class Saver(StrEnum):
    """The program whose code saves."""

    LOOP = "loop"  # a training loop of one's own, by the engine's or torch's functions
    ACCELERATE = "accelerate"  # Accelerator.save_state
    TRAINER = "trainer"  # the HF Trainer
    LIGHTNING = "lightning"  # Lightning's ModelCheckpoint


@dataclass(frozen=True, slots=True)
class Saving:
    """What is saved between two steps.

    Attributes:
        state_dict: the form; an engine that shards nothing has only one.
        saver: whose code saves.
        optimizer: whether the optimizer's states are saved, too; not so with ``save_only_model``.
    """

    state_dict: StateDict = StateDict.SHARDED
    saver: Saver = Saver.LOOP
    optimizer: bool = True
