"""Recorded events: stacks reduced, columns built and checked against torch's own totals."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.measure import fixtures, history
from benchmarks.measure.spec import Spec

MIB = 1 << 20
FIXTURES = sorted((Path(__file__).parent.parent / "fixtures" / "allocator").rglob("*.json.gz"))


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


OWNER = [frame("/site/torch/nn/modules/linear.py", 134, "forward"), frame("/site/torch/nn/modules/module.py", 9, "_call_impl")]
EMPTY = [frame("/site/torch/cuda/memory.py", 224, "empty_cache")]


def event(action, time, size, stack=(), addr=1 << 40):
    return {"action": action, "addr": addr, "size": size, "stream": 77, "time_us": time, "frames": list(stack)}


TRACE = [
    event("segment_alloc", 10, 2 * MIB, OWNER),
    event("alloc", 11, 1000, OWNER),
    event("alloc", 12, 24, (), (1 << 40) + 1024),
    event("snapshot", 13, 0, (), 0),
    event("free_requested", 20, 1000),
    event("free_completed", 40, 1000),
    event("free_requested", 41, 24, (), (1 << 40) + 1024),
    event("free_completed", 41, 24, (), (1 << 40) + 1024),
    event("segment_free", 42, 2 * MIB, EMPTY),
]
MARKS = [
    {"at": "model", "time_us": 15, "reserved": 2 * MIB, "requested": 1024},
    {"at": "init", "time_us": 30, "reserved": 2 * MIB, "requested": 1024},  # freed, but another stream still uses it
    {"at": "fwd", "time_us": 50, "reserved": 0, "requested": 0},
]


def test_columns_hold_the_events_in_order():
    made = history.compact(TRACE, MARKS, {"spec": {}})
    columns = made["columns"]
    assert [made["ops"][op] for op in columns["op"]] == [e["action"] for e in TRACE if e["action"] != "snapshot"]
    assert columns["addr"][:3] == [0, 0, 1024]
    assert columns["dt_us"] == [0, 1, 1, 8, 20, 1, 0, 1]
    assert [mark["event"] for mark in made["marks"]] == [3, 4, 8]
    assert made["frames"][:1] == ["linear.py:forward:134"]
    assert history.check(made) == []


def test_a_lost_event_is_found():
    made = history.compact(TRACE[:1] + TRACE[2:], MARKS, {})
    assert history.check(made)[0] == "model: requested 1024, replayed 24"


def test_stacks_name_operators_and_autograd_nodes():
    stack = (
        ("??", 0, "at::_ops::mm::redispatch(c10::DispatchKeySet)"),
        ("??", 0, "at::_ops::mm::call(at::Tensor const&)"),
        ("??", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>)"),
        ("??", 0, "c10d::Reducer::mark_variable_ready(unsigned long)"),
        ("??", 0, "start_thread"),
    )
    assert history.reduce_stack(stack) == ["aten:mm", "grad:MmBackward0", "c10d:Reducer::mark_variable_ready"]
    many = tuple((f"/a/f{i}.py", i, "g") for i in range(40))
    assert history.reduce_stack(many) == [f"f{i}.py:g:{i}" for i in range(history.MAX_FRAMES)]


def test_written_and_read_back(tmp_path):
    made = history.compact(TRACE, MARKS, {})
    history.write(made, tmp_path / "h.json.gz")
    assert history.read(tmp_path / "h.json.gz") == made
    history.write(made | {"format": "another"}, tmp_path / "other.json.gz")
    with pytest.raises(ValueError, match="expected format zeroplan-history/1, got another"):
        history.read(tmp_path / "other.json.gz")


def test_a_fixture_knows_who_emptied_the_cache():
    assert fixtures.emptied(history.compact(TRACE, MARKS, {})) == [7]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.split(".")[0])
def test_stored_fixtures_agree_with_torch(path):
    """Events replayed give torch's reserved and requested bytes at each mark; blocks in use never overlap."""
    stored = json.loads(gzip.decompress(path.read_bytes()))
    assert history.check(stored) == []
    assert path.stat().st_size < 300_000
    ends: dict[int, int] = {}
    for op, addr, size in zip(*(stored["columns"][name] for name in ("op", "addr", "size")), strict=True):
        if stored["ops"][op] == "alloc":
            ends[addr] = addr + size
        elif stored["ops"][op] == "free_completed":
            del ends[addr]
    used = sorted(ends.items())
    assert len(used) > 10
    assert all(end <= start for (_, end), (start, _) in pairwise(used))


def test_a_spec_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown spec keys: stagee"):
        Spec.from_dict({"id": "a", "model": "m", "stagee": 2})
    with pytest.raises(ValueError, match="stage must be 0 to 3, not 4"):
        Spec(id="a", model="m", stage=4)


def test_a_spec_is_the_ds_config_of_the_measured_rows():
    spec = Spec(id="a", model="m", stage=2, micro_batch=3, grad_accum=4, zero={"overlap_comm": True}, dtype="fp16")
    config = spec.ds_config()
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (3, 4)
    assert config["fp16"] == {"enabled": True}
    assert "bf16" not in config
    assert Spec.from_dict(spec.to_dict()) == spec
