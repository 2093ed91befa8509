"""The tapes that come with zeroplan: one file a catalog model, ``data/OWNER--NAME.json.xz``, and one for all models whose
tapes are equal: ``data/same.json`` names the model whose file it is.

A file holds an object: options key -> tape. Two more keys describe the rest: ``software`` (options key -> the versions that
traced it) and ``failed`` (options key -> why there is none). Tapes are found by model and options alone, whatever is
installed: they are read where no torch is. The versions that decide are transformers' (see the page on tapes).
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from zeroplan.core.model_config import auto_class_of
from zeroplan.models import catalog
from zeroplan.models.spec import ModelSpec
from zeroplan.tape.codec import from_json
from zeroplan.tape.format import Tape
from zeroplan.tape.options import TraceOptions

DATA = os.path.join(os.path.dirname(__file__), "data")


SOFTWARE, FAILED = "software", "failed"
#: Names of files that can be fetched into ``data/`` when a question needs them: the page in a browser has none before.
FETCHABLE: set[str] = set()


class NotFetchedError(BaseException):
    """A file of tapes that can be fetched is not here yet: `name`. No ``except Exception`` around a model's code holds it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


#: The file that names, for a model without a file, the model with equal tapes that has one.
_SAME = "same.json"


def path_of(model: str, folder: str = DATA) -> str:
    """Return the file into which a catalog model's tapes are written."""
    return os.path.join(folder, model.replace("/", "--") + ".json.xz")


def file_of(model: str, folder: str = DATA) -> str:
    """Return the file that holds a catalog model's tapes: its own, or that of a model whose tapes are equal."""
    path = path_of(model, folder)
    return path if os.path.exists(path) else path_of(_same(folder).get(model, model), folder)


@lru_cache(maxsize=4)
def _same(folder: str) -> dict[str, str]:
    try:
        with open(os.path.join(folder, _SAME), encoding="utf-8") as stream:
            found: dict[str, str] = json.load(stream)
    except FileNotFoundError:
        return {}
    return found


def share_equal(models: Iterable[str], folder: str = DATA) -> None:
    """Keep of equal files the first model's, and note whose it is for the others."""
    from zeroplan.core.plumbing.files import replace_file

    kept: dict[bytes, str] = {}
    same: dict[str, str] = {}
    for model in models:
        path = file_of(model, folder)
        if not os.path.exists(path):
            continue
        with open(path, "rb") as stream:
            content = stream.read()
        if kept.setdefault(content, model) != model:
            same[model] = kept[content]
        elif path != path_of(model, folder):
            replace_file(path_of(model, folder), content)
    for model in same:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(model, folder))
    replace_file(os.path.join(folder, _SAME), json.dumps(same, indent=1, sort_keys=True).encode() + b"\n")
    _same.cache_clear()


def read_file(path: str) -> dict[str, Any]:
    """Read the tapes of a file; empty if there is none."""
    if not os.path.exists(path):
        return {}
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        loaded: dict[str, Any] = json.load(stream)
    return loaded


def write_file(path: str, content: dict[str, Any]) -> None:
    """Write or replace a file of tapes."""
    from zeroplan.core.plumbing.files import replace_file

    replace_file(path, lzma.compress(json.dumps(content, separators=(",", ":")).encode(), preset=6))


@lru_cache(maxsize=4)
def _text(path: str) -> str:
    if not os.path.exists(path):
        if os.path.basename(path) in FETCHABLE:
            raise NotFetchedError(os.path.basename(path))
        return ""
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        return stream.read()


@lru_cache(maxsize=64)
def _tape(path: str, key: str) -> Tape | None:
    # One tape of many is wanted, and parsing takes far longer than unpacking. Only a tape's key is followed by an object.
    text, name = _text(path), f'"{key}":'
    begin = text.find(name + "{")
    return from_json(json.JSONDecoder().raw_decode(text, begin + len(name))[0]) if begin >= 0 else None


def find(spec: ModelSpec, options: TraceOptions) -> Tape | None:
    """Find the shipped tape of a model that the catalog holds, under its own name or with the same config facts.

    Raises:
        NotFetchedError: where tapes are fetched, its file has not been.
    """
    entry = _entry(spec)
    if entry is None:
        return None
    if options.lora and _linear_layers(spec) <= set(options.lora):
        options = replace(options, lora=())
    return _tape(file_of(entry.id), options.key)


def _linear_layers(spec: ModelSpec) -> set[str]:
    """Return the names of the blocks' layers that hold a matrix."""
    matrices = [t.name for unit in spec.units if unit.block for t in unit.tensors if len(t.shape) == 2]
    layers = [name.removesuffix(".weight").removesuffix(".base_layer") for name in matrices if "lora_" not in name]
    return {layer.rpartition(".")[2] for layer in layers}


def _entry(spec: ModelSpec) -> catalog.Entry | None:
    named = catalog.find(spec.name)
    if named is not None and _alike(named, spec):
        return named
    for entry in catalog.entries():
        if _alike(entry, spec):
            return entry
    return None


def _alike(entry: catalog.Entry, spec: ModelSpec) -> bool:
    """Return whether every fact that the catalog knows is the same in the model's config, where that says it at all."""
    config = spec.config
    if config.get("model_type") != entry.config.get("model_type"):
        return False
    if config.get("architectures") and auto_class_of(config) != auto_class_of(entry.config):
        return False
    if any(config.get(key, value) != value for key, value in entry.config.items() if key not in _NOT_MEMORY):
        return False
    return entry.params == spec.params - sum(t.numel * count for t, count in spec.tensor_groups() if "lora_" in t.name)


#: Config keys that change no allocation.
_NOT_MEMORY = frozenset({"architectures", "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"})
