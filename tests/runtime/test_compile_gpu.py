"""``torch.compile`` by inductor on two GPUs: every stage trains as it does uncompiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.gpu_ranks import run_on_gpus

_RANK = """
rank = dist.get_rank()

def steps(stage, dtype, how, remat):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = models.make(remat=remat)
    given = torch.compile(model) if how == "wrapped" else model
    config = ds_config(stage, dtype, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine, *_ = zeroplan_runtime.initialize(model=given, config=config, device=device)
    if how == "whole":
        engine.compile()
    elif how == "blocks":
        for block in model.blocks:
            block.compile()
    losses, graphs = [], []
    for number in range(6):
        loss = engine(models.batch(number, 0, rank).to(device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    state = engine.module_state_dict() or {}
    engine.destroy()
    del engine, model, given, loss
    gc.collect()
    return losses, {name.removeprefix("_orig_mod."): value for name, value in state.items()}, graphs

for dtype, bound in (("fp32", 1e-4), ("bf16", 5e-2)):
    for stage in range(4):
        plain, state, _ = steps(stage, dtype, "", "")
        for how, remat in (("blocks", ""), ("whole", ""), ("wrapped", ""), ("blocks", "plain")):
            losses, mine, graphs = steps(stage, dtype, how, remat)
            worst = max(abs(a - b) for a, b in zip(losses, plain))
            assert worst < bound, (stage, dtype, how, remat, worst)
            for name, value in state.items():
                assert (mine[name].float() - value.float()).abs().max() < bound, (stage, dtype, how, remat, name)
            assert graphs[-1] > 0, (stage, dtype, how, remat, graphs)
            assert graphs[2:] == graphs[2:3] * 4, (stage, dtype, how, remat, graphs)
            if rank == 0:
                print(stage, dtype, how, remat, "worst", worst, "graphs", graphs, flush=True)
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_stages_on_gpus(tmp_path: Path) -> None:
    run_on_gpus(_RANK, tmp_path, ranks=2, timeout=850)
