"""Checkpointed inputs on the host: our tape against DeepSpeed's own ``CheckpointHiddenStatesOffload``, and the plans."""

from __future__ import annotations

import gc
import importlib.util
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.engines.test_contract import ledger_and_schedule_differ
from tests.workloads import flat_workload, with_flat
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.case import Case
from zeroplan.engines.registry import find_engine
from zeroplan.models.load import load_model
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.offloaded_checkpoints import (
    on_host_by_function,
    with_checkpoints_by_function,
    with_offloaded_checkpoints,
)
from zeroplan.tape.options import Checkpointing, TraceOptions
from zeroplan.tapes import find_tape

BLOCKS, BATCH, SEQ = 5, 2, 128
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "tie_word_embeddings": False,
}
OPTIONS = TraceOptions(checkpointing=Checkpointing.NON_REENTRANT)
HIDDEN = BATCH * SEQ * 64 * 2


class _Stream:
    """A stream that is always done."""

    def wait_stream(self, _: object) -> None: ...

    def wait_event(self, _: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self) -> _Stream:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def deepspeeds() -> Any:
    """DeepSpeed's module by itself, over an accelerator whose device is the meta device."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        pytest.skip("needs DeepSpeed")
    stream = _Stream()
    accelerator = SimpleNamespace(
        Stream=_Stream,
        current_stream=lambda: stream,
        stream=lambda one: one,
        is_synchronized_device=lambda: False,
        on_accelerator=lambda tensor: tensor.is_meta,
        pin_memory=lambda tensor, **_: tensor,
    )
    stub = ModuleType("deepspeed.accelerator")
    stub.get_accelerator = lambda: accelerator  # type: ignore[attr-defined]
    place = package.origin.replace("__init__.py", "runtime/activation_checkpointing/offload_activations.py")
    spec = importlib.util.spec_from_file_location("offload_activations", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"deepspeed": ModuleType("deepspeed"), "deepspeed.accelerator": stub}):
        sys.modules[spec.name] = module  # dataclasses look for it
        spec.loader.exec_module(module)
    return module


@pytest.mark.torch
def test_inputs_leave_and_return_as_under_deepspeed() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from zeroplan.trace.build import build_inputs, build_model, full_config
    from zeroplan.trace.fit import TracePoint
    from zeroplan.trace.functions import CudaFunctions
    from zeroplan.trace.recorder import StorageRecorder
    from zeroplan.trace.run import _backward, checkpoint_blocks

    source = deepspeeds()
    config, point = full_config(CONFIG), TracePoint(BATCH, SEQ)
    model = build_model(config, "AutoModelForCausalLM", OPTIONS, 0)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    recorder = StorageRecorder([*model.parameters(), *model.buffers()])
    functions = CudaFunctions()
    checkpoint_blocks(model, OPTIONS, functions)
    host: list[int] = []
    make = source._ActivationOffloadEngine._empty_cpu_like

    def on_meta(engine: Any, tensor: Any) -> Any:
        before, plain = len(recorder.out.allocs), torch.empty
        with mock.patch.object(torch, "empty", lambda *shape, **how: plain(*shape, **{**how, "device": "meta"})):
            made = make(engine, tensor)
        host.extend(range(before, len(recorder.out.allocs)))
        return made

    def no_stream(*_: object) -> None:  # a Mock would hold the tensors
        """The meta device has none."""

    gc.disable()
    try:
        with (
            mock.patch.object(source._ActivationOffloadEngine, "_empty_cpu_like", on_meta),
            mock.patch.object(torch.Tensor, "record_stream", no_stream),
            recorder,
            functions,
        ):
            batch = build_inputs(config, "AutoModelForCausalLM", OPTIONS, point)
            recorder.mark(Mark.FORWARD_BEGIN)
            manager = source.get_checkpoint_hidden_states_offloading_ctx_manager()
            with manager:
                loss = model(**batch).loss
                recorder.mark(Mark.FORWARD_END)
                _backward(loss)
                recorder.mark(Mark.BACKWARD_END)
    finally:
        gc.enable()
    theirs = _alive(recorder.out.op, recorder.out.arg, recorder.out.aux, [one.size for one in recorder.out.allocs], set(host))
    assert len(host) == BLOCKS - 1
    assert _told(_tape()) == theirs


@pytest.mark.torch
@pytest.mark.parametrize("lora", [None, ()])
def test_a_function_around_each_block_keeps_its_input_on_the_host(lora: tuple[str, ...] | None) -> None:
    """Ours against torch, which runs such a function: the forward copies the input, and the backward brings it back."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if lora is not None:
        pytest.importorskip("peft")
    from zeroplan.trace.api import trace_at
    from zeroplan.trace.build import build_inputs, build_model, full_config
    from zeroplan.trace.fit import TracePoint
    from zeroplan.trace.functions import CudaFunctions
    from zeroplan.trace.recorder import StorageRecorder
    from zeroplan.trace.run import _backward

    options = replace(OPTIONS, checkpointing=Checkpointing.REENTRANT, lora=lora)
    rank = 8 if lora is not None else 0
    config, point = full_config(CONFIG), TracePoint(BATCH, SEQ, rank)
    model = build_model(config, "AutoModelForCausalLM", options, rank)
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    recorder = StorageRecorder([*model.parameters(), *model.buffers()])
    host: set[int] = set()

    def copied(tensor: Any) -> Any:
        before = len(recorder.out.allocs)
        made = tensor.clone()
        host.update(range(before, len(recorder.out.allocs)))
        return made

    class OnHost(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, block: Any, hidden: Any, *others: Any) -> Any:
            ctx.save_for_backward(copied(hidden))
            ctx.block, ctx.others = block, others
            with torch.no_grad():
                return block(hidden, *others)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            hidden = ctx.saved_tensors[0].clone().detach().requires_grad_()
            with torch.enable_grad():
                again = ctx.block(hidden, *ctx.others)
            torch.autograd.backward(again, grad)
            return None, hidden.grad, *(None for _ in ctx.others)

    def checkpointed(block: Any, hidden: Any, *others: Any, **how: Any) -> Any:
        return OnHost.apply(partial(block, **how) if how else block, hidden, *others)

    base: Any = model
    base = base.get_base_model() if lora is not None else base
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpointed)
    gc.disable()
    try:
        with recorder, CudaFunctions():
            batch = build_inputs(config, "AutoModelForCausalLM", options, point)
            recorder.mark(Mark.FORWARD_BEGIN)
            loss = model(**batch).loss
            recorder.mark(Mark.FORWARD_END)
            _backward(loss)
            recorder.mark(Mark.BACKWARD_END)
    finally:
        gc.enable()
    theirs = _alive(recorder.out.op, recorder.out.arg, recorder.out.aux, [one.size for one in recorder.out.allocs], host)
    plain = trace_at(CONFIG, "AutoModelForCausalLM", options, point).expand(BATCH, SEQ, rank)
    ours = with_checkpoints_by_function(plain)
    last = 3 if lora is None else 2  # torch adds the leaf's gradients in place only where modules have the tracer's hooks
    assert _told(ours)[:last] == theirs[:last]
    assert _told(plain)[:2] != theirs[:2]
    assert on_host_by_function(ours) == (HIDDEN,) * BLOCKS
    assert len(host) == BLOCKS


