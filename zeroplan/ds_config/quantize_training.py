"""The ``quantize_training`` section of a ds_config, for the included runtime (:mod:`zeroplan.core.quantize_training`)."""

from __future__ import annotations

from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.quantize_training import QUANTIZE_TRAINING as NAME
from zeroplan.core.quantize_training import QuantizeTraining
from zeroplan.ds_config.findings import Severity
from zeroplan.ds_config.reading import Reading

_KEYS = (
    "quantize_groups",
    "quantize_bits.start_bits",
    "quantize_bits.target_bits",
    "quantize_schedule.quantize_period",
    "quantize_schedule.schedule_offset",
    "quantize_algo.q_type",
    "quantize_algo.rounding",
)


def read_quantize_training(reading: Reading) -> QuantizeTraining | None:
    """Return what the runtime is asked for; None for nothing, and for something impossible: an error."""
    values = {path.removeprefix(f"{NAME}."): value for path, value in reading.values.items() if path.startswith(f"{NAME}.")}
    if not (reading.for_runtime and values.get("enabled")):
        return None
    given: dict[str, Any] = {key.rpartition(".")[2]: values[key] for key in _KEYS if key in values}
    try:
        if values.get("eigenvalue.enabled"):
            what = "periods by the eigenvalues of layers are not supported"
            raise BadInput(what, where="eigenvalue", remedy="remove it")
        kind = values.get("quantize_type")  # as the tutorial has it
        if kind is not None and given.setdefault("q_type", kind) != kind:
            raise BadInput(f"{kind!r} is not quantize_algo.q_type", where="quantize_type", remedy="remove one of the two")
        if values.get("fp16_mixed_quantize.enabled"):
            given["quantize_change_ratio"] = values.get("fp16_mixed_quantize.quantize_change_ratio", 0.001)
        return QuantizeTraining(**given)
    except BadInput as fault:
        reading.add(f"{NAME}.impossible", Severity.ERROR, f"{NAME}.{fault.where}", fault.what, fault.remedy)
        return None
