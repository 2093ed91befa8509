"""A ModelSpec as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.models.spec import ModelSpec, OwnExperts, SpecUnit, Tensor


def as_data(spec: ModelSpec) -> dict[str, Any]:
    """Return the model as data that ``json.dumps`` takes. Of its config the values that JSON has are kept."""
    units = [
        [
            unit.name,
            unit.count,
            unit.first,
            unit.block,
            [[t.name, list(t.shape), t.trainable, t.tied_to, t.kind, t.quantized] for t in unit.tensors],
        ]
        for unit in spec.units
    ]
    experts = None if spec.own_experts is None else [spec.own_experts.ranks, spec.own_experts.drops_tokens]
    return {"name": spec.name, "source": spec.source, "model_type": spec.model_type, "config": _plain(spec.config),
            "auto_class": spec.auto_class, "own_experts": experts, "units": units}  # fmt: skip


def of_data(data: Mapping[str, Any]) -> ModelSpec:
    """Return the model that :func:`as_data` stored."""
    units = tuple(
        SpecUnit(
            name,
            tuple(
                Tensor(own, tuple(shape), trainable, tied, kind, quantized)
                for own, shape, trainable, tied, kind, quantized in tensors
            ),
            count,
            first,
            block,
        )
        for name, count, first, block, tensors in data["units"]
    )
    experts = None if data["own_experts"] is None else OwnExperts(*data["own_experts"])
    return ModelSpec(
        data["name"],
        units,
        data["source"],
        data["model_type"],
        data["config"],
        auto_class=data["auto_class"],
        own_experts=experts,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
