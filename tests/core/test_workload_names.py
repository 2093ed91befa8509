"""Other programs' names for dtypes and attention implementations."""

from __future__ import annotations

import pytest

from zeroplan.core.workload import Attention, DType


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("bfloat16", "bf16"), ("torch.float16", "fp16"), ("half", "fp16"), ("float32", "fp32"), ("bf16", "bf16")],
)
def test_torchs_dtypes(text: str, dtype: str) -> None:
    assert DType(text) == dtype


@pytest.mark.parametrize("text", ["flash_attention_2", "flash-attn", "flash"])
def test_transformers_attention(text: str) -> None:
    assert Attention(text) is Attention.FLASH


@pytest.mark.parametrize("text", ["float8", "tf32", "", "bf"])
def test_what_is_not_modelled_is_no_dtype(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid DType"):
        DType(text)
