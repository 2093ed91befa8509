"""Traced tapes, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import labels_of
from zeroplan.core.plumbing.files import read_bytes, replace_file
from zeroplan.tape.codec import from_json, to_json
from zeroplan.tape.format import FORMAT, Tape
from zeroplan.tape.options import TraceOptions

#: Bumped when a trace of the same model comes out otherwise, so that older ones are not read.
_REVISION = 15
#: The same of one model type alone, whose traces came out otherwise since.
_REVISED: dict[str, int] = dict.fromkeys(
    ("autoformer", "data2vec-audio", "hubert", "ibert", "informer", "lasr_ctc", "lasr_encoder", "m2m_100",
     "nemotron_asr_streaming", "nllb-moe", "parakeet_ctc", "parakeet_encoder", "seamless_m4t", "seamless_m4t_v2", "sew",
     "speecht5", "time_series_transformer", "unispeech", "unispeech-sat", "vits", "wav2vec2", "wav2vec2-bert",
     "wav2vec2-conformer", "wavlm"),
    1,
)  # fmt: skip
#: Config keys that change no allocation and differ between copies of one model.
_NOISE = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "bos_token_id",
     "eos_token_id", "id2label", "label2id", "_commit_hash"}
)  # fmt: skip

#: Bytes of a tape as text, and of what unpacking it may use. Tapes have less than a megabyte.
_MOST_TEXT = 16 << 20
_MOST_MEMORY = 64 << 20


def folder() -> str:
    """Return the folder of traced tapes: ``$XDG_CACHE_HOME/zeroplan/tapes``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "zeroplan", "tapes")


def path_of(config: Mapping[str, Any], options: TraceOptions) -> str:
    """The file for a config and options, under the versions that are installed."""
    facts = {key: value for key, value in config.items() if key not in _NOISE}
    facts["num_labels"] = labels_of(config)
    revised = _REVISED.get(str(config.get("model_type")))
    kind = [FORMAT, _REVISION] if revised is None else [FORMAT, _REVISION, revised]
    key = json.dumps([*kind, versions(), options.key, facts], sort_keys=True, default=str)
    return os.path.join(folder(), hashlib.sha256(key.encode()).hexdigest()[:32] + ".json.xz")


@cache
def versions() -> list[str]:
    """Return the versions of the installed software that a trace depends on."""
    found = []
    for name in ("torch", "transformers", "peft"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} -")
    return found


def read(config: Mapping[str, Any], options: TraceOptions) -> Tape | None:
    """The cached tape; None when there is none, or what is there cannot be read."""
    path = path_of(config, options)
    try:
        packed = read_bytes(path, _MOST_TEXT)
        text = lzma.LZMADecompressor(memlimit=_MOST_MEMORY).decompress(packed, max_length=_MOST_TEXT + 1)
        return from_json(json.loads(text)) if len(text) <= _MOST_TEXT else None
    except (BadInput, EOFError, lzma.LZMAError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def write(config: Mapping[str, Any], options: TraceOptions, tape: Tape) -> str | None:
    """Keep a tape; returns the path, or None where the folder cannot be written."""
    path = path_of(config, options)
    text = json.dumps(to_json(tape), separators=(",", ":"))
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, lzma.compress(text.encode(), preset=1))
    except OSError:
        return None
    return path
