"""Exports the unsharded model, in its dtype, to safetensors files that transformers can load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from zeroplan.core.errors import BadInput
from zeroplan_runtime.checkpoint.agreement import on_all_ranks
from zeroplan_runtime.checkpoint.atomic_files import sync_folder, write_durably
from zeroplan_runtime.engine_parts import EngineParts
from zeroplan_runtime.full_tensors import full_state_dict, full_tensors

#: The most bytes of one file, unless a single tensor is larger.
FILE_BYTES = 5 * 10**9
_SUFFIX = ".safetensors"


def save_16bit_model(
    engine: EngineParts, folder: str | Path, filename: str = "model.safetensors", *, file_bytes: int = FILE_BYTES
) -> None:
    """Writes the parameters, the persistent buffers and the configs of a transformers model, from the first rank.

    Every rank must call it. Units are unsharded one after another; the first rank holds one file's tensors in host memory at
    a time. Tied parameters are written once, under their first name, as transformers expects.

    Args:
        engine: the engine.
        folder: where the files go; it is created.
        filename: the name of a single file; several are numbered and have an index beside them, as transformers does. One that
            does not end in ``.safetensors`` is written by ``torch.save``, as DeepSpeed does, from a state dict in host memory.
        file_bytes: the most bytes of one file, unless a single tensor is larger.

    Raises:
        BadInput: on every rank, when the first cannot write, and for an entry of the state dict that is no tensor.
    """
    where, folder = "engine.save_16bit_model", Path(folder)
    engine.checks.require_usable(where)
    if engine.optimizer_step is not None:
        engine.optimizer_step.require_common_masters(where)
    if engine.ranks.pp is not None:
        raise BadInput(
            "each rank of pp has a model of its own",
            where=where,
            remedy="write engine.module_state_dict() on the first rank of each stage",
        )
    first = engine.ranks.world.rank == 0
    on_all_ranks(engine, lambda: folder.mkdir(parents=True, exist_ok=True) if first else None, str(folder))
    if not filename.endswith(_SUFFIX):
        _save_by_torch(engine, folder / filename)
        return
    files = _Files(folder, filename.removesuffix(_SUFFIX), file_bytes)
    fault: Exception | None = None  # the other ranks go through all units, whatever the first one's disk does
    for name, tensor in full_tensors(engine.module, engine.schedule):
        if first and fault is None:
            try:
                files.add(name, tensor)
            except Exception as met:
                fault = met
        del tensor  # an error's traceback would keep it, and what lies in its memory later is another unit's

    def finish() -> None:
        if fault is not None:
            files.remove()
            raise fault
        files.finish()
        for part in ("config", "generation_config"):
            config: Any = getattr(engine.module, part, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)
        sync_folder(folder)

    on_all_ranks(engine, finish if first else lambda: None, str(folder))


class _Files:
    """The files of an export, which get their names when all are written; the last one's tensors are in host memory."""

    def __init__(self, folder: Path, stem: str, file_bytes: int) -> None:
        self._folder, self._stem, self._most = folder, stem, file_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._written: list[tuple[Path, list[str]]] = []
        self._size = self._total = 0  # bytes of those that are pending, and of all

    def add(self, name: str, tensor: Any) -> None:
        """Adds a tensor; writes the file before it, if it does not fit there.

        Raises:
            BadInput: for what is no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            remedy = 'give a name such as "pytorch_model.bin", which torch.save writes'
            raise BadInput(f"{name!r} is no tensor, which safetensors cannot hold", where=str(self._folder), remedy=remedy)
        nbytes = tensor.numel() * tensor.element_size()
        if self._size and self._size + nbytes > self._most:
            self._write()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._size += nbytes
        self._total += nbytes

    def _write(self) -> None:
        from safetensors.torch import save_file

        if self._pending:
            path = self._folder / f".{self._stem}-{len(self._written)}.writing"
            save_file(self._pending, path, metadata={"format": "pt"})
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
            self._written.append((path, list(self._pending)))
        self._pending, self._size = {}, 0

    def remove(self) -> None:
        """Removes what was written."""
        for path, _ in self._written:
            path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Writes the last file and gives all of them their names, and an index if there are several."""
        self._write()
        folder, stem, written = self._folder, self._stem, self._written
        index_file = folder / f"{stem}.safetensors.index.json"
        if len(written) == 1:
            os.replace(written[0][0], folder / f"{stem}.safetensors")
            index_file.unlink(missing_ok=True)
            return
        index_file.unlink(missing_ok=True)  # a kill leaves no index of other files than those that are there
        (folder / f"{stem}.safetensors").unlink(missing_ok=True)  # of before, which transformers would prefer
        index = {}
        for i, (path, names) in enumerate(written, 1):
            final = f"{stem}-{i:05d}-of-{len(written):05d}.safetensors"
            os.replace(path, folder / final)
            index.update(dict.fromkeys(names, final))
        text = json.dumps({"metadata": {"total_size": self._total}, "weight_map": index}, indent=1)
        write_durably(index_file, text.encode())


def _save_by_torch(engine: EngineParts, path: Path) -> None:
    state = full_state_dict(engine.module, engine.schedule)

    def write() -> None:
        unfinished = path.with_name(f".{path.name}.writing")
        try:
            with open(unfinished, "wb") as stream:
                torch.save(state, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    on_all_ranks(engine, write if state is not None else lambda: None, str(path.parent))
