"""Whatever a ds_config holds, the answer is a DsConfig or one line of BadInput."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from strategies import JSON, SHAPED

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import Workload
from zeroplan.ds_config.reader import inspect_ds_config, read_ds_config
from zeroplan.ds_config.writer import write_ds_config
from zeroplan.report.check import check_json, findings_text, verdict_text

RELAXED = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def assert_answered(data: Any, world_size: int | None = None) -> None:
    try:
        config = inspect_ds_config(data, world_size=world_size)
    except BadInput:
        return  # one line of bounded length, as its class holds
    f"{verdict_text(config)}\n{findings_text(config)}".encode()
    json.dumps(check_json(config), allow_nan=False).encode()
    assert set(config.raw) <= {key.path for key in config.keys}
    if config.errors:
        with pytest.raises(BadInput):
            read_ds_config(data, world_size=world_size)
        return
    written = write_ds_config(config.zero, source=config.raw)
    again = inspect_ds_config(written, world_size=world_size)
    assert again.zero == config.zero
    assert not again.unresolved_auto
    config.workload(Workload())


@RELAXED
@given(SHAPED, st.none() | st.integers(1, 64))
@example({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "auto"}}}, None)
@example({"optimizer": {"type": "SGD", "params": None}}, 1)
@example({"zero_optimization": {"zenflow": {}}}, 1)
@example({"train_batch_size": 10**400}, 3)
@example({"train_batch_size": True, "train_micro_batch_size_per_gpu": True}, None)
def test_shaped_like_a_ds_config(data: dict[str, Any], world_size: int | None) -> None:
    assert_answered(data, world_size)


@pytest.mark.long
@RELAXED
@given(st.dictionaries(st.text(max_size=12), JSON, max_size=5))
def test_any_object(data: dict[str, Any]) -> None:
    assert_answered(data)


@RELAXED
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | JSON.map(lambda x: json.dumps(x).encode()))
@example(b"\xff\xfe{}")
@example(b"\xef\xbb\xbf{}")
@example(b"[" * 5_000)
@example(b'{"a":' * 5_000)
@example(b'{"a": ' + b"9" * 5000 + b"}")
@example(b'{"a": 1e999}')
@example(b'{"a": NaN}')
@example(b"")
@example(b"null")
@example(b'{"a": "\\ud800"}')
def test_any_file(tmp_path_factory: pytest.TempPathFactory, blob: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(blob)
    assert_answered(str(path))


@RELAXED
@given(st.text(max_size=60))
def test_any_path(text: str) -> None:
    if not Path(text.replace("\0", "") or ".").exists():
        with pytest.raises(BadInput):
            read_ds_config(text)
