"""The plan of a head and a loss a chunk of tokens at a time, held against what such a model allocates when it runs."""

from __future__ import annotations

from typing import Any

import pytest

import zeroplan
from tests.engines.runtime.test_labelled_tokens import BATCH, LENGTH, MODELS, SHARE, SMALL, levels, recorded_levels, request
from zeroplan.core.errors import BadInput
from zeroplan.core.losses import labelled_tokens
from zeroplan.engines.runtime.chunked_cross_entropy import with_chunked_cross_entropy
from zeroplan.engines.runtime.labelled_tokens import with_labelled_tokens
from zeroplan.engines.runtime.simulation import with_fused_loss
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.tape.expanded import ExpandedTape

TOKENS = 250
ROWS = BATCH * LENGTH


def planned(labelled_only: bool) -> ExpandedTape:
    resolved = resolve(request("llama"))
    tape = with_fused_loss(expanded_tape_of(resolved.engine, resolved.cases[0]), rows=ROWS, itemsize=4)
    tape = with_labelled_tokens(tape, tokens=ROWS, share=SHARE) if labelled_only else tape
    return with_chunked_cross_entropy(tape, tokens=TOKENS)


def recorded(labelled_only: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The same model with the runtime's head, recorded on the meta device."""
    import torch
    import transformers

    from zeroplan_runtime.techniques import chunked_cross_entropy as runtime
    from zeroplan_runtime.techniques import labelled_tokens as picking

    def cross_entropy(logits: Any, labels: Any, ignore: int, out: tuple[Any, Any]) -> tuple[Any, Any]:
        return out

    def cross_entropy_grad(logits: Any, labels: Any, lse: Any, scale: Any, ignore: int, out: Any) -> Any:
        return out

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**MODELS["llama"])
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    picks: dict[Any, Any] = {}
    if labelled_only:
        picking.attach_labelled_tokens(model, picks)
        monkeypatch.setattr(picking.HostCount, "wait", lambda self: labelled_tokens(ROWS, SHARE))
    monkeypatch.setattr(runtime, "cross_entropy", cross_entropy)  # the kernels allocate nothing
    monkeypatch.setattr(runtime, "cross_entropy_grad", cross_entropy_grad)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # which does not know the meta device
    runtime.attach_chunked_cross_entropy(model, TOKENS, picks)
    return recorded_levels(model)


@pytest.mark.torch
@pytest.mark.parametrize("labelled_only", [False, True])
def test_it_allocates_what_is_planned(labelled_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    tape = planned(labelled_only)
    assert levels(zip(tape.op, tape.arg, tape.aux, strict=True), lambda arg, aux: aux) == pytest.approx(
        recorded(labelled_only, monkeypatch), rel=1e-3
    )


def with_chunks(tokens: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 1},
        "zeroplan": {"chunked_cross_entropy": tokens},
    }
    given = {"model": MODELS["llama"], "engine": "zeroplan", "seq_len": LENGTH, "dtype": "fp32", "depth": "simulated"}
    return zeroplan.estimate(**{**given, **more}, ds_config=config)


def test_the_key_saves_the_logits() -> None:
    whole, parts, more = (with_chunks(tokens)[0] for tokens in (0, 128, 1 << 20))
    logits = ROWS * SMALL["vocab_size"] * 4
    assert whole.gpu.peak_allocated - parts.gpu.peak_allocated > 0.8 * logits
    assert parts.gpu.peak_allocated < more.gpu.peak_allocated <= whole.gpu.peak_allocated * 1.01


def test_models_whose_head_it_does_not_know_are_refused() -> None:
    with pytest.raises(BadInput, match="no causal language model whose linear head is followed by its loss"):
        with_chunks(128, model=MODELS["bert"])
    gemma = {**MODELS["llama"], "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 12}
    with pytest.raises(BadInput, match="no causal language model whose linear head is followed by its loss"):
        with_chunks(128, model=gemma)


def test_a_split_head_is_refused() -> None:
    with pytest.raises(BadInput, match="ranks of tp have parts of the head"):
        with_chunks(128, model={**MODELS["llama"], "vocab_size": 4000}, gpus=2, tp=2)
