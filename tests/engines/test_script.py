"""Where a micro batch's cues take cuBLAS's workspaces."""

from __future__ import annotations

from dataclasses import replace

from tests.engines.deepspeed.llama_tape import llama_tape
from zeroplan.engines.script import workspaces_of
from zeroplan.tape.expanded import Mark


def test_rotary_angles_of_an_image_take_no_workspace() -> None:
    """An H200 (VD02) took Qwen3-VL's first workspace at the first linear layer; a text's angles are a product before it."""
    tape = llama_tape(1)
    forward = range(tape.marks[Mark.BACKWARD_BEGIN])
    modules = [replace(one, type="Qwen3VLVisionRotaryEmbedding") if "Rotary" in one.type else one for one in tape.modules]
    ((_, _, text),) = workspaces_of(tape, forward, 0)
    ((_, _, image),) = workspaces_of(replace(tape, modules=tuple(modules)), forward, 0)
    assert [tape.modules[at].name for at in (text, image)] == ["model.rotary_emb", "model.layers.0.self_attn.q_proj"]