def _told(tape: ExpandedTape) -> tuple[int, int, int]:
    made = {arg: aux for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True) if op == Op.ALLOC}
    return _alive(tape.op, tape.arg, tape.aux, [made.get(number, 0) for number in range(1 + max(made))], set())


def _alive(op: Any, arg: Any, aux: Any, sizes: Any, without: set[int]) -> tuple[int, int, int]:
    """The bytes that are alive when the forward ends, the most in the backward, and hidden states behind the last operator."""
    alive: dict[int, int] = {}
    at_end = peak = hidden = 0
    backward = False
    for what, number, other in zip(op, arg, aux, strict=True):
        if what == Op.ALLOC and number not in without and isinstance(sizes[number], int):
            alive[number] = sizes[number]
            peak = max(peak, sum(alive.values())) if backward else 0
            hidden = sum(size == HIDDEN for size in alive.values())
        elif what == Op.FREE:
            alive.pop(number, None)
        elif what == Op.GRAD:
            alive.pop(other, None)
        elif what == Op.MARK and number == Mark.FORWARD_END:
            at_end, backward = sum(alive.values()), True
        elif what == Op.MARK and number == Mark.BACKWARD_END:
            break
    return at_end, peak, hidden


def _tape() -> ExpandedTape:
    from zeroplan.trace.api import trace_at
    from zeroplan.trace.fit import TracePoint

    return with_offloaded_checkpoints(
        trace_at(CONFIG, "AutoModelForCausalLM", OPTIONS, TracePoint(BATCH, SEQ)).expand(BATCH, SEQ)
    )


