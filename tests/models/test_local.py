"""Folders, configs and safetensors headers on disk, against safetensors' own writer and transformers' own files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.models.grouping import group_units
from zeroplan.models.load import load_model
from zeroplan.models.local import read_header

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def write_safetensors(
    path: Path, tensors: dict[str, tuple[int, ...]], *, dtype: str = "BF16", width: int = 2, sparse: bool = True
) -> None:
    """A file by the format's own words: header length, header, data (a hole)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = width
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        if sparse:
            stream.truncate(8 + len(raw) + at)


@pytest.fixture
def shapes() -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in load_model(LLAMA).tensors()}


def test_config_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", LLAMA):
        spec = load_model(source)
        assert spec.source == "config"
        assert spec.units == load_model(LLAMA).units
    assert load_model(tmp_path).name == load_model(tmp_path / "config.json").name == tmp_path.name


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert load_model(tmp_path).params == load_model(LLAMA).params


def test_safetensors_file(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    write_safetensors(tmp_path / "model.safetensors", shapes)
    spec = load_model(tmp_path / "model.safetensors")
    assert spec.source == "safetensors"
    assert {name: tensor.shape for name, tensor in spec.tensors()} == shapes
    blocks = [unit for unit in spec.units if unit.block]
    assert [(unit.name, unit.count) for unit in blocks] == [("model.layers.{}", 3)]
    assert {unit.name for unit in spec.units} == {"model.layers.{}", "model.embed_tokens", "model.norm", "lm_head"}
    kinds = {name: tensor.kind for name, tensor in spec.tensors()}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "linear"
    assert kinds["model.embed_tokens.weight"] == "embedding"
    assert kinds["lm_head.weight"] == "head"


@pytest.mark.torch
def test_safetensors_own_writer(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        f"h.{i}.w": torch.zeros(3, i + 1, dtype=dtype) for i, dtype in enumerate([torch.float16, torch.int8, torch.float64])
    }
    tensors |= {"scalar": torch.zeros(()), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    assert read_header(str(tmp_path / "x.safetensors")) == {name: tuple(t.shape) for name, t in tensors.items()}


def test_folder_without_config_uses_index(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    names = list(shapes)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        write_safetensors(tmp_path / file, {name: shapes[name] for name in own})
    weight_map = {name: file for file, own in parts.items() for name in own}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    write_safetensors(tmp_path / "stray.safetensors", {"not.part": (5,)})
    for source in (tmp_path, index):
        assert {name: tensor.shape for name, tensor in load_model(source).tensors()} == shapes
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(BadInput, match=r"2 files, of which 1 are missing, 'model-2\.safetensors' first; finish the download"):
        load_model(index)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path).source == "config"  # the config alone says it all, even with a shard missing


def test_of_400_gb_the_header_alone_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    write_safetensors(path, {f"model.layers.{i}.mlp.up_proj.weight": (53248, 29351) for i in range(128)})
    assert path.stat().st_size > 400 * 10**9
    spec = load_model(path)
    assert spec.params == 128 * 53248 * 29351


def test_experts_and_second_numbers_belong_to_their_block() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.w1.weight" for i in range(2) for e in range(3)]
    units = group_units(dict.fromkeys(names, (4, 5)))
    assert [(unit.name, unit.count, len(unit.tensors)) for unit in units] == [("model.layers.{}", 2, 3)]


def test_blocks_that_differ_stay_apart() -> None:
    shapes = {f"h.{i}.w.weight": (4, 4 if i != 2 else 5) for i in range(12)} | {f"h.{i}.v.weight": (4, 4) for i in range(12)}
    units = group_units(shapes)
    assert [(unit.first, unit.count) for unit in units] == [(0, 2), (2, 1), (3, 9)]
    assert sum(unit.numel * unit.count for unit in units) == 12 * 16 + 11 * 16 + 20


def _header(entry: Any, data: bytes = b"\0" * 64) -> bytes:
    raw = json.dumps({"t": entry}).encode()
    return len(raw).to_bytes(8, "little") + raw + data


GOOD = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a safetensors file"),
    "short": (b"\1\2\3", "is not a safetensors file"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
    "header longer than the file": ((1000).to_bytes(8, "little") + b"{}", "truncated inside its header"),
    "header of an exabyte": ((1 << 60).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
    "not JSON": ((4).to_bytes(8, "little") + b"nope", "is not JSON"),
    "not UTF-8": ((4).to_bytes(8, "little") + b'"\xff\xfe"', "is not UTF-8"),
    "nested": ((200_000).to_bytes(8, "little") + b"[" * 200_000, "nested deeper than"),
    "a list": ((2).to_bytes(8, "little") + b"[]", "header that is no object"),
    "no tensors": ((2).to_bytes(8, "little") + b"{}", "holds no tensors"),
    "an entry that is no object": (_header(3), "malformed entry"),
    "negative shape": (_header({**GOOD, "shape": [-4, -4]}), "malformed entry"),
    "shape of text": (_header({**GOOD, "shape": ["4", 4]}), "malformed entry"),
    "shape of truth": (_header({**GOOD, "shape": [True, 16]}), "malformed entry"),
    "huge shape": (_header({**GOOD, "shape": [1 << 40, 1 << 40]}), "malformed entry"),
    "no offsets": (_header({"dtype": "F32", "shape": [4, 4]}), "malformed entry"),
    "offsets reversed": (_header({**GOOD, "data_offsets": [64, 0]}), "offsets that do not fit"),
    "offsets too small": (_header({**GOOD, "data_offsets": [0, 60]}), "offsets that do not fit"),
    "unknown dtype": (_header({**GOOD, "dtype": "F7"}), "unknown dtype"),
    "dtype of a number": (_header({**GOOD, "dtype": 7}), "unknown dtype"),
    "truncated data": (_header(GOOD, b"\0" * 10), "ends 54 bytes behind the file's end; download the file again"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_safetensors(case: str, tmp_path: Path) -> None:
    data, message = BAD_FILES[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(BadInput) as caught:
        load_model(tmp_path / "x.safetensors")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "", "a\0b", "sub/x.safetensors"])
def test_an_index_cannot_lead_outside_its_folder(shard: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": shard}}))
    with pytest.raises(BadInput, match=r"no file beside it|no usable files"):
        load_model(tmp_path)


def _unreadable_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0)


BAD_PATHS: dict[str, tuple[Any, str]] = {
    "missing": (lambda path: None, "does not exist"),
    "an empty folder": (lambda path: path.mkdir(), "neither a config.json nor safetensors"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to(path.parent / "gone"), "does not exist"),
    "a pipe": (lambda path: os.mkfifo(path), "is a pipe, not a file"),
    "an empty file": (lambda path: path.write_bytes(b""), "is not JSON"),
    "a binary file": (lambda path: path.write_bytes(bytes(range(256))), "is not UTF-8"),
    "a list": (lambda path: path.write_text("[1]"), "holds no JSON object"),
    "a deep list": (lambda path: path.write_text("[" * 100_000), "nested deeper than"),
    "a number of many digits": (
        lambda path: path.write_text('{"model_type": "llama", "x": 1' + "0" * 9000 + "}"),
        "is not usable JSON",
    ),
}


@pytest.mark.parametrize("case", BAD_PATHS)
def test_bad_path(case: str, tmp_path: Path) -> None:
    make, message = BAD_PATHS[case]
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(BadInput) as caught:
        load_model(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "locked"
    _unreadable_folder(path)
    with pytest.raises(BadInput, match="Permission denied"):
        load_model(path)


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(BadInput, match="is a folder"):
        load_model(tmp_path)


def test_a_local_folder_beats_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(LLAMA))
    assert load_model("gpt2").model_type == "gpt2"
    monkeypatch.chdir(tmp_path)
    assert load_model("gpt2").model_type == "llama"


def test_a_header_of_too_many_tensors_is_refused(tmp_path: Path) -> None:
    """140,000 tensors: more than any published model has in one file. Time and memory grow with their number."""
    path = tmp_path / "many.safetensors"
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = ("{" + ",".join(f'"t{i}":{entry}' for i in range(140_000)) + "}").encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(BadInput, match="more than 1,500,000 values"):
        read_header(str(path))
