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
