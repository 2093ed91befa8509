"""Exports the unsharded model, in its dtype, to safetensors files that transformers can load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from zeroplan_runtime.checkpoint.atomic_files import sync_folder, write_durably
from zeroplan_runtime.engine_parameters import EngineParameters

#: The most bytes of one file, unless a single tensor is larger.
FILE_BYTES = 5 * 10**9


def save_16bit_model(
    engine: EngineParameters, folder: str | Path, filename: str = "model.safetensors", *, file_bytes: int = FILE_BYTES
) -> None:
    """Writes the parameters, the persistent buffers and the configs of a transformers model, from the first rank.

    Every rank must call it. Units are unsharded one after another; the first rank holds one file's tensors in host memory at
    a time. Tied parameters are written once, under their first name, as transformers expects.

    Args:
        engine: the engine.
        folder: where the files go; it is created.
        filename: the name of a single file; several are numbered and have an index beside them, as transformers does.
        file_bytes: the most bytes of one file, unless a single tensor is larger.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    first = engine.comm.rank == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    stem = filename.removesuffix(".safetensors")
    pending: dict[str, torch.Tensor] = {}
    written: list[tuple[Path, list[str]]] = []
    total = size = 0

    def flush() -> None:
        nonlocal size
        if pending:
            path = folder / f".{stem}-{len(written)}.writing"
            save_file(pending, path, metadata={"format": "pt"})
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
            written.append((path, list(pending)))
            pending.clear()
        size = 0

    for name, tensor in engine.full_tensors():
        if first:
            nbytes = tensor.numel() * tensor.element_size()
            if size and size + nbytes > file_bytes:
                flush()
            pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += nbytes
            total += nbytes
    if first:
        flush()
        _name_files(folder, stem, written, total)
        for part in ("config", "generation_config"):
            config: Any = getattr(engine.module, part, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)
        sync_folder(folder)
    engine.comm.barrier()


def _name_files(folder: Path, stem: str, written: list[tuple[Path, list[str]]], total: int) -> None:
    if len(written) == 1:
        os.replace(written[0][0], folder / f"{stem}.safetensors")
        return
    index = {}
    for i, (path, names) in enumerate(written, 1):
        final = f"{stem}-{i:05d}-of-{len(written):05d}.safetensors"
        os.replace(path, folder / final)
        index.update(dict.fromkeys(names, final))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    write_durably(folder / f"{stem}.safetensors.index.json", text.encode())
