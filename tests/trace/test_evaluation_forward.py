"""The forward of an evaluation: without gradients nothing is kept, and without training nothing is dropped."""

from __future__ import annotations

from zeroplan.tape.chunked_head import with_chunked_forward
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import TraceOptions
from zeroplan.trace.api import trace_at
from zeroplan.trace.fit import TracePoint

GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 1000, "n_positions": 256}
LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 128, "vocab_size": 100_000, "max_position_embeddings": 512}
BATCH, SEQ = 2, 256


def tape(config: dict[str, object], options: TraceOptions) -> ExpandedTape:
    traced = trace_at(config, "AutoModelForCausalLM", options, TracePoint(BATCH, SEQ))
    return traced.expand(BATCH, SEQ)


def peaks(events: ExpandedTape) -> tuple[int, int, int]:
    """The most bytes of the forward, those alive at its end, and those alive at the end of everything."""
    sizes: dict[int, int] = {}
    now = most = kept = 0
    running = True
    for op, arg, aux in zip(events.op, events.arg, events.aux, strict=True):
        if op == Op.ALLOC:
            now += aux
            sizes[arg] = aux
            most = max(most, now) if running else most
        elif op == Op.FREE:
            now -= sizes.pop(arg)
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            running, kept = False, now
    return most, kept, now


def test_nothing_waits_for_a_backward() -> None:
    for config in (GPT2, LLAMA):
        training, evaluation = tape(config, TraceOptions()), tape(config, TraceOptions(evaluation=True))
        assert [module.name for module in training.modules] == [module.name for module in evaluation.modules]
        (most, kept, left), (trained, waiting, _) = peaks(evaluation), peaks(training)
        tokens = 8 * BATCH * SEQ
        assert left == 0
        assert kept <= tokens + 8
        assert most < trained
        assert waiting > 10 * kept
        assert not {Op.GRAD, Op.BWD_ENTER, Op.BWD_EXIT} & set(evaluation.op)


def test_dropout_makes_no_masks() -> None:
    dropping = tape(GPT2, TraceOptions(evaluation=True))
    without = tape(GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, TraceOptions(evaluation=True))
    assert (dropping.op, dropping.aux) == (without.op, without.aux)


def test_trls_head_makes_no_logits_of_all_tokens() -> None:
    plain = tape(LLAMA, TraceOptions(evaluation=True))
    tiled = with_chunked_forward(plain, batch=BATCH, seq_len=SEQ)
    logits = 2 * BATCH * SEQ * 100_000
    assert logits in plain.aux
    assert logits not in tiled.aux
    assert peaks(tiled)[0] < peaks(plain)[0]
    assert peaks(tiled)[2] == 0
    assert [event for event in tiled.op if event in (Op.ENTER, Op.EXIT)] == [
        event for event in plain.op if event in (Op.ENTER, Op.EXIT)
    ]
