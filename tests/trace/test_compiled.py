"""Compiled blocks: what they keep is what torch.compile keeps, and what they allocate follows from fusion."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.step.predict import errors
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import Arithmetic, TracedGraphs, TraceOptions
from zeroplan.trace.api import trace_module
from zeroplan.trace.compiled import CompiledRegions
from zeroplan.trace.functions import CudaFunctions
from zeroplan_runtime import compile_blocks

STEP_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "step"
ROWS = 512
BYTES = ROWS * 64 * 4


class Pointwise(nn.Module):
    """One fused kernel each way."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sin().exp() + x


class Stack(nn.Module):
    """Blocks of one kind behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.blocks = nn.ModuleList([Pointwise() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def tape_of(*, compiled: bool) -> ExpandedTape:
    options = TraceOptions(arithmetic=Arithmetic.FP32, graphs=TracedGraphs() if compiled else None)
    tape = trace_module(Stack(), lambda: {"x": torch.empty(ROWS, 64, device="meta")}, options)
    return tape.expand(1, 1)


def of_blocks(tape: ExpandedTape, half: range) -> list[int]:
    """Bytes of at least a kilobyte that blocks allocate, in order."""
    inside = {i for i, module in enumerate(tape.modules) if module.name.startswith("blocks.")}
    rows = list(zip(tape.op, tape.aux, tape.module, strict=True))
    return [rows[i][1] for i in half if rows[i][0] == Op.ALLOC and rows[i][2] in inside and rows[i][1] >= 1024]


def test_what_is_fused_is_not_allocated() -> None:
    tape = tape_of(compiled=True)
    split = next(
        i for i, (op, arg) in enumerate(zip(tape.op, tape.arg, strict=True)) if op == Op.MARK and arg == Mark.FORWARD_END
    )
    # Forward: its output alone, since the backward computes sine and exponential again from the input.
    assert of_blocks(tape, range(split)) == [BYTES] * 3
    eager = tape_of(compiled=False)
    assert len(of_blocks(eager, range(len(eager.op)))) > len(of_blocks(tape, range(len(tape.op))))


def live_after_forward(tape: ExpandedTape) -> int:
    sizes: dict[int, int] = {}
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC:
            sizes[arg] = aux
        elif op == Op.FREE:
            del sizes[arg]
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            break
    return sum(sizes.values())


def test_the_partitioner_decides_what_is_kept() -> None:
    compiled, eager = live_after_forward(tape_of(compiled=True)), live_after_forward(tape_of(compiled=False))
    # Compiled: each block's input, and the batch. In eager mode product, sine's input and exponential besides.
    assert compiled // BYTES == 4
    assert eager // BYTES > 6


def test_every_event_has_its_end() -> None:
    tape = tape_of(compiled=True)
    alive = set()
    for op, arg, aux in zip(tape.op, tape.arg, tape.aux, strict=True):
        if op == Op.ALLOC:
            alive.add(arg)
        elif op == Op.FREE:
            alive.remove(arg)
        elif op == Op.GRAD:
            alive.remove(aux)
    assert not alive
    assert sum(op == Op.GRAD for op in tape.op) == 4


CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


def saved(run: Callable[[], Any], parameters: set[tuple[int, ...]]) -> Counter[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of floating tensors that are kept for the backward, parameters left aside."""
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    known: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if tensor.is_floating_point() and tuple(tensor.shape) not in parameters and storage not in known:
            known.add(storage)
            found[(tensor.numel(),), str(tensor.dtype)] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    del kept
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_block_keeps_what_torch_compile_keeps(recomputes: bool) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(**CONFIG)
    config._attn_implementation = "sdpa"
    arguments = {"hidden_states": (2, 48, 64), "cos": (1, 48, 16), "sin": (1, 48, 16)}

    def made(device: str) -> tuple[Any, dict[str, torch.Tensor]]:
        with torch.device(device):
            block = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
            tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in arguments.items()}
        tensors["hidden_states"].requires_grad_()
        return block, tensors

    def call(block: Any, tensors: dict[str, torch.Tensor]) -> Any:
        return block(tensors["hidden_states"], position_embeddings=(tensors["cos"], tensors["sin"]), attention_mask=None)

    block, tensors = made("cpu")
    shapes = {tuple(p.shape) for p in block.parameters()}
    owner = nn.Module()
    owner.layers = nn.ModuleList([block, block.__class__(config, 1)])
    block.gradient_checkpointing = recomputes
    compile_blocks(owner, backend="aot_eager_decomp_partition")  # inductor's partitioner, without its kernels
    call(block, tensors)
    real = saved(lambda: call(block, tensors), shapes)
    torch._dynamo.reset()

    block, tensors = made("meta")
    model = nn.Module()
    model.layers = nn.ModuleList([block])
    with CompiledRegions(model, every=int(recomputes)), CudaFunctions():
        call(block, tensors)
        planned = saved(lambda: call(block, tensors), shapes)
    assert planned == real
    assert (sum(real.values()) < 4) == recomputes  # the hidden states and the rotary embedding alone


