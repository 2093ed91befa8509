"""DeepSpeed itself on two gloo ranks, for :mod:`tests.runtime.test_deepspeed_checkpoints`. Run as a script under ``torchrun``.

Arguments: a folder, the universal checkpoint in it to resume from, and the state dict in it to begin from. For each stage it
trains, saves, goes on, makes its checkpoint universal and fp32, and goes on from what it was given; in 16 bits it trains, saves
and resumes. ``losses.json`` gets the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

RANKS, STAGES, SAVED, END = 2, (1, 2, 3), 3, 6
#: Sections of 16 bits. The first loss scale overflows, so that a step is skipped before the checkpoint.
HALVES = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}}


def make(seed: int) -> nn.Module:
    """Two layers, a norm and a frozen layer, fp32. DeepSpeed resumes no frozen parameters, so these are always the same."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 10, bias=False), nn.Linear(10, 3))
    nn.init.eye_(model[3].requires_grad_(False).weight)
    return model


def ds_config(stage: int, **more: Any) -> dict[str, Any]:
    """A config that both read alike."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_min_lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """What is trained, in two groups: matrices decay."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]


def take_steps(engine: Any, first: int, last: int, rank: int) -> list[float]:
    """Trains steps ``[first, last)`` and returns their losses."""
    losses = []
    for number in range(first, last):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
        dtype = next(engine.module.parameters()).dtype
        loss = functional.mse_loss(engine(x.to(dtype)).float(), x[:, :3])
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it needs a compiler
    folder, given, state = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    if given == "groups":  # two of them, whose universal checkpoints are named by their 16 bits
        for half in ("", "bf16"):
            for stage in (1, 2):
                more = {half: HALVES[half]} if half else {}
                model, config = make(1), ds_config(stage, checkpoint={"load_universal": True}, **more)
                engine = deepspeed.initialize(model=model, config=config, model_parameters=grouped(model))[0]
                engine.load_checkpoint(str(folder), tag=f"universal{half}")
                found[f"{half}{stage}"] = take_steps(engine, SAVED, END, rank)
                engine.destroy()
        if rank == 0:
            (folder / "losses.json").write_text(json.dumps(found))
        return

    def start(config: dict[str, Any], model: nn.Module) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        return deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]

    for stage in STAGES:
        engine = start(ds_config(stage), make(0))
        own = folder / f"deepspeed{stage}"
        take_steps(engine, 0, SAVED, rank)
        engine.save_checkpoint(str(own), tag="saved")
        found[f"own{stage}"] = take_steps(engine, SAVED, END, rank)
        if rank == 0:
            torch.save(get_fp32_state_dict_from_zero_checkpoint(str(own), "saved"), folder / f"deepspeed{stage}.pt")
            options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
            places = {"input_folder": str(own / "saved"), "output_folder": str(own / "universal")}
            ds_to_universal(argparse.Namespace(**places, **options, strict=True, inject_missing_state=True))
        dist.barrier()
        engine.destroy()
        engine = start(ds_config(stage, checkpoint={"load_universal": True}), make(1))
        engine.load_checkpoint(str(folder), tag=given)
        found[f"resumed{stage}"] = take_steps(engine, SAVED, END, rank)
        engine.destroy()
        model = make(2)
        model.load_state_dict(torch.load(folder / state, weights_only=True))
        engine = start(ds_config(stage), model)
        found[f"begun{stage}"] = take_steps(engine, SAVED, END, rank)
        engine.destroy()
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it says no of CPUs whose torch can
    for stage in STAGES:
        for half, section in HALVES.items():
            engine = start(ds_config(stage, **{half: section}), make(0))
            take_steps(engine, 0, SAVED, rank)
            engine.save_checkpoint(str(folder / f"{half}{stage}"), tag="saved", client_state={"epoch": 7})
            engine.destroy()
            engine = start(ds_config(stage, **{half: section}), make(0))
            engine.load_checkpoint(str(folder / f"{half}{stage}"))
            found[f"{half}{stage}"] = take_steps(engine, SAVED, END, rank)
            engine.destroy()
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
