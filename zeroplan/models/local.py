"""A ModelSpec from what lies on disk: a folder, a ``config.json``, a safetensors file or the index of many."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.models.from_config import spec_from_config
from zeroplan.models.spec import ModelSpec

#: A config or index larger than this is none (the largest published index is about 15 MB).
_LARGEST_JSON = 256 << 20


def is_local(text: str) -> bool:
    """Whether the text is meant as a path: it exists, or cannot be an id of the catalog or the hub."""
    if text.startswith(("/", "./", "../", "~", "\\")) or text.endswith((".json", ".safetensors")) or text in (".", ".."):
        return True
    try:
        os.lstat(text)
    except (OSError, ValueError):
        return text.count("/") > 1
    return True


def spec_from_path(text: str, *, where: str = "MODEL", trust_remote_code: bool = False) -> ModelSpec:
    """The model of a folder or file.

    Raises:
        BadInput: when it does not exist, cannot be read, or is none of the kinds known.
    """
    path = os.path.expanduser(text)
    if stat.S_ISDIR(_stat(path, where).st_mode):
        return _from_folder(path, where, trust_remote_code)
    if path.endswith(".safetensors"):
        return _from_shards([path], os.path.basename(path), where)
    return _from_json(path, os.path.basename(path), where, trust_remote_code)


def _stat(path: str, where: str) -> os.stat_result:
    try:
        info = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, where) from None
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
        raise BadInput(
            f"{path} is neither a file nor a folder", where=where, remedy="give a folder, config.json or safetensors file"
        )
    return info


def _unreadable(path: str, error: Exception, where: str) -> BadInput:
    reason = getattr(error, "strerror", None) or str(error)
    return BadInput(f"{path}: {reason}", where=where, remedy="check the path, or give a model's id")


def read_json(path: str, *, where: str = "MODEL") -> Any:
    """The contents of a JSON file.

    Raises:
        BadInput: when it cannot be read, is not UTF-8 JSON, is nested too deeply, or is too large.
    """
    info = _stat(path, where)
    if stat.S_ISDIR(info.st_mode):
        raise BadInput(f"{path} is a folder, not a JSON file", where=where)
    if info.st_size > _LARGEST_JSON:
        raise BadInput(f"{path} is too large for a config ({info.st_size >> 20:,} MiB)", where=where)
    try:
        with open(path, "rb") as stream:
            data = stream.read(_LARGEST_JSON)
    except OSError as error:
        raise _unreadable(path, error, where) from None
    return parse_json(data, path, where=where)


def parse_json(data: bytes, name: str, *, where: str = "MODEL") -> Any:
    """JSON from bytes, with every fault as one line."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 text (byte {error.start:,})", where=where) from None
    except RecursionError:
        raise BadInput(f"{name} is nested too deeply", where=where) from None
    except ValueError as error:  # JSONDecodeError, or a number of too many digits
        raise BadInput(f"{name} is not JSON: {error}", where=where) from None


def _from_folder(path: str, where: str, trust_remote_code: bool) -> ModelSpec:
    name = os.path.basename(os.path.abspath(path))
    config = os.path.join(path, "config.json")
    if os.path.lexists(config):
        return _from_json(config, name, where, trust_remote_code)
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.lexists(index):
        return _from_json(index, name, where, trust_remote_code)
    try:
        shards = sorted(entry for entry in os.listdir(path) if entry.endswith(".safetensors"))
    except OSError as error:
        raise _unreadable(path, error, where) from None
    if not shards:
        raise BadInput(
            f"{path} holds neither a config.json nor safetensors files", where=where, remedy="give the folder of a saved model"
        )
    return _from_shards([os.path.join(path, shard) for shard in shards], name, where)


def _from_json(path: str, name: str, where: str, trust_remote_code: bool) -> ModelSpec:
    data = read_json(path, where=where)
    if not isinstance(data, dict):
        raise BadInput(f"{path} holds no JSON object", where=where, remedy="give a config.json or a safetensors index")
    if isinstance(data.get("weight_map"), dict):
        from zeroplan.models.safetensors import index_shards

        return _from_shards(index_shards(data, path, where=where), name, where)
    return spec_from_config(data, name=name, source="config", where=path, trust_remote_code=trust_remote_code)


def _from_shards(paths: list[str], name: str, where: str) -> ModelSpec:
    from zeroplan.models.grouping import group_units
    from zeroplan.models.safetensors import read_header

    shapes = {tensor: shape for path in paths for tensor, shape in read_header(path, where=where).items()}
    return ModelSpec(name, group_units(shapes), "safetensors")
