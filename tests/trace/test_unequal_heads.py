"""The kernels that an attention of unequal heads gets, and what a grouped product of frozen matrices keeps."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("key_heads", "gqa", "fused"), [(4, False, True), (1, True, True), (1, False, False)])
def test_heads_that_are_left_to_broadcasting_have_no_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, *, key_heads: int, gqa: bool, fused: bool
) -> None:
    from zeroplan.trace import attention

    ran: list[Any] = []
    monkeypatch.setattr(attention, "_run", lambda function, query, *_: ran.append(function) or query)
    query = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, key_heads, 16, 8, dtype=torch.bfloat16, device="meta")
    found = attention.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=gqa)
    assert found.shape == query.shape
    assert bool(ran) is fused


@pytest.mark.parametrize(("rows_train", "matrices_train"), [(True, False), (False, True), (True, True)])
def test_a_grouped_product_keeps_what_the_others_gradient_needs(*, rows_train: bool, matrices_train: bool) -> None:
    from zeroplan.trace.functions import _GroupedProduct

    rows = torch.empty(6, 4, requires_grad=rows_train)
    matrices = torch.empty(3, 5, 4, requires_grad=matrices_train)
    out = _GroupedProduct.apply(rows, matrices.transpose(-2, -1))
    kept_rows, kept_matrices = out.grad_fn.saved_tensors
    assert (kept_rows is not None, kept_matrices is not None) == (matrices_train, rows_train)
    out.sum().backward()
    assert (rows.grad is not None, matrices.grad is not None) == (rows_train, matrices_train)


def test_the_output_lies_as_the_query_does() -> None:
    """DeepSeek's query is joined of two parts, so it lies head by head; its value is narrower (MHA.cpp)."""
    from zeroplan.trace.attention import fused_forward

    joined = torch.empty(2, 4, 16, 24, dtype=torch.bfloat16)
    split = torch.empty(2, 16, 4, 24, dtype=torch.bfloat16).transpose(1, 2)
    value = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16)
    outs = [fused_forward(query, value)[0] for query in (joined, split)]
    assert [out.shape for out in outs] == [value.shape] * 2
    assert [out.is_contiguous() for out in outs] == [True, False]
    assert outs[1].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("learned", "kernel"), [(False, "FusedAttention"), (True, "EfficientAttention")])
def test_a_mask_that_is_learned_is_none_of_cudnns(monkeypatch: pytest.MonkeyPatch, *, learned: bool, kernel: str) -> None:
    """Swin's relative positions (sdp_utils_cpp.h, check_attn_mask_shape): windows of 49 are padded to 56, which is kept."""
    from zeroplan.trace import attention

    ran: list[Any] = []
    monkeypatch.setattr(attention, "_run", lambda function, query, *rest: ran.append((function.__name__, rest[-1])) or query)
    query = torch.empty(2, 4, 49, 8, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(1, 4, 49, 49, dtype=torch.bfloat16, device="meta", requires_grad=learned)
    attention.scaled_dot_product_attention(query, query, query, mask)
    ((name, kept),) = ran
    assert name == kernel
    assert kept.untyped_storage().nbytes() == 2 * 4 * 49 * (56 if learned else 49)
