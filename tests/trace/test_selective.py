"""Checkpoint policies: the traced allocations against those of a real run on the CPU, one by one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy as SavePolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.workloads import flat_workload
from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Attention, CheckpointPolicy
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import Arithmetic, Checkpointing, TraceOptions, options_for
from zeroplan.tape.summary import summarise
from zeroplan.trace import kernels
from zeroplan.trace.api import trace_at, trace_model
from zeroplan.trace.fit import TracePoint

pytestmark = pytest.mark.torch

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
BATCH, SEQ = 2, 64
#: The CPU makes numbers of a few bytes that CUDA's kernels take as arguments.
SMALL = 256


@pytest.fixture
def _cpu_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the product that CUDA's softmax backward makes beside its result."""
    monkeypatch.delitem(kernels.AFTER, torch.ops.aten._softmax_backward_data.default)


def _odd_products() -> Any:
    """torchtitan's contexts: the first, third, … product of a block is kept."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> SavePolicy:
        seen[context.is_recompute] += operator is torch.ops.aten.mm.default
        keep = operator is torch.ops.aten.mm.default and seen[context.is_recompute] % 2
        return SavePolicy.MUST_SAVE if keep else SavePolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _real(policy: CheckpointPolicy) -> tuple[list[int], list[int]]:
    """Bytes taken (and given back, negative) by the CPU's allocator in forward and backward, in order."""
    values = dict(LLAMA)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").train()
    model.config.use_cache = False
    arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if policy.selective:
        products = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
        arguments["context_fn"] = _odd_products if policy.alternate else partial(create_selective_checkpoint_contexts, products)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    for number, block in enumerate(model.model.layers, 1):
        block.gradient_checkpointing = number % policy.every == 0
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)

    def recorded(function: Callable[[], Any]) -> tuple[Any, list[int]]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            result = function()
        events = run.profiler.kineto_results.events()
        return result, [e.nbytes() for e in events if e.name() == "[memory]" and abs(e.nbytes()) >= SMALL]

    gc.disable()
    try:
        loss, forward = recorded(lambda: model(input_ids=ids, labels=ids)["loss"])
        _, backward = recorded(lambda: loss.backward())
    finally:
        gc.enable()
    return forward, backward


def _traced(tape: ExpandedTape) -> tuple[list[int], list[int]]:
    """The same of a tape; the batch is not counted."""
    size: dict[int, int] = {}
    parts: dict[int, list[int]] = {Mark.FORWARD_BEGIN: [], Mark.BACKWARD_BEGIN: []}
    now: list[int] | None = None
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.MARK:
            now = parts.get(arg)
        elif op in (Op.ALLOC, Op.FREE):
            signed = aux if op == Op.ALLOC else -size[arg]
            size[arg] = abs(signed)
            if now is not None and abs(signed) >= SMALL:
                now.append(signed)
    return parts[Mark.FORWARD_BEGIN], parts[Mark.BACKWARD_BEGIN]


@pytest.mark.usefixtures("_cpu_softmax")
@pytest.mark.parametrize("policy", ["full", "selective", "op", "every:2"])
def test_a_tape_is_a_real_runs_allocations_in_their_order(policy: str) -> None:
    workload = flat_workload(gradient_checkpointing=True, checkpoint_policy=policy, attn=Attention.EAGER)
    asked = options_for(workload)
    options = TraceOptions(Attention.EAGER, asked.checkpointing, Arithmetic.FP32, every=asked.every)
    tape = trace_at(LLAMA, "AutoModelForCausalLM", options, TracePoint(BATCH, SEQ))
    forward, backward = _traced(tape.expand(BATCH, SEQ))
    real_forward, real_backward = _real(CheckpointPolicy.parse(policy))
    assert forward == real_forward
    assert backward == real_backward


def test_selective_keeps_products_and_what_fused_attention_makes() -> None:
    def live(checkpointing: Checkpointing) -> int:
        tape = trace_at(LLAMA, "AutoModelForCausalLM", TraceOptions(checkpointing=checkpointing), TracePoint(BATCH, SEQ))
        return summarise(tape.expand(BATCH, SEQ)).live_after_forward

    tokens, hidden, kv, inner, heads = BATCH * SEQ, 96, 48, 160, 4
    products = 2 * tokens * (2 * hidden + 2 * kv + 2 * inner + hidden)
    attention = 2 * tokens * hidden + 4 * heads * tokens + 8 + 8 + 256  # output, row sums, random state, scratch of cuDNN
    assert live(Checkpointing.SELECTIVE) - live(Checkpointing.NON_REENTRANT) == 5 * (products + attention)


def test_op_drops_keys_output_and_up_projection_of_a_llama_block() -> None:
    def live(checkpointing: Checkpointing) -> int:
        tape = trace_at(LLAMA, "AutoModelForCausalLM", TraceOptions(checkpointing=checkpointing), TracePoint(BATCH, SEQ))
        return summarise(tape.expand(BATCH, SEQ)).live_after_forward

    kv, output, up = 48, 96, 160
    assert live(Checkpointing.SELECTIVE) - live(Checkpointing.ALTERNATE) == 5 * 2 * BATCH * SEQ * (kv + output + up)


def test_every_k_th_block_is_checkpointed_at_any_depth() -> None:
    deep = {**LLAMA, "num_hidden_layers": 24}
    tape = trace_model(deep, "AutoModelForCausalLM", TraceOptions(checkpointing=Checkpointing.NON_REENTRANT, every=2))
    stream = tape.expand(1, 100)
    entered = [stream.modules[a].name for op, a in zip(stream.op, stream.arg, strict=True) if op == Op.ENTER]
    twice = [i for i in range(24) if entered.count(f"model.layers.{i}") == 2]
    assert twice == list(range(1, 24, 2))
    assert len(set(tape.stacks[0].plan)) < 24, "no block was left out"


def test_a_policy_reads_as_it_is_written() -> None:
    for text in ("full", "selective", "op", "every:4"):
        assert str(CheckpointPolicy.parse(text)) == text
    for text in ("", "every", "every:0", "every:-1", "every:x", "selective:2", "op:2"):
        with pytest.raises(BadInput, match="checkpoint-policy"):
            CheckpointPolicy.parse(text)


def test_keys_of_older_options_stay() -> None:
    assert TraceOptions(checkpointing=Checkpointing.NON_REENTRANT).key == "sdpa_ckpt_half"
    assert options_for(flat_workload(checkpoint_policy="selective")).key == "sdpa_none_half"
    assert options_for(flat_workload(gradient_checkpointing=True, checkpoint_policy="every:2")).key == "sdpa_ckpt-every2_half"
