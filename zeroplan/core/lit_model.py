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
        quantize: how bitsandbytes keeps all linear layers, the head's among them; None in 16 or 32 bits.
        keeps_inputs: whether bitsandbytes' products keep their inputs for the backward, as they did before 0.43.2.
        mixed_units: whether FSDP 1 wraps blocks with the adapters in them.
        longest_first: whether the first micro batch holds the longest sample.
    """

    name: str
    adapters: tuple[tuple[str, int | float | bool], ...] = ()
    chunked_head: bool = False
    shifted: bool = True
    quantize: str | None = None
    keeps_inputs: bool = False
    mixed_units: bool = False
    longest_first: bool = False
