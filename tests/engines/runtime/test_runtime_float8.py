"""8-bit products under the included runtime: what they hold, and how they are asked for."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from tests.small_llama import small_llama
from zeroplan.core.arena.layout import UnitKind
from zeroplan.core.arena.owned_buffers import runtime_buffers
from zeroplan.core.buffers import Buffer
from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import RUNTIME_RECIPES, Float8Recipe
from zeroplan.engines.runtime.float8 import float8_layers, with_float8
from zeroplan.engines.runtime.traffic import RuntimeFacts, gather
from zeroplan.ledger.line import evaluate
from zeroplan.planner.estimate import estimate_runs
from zeroplan.planner.resolve import resolve
from zeroplan.planner.tapes import expanded_tape_of
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Op

ASKED: dict[str, Any] = {"model": small_llama(layers=3), "engine": "zeroplan", "gpus": 2, "gpu": "H100", "seq_len": 640}
#: Scales and what they are made from are smaller than any factor here.
SMALL = 8192


def large_allocations(tape: ExpandedTape) -> list[tuple[int, int]]:
    """Each large allocation: its bytes, and those of the large storages that live then."""
    sizes, live, found = {}, 0, []
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC and aux > SMALL:
            sizes[arg] = aux
            live += aux
            found.append((aux, live))
        elif op == Op.FREE:
            live -= sizes.pop(arg, 0)
        elif op == Op.GRAD:
            live -= sizes.pop(aux, 0)  # the hook takes it
    return found


@pytest.mark.torch
@pytest.mark.parametrize("recipe", RUNTIME_RECIPES)
@pytest.mark.parametrize("tokens", [96, 90])
def test_the_tape_is_that_of_the_runtimes_own_layers(recipe: Float8Recipe, tokens: int) -> None:
    """The runtime's layers traced on meta tensors, whose products make their results alone as cuBLAS does."""
    import torch
    from torch import nn

    from zeroplan.tape.options import TraceOptions
    from zeroplan.trace.example import trace_example
    from zeroplan_runtime.techniques import float8

    width = 512 if recipe is Float8Recipe.BLOCKWISE else 256

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(width, width, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x.float().square().mean()

    def traced(net: nn.Module) -> ExpandedTape:
        return trace_example(net, torch.empty(1, tokens, width, dtype=torch.bfloat16), TraceOptions()).expand(1, tokens, None)

    def empty(left: Any, right: Any, *, fast: bool) -> torch.Tensor:
        out: torch.Tensor = left.bits.new_empty((left.bits.shape[0], right.bits.shape[0]), dtype=torch.bfloat16)
        return out

    net = Model().bfloat16()
    plain = traced(net)
    float8.attach_float8(list(net.blocks), recipe, torch.device("cpu"))
    with mock.patch.object(float8, "product", empty):
        own = traced(net)
    layers = float8_layers(plain, recipe, ["blocks.0", "blocks.1"])
    assert len(layers) == 4
    assert large_allocations(with_float8(plain, layers, recipe)) == large_allocations(own)
    assert large_allocations(plain) != large_allocations(own)


def test_a_flag_and_a_key_are_one_request() -> None:
    flag = resolve(Ask(**ASKED, stage=3, fp8="tensorwise"))
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    key = resolve(Ask(**ASKED, ds_config={**config, "zeroplan": {"float8": "tensorwise"}}))
    assert flag.cases[0].workload.technique(Float8Recipe) is key.cases[0].workload.technique(Float8Recipe)
    assert flag.engine.runtime_options == key.engine.runtime_options  # type: ignore[attr-defined]
    assert flag.engine.run_config(flag.cases[0], {}, 10.0)["zeroplan"]["float8"] == "tensorwise"  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"says tensorwise, the flag rowwise"):
        resolve(Ask(**ASKED, fp8="rowwise", ds_config={**config, "zeroplan": {"float8": "tensorwise"}}))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("layers", "ends", "compiled"),
    [(4, (1, 2), None), pytest.param(9, (1, 2), "checkpointed-blocks", marks=pytest.mark.long)],
)
def test_blocks_at_the_ends_are_those_of_bf16(layers: int, ends: tuple[int, int], compiled: str | None) -> None:
    """Each block allocates as in a model of its kind alone; compiled, a few traced blocks stand for nine."""
    keys = dict(zip(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), ends, strict=True))
    changes = {"model": small_llama(layers=layers), "compile": compiled, "gradient_checkpointing": compiled is not None}

    def made(own: dict[str, Any]) -> tuple[ExpandedTape, list[bool]]:
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
        found = resolve(Ask(**ASKED | changes, ds_config={**config, "zeroplan": own}))
        engine: Any = found.engine
        tape = expanded_tape_of(engine, found.cases[0])
        if compiled is None:
            tape = engine.computed_tape(found.cases[0], tape)
        return tape, [unit.narrow for unit in engine.layout(found.cases[0]).units if unit.shape.kind is UnitKind.BLOCK]

    mixed, narrow = made({"float8": "tensorwise"} | keys)
    assert narrow == [ends[0] <= number < layers - ends[1] for number in range(layers)]
    whole = {name: allocated_by_block(made(own)[0]) for name, own in (("8", {"float8": "tensorwise"}), ("16", {}))}
    assert allocated_by_block(mixed) == [whole["8" if one else "16"][number] for number, one in enumerate(narrow)]
    assert whole["8"] != whole["16"]


