"""Attention over lists of blocks, in Triton: each block of queries meets the blocks of keys that its layout has, and no others.

Note [Pieces]
    A program computes a piece: one block with up to some number of the blocks that it meets. Blocks that meet more, as global
    rows and columns do, are several pieces, so that no program takes much longer than the others; each writes a partial
    result to a slot of its own, and another kernel adds these up. A row of pieces is (block, first, count, slot): `count`
    entries of the list from `first` on, and the slot, or -1 where the piece is the block's only one. Lists hold a row a layout.

Scores are kept in base 2 within the kernels; the log-sum-exps that they read and write are natural.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


def _jit(kernel: Callable[..., Any]) -> Any:
    return triton.jit(kernel)


@_jit
def _piece(pieces: tl.tensor, layout: tl.tensor, number: tl.tensor) -> tl.tensor:
    at = pieces + (layout * tl.num_programs(0) + number) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@_jit
def _met(
    entries: tl.tensor, start: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, STEP: tl.constexpr, tokens: tl.tensor
) -> tl.tensor:
    """Returns the tokens of the list's next blocks, and which of them exist."""
    within = start + tl.arange(0, STEP)
    index = within // BLOCK
    exists = index < count
    found = tl.load(entries + index, mask=exists, other=0) * BLOCK + within % BLOCK
    return found, exists & (found < tokens)


