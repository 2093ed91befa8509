"""The coercers are pydantic's lax mode, value by value."""

from __future__ import annotations

import enum
import math
import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from zeroplan.core.workload import DType
from zeroplan.ds_config.coercion import COERCE, ValueKind, to_bool, to_dtype, to_float, to_int, to_str


class Stage(int, enum.Enum):
    A, B, C, D = 0, 1, 2, 3


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-100, 100).map(float),
    st.text(max_size=8),
    st.text(string.digits + "+-_. eE", max_size=8),
    st.sampled_from(["yes", "No", "ON", "tRuE", "f", "1", "0", "2e8", "2.0", "2.", ".0", "1_000", " 5 ", "cpu", "nan", "inf"]),
)


def outcome(call: Callable[[Any], Any], value: Any, *refusals: type[Exception]) -> Any:
    try:
        found = call(value)
    except refusals:
        return "refused"
    return "nan" if isinstance(found, float) and math.isnan(found) else found


@pytest.mark.parametrize(
    ("ours", "kind"), [(to_int, int), (to_float, float), (to_bool, bool), (to_str, str), (COERCE[ValueKind.STAGE], Stage)]
)
@given(value=SCALARS)
@example(value="١")
@example(value="1_0.0")
@example(value="1__0")
@example(value=2**63)
@example(value=1e30)
@example(value=-0.0)
@example(value=10**400)
def test_coercion_is_pydantics(ours: Callable[[Any], Any], kind: Any, value: Any) -> None:
    theirs = outcome(TypeAdapter(kind).validate_python, value, ValidationError)
    assert outcome(ours, value, ValueError) == theirs


@pytest.mark.parametrize("word", ["fp16", "float16", "half", "torch.float16", "bf16", "bfloat16", "fp32", "float", "float32"])
@pytest.mark.torch
def test_dtypes_are_those_of_deepspeed(word: str) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DtypeEnum

    names = {DType.FP16: "torch.float16", DType.BF16: "torch.bfloat16", DType.FP32: "torch.float32"}
    assert str(DtypeEnum(word).value) == names[to_dtype(word)]


@pytest.mark.parametrize("word", ["fp8", "FP16", "", None, 16, "int8"])
def test_other_dtypes_are_refused(word: Any) -> None:
    with pytest.raises(ValueError):
        to_dtype(word)
