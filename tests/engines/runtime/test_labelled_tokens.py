"""The plan of a head over labelled tokens alone, held against what such a model allocates when it runs."""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.losses import labelled_tokens
from zeroplan.engines.runtime.labelled_tokens import with_labelled_tokens
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import TraceOptions
from zeroplan.tape.sizes import FUNCTIONS, KernelDevice

LENGTH, BATCH, SHARE = 384, 3, 0.15
SMALL = {
    "vocab_size": 4001,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4},
    "bert": {**SMALL, "model_type": "bert", "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.0},
}


def request(kind: str, **more: Any) -> Ask:
    return Ask(
        model=MODELS[kind],
        engine="zeroplan",
        stage=1,
        seq_len=LENGTH,
        micro_batch=BATCH,
        dtype="fp32",
        depth="simulated",
        **more,
    )


def levels(events: Any, sizes: Any) -> dict[str, int]:
    """The most bytes alive in the head's forward and loss, in its backward, and those alive when the forward has ended."""
    alive: dict[int, int] = {}
    now = top = 0
    found = {}
    for op, arg, aux in events:
        if op == Op.ALLOC:
            alive[arg] = sizes(arg, aux)
            now += alive[arg]
        elif op in (Op.FREE, Op.GRAD):
            now -= alive.pop(arg if op == Op.FREE else aux, 0)
        top = max(top, now)
        if op == Op.MARK and arg == Mark.FORWARD_END:
            found["kept"] = now
            top = now
        if op == Op.MARK and arg == Mark.BACKWARD_END:
            found["backward"] = top
    return found


def planned(kind: str) -> ExpandedTape:
    resolved = resolve(request(kind))
    return expanded_tape_of(resolved.engine, resolved.cases[0])


def bytes_of(size: Any) -> int:
    """A recorded size: bytes, or the name of a rule of kernels with its numbers."""
    return size if isinstance(size, int) else FUNCTIONS[size[0]](KernelDevice(), *size[1:])


def recorded_levels(model: Any) -> dict[str, int]:
    """The levels of one micro batch of a model on the meta device."""
    import torch

    from zeroplan.trace.run import record

    def inputs() -> dict[str, torch.Tensor]:
        ids = torch.empty((BATCH, LENGTH), dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids}

    out = record(model, inputs, TraceOptions())
    return levels(zip(out.op, out.arg, out.aux, strict=True), lambda arg, _: bytes_of(out.allocs[arg].size))


def recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The same model with the runtime's hooks, recorded on the meta device; only the number of labels is told to it."""
    import torch
    import transformers

    from zeroplan_runtime.techniques import labelled_tokens as runtime

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**MODELS[kind])
        auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="sdpa").train()
    runtime.attach_labelled_tokens(model)
    monkeypatch.setattr(runtime.HostCount, "wait", lambda self: labelled_tokens(BATCH * LENGTH, SHARE))
    return recorded_levels(model)


@pytest.mark.torch
@pytest.mark.parametrize("kind", list(MODELS))
def test_it_allocates_what_is_planned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    whole = planned(kind)
    picked = with_labelled_tokens(whole, tokens=BATCH * LENGTH, share=SHARE)
    before, after = (levels(zip(tape.op, tape.arg, tape.aux, strict=True), lambda arg, aux: aux) for tape in (whole, picked))
    logits = BATCH * LENGTH * 4001 * 4
    real = recorded(kind, monkeypatch)
    assert before["kept"] - after["kept"] > 0.8 * logits
    assert after == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize("kind", list(MODELS))
def test_hidden_states_as_large_as_a_weight_are_found(kind: str) -> None:
    tokens = SMALL["intermediate_size"]
    resolved = resolve(request(kind).replace(seq_len=tokens, micro_batch=1))
    whole = expanded_tape_of(resolved.engine, resolved.cases[0])
    picked = with_labelled_tokens(whole, tokens=tokens, share=SHARE)
    assert whole.activation_peak - picked.activation_peak > 0.8 * tokens * 4001 * 4


def test_a_share_switches_the_runtimes_key_on() -> None:
    resolved = resolve(request("llama", labelled_share=SHARE))
    case = resolved.cases[0]
    tape = expanded_tape_of(resolved.engine, case)
    plain = resolve(request("llama"))
    saved = plain.engine.computed_tape(case, tape).activation_peak - resolved.engine.computed_tape(case, tape).activation_peak
    assert saved > 0.8 * BATCH * LENGTH * 4001 * 4
    assert resolved.engine.run_config(case, {}, 10.0)["zeroplan"]["labelled_tokens_only"] is True
    config = resolved.engine.ds_config(case.zero, case.workload, case.layout)
    assert config is not None
    assert config["zeroplan"] == {"labelled_tokens_only": True}


def test_all_tokens_cost_no_less_than_without_it() -> None:
    whole = planned("llama")
    assert with_labelled_tokens(whole, tokens=BATCH * LENGTH, share=1.0).activation_peak >= whole.activation_peak


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(BadInput, match="is no share of the tokens"):
        resolve(request("llama", labelled_share=share))


def test_other_engines_compute_all_logits() -> None:
    with pytest.raises(BadInput, match="deepspeed computes the logits of all tokens; use --engine zeroplan"):
        resolve(request("llama", labelled_share=SHARE).replace(engine="deepspeed"))