@_jit
def forward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    part_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    pieces_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    q_b: tl.tensor,
    q_h: tl.tensor,
    q_t: tl.tensor,
    k_b: tl.tensor,
    k_h: tl.tensor,
    k_t: tl.tensor,
    v_b: tl.tensor,
    v_h: tl.tensor,
    v_t: tl.tensor,
    o_b: tl.tensor,
    o_h: tl.tensor,
    o_t: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    entries_row: tl.tensor,
    slots: tl.tensor,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    STARTED: tl.constexpr,
    BY_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes output and log-sum-exp of a piece's queries; where STARTED, from those of other keys that stand there."""
    scale = tl.cast(scale, tl.float32)  # inductor hands it over in 64 bits
    sample, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    layout = head if BY_HEAD else 0
    block, first, count, slot = _piece(pieces_ptr, layout, tl.program_id(0))
    if block < 0:
        return
    entries = entries_ptr + layout * entries_row + first
    dims = tl.arange(0, WIDTH)
    here = dims < width
    rows = block * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    used = inside[:, None] & here[None, :]
    q = tl.load(q_ptr + sample * q_b + head * q_h + rows[:, None] * q_t + dims[None, :], mask=used, other=0.0)
    k_base = k_ptr + sample * k_b + (head // group) * k_h
    v_base = v_ptr + sample * v_b + (head // group) * v_h
    o_at = out_ptr + sample * o_b + head * o_h + rows[:, None] * o_t + dims[None, :]
    lse_at = lse_ptr + tl.program_id(1).to(tl.int64) * tokens + rows
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    if STARTED:
        alone = slot < 0
        most = tl.load(lse_at, mask=inside & alone, other=float("-inf")) * _LOG2E
        total += tl.where(alone, 1.0, 0.0)
        acc = tl.load(o_at, mask=used & alone, other=0.0).to(tl.float32)
    for start in range(0, count * BLOCK, STEP):
        cols, exists = _met(entries, start, count, BLOCK, STEP, tokens)
        if PADDED:
            exists = exists & (tl.load(padding_ptr + sample * tokens + cols, mask=exists, other=0) != 0)
        taken = exists[:, None] & here[None, :]
        k = tl.load(k_base + cols[:, None] * k_t + dims[None, :], mask=taken, other=0.0)
        v = tl.load(v_base + cols[:, None] * v_t + dims[None, :], mask=taken, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
        counts = exists[None, :]
        if CAUSAL:
            counts = counts & (rows[:, None] >= cols[None, :])
        scores = tl.where(counts, scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(most - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        most = new
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    lse = tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf")) * _LN2
    if slot < 0:
        tl.store(o_at, acc.to(out_ptr.dtype.element_ty), mask=used)
        tl.store(lse_at, lse, mask=inside)
    else:
        at = tl.program_id(1).to(tl.int64) * slots + slot
        tl.store(part_ptr + (at * BLOCK + tl.arange(0, BLOCK))[:, None] * WIDTH + dims[None, :], acc)
        tl.store(part_lse_ptr + at * BLOCK + tl.arange(0, BLOCK), lse)


@_jit
def merge_outputs(
    part_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    long_ptr: tl.tensor,
    o_b: tl.tensor,
    o_h: tl.tensor,
    o_t: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STARTED: tl.constexpr,
    BY_HEAD: tl.constexpr,
) -> None:
    """Puts together the partial outputs of a block of several pieces; `long_ptr` holds (block, first slot, slots)."""
    sample, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    at = long_ptr + ((head if BY_HEAD else 0) * tl.num_programs(0) + tl.program_id(0)) * 3
    block, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if block < 0:
        return
    dims, lines = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    rows = block * BLOCK + lines
    inside = rows < tokens
    used = inside[:, None] & (dims < width)[None, :]
    o_at = out_ptr + sample * o_b + head * o_h + rows[:, None] * o_t + dims[None, :]
    lse_at = lse_ptr + tl.program_id(1).to(tl.int64) * tokens + rows
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    if STARTED:
        most = tl.load(lse_at, mask=inside, other=0.0) * _LOG2E
        total += 1.0
        acc = tl.load(o_at, mask=used, other=0.0).to(tl.float32)
    base = tl.program_id(1).to(tl.int64) * slots + first
    for number in range(count):
        line = (base + number) * BLOCK + lines
        lse = tl.load(part_lse_ptr + line) * _LOG2E
        new = tl.maximum(most, lse)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, weight = tl.exp2(most - safe), tl.exp2(lse - safe)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + tl.load(part_ptr + line[:, None] * WIDTH + dims[None, :]) * weight[:, None]
        most = new
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    tl.store(o_at, acc.to(out_ptr.dtype.element_ty), mask=used)
    lse = tl.where(some, most + tl.log2(tl.where(some, total, 1.0)), float("-inf")) * _LN2
    tl.store(lse_at, lse, mask=inside)


@_jit
def backward_queries(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    part_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    pieces_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    q_b: tl.tensor,
    q_h: tl.tensor,
    q_t: tl.tensor,
    k_b: tl.tensor,
    k_h: tl.tensor,
    k_t: tl.tensor,
    v_b: tl.tensor,
    v_h: tl.tensor,
    v_t: tl.tensor,
    o_b: tl.tensor,
    o_h: tl.tensor,
    o_t: tl.tensor,
    g_b: tl.tensor,
    g_h: tl.tensor,
    g_t: tl.tensor,
    dq_b: tl.tensor,
    dq_h: tl.tensor,
    dq_t: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    entries_row: tl.tensor,
    slots: tl.tensor,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    STARTED: tl.constexpr,
    BY_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes the gradient of a piece's queries, and each query's output times its gradient, summed (`delta`)."""
    scale = tl.cast(scale, tl.float32)  # inductor hands it over in 64 bits
    sample, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    layout = head if BY_HEAD else 0
    block, first, count, slot = _piece(pieces_ptr, layout, tl.program_id(0))
    if block < 0:
        return
    entries = entries_ptr + layout * entries_row + first
    dims = tl.arange(0, WIDTH)
    here = dims < width
    rows = block * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    used = inside[:, None] & here[None, :]
    q = tl.load(q_ptr + sample * q_b + head * q_h + rows[:, None] * q_t + dims[None, :], mask=used, other=0.0)
    grad = tl.load(grad_ptr + sample * g_b + head * g_h + rows[:, None] * g_t + dims[None, :], mask=used, other=0.0)
    out = tl.load(out_ptr + sample * o_b + head * o_h + rows[:, None] * o_t + dims[None, :], mask=used, other=0.0)
    line = tl.program_id(1).to(tl.int64) * tokens + rows
    lse = tl.load(lse_ptr + line, mask=inside, other=0.0) * _LOG2E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)  # a query that sees no key
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + line, delta, mask=inside)
    k_base = k_ptr + sample * k_b + (head // group) * k_h
    v_base = v_ptr + sample * v_b + (head // group) * v_h
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, count * BLOCK, STEP):
        cols, exists = _met(entries, start, count, BLOCK, STEP, tokens)
        if PADDED:
            exists = exists & (tl.load(padding_ptr + sample * tokens + cols, mask=exists, other=0) != 0)
        taken = exists[:, None] & here[None, :]
        k = tl.load(k_base + cols[:, None] * k_t + dims[None, :], mask=taken, other=0.0)
        v = tl.load(v_base + cols[:, None] * v_t + dims[None, :], mask=taken, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2E)
        counts = exists[None, :]
        if CAUSAL:
            counts = counts & (rows[:, None] >= cols[None, :])
        weights = tl.exp2(tl.where(counts, scores, float("-inf")) - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[:, None])
        acc += tl.dot(grad_scores.to(k.dtype), k, input_precision=PRECISION)
    acc = acc * scale
    if slot < 0:
        dq_at = dq_ptr + sample * dq_b + head * dq_h + rows[:, None] * dq_t + dims[None, :]
        if STARTED:
            acc += tl.load(dq_at, mask=used, other=0.0).to(tl.float32)
        tl.store(dq_at, acc.to(dq_ptr.dtype.element_ty), mask=used)
    else:
        at = (tl.program_id(1).to(tl.int64) * slots + slot) * BLOCK + tl.arange(0, BLOCK)
        tl.store(part_ptr + at[:, None] * WIDTH + dims[None, :], acc)


@_jit
def backward_keys(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    part_k_ptr: tl.tensor,
    part_v_ptr: tl.tensor,
    padding_ptr: tl.tensor,
    pieces_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    q_b: tl.tensor,
    q_h: tl.tensor,
    q_t: tl.tensor,
    k_b: tl.tensor,
    k_h: tl.tensor,
    k_t: tl.tensor,
    v_b: tl.tensor,
    v_h: tl.tensor,
    v_t: tl.tensor,
    g_b: tl.tensor,
    g_h: tl.tensor,
    g_t: tl.tensor,
    dk_b: tl.tensor,
    dk_h: tl.tensor,
    dk_t: tl.tensor,
    dv_b: tl.tensor,
    dv_h: tl.tensor,
    dv_t: tl.tensor,
    scale: tl.tensor,
    key_heads: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    entries_row: tl.tensor,
    slots: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    PADDED: tl.constexpr,
    BY_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Computes the gradients of a piece's keys and values, over all heads that share them."""
    scale = tl.cast(scale, tl.float32)  # inductor hands it over in 64 bits
    sample, key_head = (tl.program_id(1) // key_heads).to(tl.int64), tl.program_id(1) % key_heads
    layout = key_head if BY_HEAD else 0
    block, first, count, slot = _piece(pieces_ptr, layout, tl.program_id(0))
    if block < 0:
        return
    entries = entries_ptr + layout * entries_row + first
    dims = tl.arange(0, WIDTH)
    here = dims < width
    cols = block * BLOCK + tl.arange(0, BLOCK)
    inside = cols < tokens
    used = inside[:, None] & here[None, :]
    k = tl.load(k_ptr + sample * k_b + key_head * k_h + cols[:, None] * k_t + dims[None, :], mask=used, other=0.0)
    v = tl.load(v_ptr + sample * v_b + key_head * v_h + cols[:, None] * v_t + dims[None, :], mask=used, other=0.0)
    seen = inside
    if PADDED:
        seen = seen & (tl.load(padding_ptr + sample * tokens + cols, mask=inside, other=0) != 0)
    acc_k = tl.zeros([BLOCK, WIDTH], tl.float32)
    acc_v = tl.zeros([BLOCK, WIDTH], tl.float32)
    for one in tl.static_range(GROUP):
        head = key_head * GROUP + one
        q_base = q_ptr + sample * q_b + head * q_h
        g_base = grad_ptr + sample * g_b + head * g_h
        line = (sample * key_heads * GROUP + head) * tokens
        for start in range(0, count * BLOCK, STEP):
            rows, exists = _met(entries, start, count, BLOCK, STEP, tokens)
            taken = exists[:, None] & here[None, :]
            q = tl.load(q_base + rows[:, None] * q_t + dims[None, :], mask=taken, other=0.0)
            grad = tl.load(g_base + rows[:, None] * g_t + dims[None, :], mask=taken, other=0.0)
            lse = tl.load(lse_ptr + line + rows, mask=exists, other=float("inf")) * _LOG2E
            lse = tl.where(lse == float("-inf"), float("inf"), lse)
            delta = tl.load(delta_ptr + line + rows, mask=exists, other=0.0)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * _LOG2E)
            counts = seen[:, None] & exists[None, :]
            if CAUSAL:
                counts = counts & (rows[None, :] >= cols[:, None])
            weights = tl.exp2(tl.where(counts, scores, float("-inf")) - lse[None, :])
            acc_v += tl.dot(weights.to(grad.dtype), grad, input_precision=PRECISION)
            grad_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            grad_scores = weights * (grad_weights - delta[None, :])
            acc_k += tl.dot(grad_scores.to(q.dtype), q, input_precision=PRECISION)
    acc_k = acc_k * scale
    if slot < 0:
        dk_at = dk_ptr + sample * dk_b + key_head * dk_h + cols[:, None] * dk_t + dims[None, :]
        dv_at = dv_ptr + sample * dv_b + key_head * dv_h + cols[:, None] * dv_t + dims[None, :]
        tl.store(dk_at, acc_k.to(dk_ptr.dtype.element_ty), mask=used)
        tl.store(dv_at, acc_v.to(dv_ptr.dtype.element_ty), mask=used)
    else:
        at = (tl.program_id(1).to(tl.int64) * slots + slot) * BLOCK + tl.arange(0, BLOCK)
        tl.store(part_k_ptr + at[:, None] * WIDTH + dims[None, :], acc_k)
        tl.store(part_v_ptr + at[:, None] * WIDTH + dims[None, :], acc_v)


@_jit
def sum_parts(
    part_ptr: tl.tensor,
    out_ptr: tl.tensor,
    long_ptr: tl.tensor,
    o_b: tl.tensor,
    o_h: tl.tensor,
    o_t: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    STARTED: tl.constexpr,
    BY_HEAD: tl.constexpr,
) -> None:
    """Adds up the partial gradients of a block of several pieces; `long_ptr` holds (block, first slot, slots)."""
    sample, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    at = long_ptr + ((head if BY_HEAD else 0) * tl.num_programs(0) + tl.program_id(0)) * 3
    block, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if block < 0:
        return
    dims, lines = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    rows = block * BLOCK + lines
    used = (rows < tokens)[:, None] & (dims < width)[None, :]
    o_at = out_ptr + sample * o_b + head * o_h + rows[:, None] * o_t + dims[None, :]
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    if STARTED:
        acc = tl.load(o_at, mask=used, other=0.0).to(tl.float32)
    base = tl.program_id(1).to(tl.int64) * slots + first
    for number in range(count):
        line = (base + number) * BLOCK + lines
        acc += tl.load(part_ptr + line[:, None] * WIDTH + dims[None, :])
    tl.store(o_at, acc.to(out_ptr.dtype.element_ty), mask=used)