def allocated_by_block(tape: ExpandedTape) -> list[Counter[int]]:
    """What each block allocates, forward and backward: bytes, and how often."""
    blocks = [i for i, module in enumerate(tape.modules) if module.type == "LlamaDecoderLayer"]
    home: dict[int, int] = {}
    for index, module in enumerate(tape.modules):
        home[index] = blocks.index(index) if index in blocks else home.get(module.parent, -1)
    found = [Counter[int]() for _ in blocks]
    for op, aux, module in zip(tape.op, tape.aux, tape.module, strict=True):
        if op == Op.ALLOC and home.get(module, -1) >= 0:
            found[home[module]][aux] += 1
    return found


def test_gathers_in_8_bits_have_a_buffer_and_send_half() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    narrow, wide = (
        resolve(Ask(**ASKED, ds_config={**config, "zeroplan": {"float8": "tensorwise", "float8_gathers": gathers}}))
        for gathers in (True, False)
    )
    layout = narrow.engine.layout(narrow.cases[0])  # type: ignore[attr-defined]
    unit = next(unit for unit in layout.units if unit.narrow)
    shard, norms = unit.trainable.shard, 2 * 2 * 256
    assert layout.float8_gather == 2 * -(-(16 + shard + norms) // 16) * 16
    row = next(row for row in runtime_buffers(layout) if row.buffer is Buffer.COMM_ALL_GATHER)
    assert row.bytes == layout.float8_gather
    items = {item.buffer: item.bytes for item in evaluate(*narrow.engine.ledger(narrow.cases[0]))}
    assert items[Buffer.COMM_ALL_GATHER] == layout.float8_gather
    ranks = (run.engine.ledger(run.cases[0])[1] for run in (narrow, wide))
    sent = [gather(RuntimeFacts(rank, local_ranks=2, one_node=True)) for rank in ranks]
    assert 0.5 < sent[0] / sent[1] < 0.9  # the embedding and the head are gathered as ever


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fp8": "rowwise_with_gw_hp"}, "rowwise_with_gw_hp is not a recipe of zeroplan; use tensorwise, rowwise or blockwise"),
        ({"fp8": "blockwise", "engine": "fsdp2"}, "blockwise is not a recipe of fsdp2"),
        ({"fp8": "tensorwise", "gpu": "A100-80G"}, "has no 8-bit floats"),
    ],
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        resolve(Ask(**{**ASKED, "stage": 3, **changes}))


@pytest.mark.torch
def test_a_plan_holds_the_factors_and_is_sure() -> None:
    asked = Ask(**ASKED | {"model": small_llama(vocab=64)}, stage=3, depth="simulated", gradient_checkpointing=True)
    plain, narrow = (estimate_runs(asked.replace(fp8=recipe)).runs[0] for recipe in (None, "tensorwise"))
    assert plain is not None
    assert narrow is not None
    assert narrow.plan.fits
    assert not narrow.plan.unmodelled
    assert narrow.plan.gpu.peak_allocated > plain.plan.gpu.peak_allocated
    resolved = resolve(Ask(**ASKED, stage=3, fp8="tensorwise"))
    types = {module.type for module in expanded_tape_of(resolved.engine, resolved.cases[0]).modules}
    assert "Linear" in types
    assert "Float8Linear" not in types  # torchao's: the engine writes its own products into the tape


def kept_behind_blocks(tape: ExpandedTape) -> list[int]:
    """Bytes that live behind each block's forward."""
    sizes, live, found = {}, 0, []
    for at in range(tape.backward):
        op, arg = tape.op[at], tape.arg[at]
        if op == Op.ALLOC:
            sizes[arg] = tape.aux[at]
            live += tape.aux[at]
        elif op == Op.FREE:
            live -= sizes.pop(arg, 0)
        elif op == Op.EXIT and tape.modules[arg].type == "LlamaDecoderLayer":
            found.append(live)
    return found


@pytest.mark.torch
@pytest.mark.parametrize(
    ("recipe", "checkpoints"),
    [
        ("tensorwise", True),
        *(pytest.param(str(recipe), within, marks=pytest.mark.long) for recipe in RUNTIME_RECIPES for within in (False, True)),
    ],
)
def test_compiled_blocks_keep_what_their_graphs_do(recipe: str, checkpoints: bool) -> None:
    width, tokens = 512, 256
    compiled = "checkpointed-blocks" if checkpoints else "blocks"
    changes = {"model": small_llama(layers=3, width=width), "seq_len": tokens, "gradient_checkpointing": checkpoints}
    resolved = resolve(Ask(**ASKED | changes, stage=3, fp8=recipe, compile=compiled))
    tape = expanded_tape_of(resolved.engine, resolved.cases[0])
    assert len(tape.shapes) == 1  # the first micro batch, as written
    inputs = tokens * width * 2
    kept = [after - before for before, after in pairwise(kept_behind_blocks(tape))]
    assert len(kept) == 2
    if checkpoints:
        assert kept == [inputs] * 2  # nothing more, in 8 bits as in 16
    else:
        assert min(kept) > 3 * inputs
