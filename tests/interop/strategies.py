"""Hypothesis strategies: arbitrary JSON, JSON shaped like a ds_config, and valid ZeroConfigs."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import (
    ActivationCheckpointing,
    Aio,
    LeafModule,
    OffloadDevice,
    OffloadOptimizer,
    OffloadParam,
    ZenFlow,
    ZeroConfig,
)
from zeroplan.ds_config.schema import Section
from zeroplan.ds_config.sections import REMOVED, SECTIONS

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 4),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["auto", "cpu", "nvme", "none", "2e8", "yes", "bf16", "fp32", "AdamW", "sgd", "[cpu|nvme]", "mean", "sum"]),
)
JSON = st.recursive(SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4))


@st.composite
def _section(draw: st.DrawFn, section: Section) -> dict[str, Any]:
    """An object with the section's own keys, holding anything at all."""
    names = draw(st.lists(st.sampled_from(section.names()) if section.names() else st.text(max_size=6), max_size=6))
    found: dict[str, Any] = {}
    for name in names:
        child = SECTIONS.get(f"{section.path}.{name}" if section.path else name)
        if child is not None and draw(st.booleans()):
            found[name] = draw(_section(child))
        else:
            found[name] = draw(SCALARS | JSON)
    if draw(st.integers(0, 9)) == 0:
        found[draw(st.sampled_from(sorted(REMOVED)) | st.text(max_size=6))] = draw(JSON)
    return found


SHAPED: st.SearchStrategy[dict[str, Any]] = _section(SECTIONS[""])

_COUNT = st.integers(1, 10**12)


def _block(cls: type, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any value for each field, by the type of its default."""
    made: dict[str, st.SearchStrategy[Any]] = {}
    for f in fields(cls):
        if f.name in special:
            made[f.name] = special[f.name]
        elif isinstance(f.default, bool):
            made[f.name] = st.booleans()
        elif isinstance(f.default, int):
            made[f.name] = _COUNT
    return st.builds(cls, **made)


_DEVICE = st.sampled_from(list(OffloadDevice))
_PATH = st.none() | st.sampled_from(["/nvme", "/local scratch"])
_SHARE = st.floats(0, 1, allow_nan=False)
_NAMES = st.lists(st.text(min_size=1, max_size=6), max_size=3, unique=True).map(tuple)
_DTYPE = st.none() | st.sampled_from(list(DType))

#: Any combination of values, be it one that DeepSpeed runs or not.
ZERO_CONFIGS: st.SearchStrategy[ZeroConfig] = _block(
    ZeroConfig,
    stage=st.integers(0, 3),
    overlap_comm=st.none() | st.booleans(),
    model_persistence_threshold=st.just(sys.maxsize) | _COUNT,
    gradient_clipping=st.floats(0, 10),
    gradient_predivide_factor=st.floats(0.5, 4),
    communication_data_type=_DTYPE,
    seq_parallel_communication_data_type=_DTYPE,
    grad_accum_dtype=_DTYPE,
    fp32_optimizer_states=st.just(True),
    offload_optimizer=_block(OffloadOptimizer, device=_DEVICE, nvme_path=_PATH, ratio=_SHARE, cpuadam_cores_perc=_SHARE),
    offload_param=_block(OffloadParam, device=_DEVICE, nvme_path=_PATH),
    zenflow=st.none()
    | _block(
        ZenFlow,
        topk_ratio=st.floats(0.01, 0.99),
        select_strategy=st.sampled_from(["auto", "step", "epoch"]),
        select_interval=st.just("auto") | st.integers(1, 9),
        update_interval=st.just("auto") | st.integers(1, 9),
        auto_ratio=_SHARE,
        pt_reserved_cores_perc=_SHARE,
    ),
    leaf_module=st.builds(LeafModule, classes=_NAMES, names=_NAMES, name_suffixes=_NAMES),
    activation_checkpointing=_block(ActivationCheckpointing, number_checkpoints=st.none() | st.integers(1, 100)),
    aio=_block(Aio),
)

_MODES = [
    (DType.BF16, Precision.MIXED),
    (DType.FP16, Precision.MIXED),
    (DType.FP32, Precision.FP32),
    (DType.BF16, Precision.AUTOCAST),
    (DType.FP16, Precision.AUTOCAST),
]
WORKLOADS: st.SearchStrategy[Workload] = st.builds(
    lambda micro, accum, mode: Workload.of(micro_batch=micro, grad_accum=accum, dtype=mode[0], precision=mode[1]),
    st.integers(1, 512),
    st.integers(1, 64),
    st.sampled_from(_MODES),
)

__all__ = ["JSON", "SHAPED", "WORKLOADS", "ZERO_CONFIGS"]
