"""A ModelSpec from what lies on disk: a folder, a ``config.json``, a safetensors file or the index of many.

Of safetensors files the headers alone are read: 8 bytes, the header's length N as a little-endian unsigned integer; N bytes of
JSON that map each tensor to ``dtype``, ``shape`` and ``data_offsets`` relative to the end of the header; the data.
Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import Limits, parse_json, text_of
from zeroplan.core.plumbing.files import file_kind, read_head, refused
from zeroplan.models.files import read_json
from zeroplan.models.from_config import describable, spec_from_config
from zeroplan.models.grouping import group_units
from zeroplan.models.spec import ModelSpec

#: The format's own limit on a header.
_LARGEST_HEADER = 100_000_000
#: What is read of one: some 120,000 tensors, more than any published model has in all of its files.
HEADER = Limits(size=20 << 20, depth=8, nodes=1_500_000)
_LARGEST_NUMEL = 1 << 50
#: Tensors of one model, in all of its files; those of one trillion parameters in 8 bits with their scales have some 140,000.
MOST_TENSORS = 200_000

#: Bits an element, by the format's names.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

_REMEDY = "download the file again"


def read_header(path: str, *, where: str = "MODEL") -> dict[str, tuple[int, ...]]:
    """Read the shapes of a file's tensors by name, in the file's order.

    Raises:
        BadInput: when the file cannot be read, is truncated, or its header contradicts itself or the file's size.
    """
    head, size = read_head(path, 8, where=where)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= _LARGEST_HEADER:
        raise BadInput(f"{path} is not a safetensors file", where=where, remedy="check that it is not a git-lfs pointer")
    if length > HEADER.size:
        what = f"{path} has a header of {length >> 20} MiB, which is more than {HEADER.size >> 20}"
        raise BadInput(what, where=where, remedy="give the folder's config.json")
    if length + 8 > size:
        raise BadInput(f"{path} is truncated inside its header", where=where, remedy=_REMEDY)
    raw = read_head(path, 8 + length, where=where)[0][8:]
    header = parse_json(text_of(raw, path, where=where), path, HEADER, where=where)
    if not isinstance(header, dict):
        raise BadInput(f"{path} has a header that is no object", where=where, remedy=_REMEDY)
    return _checked(header, path, size - 8 - length, where)


def _checked(header: Mapping[str, Any], path: str, data_size: int, where: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, begin, end = _entry(name, entry, path, where)
        bits = _BITS.get(entry["dtype"]) if isinstance(entry.get("dtype"), str) else None
        if bits is None:
            raise BadInput(f"{path}: tensor {name[:80]!r} has an unknown dtype", where=where, remedy="update zeroplan")
        if not 0 <= begin <= end or (end - begin) * 8 != math.prod(shape) * bits:
            raise BadInput(f"{path}: tensor {name[:80]!r} has offsets that do not fit its shape", where=where, remedy=_REMEDY)
        if end > data_size:
            raise BadInput(
                f"{path} is truncated: {name[:80]!r} ends {end - data_size:,} bytes behind the file's end",
                where=where,
                remedy=_REMEDY,
            )
        shapes[name] = shape
    if not shapes:
        raise BadInput(f"{path} holds no tensors", where=where)
    return shapes


def _entry(name: str, entry: object, path: str, where: str) -> tuple[tuple[int, ...], int, int]:
    """Return a header entry's shape and offsets, checked for type and range."""
    shape, offsets = (entry.get("shape"), entry.get("data_offsets")) if isinstance(entry, dict) else (None, None)
    if isinstance(shape, list) and len(shape) <= 16 and isinstance(offsets, list) and len(offsets) == 2:
        sizes = (*shape, *offsets)
        if all(type(value) is int and 0 <= value <= _LARGEST_NUMEL for value in sizes) and math.prod(shape) <= _LARGEST_NUMEL:
            return tuple(shape), offsets[0], offsets[1]
    raise BadInput(f"{path}: tensor {name[:80]!r} has a malformed entry", where=where, remedy=_REMEDY)


def index_shards(index: Mapping[str, Any], path: str, *, where: str = "MODEL") -> list[str]:
    """Paths of the files that an index names, all of them present.

    Raises:
        BadInput: when a file is missing, or the index names one outside its folder.
    """
    folder = os.path.dirname(path)
    shards = sorted({shard for shard in index["weight_map"].values() if isinstance(shard, str)})
    if not shards or len(shards) > 10_000:
        raise BadInput(f"{path} names no usable files", where=where, remedy="download the index again")
    for shard in shards:
        if not shard or os.path.basename(shard) != shard or "\0" in shard:
            raise BadInput(
                f"{path} names {shard[:80]!r}, which is no file beside it", where=where, remedy="download the index again"
            )
    missing = [shard for shard in shards if not os.path.exists(os.path.join(folder, shard))]
    if missing:
        raise BadInput(
            f"{path} names {len(shards)} files, of which {len(missing)} are missing, {missing[0][:80]!r} first",
            where=where,
            remedy="finish the download",
        )
    return [os.path.join(folder, shard) for shard in shards]


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
