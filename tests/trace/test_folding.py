"""Depth and size: an expanded tape equals a trace of the whole model at that very point, event by event."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import nn

from zeroplan.core.model_config import auto_class_of
from zeroplan.core.workload import Attention
from zeroplan.tape.codec import from_json, to_json
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import Arithmetic, Checkpointing, TraceOptions
from zeroplan.tape.sizes import KernelDevice
from zeroplan.trace import remembered
from zeroplan.trace.api import Donors, _Attempt, trace_at, trace_model, trace_module
from zeroplan.trace.build import Depth
from zeroplan.trace.fit import DoesNotFitError, TracePoint, fit_poly
from zeroplan.trace.fold import DoesNotFoldError
from zeroplan.trace.ranks import ALONE

pytestmark = pytest.mark.torch

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
GEMMA2 = {
    **LLAMA,
    "model_type": "gemma2",
    "num_hidden_layers": 9,
    "sliding_window": 600,
    "head_dim": 256,  # too wide for FlashAttention: a mask whose rows are no multiple of 8 is copied
    "hidden_activation": "gelu_pytorch_tanh",
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 4,
    "vocab_size": 500,
    "decoder_start_token_id": 0,
}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}


def columns(tape: ExpandedTape) -> tuple[list[int], ...]:
    return tape.op, tape.arg, tape.aux, tape.kind, tape.module


def renumbered(tape: ExpandedTape) -> tuple[list[int], ...]:
    """Columns with storages numbered in the order of their allocation."""
    number: dict[int, int] = {}
    arg, aux = [], []
    for op, a, x in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC:
            number[a] = len(number)
        arg.append(number[a] if op in (Op.ALLOC, Op.FREE) else a)
        aux.append(number[x] if op == Op.GRAD else x)
    return tape.op, arg, aux, tape.kind, tape.module


@pytest.mark.parametrize(
    "config, options, points",
    [
        (LLAMA, TraceOptions(), [(1, 100), (3, 333)]),
        (LLAMA, TraceOptions(checkpointing=Checkpointing.NON_REENTRANT, zero3=True), [(1, 100), (5, 64)]),
        (LLAMA, TraceOptions(arithmetic=Arithmetic.AUTOCAST), [(1, 100), (2, 50)]),
        (T5, TraceOptions(), [(2, 96)]),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (LLAMA, TraceOptions(attn=Attention.EAGER, arithmetic=Arithmetic.FP32), [(2, 77)]),
                (LLAMA, TraceOptions(attn=Attention.FLASH), [(2, 77)]),
                (LLAMA, TraceOptions(checkpointing=Checkpointing.REENTRANT), [(2, 100)]),
                (LLAMA, TraceOptions(checkpointing=Checkpointing.SELECTIVE, zero3=True), [(2, 100)]),
                (LLAMA, TraceOptions(lora=(), checkpointing=Checkpointing.NON_REENTRANT), [(2, 100)]),
                (GEMMA2, TraceOptions(), [(1, 599), (1, 600), (2, 1024)]),
                (MOE, TraceOptions(), [(2, 96)]),
            )
        ),
    ],
    ids=lambda value: value.key if isinstance(value, TraceOptions) else value["model_type"] if isinstance(value, dict) else "",
)
def test_an_expanded_tape_equals_the_whole_model_traced_there(
    config: dict[str, Any], options: TraceOptions, points: list[tuple[int, int]]
) -> None:
    tape = trace_model(config, auto_class_of(config), options)
    assert any(len(set(stack.plan)) < len(stack.plan) for stack in tape.stacks), "no block was left out"
    for batch, seq in points:
        whole = {key: value for key, value in config.items() if "layers" not in key}
        depths = {key: value for key, value in config.items() if "layers" in key}
        there = whole_trace(whole | depths, options, TracePoint(batch, seq, 4 if options.lora is not None else 0))
        folded = tape.expand(batch, seq, 4)
        assert renumbered(folded) == renumbered(there)
        assert folded.params == there.params
        assert folded.modules == there.modules


def whole_trace(config: dict[str, Any], options: TraceOptions, point: TracePoint) -> ExpandedTape:
    """Every block traced, nothing fitted."""
    from zeroplan.trace import api

    whole = api.full_config(config)
    depths = [Depth(d.path, d.real, d.real) for d in api.depths_of(whole)]
    lora = (point.rank,) if point.rank else (6,)
    attempt = api._Attempt(whole, depths, auto_class_of(config), options, lora, ALONE)
    return attempt.at(point).expand(point.batch, point.seq, point.rank)


def test_models_of_a_family_share_patterns_and_come_out_the_same() -> None:
    donors = Donors()
    donors.trace(LLAMA, "AutoModelForCausalLM", TraceOptions())
    wider = {**LLAMA, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 11, "head_dim": 40, "vocab_size": 777}
    borrowed = donors.trace(wider, "AutoModelForCausalLM", TraceOptions())
    own = trace_model(wider, "AutoModelForCausalLM", TraceOptions())
    assert sum(map(len, donors._known.values())) == 1
    for batch, seq in ((1, 50), (4, 999)):
        assert columns(borrowed.expand(batch, seq)) == columns(own.expand(batch, seq))


@pytest.mark.long
def test_a_second_t5_needs_no_points_but_those_of_its_sizes() -> None:
    """Its casts under autocast end in runs of frees that the folder puts into order: the traces themselves keep theirs."""
    donors, options = Donors(), TraceOptions(arithmetic=Arithmetic.AUTOCAST)
    donors.trace(T5, auto_class_of(T5), options)
    wider = {**T5, "d_model": 2 * T5["d_model"], "vocab_size": 777}
    borrowed = donors.trace(wider, auto_class_of(T5), options)
    assert sum(map(len, donors._known.values())) == 1
    own = trace_model(wider, auto_class_of(T5), options)
    for batch, seq in ((1, 50), (4, 999)):
        assert columns(borrowed.expand(batch, seq)) == columns(own.expand(batch, seq))


@pytest.mark.parametrize(("left", "folds"), [(2, True), (1, False)])
def test_a_tape_that_leaves_more_behind_than_its_trace_does_not_fold(left: int, folds: bool) -> None:
    def alive(count: int) -> SimpleNamespace:
        return SimpleNamespace(op=[Op.ALLOC] * count, arg=list(range(count)), aux=[512] * count)

    attempt = SimpleNamespace(_run=lambda point: alive(left), _tells_deeper=lambda point: None)
    tape: Any = SimpleNamespace(expand=lambda *numbers: alive(2))
    balanced = partial(_Attempt._balanced, cast("Any", attempt), tape, TracePoint(1, 8))
    if folds:
        assert balanced() is tape
    else:
        with pytest.raises(DoesNotFoldError):
            balanced()


def test_a_tape_survives_its_stored_form() -> None:
    tape = trace_model(LLAMA, "AutoModelForCausalLM", TraceOptions())
    again = from_json(to_json(tape))
    assert columns(again.expand(2, 100)) == columns(tape.expand(2, 100))


def test_other_devices_run_other_attention_kernels() -> None:
    tape = trace_model(LLAMA, "AutoModelForCausalLM", TraceOptions())
    hopper, ampere = tape.expand(2, 100), tape.expand(2, 100, device=KernelDevice(108, 2048, cudnn_attention=False))
    rows, heads, dim = 128, 4, 32  # flash's fp32 gradient of the queries: rows padded to 128, head dimension to 32
    assert 4 * 2 * rows * heads * dim in set(ampere.aux) - set(hopper.aux)


def test_remembered_results_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    point = TracePoint(2, 96)
    quick = trace_at(T5, auto_class_of(T5), TraceOptions(), point)
    monkeypatch.setattr(remembered, "run", lambda func, args, kwargs: func(*args, **kwargs))
    slow = trace_at(T5, auto_class_of(T5), TraceOptions(), point)
    assert columns(quick.expand(2, 96)) == columns(slow.expand(2, 96))


def test_results_are_remembered_by_all_that_decides_them() -> None:
    """Strides, types of numbers and what an operator returns beside its result; neither views nor writes."""
    aten = torch.ops.aten
    x, whole = (torch.empty(4, 6, dtype=dtype, device="meta") for dtype in (torch.float16, torch.int64))
    turned = torch.empty(6, 4, dtype=torch.float16, device="meta").t()
    calls = [
        *((aten.mul.Tensor, (a, b)) for a in (x, turned) for b in (x, turned)),
        *((aten.add.Scalar, (whole, number)) for number in (1, 1.0, True)),
        *((aten.native_dropout.default, (a, 0.1, True)) for a in (x, turned)),
        *((aten.sum.dim_IntList, (x, dims)) for dims in ([0], [1], [0, 1])),
        (aten.cat.default, ([x, turned], 1)),
    ]

    def described(out: object) -> list[object]:
        return [(one.shape, one.stride(), one.dtype) for one in (out if isinstance(out, tuple) else (out,))]

    for func, args in (*calls, *calls):
        assert described(remembered.run(func, args, {})) == described(func(*args)), (func, args)
    for func, args in ((aten.view.default, (x, [24])), (aten._unsafe_view.default, (x, [24])), (aten.add_.Tensor, (x, x))):
        for _ in range(2):
            assert remembered.run(func, args, {}).untyped_storage()._cdata == x.untyped_storage()._cdata, func


def test_a_plain_module_is_traced_with_an_example_batch() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    tape = trace_module(module, lambda: {"input": torch.empty(32, 8, device="meta")})
    stream = tape.expand(1, 1)
    live, saved = {}, 0
    for op, arg, aux in zip(stream.op, stream.arg, stream.aux, strict=True):
        if op == Op.ALLOC:
            live[arg] = aux
        elif op == Op.FREE:
            live.pop(arg)
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            saved = sum(live.values())
    # the batch, what the ReLU made (saved once for it and the second layer), the mean
    assert saved == 4 * (32 * 8 + 32 * 16 + 1)
    assert sum(op == Op.GRAD for op in stream.op) == 4


def test_sizes_are_fitted_exactly_or_not_at_all() -> None:
    points = [TracePoint(1, 192), TracePoint(2, 320), TracePoint(3, 448), TracePoint(5, 64)]
    assert fit_poly(points, [b * s * 24 for b, s, _ in points]) == ((24, 1, 1, 0),)
    assert fit_poly(points, [8 * b * (s + 1) for b, s, _ in points]) == ((8, 1, 0, 0), (8, 1, 1, 0))
    with pytest.raises(DoesNotFitError):
        fit_poly(points, [b * (s // 100) * 512 for b, s, _ in points])


def test_numbered_blocks_are_a_pattern_and_numbered_classes_are_none() -> None:
    """Gemma 4 names the blocks that differ by their numbers; every config names its classes so."""
    from zeroplan.trace.build import _pattern

    wide = {"head_dim": 512}
    assert _pattern({"id2label": {0: "LABEL_0", 1: "LABEL_1"}}, 6) == (0, 1)
    assert _pattern({"per_layer_config": {2: wide, 5: wide}}, 6) == (0, 3)
