"""The graphs of a compiled transformers model: no unit shares one, each block has one, and none is made anew later on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput
from zeroplan_runtime.parameter_states import ParameterStates

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 64,
}
#: Linear layers of a block; the head is one more.
OF_A_BLOCK = 7
STEPS = 4


def trained(group: dist.ProcessGroup, stage: int, checkpointing: bool, offload: str, *, compiled: bool) -> dict[str, Any]:
    """Trains; losses, and of each graph the number of its linear layers, by the step that made it; why graphs broke."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.config.use_cache = False
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    zero: dict[str, Any] = {"stage": stage}
    zero |= {"offload_optimizer": {"device": "cpu"}} if offload else {}
    zero |= {"offload_param": {"device": "cpu"}} if offload == "params" else {}
    config = ds_config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}} if not offload else {"type": "AdamW"})
    config |= {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 2}
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, group=group, device="cpu")
    graphs: list[list[int]] = [[]]

    def count(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        bodies = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # checkpoints', too
        graphs[-1].append(sum(node.target is torch.nn.functional.linear for one in bodies for node in one.graph.nodes))
        return graph.forward

    if compiled:
        engine.compile(backend=count)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group)))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        graphs.append([])
    engine.destroy()
    return {"losses": losses, "graphs": graphs[:STEPS], "breaks": list(torch._dynamo.utils.counters["graph_break"])}


def compared(group: dist.ProcessGroup, cases: list[tuple[int, bool, str]]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        plain, mine = (trained(group, *case, compiled=compiled) for compiled in (False, True))
        assert mine["losses"] == pytest.approx(plain["losses"], rel=1e-5), case
        found.append(mine)
    return found


#: Stage, checkpointing, what is offloaded.
CASES = [
    *((stage, False, "") for stage in range(4)),
    (2, True, ""),
    (3, True, ""),
    (2, False, "optimizer"),
    (3, True, "params"),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [CASES[3], CASES[4], CASES[6]]),
        pytest.param(1, CASES, marks=pytest.mark.long),
        pytest.param(2, [CASES[1], CASES[5], CASES[6]], marks=pytest.mark.long),
    ],
    ids=["three", "all", "two ranks"],
)
def test_no_graph_spans_blocks_and_none_is_made_later(pool: RankPool, ranks: int, cases: list[tuple[int, bool, str]]) -> None:
    for case, found in zip(cases, pool.run(ranks, compared, cases)[0], strict=True):
        first, second, *later = found["graphs"]
        assert not first, case  # checked, which is done uncompiled
        assert not any(later), case
        # Blocks are alike, so they share one graph, whatever checkpointing wraps them.
        assert [linears for linears in second if linears > 1] == [OF_A_BLOCK], (case, second)
        # Dynamo is kept out of hooks, of the loss and of checkpointing, and breaks for nothing else.
        for why in found["breaks"]:
            assert "disable" in why, (case, why)


def releases(group: dist.ProcessGroup, stage: int, compiled: bool) -> list[int]:
    """Trains the small model with accumulation; how often its cache was given back, before each micro batch's backward."""
    from tests.runtime import models

    torch._dynamo.reset()
    config = ds_config(stage, gradient_accumulation_steps=2)
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=config, group=group, device="cpu")
    if compiled:
        engine.compile(backend="eager")
    count = 0
    real = engine.model_states.release_cache

    def counted() -> None:
        nonlocal count
        count += 1
        real()

    engine.model_states.release_cache = counted  # type: ignore[method-assign]
    found = []
    for number in range(4):
        loss = engine(models.batch(number, 0, dist.get_rank(group)))
        found.append(count)
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_the_cache_is_given_back_once_and_only_of_compiled_models(pool: RankPool, stage: int) -> None:
    assert pool.run(1, releases, stage, True)[0] == [0, 1, 1, 1]
    assert pool.run(1, releases, stage, False)[0] == [0, 0, 0, 0]


def refused(group: dist.ProcessGroup) -> list[str]:
    """What is said of a model, and of a block, that is compiled with CUDA graphs; and of one whose other modes have none."""
    from tests.runtime import models

    torch._dynamo.reset()
    said = []
    tokens = models.batch(0, 0, dist.get_rank(group))
    for how in ("engine", "block", "blocks"):
        model = models.make()
        if how == "blocks":
            zeroplan_runtime.compile_blocks(model, mode="max-autotune")
        engine, *_ = zeroplan_runtime.initialize(model=model, config=ds_config(2), group=group, device="cpu")
        try:
            if how == "engine":
                engine.compile(mode="reduce-overhead")
            elif how == "block":
                engine.module.blocks[2].compile(options={"triton.cudagraphs": True})  # type: ignore[union-attr, index]
            for _ in range(2):
                engine.backward(engine(tokens))
                engine.step()
        except BadInput as error:
            said.append(str(error))
        engine.destroy()
    engine, *_ = zeroplan_runtime.initialize(model=models.make(), config=ds_config(2), group=group, device="cpu")
    engine.compile(mode="max-autotune-no-cudagraphs")
    engine.destroy()
    return said


def test_cuda_graphs_are_refused_in_one_line(pool: RankPool) -> None:
    whole, block, blocks = pool.run(1, refused)[0]
    assert blocks.startswith("torch.compile of blocks.0: CUDA graphs keep")
    assert whole.startswith("torch.compile of blocks.0: CUDA graphs keep")
    assert block.startswith("torch.compile of blocks.2: CUDA graphs keep")
    assert whole.endswith("use max-autotune-no-cudagraphs")


def copies(group: dist.ProcessGroup, compiled: bool) -> tuple[list[int], bool]:
    """Trains the small model; how many gradients each common copy took, and whether a hook that reads the gradients that have
    arrived in the middle of a graph's found them.
    """
    from tests.runtime import models

    torch._dynamo.reset()
    config = ds_config(1, gradient_accumulation_steps=2)
    engine, *_ = zeroplan_runtime.initialize(model=models.make(depth=2), config=config, group=group, device="cpu")
    if compiled:
        engine.compile(backend="aot_eager")
    states = ParameterStates(engine)
    sizes: list[int] = []
    seen: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    real = torch._foreach_copy_

    def counted(views: Any, grads: Any) -> None:
        sizes.append(len(grads))
        real(views, grads)

    def look(_grad: torch.Tensor) -> None:
        for unit in engine.model_states.units:
            for param, arrived in zip(unit.trainable.params, unit.grads.received, strict=True) if unit.trainable else ():
                if arrived:
                    seen.append((param, states.grad(param)))  # type: ignore[arg-type]

    def micro_batch(number: int) -> None:
        engine.backward(engine(models.batch(number, 0, dist.get_rank(group))))

    def step(first: int) -> None:
        for number in (first, first + 1):
            micro_batch(number)
            engine.step()

    with mock.patch.object(torch, "_foreach_copy_", counted):
        step(0)  # checked, which is done uncompiled
        assert not sizes
        step(2)
    for param in engine.module.blocks[0].parameters():  # type: ignore[union-attr, index]
        param.register_hook(look)
    micro_batch(4)
    found = bool(seen) and all(torch.equal(value, states.grad(param)) for param, value in seen)  # type: ignore[arg-type]
    engine.destroy()
    return sizes, found


def test_a_graphs_gradients_are_copied_together(pool: RankPool) -> None:
    from tests.runtime import models

    block = len(list(models.make(depth=2).blocks[0].parameters()))
    assert pool.run(1, copies, True) == [([block, block], True)]
    assert pool.run(1, copies, False) == [([], True)]
