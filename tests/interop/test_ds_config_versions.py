"""A ds_config read for another DeepSpeed than 0.19.8: its defaults, the keys that it knows, and the wrapper that it builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.dialect import Support
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reader import DsConfig, inspect_ds_config, read_ds_config
from zeroplan.ds_config.sections import REMOVED, find_key
from zeroplan.ds_config.versions import DEFAULT_CHANGES, KEY_HISTORIES, as_read_by, older_defaults
from zeroplan.ds_config.wrappers import Wrapper
from zeroplan.ds_config.writer import write_ds_config


def read_at(config: dict[str, Any], version: str) -> DsConfig:
    """The config as a version reads it."""
    return inspect_ds_config(config, engine_version=version)


@pytest.mark.parametrize(
    ("version", "clipping", "checks", "pinned"),
    [("0.18.9", 0.0, False, False), ("0.19.2", 0.0, False, False), ("0.19.3", 1.0, True, False), ("0.19.5", 1.0, True, True)],
)
def test_defaults_of_older_versions(version: str, clipping: float, checks: bool, pinned: bool) -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    zero = read_ds_config(config, engine_version=version).zero
    found = (zero.step.gradient_clipping, zero.step.check_grad_overflow, zero.offload_optimizer.pin_memory)
    assert found == (clipping, checks, pinned)


def test_what_the_file_says_holds_in_every_version() -> None:
    config = {"train_batch_size": 1, "gradient_clipping": 0.3, "zero_optimization": {"stage": 2}}
    assert read_ds_config(config, engine_version="0.18.0").zero.step.gradient_clipping == 0.3


def test_a_changed_default_holds_until_its_version() -> None:
    for change in DEFAULT_CHANGES:
        key = find_key(change.path)
        assert key is not None
        major, minor, patch = change.since
        earlier = (major, minor, patch - 1) if patch else (major, minor - 1, 99)
        assert older_defaults(earlier).get(change.path, key.default) == change.before
        assert older_defaults(change.since).get(change.path, key.default) != change.before
    assert older_defaults("0.19.8") == {}


def test_keys_came_and_went() -> None:
    """A pydantic section refuses a key that is too new, a plain one ignores it; an old key acts until it is taken out."""
    section = {"allgather_sequential": True, "mics_shard_size": 4}
    config = {"train_batch_size": 1, "torch_autocast": {"enabled": True}, "zero_optimization": {"stage": 3, **section}}
    found = {
        version: {(one.id, one.where.rpartition(".")[2]): one.severity for one in read_at(config, version).findings}
        for version in ("0.14.2", "0.17.2", "0.18.5", "0.19.7")
    }
    newer = {version: {where for id, where in said if id == "key.newer"} for version, said in found.items()}
    assert newer == {
        "0.14.2": {"torch_autocast", "allgather_sequential"},
        "0.17.2": {"allgather_sequential"},
        "0.18.5": set(),
        "0.19.7": set(),
    }
    assert found["0.14.2"]["key.newer", "torch_autocast"] is Severity.WARNING
    assert found["0.14.2"]["key.newer", "allgather_sequential"] is Severity.ERROR
    old = read_at(config, "0.14.2")
    assert not old.zero.stage3.allgather_sequential
    assert old.training.autocast is None
    assert [one.key for one in old.unmodelled] == ["zero_optimization.mics_shard_size"]
    assert found["0.19.7"]["key.removed", "mics_shard_size"] is Severity.ERROR


def test_every_history_is_of_a_key() -> None:
    for history in KEY_HISTORIES:
        key = find_key(history.path)
        assert (key is None or key.deepspeed is Support.REFUSED) == (history.until is not None)
        assert (history.path in REMOVED) == (history.until is not None)
    assert {history.path for history in KEY_HISTORIES if history.until} == set(REMOVED)


def test_a_file_for_an_older_version_has_none_of_its_defaults() -> None:
    zero = as_read_by(ZeroConfig.of(2, "cpu"), (0, 14, 2))
    written = write_ds_config(zero)
    block = written["zero_optimization"]
    assert "leaf_module" not in block
    assert block["offload_optimizer"] == {"device": "cpu"}
    assert (
        read_ds_config({"train_batch_size": 1, "optimizer": {"type": "AdamW"}, **written}, engine_version="0.14.2").zero == zero
    )
    pinned = replace(zero, offload_optimizer=replace(zero.offload_optimizer, pin_memory=True))
    assert write_ds_config(pinned)["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_stage_0_of_older_versions_accumulates_bf16_in_fp32() -> None:
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    for version, dtype, runs in (("0.17.5", "fp32", True), ("0.17.5", "bf16", False), ("0.17.6", "fp32", False)):
        asked = {**config, "data_types": {"grad_accum_dtype": dtype}}
        assert read_at(asked, version).runs_alone is runs
    built = [read_at(config, version).wrapper for version in ("0.17.5", "0.17.6")]
    assert built == [Wrapper.BF16, Wrapper.FP16]


@pytest.mark.parametrize("text", ["", "latest", "v1", "x.y.z"])
def test_no_version(text: str) -> None:
    with pytest.raises(BadInput, match="is not a version"):
        older_defaults(text)