def test_a_plan_moves_them_to_pinned_memory() -> None:
    """31 of 32 blocks' inputs are copied, of which 30 leave; torch rounds a pinned block up to a power of two."""
    asked = Ask(
        model="meta-llama/Llama-3.1-8B",
        engine="deepspeed",
        stage=2,
        gpus=8,
        gpu="H200",
        seq_len=3072,
        gradient_checkpointing=True,
    )
    plain = estimate_report(asked).plans[0]
    report = estimate_report(asked.replace(offload_checkpoints=True))
    moved = report.plans[0]
    assert plain.gpu.activations is not None
    assert moved.gpu.activations is not None
    assert plain.gpu.activations - moved.gpu.activations == 30 * 3072 * 4096 * 2
    assert moved.cpu.pinned - plain.cpu.pinned == 8 * 31 * (32 << 20)
    assert moved.fits
    assert not moved.unmodelled
    assert plain.gpu.peak_reserved is not None
    assert moved.gpu.peak_reserved is not None
    back = 30 * (24 << 20)  # on the copying stream, which takes nothing from the other
    assert moved.gpu.peak_reserved - plain.gpu.peak_reserved == back
    assert any("reserves what comes back on up to 32 streams" in said for said in report.warnings)


def test_what_the_ledger_keeps_the_schedule_leaves_alive() -> None:
    spec = load_model("meta-llama/Llama-3.1-8B")
    work = flat_workload(micro_batch=1, seq_len=1024, gradient_checkpointing=True)
    found = find_tape(spec, work)
    assert found is not None
    tape = with_offloaded_checkpoints(found.expand(1, 1024))
    for zero in (ZeroConfig.of(2), ZeroConfig.of(2, "cpu"), ZeroConfig.of(3)):
        case = Case(spec, with_flat(work, offload_checkpoints=True), Cluster(gpus=8), zero)
        assert not ledger_and_schedule_differ(case, find_engine("deepspeed"), tape)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gradient_checkpointing": False}, "where every block is recomputed"),
        ({"checkpoint_policy": "every:2"}, "where every block is recomputed"),
        ({"engine": "fsdp"}, "checkpoints on the host are not planned under fsdp"),
        ({"lora_rank": 8}, "--lora-rank: DeepSpeed's context is not modelled beside adapters"),
        ({"tp": 2}, "--tp: checkpoints on the host are not modelled beside it"),
    ],
)
def test_what_is_refused_is_one_line(asked: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"engine": "deepspeed", "stage": 2, "gradient_checkpointing": True, "depth": "formula"} | asked
    with pytest.raises(BadInput) as refused:
        estimate_report(Ask(model=CONFIG, gpus=8, offload_checkpoints=True, **fields))
    assert said in str(refused.value)
