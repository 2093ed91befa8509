"""A model of LitGPT's own code, by the names of its files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LitModel:
    """What LitGPT builds and trains.

    Attributes:
        name: of the model: LitGPT's own, or the hub's with or without its owner.
        adapters: keyword arguments of its LoRA config (``lora_r``, ``lora_query``, …); empty for full training.
        chunked_head: whether the head runs in chunks of 128 tokens, as it does where adapters are trained.
        shifted: whether the model's logits are shifted against the labels; pre-training's samples come shifted.
    """

    name: str
    adapters: tuple[tuple[str, int | float | bool], ...] = ()
    chunked_head: bool = False
    shifted: bool = True
