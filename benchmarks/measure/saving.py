"""Saves a training run between two steps, in the ways that plans call ``--save-by loop``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure.spec import Spec


def save(spec: Spec, model: Any, optimizer: Any) -> None:
    """Save the model and the optimizer into a folder that is removed afterwards."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    try:
        _WAYS[spec.engine](spec, model, optimizer, Path(folders[0]))
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folders[0])


def _deepspeed(spec: Spec, engine: Any, optimizer: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder))
    if spec.zero.get("stage3_gather_16bit_weights_on_model_save"):
        engine.save_16bit_model(str(folder))


def _ddp(spec: Spec, model: Any, optimizer: Any, folder: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def _fsdp2(spec: Spec, model: Any, optimizer: Any, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    full = spec.save == "full"
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    state = {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    _write(state, folder, full=full)


def _fsdp(spec: Spec, model: Any, optimizer: Any, folder: Path) -> None:
    from torch.distributed import fsdp

    full = spec.save == "full"
    kind = fsdp.StateDictType.FULL_STATE_DICT if full else fsdp.StateDictType.SHARDED_STATE_DICT
    configs: tuple[Any, Any] = (
        (fsdp.FullStateDictConfig(True, rank0_only=True), fsdp.FullOptimStateDictConfig(True, rank0_only=True))
        if full
        else (fsdp.ShardedStateDictConfig(True), fsdp.ShardedOptimStateDictConfig(True))
    )
    whole = fsdp.FullyShardedDataParallel
    with whole.state_dict_type(model, kind, *configs):
        state = {"model": model.state_dict(), "optimizer": whole.optim_state_dict(model, optimizer)}
    _write(state, folder, full=full)


def _write(state: dict[str, Any], folder: Path, *, full: bool) -> None:
    if not full:
        from torch.distributed.checkpoint.state_dict_saver import save as save_shards

        save_shards(state, checkpoint_id=str(folder))
    elif dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")


_WAYS = {"deepspeed": _deepspeed, "ddp": _ddp, "fsdp2": _fsdp2, "fsdp": _fsdp}
