"""``DeepSpeedTransformerConfig``: DeepSpeed's names and defaults (deepspeed/ops/transformer/transformer.py)."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput

_WHERE = "DeepSpeedTransformerConfig"


@dataclass
class DeepSpeedTransformerConfig:
    """What a :class:`.layer.DeepSpeedTransformerLayer` is like. A size of −1 is missing; a ratio of −1 is 0.

    Attributes:
        batch_size: ignored; DeepSpeed's kernels allocated for so many samples, these for those that come.
        hidden_size: width of the hidden states.
        intermediate_size: width between the two products of the feed-forward part; by default four times `hidden_size`.
        heads: attention heads.
        attn_dropout_ratio: dropout of the attention's probabilities.
        hidden_dropout_ratio: dropout of what is added to the residual stream.
        num_hidden_layers: layers of the model, for `adjust_init_range`.
        initializer_range: standard deviation of fresh weights.
        layer_norm_eps: added to variances.
        local_rank: the GPU that becomes the current one; −1 leaves it.
        seed: mixed into the dropouts' seeds, which come from torch's generator; −1 leaves them as they are.
        fp16: compute in fp16; parameters in fp32 are cast.
        pre_layer_norm: norms before attention and feed-forward part; else behind their residual sums, as in BERT.
        normalize_invertible: keep no input of a norm: the backward finds it from the norm's output.
        gelu_checkpoint: keep no output of GELU: the backward computes it again.
        adjust_init_range: divide the deviation of fresh output weights by √(2 · `num_hidden_layers`).
        attn_dropout_checkpoint: keep no dropped probabilities: the backward drops them again. Fused attention keeps neither
            them nor the probabilities, whatever this says.
        stochastic_mode: ignored; DeepSpeed's faster kernels differed from run to run, these do not.
        return_tuple: forward returns a tuple of one element.
        training: begin in training mode.
        bf16: compute in bf16; parameters in fp32 are cast. Not in DeepSpeed's class.
        gelu_approximate: ``"tanh"``, as DeepSpeed's kernels, or ``"none"``, the exact GELU of most BERTs. Not in DeepSpeed's.
        layer_id: how many layers were made before; set by the layer.
        fused_attention: on a GPU use torch's fused attention, which keeps no scores. Not in DeepSpeed's.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True
    bf16: bool = False
    gelu_approximate: str = "tanh"
    fused_attention: bool = True
    layer_id: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, json_object: dict[str, Any]) -> DeepSpeedTransformerConfig:
        """Returns the config of these keys.

        Raises:
            BadInput: for a key that it does not have.
        """
        known = [each.name for each in dataclasses.fields(cls) if each.init]
        for key in json_object:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                remedy = f"did you mean {close[0]!r}?" if close else "leave it out"
                raise BadInput(f"{key!r} is no key of it", where=_WHERE, remedy=remedy)
        return cls(**json_object)

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """Returns the config of a file, in UTF-8, or in UTF-16 with its mark, as DeepSpeed reads.

        Raises:
            BadInput: for a file that holds no JSON object, or a key that the config does not have.
        """
        content = Path(json_file).read_bytes()
        try:
            values = json.loads(content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"))
        except ValueError as fault:
            raise BadInput(f"it is no JSON: {fault}", where=str(json_file), remedy="write one JSON object") from None
        if not isinstance(values, dict):
            raise BadInput("it holds no JSON object", where=str(json_file), remedy="write one JSON object")
        return cls.from_dict(values)

    @property
    def dtype(self) -> torch.dtype | None:
        """What the layer computes in; None for its parameters' dtype."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None

    def require_valid(self) -> None:
        """Checks what a layer needs.

        Raises:
            BadInput: for a size that is missing or does not fit, and a ratio that is none.
        """
        for name in ("hidden_size", "heads"):
            if getattr(self, name) <= 0:
                raise BadInput(f"{getattr(self, name)} is no size", where=f"{_WHERE}.{name}", remedy="give the model's")
        if self.hidden_size % self.heads:
            raise BadInput(
                f"{self.heads} heads do not divide hidden_size {self.hidden_size}",
                where=f"{_WHERE}.heads",
                remedy="give a divisor",
            )
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if getattr(self, name) >= 1:
                raise BadInput(f"{getattr(self, name)} drops everything", where=f"{_WHERE}.{name}", remedy="give less than 1")
        if self.adjust_init_range and self.num_hidden_layers <= 0:
            raise BadInput(
                "adjust_init_range divides by it",
                where=f"{_WHERE}.num_hidden_layers",
                remedy="give the model's number of layers",
            )
        if self.initializer_range < 0:
            raise BadInput(
                f"{self.initializer_range} is no deviation",
                where=f"{_WHERE}.initializer_range",
                remedy="give the model's (0.02)",
            )
        if self.fp16 and self.bf16:
            raise BadInput("fp16 and bf16 are both set", where=f"{_WHERE}.bf16", remedy="set one")
        if self.gelu_approximate not in ("tanh", "none"):
            raise BadInput(
                f"{self.gelu_approximate!r} is no GELU", where=f"{_WHERE}.gelu_approximate", remedy="use 'tanh' or 'none'"
            )
