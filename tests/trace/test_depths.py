"""Which stack of blocks is how deep: models with several, of which few blocks are traced."""

from __future__ import annotations

from typing import Any

import pytest

import zeroplan
from zeroplan.core.errors import BadInput
from zeroplan.models.load import load_model
from zeroplan.planner import tapes
from zeroplan.tape.options import TraceOptions
from zeroplan.trace.assemble import find_blocks
from zeroplan.trace.build import build_model, depths_of, full_config, shorten

_SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
_TEXT = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 33000, "pad_token_id": 0}
_TOWER = {**_SMALL, "image_size": 28, "patch_size": 14}
_T5 = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 5, "num_decoder_layers": 24, "vocab_size": 64}


def _with_tower(kind: str, tower: str, text: str, blocks: tuple[int, int]) -> dict[str, Any]:
    vision = {**_TOWER, "model_type": tower, "num_hidden_layers": blocks[0]}
    return {
        "model_type": kind,
        "vision_config": vision,
        "text_config": {**_TEXT, "model_type": text, "num_hidden_layers": blocks[1]},
    }


@pytest.mark.parametrize(
    ("config", "real"),
    [
        (_with_tower("llava", "clip_vision_model", "llama", (24, 32)), [24, 32]),
        (_with_tower("llava", "clip_vision_model", "llama", (32, 4)), [32, 4]),  # one is traced whole
        (_with_tower("paligemma", "siglip_vision_model", "gemma", (27, 18)), [27, 18]),
        (_with_tower("idefics3", "idefics3_vision", "llama", (12, 32)), [12, 32]),
        ({"model_type": "t5", **_T5}, [5, 24]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_each_stack_has_its_own_depth(config: dict[str, Any], real: list[int]) -> None:
    """Their traced blocks are as many, since the patterns are alike: LLaVA's text had its tower's 24 blocks."""
    whole, auto = full_config(config), load_model(config).auto_class
    depths = depths_of(whole)
    model = build_model(shorten(whole, depths), auto, TraceOptions(), 0)
    found = find_blocks(model, [(depth.traced, depth.real) for depth in depths])
    assert [blocks.real for blocks in found] == real
    assert max(blocks.traced for blocks in found) < max(real)


def test_a_tape_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", **_TEXT, "num_hidden_layers": 2}
    two, trace = load_model(config), tapes._traced
    monkeypatch.setattr(tapes, "lookup", lambda *_, **__: None)
    monkeypatch.setattr(tapes, "_traced", lambda _, *args: trace(two, *args))
    zeroplan.estimate(config, seq_len=16, stage=2, gpus=1, depth="simulated")
    with pytest.raises(BadInput, match="the traced model has"):
        zeroplan.estimate({**config, "num_hidden_layers": 3}, seq_len=16, stage=2, gpus=1, depth="simulated")


def test_weights_that_grow_with_depth_are_no_other_model() -> None:
    """ESM's contacts have a weight for each head of each block; those of other blocks are less than a 2,000th."""
    esm = {"model_type": "esm", "architectures": ["EsmForMaskedLM"], "num_hidden_layers": 7, "vocab_size": 33,
           "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary", **_SMALL}  # fmt: skip
    (plan,) = zeroplan.estimate(esm, seq_len=16, stage=2, gpus=1)
    assert plan.depth == "simulated"
