"""The same on GPUs over NCCL: every stage equals plain torch, memory equals the layout, nothing fragments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.gpu_ranks import run_on_gpus

_RANK = """
rank, ranks = dist.get_rank(), dist.get_world_size()
for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    plain = models.Plain(models.make().to(device), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), ranks, dtype=kind)
    real = models.batch
    models.batch = lambda *where: real(*where).to(device)
    expected = [plain.step(number)[rank] for number in range(20)]
    for stage in range(4):
        for remat in ("", "plain", "reentrant"):
            before = torch.cuda.memory_allocated()
            model = models.make(remat=remat)
            engine, *_ = zeroplan_runtime.initialize(model=model, config=ds_config(stage, dtype), device=device)
            rows = engine.arena.measurement()
            grown = torch.cuda.memory_allocated() - before
            kinds = len({(row["buffer"], row["place"]) for row in rows})
            owned = sum(row["bytes"] for row in rows)
            assert owned <= grown <= owned + 1024 * (kinds + 4), (stage, owned, grown)
            losses = []
            for number in range(20):
                loss = engine(models.batch(number, 0, rank))
                losses.append(engine.backward(loss).item())
                engine.step()
            worst = max(abs(a - b) for a, b in zip(losses, expected))
            assert worst < (2e-4 if dtype == "fp32" else 5e-2), (stage, dtype, remat, worst)
            del loss
            engine.destroy()
            del engine, model
            gc.collect()
    # Whatever an optimizer needs is the Arena's, also after steps.
    for name in ("AdamW", "AdamW8bit", "AdamW4bit", "Lamb", "Lion", "SGD"):
        before = torch.cuda.memory_allocated()
        model = models.make()
        config = ds_config(2, dtype, optimizer={"type": name, "params": {"lr": 1e-3}})
        engine, *_ = zeroplan_runtime.initialize(model=model, config=config, device=device)
        for number in range(2):
            engine.backward(engine(models.batch(number, 0, rank)))
            engine.step()
        grown, rows = torch.cuda.memory_allocated() - before, engine.arena.measurement()
        owned, kinds = sum(row["bytes"] for row in rows), len({(row["buffer"], row["place"]) for row in rows})
        assert owned <= grown <= owned + 1024 * (kinds + 4), (name, owned, grown)
        engine.destroy()
        del engine, model
        gc.collect()
    models.batch = real
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_on_gpus(tmp_path: Path, ranks: int) -> None:
    run_on_gpus(_RANK, tmp_path, ranks=ranks, timeout=250)


_ENDS = """
for end in ("destroy", "garbage"):
    torch.cuda.empty_cache()  # so that what is freed below is found again among few
    engine = zeroplan_runtime.initialize(model=models.make(), config=ds_config(3, "fp32"), device=device)[0]
    for number in range(2):
        engine.backward(engine(models.batch(number, 0, dist.get_rank()).to(device)))
        engine.step()
    gathered = [flat.full for unit in engine.model_states.units for flat in unit.flats()]
    places = [range(one.data_ptr(), one.data_ptr() + one.nbytes) for one in gathered]
    torch.cuda.synchronize()
    with engine.schedule.all_gather_stream.as_current():
        torch.cuda._sleep(2 * 10**9)  # a gather that other ranks keep waiting for a second
        for one in gathered:
            one.fill_(7.0)
    if end == "destroy":
        engine.destroy()
    del engine, one, gathered
    gc.collect()
    taken = [torch.zeros(512, dtype=torch.uint8, device=device) for _ in range(16384)]
    begins = [one.data_ptr() for one in taken]
    assert all(any(begin in place for begin in begins) for place in places), end  # or the test shows nothing
    torch.cuda.synchronize()
    assert not any(one.any() for one in taken), end
    del taken
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_under_a_gather_is_not_reused(tmp_path: Path, ranks: int) -> None:
    run_on_gpus(_ENDS, tmp_path, ranks=ranks, timeout=120)


_SCRIPTS = """
from tests.runtime.gpu_scripts import rows
wrong = [row for row in rows(device) if isinstance(row["apart"], str) or not row["apart"] < 1e-5]
assert not wrong, wrong
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_scripts_on_gpus(tmp_path: Path, ranks: int) -> None:
    """Freezing, quantised bases, ``loss.backward()`` and rare scripts are as in plain torch there, too."""
    run_on_gpus(_SCRIPTS, tmp_path, ranks=ranks, timeout=400)
