"""A ModelSpec from what lies on disk: a folder, a ``config.json``, a safetensors file or the index of many."""

from __future__ import annotations

import os
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import file_kind, refused
from zeroplan.models.files import read_json
from zeroplan.models.from_config import describable, spec_from_config
from zeroplan.models.grouping import group_units
from zeroplan.models.safetensors import MOST_TENSORS, index_shards, read_header
from zeroplan.models.spec import ModelSpec


def spec_from_path(text: str, *, where: str = "MODEL", trust_remote_code: bool = False) -> ModelSpec:
    """Describe the model of a folder or file.

    Raises:
        BadInput: when it does not exist, cannot be read, or is none of the kinds known.
    """
    path = os.path.expanduser(text)
    if file_kind(path, where=where, remedy="check the path, or give a model's id") == "folder":
        return _from_folder(path, where, trust_remote_code)
    name = os.path.basename(path)
    if name.endswith(".safetensors"):
        return _from_shards([path], name, where)
    if name == "config.json":  # the folder says more than the file's own name
        name = os.path.basename(os.path.dirname(os.path.abspath(path))) or name
    return _from_object(read_json(path, where=where), path, name, where, trust_remote_code)


def _from_folder(path: str, where: str, trust_remote_code: bool) -> ModelSpec:
    """Describe a folder's model by its config.json, or by its safetensors headers where there is no config that can be
    described here.
    """
    name = os.path.basename(os.path.abspath(path))
    config_path = os.path.join(path, "config.json")
    has_config = os.path.lexists(config_path)
    config = read_json(config_path, where=where) if has_config else None
    if isinstance(config, dict) and describable(config):
        return _from_object(config, config_path, name, where, trust_remote_code)
    shards = _shards_of(path, where)
    if shards:
        return _from_shards(shards, name, where)
    if has_config:
        return _from_object(config, config_path, name, where, trust_remote_code)
    adapter = os.path.join(path, "adapter_config.json")
    if os.path.isfile(adapter):
        said = read_json(adapter, where=where)
        base = said.get("base_model_name_or_path") if isinstance(said, dict) else None
        what = f"{path} holds an adapter on {str(base)[:120]}"
        raise BadInput(what, where=where, remedy="give that model, with --lora-rank and --lora-targets")
    what = f"{path} holds neither a config.json nor safetensors files"
    raise BadInput(what, where=where, remedy="give the folder of a saved model")


def _shards_of(path: str, where: str) -> list[str]:
    """Return the safetensors files of a folder: those its index names, else all."""
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.lexists(index):
        data = read_json(index, where=where)
        if isinstance(data, dict) and isinstance(data.get("weight_map"), dict):
            return index_shards(data, index, where=where)
    try:
        return [os.path.join(path, entry) for entry in sorted(os.listdir(path)) if entry.endswith(".safetensors")]
    except OSError as error:
        raise refused(path, error, where) from None


def _from_object(data: Any, path: str, name: str, where: str, trust_remote_code: bool) -> ModelSpec:
    if not isinstance(data, dict):
        raise BadInput(f"{path} holds no JSON object", where=where, remedy="give a config.json or a safetensors index")
    if isinstance(data.get("weight_map"), dict):
        return _from_shards(index_shards(data, path, where=where), name, where)
    folder = os.path.dirname(os.path.abspath(path))
    return spec_from_config(
        data, name=name, source="config", where=path, trust_remote_code=trust_remote_code, repository=folder
    )


def _from_shards(paths: list[str], name: str, where: str) -> ModelSpec:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        shapes |= read_header(path, where=where)
        if len(shapes) > MOST_TENSORS:
            raise BadInput(f"{name} holds more than {MOST_TENSORS:,} tensors", where=where, remedy="give its config.json")
    return ModelSpec(name, group_units(shapes), "safetensors")
