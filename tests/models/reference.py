"""The independent reference for shapes: transformers' own classes on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.models.spec import ModelSpec

#: One parameter as both sides give it: name, shape, gets a gradient, owner of its storage (itself when not tied).
Row = tuple[str, tuple[int, ...], bool, str]


def build_on_meta(config: Mapping[str, Any], auto_class: str) -> Any:
    import torch
    import transformers

    values = dict(config)
    built = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(built)


def rows_of_module(module: Any) -> list[Row]:
    owners: dict[int, str] = {}
    return [
        (name, tuple(p.shape), p.requires_grad, owners.setdefault(id(p), name))
        for name, p in module.named_parameters(remove_duplicate=False)
    ]


def rows_of_spec(spec: ModelSpec) -> list[Row]:
    rows = []
    for unit in spec.units:
        for prefix in unit.names():
            for tensor in unit.tensors:
                name = f"{prefix}.{tensor.name}" if prefix else tensor.name
                rows.append((name, tensor.shape, tensor.trainable, tensor.tied_to or name))
    return rows


def assert_same_rows(ours: list[Row], theirs: list[Row]) -> None:
    """Fails on the first row that differs, with both sides of it."""
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        assert mine == other, f"parameter {i}: described {mine}, built {other}"
    assert len(ours) == len(theirs), f"described {len(ours)} parameters, built {len(theirs)}"