def inductor_without_kernels() -> Any:
    """The backend that partitions a graph as inductor does, with its passes over the joint graph, and runs it as it is."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table

    def partition(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        graph = _recursive_joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **kwargs)

    def as_it_is(graph: Any, _inputs: Any) -> Any:
        return graph.forward

    return aot_autograd(fw_compiler=as_it_is, partition_fn=partition, decompositions=select_decomp_table)


@pytest.mark.long
@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_block_of_t5s_decoder_keeps_what_torch_compile_keeps(first: bool) -> None:
    """The first computes the bias of positions, which the others are given."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Block

    config = T5Config(d_model=48, d_kv=12, num_heads=4, d_ff=80, dropout_rate=0.0, is_decoder=True, use_cache=False)
    config._attn_implementation = "eager"
    shapes_of = {"hidden_states": (2, 24, 48), "encoder_hidden_states": (2, 40, 48)}
    shapes_of |= {} if first else {"position_bias": (1, 4, 24, 24), "encoder_decoder_position_bias": (1, 4, 24, 40)}

    def made(device: str) -> tuple[Any, dict[str, torch.Tensor]]:
        with torch.device(device):
            block = T5Block(config, has_relative_attention_bias=first, layer_idx=0).to(torch.bfloat16)
            tensors = {name: torch.zeros(shape, dtype=torch.bfloat16).requires_grad_() for name, shape in shapes_of.items()}
        return block, tensors

    def call(block: Any, tensors: dict[str, torch.Tensor]) -> Any:
        return block(**tensors)

    block, tensors = made("cpu")
    shapes = {tuple(p.shape) for p in block.parameters()}
    block.compile(backend=inductor_without_kernels())
    call(block, tensors)
    real = saved(lambda: call(block, tensors), shapes)
    torch._dynamo.reset()
    block, tensors = made("meta")
    model = nn.Module()
    model.block = nn.ModuleList([block])
    with CompiledRegions(model), CudaFunctions():
        call(block, tensors)
        planned = saved(lambda: call(block, tensors), shapes)
    assert planned == real


@pytest.mark.long
def test_compiled_t5_is_planned_without_its_decoders_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 96, "d_model": 48, "d_kv": 12}
    config |= {"num_heads": 4, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 2}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: dict[str, Any] = {"model": config, "seq_len": 64, "micro_batch": 4, "from_scratch": True, "engine": "fsdp2"}
    eager, compiled = (
        estimate_report(Ask(**asked, stage=3, gpus=2, vram="24G", compile=how)).plans[0] for how in (None, "blocks")
    )
    assert compiled.depth == "simulated"
    assert compiled.gpu.activations is not None
    assert eager.gpu.activations is not None
    assert compiled.gpu.activations < eager.gpu.activations
    assert compiled.fits is None
    assert "an encoder-decoder" in compiled.unmodelled[0].says


@pytest.mark.long
@pytest.mark.parametrize("checkpoints", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_whole_model_with_hooks_keeps_what_torch_compile_keeps(checkpoints: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**CONFIG | {"num_hidden_layers": 2, "vocab_size": 96}, use_cache=False)
    config._attn_implementation = "sdpa"
    graphs: list[int] = []

    def made(device: str) -> tuple[Any, torch.Tensor]:
        with torch.device(device):
            model = LlamaForCausalLM(config).to(torch.bfloat16).train()
            if checkpoints:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return model, torch.zeros(2, 48, dtype=torch.long)

    def kept(model: Any, tokens: torch.Tensor) -> Counter[tuple[tuple[int, ...], str]]:
        shapes = {tuple(p.shape) for p in model.parameters()}
        model(input_ids=tokens, labels=tokens)
        return saved(lambda: model(input_ids=tokens, labels=tokens), shapes)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes))
        return inductor_without_kernels()(graph, inputs)

    model, tokens = made("cpu")
    closed = torch.compiler.disable(lambda *_: None)  # as the hooks of fully_shard are to dynamo
    for unit in (*model.model.layers, model):
        unit.register_forward_pre_hook(closed)
    model.compile(backend=backend)
    real = kept(model, tokens)
    torch._dynamo.reset()
    # Blocks share a graph, unless checkpointing keeps dynamo away from them; the head and the loss have one.
    assert [linears for linears in graphs if linears] == ([1] if checkpoints else [7, 1])

    model, tokens = made("meta")
    with CompiledRegions(model, between=True, checkpoints=checkpoints), CudaFunctions():
        planned = kept(model, tokens)
    assert planned == real


def test_plan_of_a_measured_run() -> None:
    rows = [json.loads(line) for line in (STEP_RESULTS / "h200_x4_compiled.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["case"] == "fsdp2:3+compile" and row["shape"] == "llama-1b" and row["micro"] == 1)
    found = errors(row)
    assert found is not None
    assert abs(found[0]) < 0.1, "allocated, per cent"
    assert abs(found[1]) < 3, "reserved, per cent"
