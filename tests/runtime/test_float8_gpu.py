"""8-bit products on a GPU, beside the same rounded factors multiplied in fp32, and training with them on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.gpu_ranks import run_on_gpus
from zeroplan.core.float8 import RUNTIME_RECIPES, Float8Recipe
from zeroplan_runtime.compiled import keep_out_of_graphs
from zeroplan_runtime.techniques.float8 import Float8Product, float8_product_in_graph

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.mark.parametrize("recipe", RUNTIME_RECIPES)
@pytest.mark.parametrize("tokens", [256, 200])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_are_those_of_the_emulation(recipe: Float8Recipe, tokens: int, compiled: bool) -> None:
    torch.manual_seed(0)
    rows, inner = 1536, 1024
    x, weight, grad, bias = (
        torch.randn(*s).bfloat16() for s in ((2, tokens, inner), (rows, inner), (2, tokens, rows), (rows,))
    )

    def run(device: str) -> list[torch.Tensor]:
        leaves = [one.detach().to(device).requires_grad_() for one in (x, weight, bias)]

        def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
            if torch.compiler.is_compiling():
                return float8_product_in_graph(x, weight, bias, recipe.value)
            return Float8Product.apply(x, weight, bias, recipe, False)

        keep_out_of_graphs([])
        function = torch.compile(apply, fullgraph=True) if compiled and device == "cuda" else apply
        out = function(*leaves)
        return [out.detach().cpu(), *(one.cpu() for one in torch.autograd.grad(out, leaves, grad.to(device)))]

    for found, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert torch.isfinite(found).all()
        off = (found.double() - expected.double()).norm() / expected.double().norm()
        assert off < 6e-3, float(off)  # bf16's own rounding; fast sums keep 14 bits


_TRAIN = """
from tests.runtime.test_float8 import VOCAB, config, model
def run(stage, recipe="", **options):
    torch.manual_seed(0)
    engine, *_ = zeroplan_runtime.initialize(model=model(odd=False), config=config(stage, recipe, **options), device=device)
    losses = []
    for step in range(6):
        made = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, VOCAB, (2, 16), generator=made).to(device)
        loss = engine(tokens)
        losses.append(float(loss))
        engine.backward(loss)
        engine.step()
    params = engine.module_state_dict()
    rows = {(row["buffer"], row["unit"]): row["peak"] for row in engine.arena.measurement()}
    from zeroplan.core.arena.owned_buffers import runtime_buffers
    planned = {(row.buffer, row.unit): row.bytes for row in runtime_buffers(engine.model_states.layout)}
    assert rows == planned, (rows, planned)
    engine.destroy()
    return losses, params
plain, _ = run(3)
for recipe in ("tensorwise", "rowwise"):
    one, a = run(1, recipe)
    three, b = run(3, recipe)
    assert one == three, (recipe, one, three)
    if a is not None:
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(abs(p - q) < 0.05 * p for p, q in zip(plain, three)), (plain, three)
narrow, _ = run(3, "tensorwise", float8_gathers=True)
assert all(abs(p - q) < 0.05 * p for p, q in zip(plain, narrow)), (plain, narrow)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_training(tmp_path: Path, ranks: int) -> None:
    run_on_gpus(_TRAIN, tmp_path, ranks=ranks, timeout=240)


def test_what_uncompiled_layers_allocate_is_planned() -> None:
    """A small Llama for three steps: the peak of what is allocated, to 1 % (an H100 took 0.9 % more than planned)."""
    transformers = pytest.importorskip("transformers")
    import zeroplan_runtime
    from tests.small_llama import small_llama
    from zeroplan.planner.estimate import estimate_runs
    from zeroplan.run.ask import Ask

    shape = small_llama(layers=4)
    setting = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
        "zeroplan": {"float8": "tensorwise"},
    }
    values = {key: value for key, value in shape.items() if key not in ("model_type", "architectures")}
    config = transformers.AutoConfig.for_model(shape["model_type"], **values)
    with torch.device("cuda"):
        net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    engine, *_ = zeroplan_runtime.initialize(model=net, config=setting, device="cuda")
    for _ in range(3):
        tokens = torch.randint(0, shape["vocab_size"], (2, 512), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    engine.destroy()
    asked = Ask(model=shape, engine="zeroplan", gpus=1, gpu="H100", seq_len=512, depth="simulated", ds_config=setting)
    run = estimate_runs(asked).runs[0]
    assert run is not None
    planned = max(size for phase, size in run.plan.gpu.phases.items() if str(phase) in ("forward", "backward", "step"))
    assert peak == pytest.approx(planned, rel=0.01), (peak, run.plan.gpu)
