"""``torch.compile`` under the runtime: the same numbers as without, a graph for each kind of unit, and none anew later on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroplan_runtime
from tests.runtime import models
from tests.runtime.ranks import RankPool
from tests.runtime.train import ds_config
from zeroplan.core.errors import BadInput

STEPS = 3


def steps(group: dist.ProcessGroup, stage: int, how: str, backend: str, model: dict[str, Any]) -> dict[str, Any]:
    """Trains; losses, parameters (first rank) and the number of graphs after each step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made = models.make(**model)
    if how == "checkpointed":
        for block in made.blocks:
            block.gradient_checkpointing = True
        zeroplan_runtime.compile_blocks(made, backend=backend)
    given = torch.compile(made, backend=backend) if how == "wrapped" else made
    config = ds_config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine, *_ = zeroplan_runtime.initialize(model=given, config=config, group=group, device="cpu")  # type: ignore[arg-type]
    if how == "whole":
        engine.compile(backend=backend)
    elif how == "blocks":
        for block in made.blocks:
            block.compile(backend=backend)
    call: Any = torch.compile(engine, backend=backend) if how == "around" else engine
    losses, graphs = [], []
    for number in range(STEPS):
        loss = call(models.batch(number, 0, dist.get_rank(group)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    state = engine.module_state_dict() or {}
    engine.destroy()
    return {
        "losses": losses,
        "state": {name.removeprefix("_orig_mod."): value for name, value in state.items()},
        "graphs": graphs,
    }


def compare(
    group: dist.ProcessGroup, stage: int, backend: str, hows: tuple[str, ...], model: dict[str, Any]
) -> dict[str, list[int]]:
    """The numbers of graphs of each way to compile, all of whose numbers are those of plain execution."""
    plain = steps(group, stage, "", "eager", model)
    found = {}
    for how in hows:
        mine = steps(group, stage, how, backend, model)
        assert mine["losses"] == pytest.approx(plain["losses"], rel=1e-6), how
        for name, value in plain["state"].items():
            assert (mine["state"][name] - value).abs().max() < 1e-6, (how, name)
        found[how] = mine["graphs"]
    return found


WAYS = ("whole", "blocks", "wrapped", "around")
MORE = [(stage, WAYS) for stage in (0, 1, 2)] + [(3, WAYS[2:])]


@pytest.mark.parametrize(("stage", "ways"), [(3, WAYS[:2]), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)])
def test_compiled_equals_eager(pool: RankPool, stage: int, ways: tuple[str, ...]) -> None:
    found = pool.run(2, compare, stage, "eager", ways, {})[0]
    # The first micro batch is checked, which is done uncompiled. The blocks are of two sizes, so of two graphs; the whole
    # model has the embedding and what comes after the blocks besides.
    count_of = {"whole": 4, "blocks": 2, "wrapped": 4, "around": 0}
    assert found == {how: [0] + [count_of[how]] * (STEPS - 1) for how in ways}


@pytest.mark.parametrize(
    ("stage", "how", "model"),
    [pytest.param(*case, marks=pytest.mark.long) for case in ((1, "whole", {}), (3, "blocks", {"remat": "plain"}))],
)
def test_compiled_backwards(pool: RankPool, stage: int, how: str, model: dict[str, Any]) -> None:
    """With graphs of the backward, too, which save and read parameters; and with checkpointing in the graphs."""
    pool.run(2, compare, stage, "aot_eager", (how,), {"depth": 2, **model})


@pytest.mark.long
def test_checkpoints_within_graphs(pool: RankPool) -> None:
    """One graph of every kind of block, whose backward recomputes: no hook and no checkpoint breaks it."""
    found = pool.run(2, compare, 3, "aot_eager", ("checkpointed",), {"depth": 4})[0]
    assert found == {"checkpointed": [0, 2, 2]}


def gradients(backend: Any, *, own: bool = False) -> list[torch.Tensor]:
    """Of a model of transformers whose blocks drop elements and checkpoint, by `backend` or, for "", plain torch.

    With `own` each block has a forward of its own, as wrappers put in its place.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for block in model.transformer.h if own else ():
        block.forward = partial(type(block).forward, block)
    if backend:
        zeroplan_runtime.compile_blocks(model, backend=backend)
    tokens = torch.arange(12).view(2, 6)
    torch.manual_seed(1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_recomputed_dropout_is_the_forwards() -> None:
    """Also with a backend that runs graphs as they are, in which a checkpoint would draw other masks."""
    plain = gradients("")
    for backend, own in (
        ("eager", False),
        (lambda graph, _inputs: graph.forward, False),
        ("aot_eager", False),
        ("aot_eager", True),
    ):
        for mine, wanted in zip(gradients(backend, own=own), plain, strict=True):
            assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-6), (backend, own)


def test_what_is_no_model_of_blocks_is_refused() -> None:
    for model, said in (("text", "a str is no nn.Module"), (torch.nn.Linear(2, 2), "has no list of blocks")):
        with pytest.raises(BadInput, match=said):
            zeroplan_runtime.compile_blocks(model)  # type: ignore[arg-type]


def test_one_graph_serves_every_block(pool: RankPool) -> None:
    found = pool.run(1, compare, 3, "eager", ("blocks",), {"depth": 20})[0]
    assert found["blocks"][-1] == 2
