"""JSON files of models: configs and indices."""

from __future__ import annotations

from typing import Any

from zeroplan.core.plumbing.documents import Limits, parse_json, text_of
from zeroplan.core.plumbing.files import read_bytes

#: A config, or an index of a checkpoint's files; the largest published index has 15 MB and some 200,000 tensors.
MODEL_JSON = Limits(size=32 << 20, depth=64, nodes=2_000_000)


def read_json(path: str, *, where: str = "MODEL") -> Any:
    """Read a JSON file. Raises BadInput: when it cannot be read, is not UTF-8 JSON, is nested too deeply, or is too large."""
    data = read_bytes(path, MODEL_JSON.size, where=where, remedy="give a model's id, folder, config.json or safetensors file")
    return parse_json(text_of(data, path, where=where), path, MODEL_JSON, where=where)
