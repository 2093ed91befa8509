"""Block-sparse attention on one GPU, beside dense attention by torch's fused kernels and eager attention.

    python -m benchmarks.kernels.sparse_attention [--lengths 4096,8192,16384] [--kinds fixed,bigbird] [--tile 128] [--autotune]

First every kind's output and gradients are held against fp32 attention under its layout's mask, with padding and a length that
fills no tile. Then forward and backward are timed in turn at each length, in bf16; peaks are what torch allocated beside the
inputs. Last come sequences some multiples longer than one whose eager attention sets the memory: which of them fit in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.measure import machine, race, save
from zeroplan_runtime.techniques import sparse_attention
from zeroplan_runtime.techniques.sparse_attention import SparsityConfig
from zeroplan_runtime.techniques.sparse_attention.attention import tiled_attention
from zeroplan_runtime.techniques.sparse_attention.block_attention import BlockLists, block_attention, lists_for_kernels
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

#: Tokens at which results are checked; the second fills neither a tile nor a block.
CHECKED = (1024, 1000)
MULTIPLES = (10, 20, 40)
_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

#: Class, its arguments, and whether the model is causal.
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "fixed": ("Fixed", {}, False),
    "fixed_window16": ("Fixed", {"num_local_blocks": 16}, False),
    "fixed_causal": ("Fixed", {"attention": "unidirectional"}, True),
    "bigbird": ("BigBird", {"seed": 0}, False),
    "bigbird_64": ("BigBird", {"seed": 0, "block": 64}, False),
    "fixed_patterns": ("Fixed", {"different_layout_per_head": True, "num_different_global_patterns": 4}, False),
    "fixed_horizontal": ("Fixed", {"horizontal_global_attention": True}, False),
    "bslongformer": ("BSLongformer", {}, False),
    "variable": ("Variable", {"num_random_blocks": 1, "seed": 0}, False),
    "sliding_window": ("LocalSlidingWindow", {}, True),
}


def main() -> None:
    """Checks every kind, then times them beside dense attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", default="4096,8192,16384")
    parser.add_argument("--kinds", default="fixed,fixed_window16,fixed_causal,bigbird,bigbird_64")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--flex", default="fixed,bigbird", help="kinds that FlexAttention computes, too, at the longest length")
    parser.add_argument("--autotune", action="store_true", help="try several kernels of FlexAttention for each shape")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels run on a GPU alone, and there is none")
    lengths, kinds = [int(one) for one in given.lengths.split(",")], given.kinds.split(",")
    checks = {kind: check(kind, given) for kind in kinds}
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        rows += timed(tokens, kinds, given)
    longest = longer(min(lengths), kinds, given)
    shape = {name: getattr(given, name) for name in ("batch", "heads", "width", "tile", "autotune")}
    content = {"machine": machine(torch.device("cuda")), "shape": shape, "checks": checks, "rows": rows, "longer": longest}
    save("kernels_sparse_attention", content, given.out)


def config_of(kind: str, heads: int) -> tuple[SparsityConfig, bool]:
    """Return the sparsity of a kind, and whether it is causal."""
    name, arguments, causal = KINDS[kind]
    return getattr(sparse_attention, f"{name}SparsityConfig")(heads, **arguments), causal


def scores_of(kind: str, tokens: int, given: argparse.Namespace) -> SparseScores:
    """Return a kind's scores as a GPU attends them."""
    config, causal = config_of(kind, given.heads)
    scores = SparseScores.make(config, tokens, causal=causal, tile=given.tile)
    return scores.for_kernels(queries=config.moves_queries, keys=config.moves_keys).to(torch.device("cuda"))


def lists_of(kind: str, tokens: int, given: argparse.Namespace) -> BlockLists | None:
    """Return a kind's lists for the GPU; None where tiles are computed."""
    config, causal = config_of(kind, given.heads)
    scores = SparseScores.make(config, tokens, causal=causal, tile=given.tile)
    return lists_for_kernels(config, scores, torch.device("cuda"), shares_keys=False)


def attend_of(kind: str, tokens: int, given: argparse.Namespace, padding: torch.Tensor | None = None) -> _Attend:
    """Return the attention of a kind, as a model has it."""
    lists = lists_of(kind, tokens, given)
    if lists is not None and lists.hides(padding):
        return partial(block_attention, lists=lists, padding=padding)
    scores = scores_of(kind, tokens, given)
    return partial(ours, scores=scores, mask=scores.block_mask(padding), given=given)


def flex_of(kind: str, tokens: int, given: argparse.Namespace) -> _Attend:
    """Return FlexAttention with the mask that it makes itself of the layout, as a user would write it."""
    from torch.nn.attention.flex_attention import create_block_mask

    config, causal = config_of(kind, given.heads)
    made = SparseScores.make(config, tokens, causal=causal).to(torch.device("cuda"))
    table, block = made.table[0], made.block

    def counts(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = table[q // block, k // block]
        return found & (q >= k) if causal else found

    mask = create_block_mask(counts, None, None, tokens, tokens, device="cuda")
    return partial(ours, scores=made, mask=mask, given=given)


def states(tokens: int, given: argparse.Namespace) -> list[torch.Tensor]:
    """Return query, key, value and the output's gradient [batch, heads, tokens, width], laid out as a model's projections."""
    shape = (given.batch, tokens, given.heads, given.width)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    return [each.requires_grad_(i < 3) for i, each in enumerate(made)]


def check(kind: str, given: argparse.Namespace) -> dict[str, float]:
    """Hold output and gradients against fp32; return the greatest errors over a norm.

    Raises:
        SystemExit: when they differ.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    worst: dict[str, float] = {}
    for tokens in CHECKED:
        config, causal = config_of(kind, given.heads)
        padding = torch.ones(given.batch, tokens, dtype=torch.bool, device="cuda")
        lists = lists_of(kind, tokens, given)
        if lists is None or lists.hides(padding):  # dense kernels get whole samples alone
            padding[-1, tokens * 3 // 4 :] = False
        mask = SparseScores.make(config, tokens, causal=causal).dense_mask().cuda().unsqueeze(0) & padding[:, None, None]
        inputs = states(tokens, given)
        kept = padding[:, None, :, None]  # what queries of padding see is of no use
        attend = attend_of(kind, tokens, given, None if bool(padding.all()) else padding)
        found = gradients(attend, inputs, kept)
        exact = gradients(
            partial(plain, mask=mask), [each.detach().float().requires_grad_(i < 3) for i, each in enumerate(inputs)], kept
        )
        for name, one, other in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
            error = float((one.float() - other).norm() / other.norm())
            worst[name] = max(worst.get(name, 0.0), error)
    print(f"{kind:18s} checked: " + "  ".join(f"{name} {error:.1e}" for name, error in worst.items()), flush=True)
    if not max(worst.values()) < 0.02:
        raise SystemExit(f"{kind}: results differ from fp32's by {worst} of their norms")
    return worst


def ours(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scores: SparseScores,
    mask: Any,
    given: argparse.Namespace,
) -> torch.Tensor:
    """Return block-sparse attention."""
    return tiled_attention(query, key, value, scores, mask, autotune=given.autotune)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return attention with all scores in memory, as transformers' eager attention computes it."""
    weights = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if mask is not None:
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
    return functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backend: SDPBackend | None, causal: bool
) -> torch.Tensor:
    """Return torch's fused attention by one kernel, or by the one that torch picks."""
    if backend is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def gradients(attend: _Attend, inputs: list[torch.Tensor], kept: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the output and the gradients of query, key and value; rows where `kept` is not are left out."""
    query, key, value, grad = inputs
    out = attend(query, key, value)
    used = grad if kept is None else grad * kept
    found = torch.autograd.grad(out, (query, key, value), used.to(out.dtype))
    return [out.detach() if kept is None else out.detach() * kept, *found]


def timed(tokens: int, kinds: list[str], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time forward and backward at one length; return a row for each contender."""
    torch._dynamo.reset()
    inputs = states(tokens, given)
    causals = sorted({KINDS[kind][2] for kind in kinds})
    contenders: dict[str, tuple[_Attend, bool, float]] = {}
    for causal in causals:
        after = " causal" if causal else ""
        for name, backend in (("sdpa", None), ("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            contenders[f"{name}{after}"] = (partial(dense, backend=backend, causal=causal), causal, 1.0)
    contenders["eager"] = (plain, False, 1.0)
    for kind in kinds:
        contenders[kind] = (attend_of(kind, tokens, given), KINDS[kind][2], share_of(kind, tokens, given))
    if tokens == max(int(one) for one in given.lengths.split(",")):
        for kind in filter(None, given.flex.split(",")):
            contenders[f"flex {kind}"] = (flex_of(kind, tokens, given), KINDS[kind][2], 1.0)
    rows: dict[str, dict[str, Any]] = {}
    for name, (attend, causal, share) in list(contenders.items()):
        try:
            gradients(attend, inputs)  # compiled now, and workspaces made
            peak = peak_of(attend, inputs)
        except RuntimeError as fault:
            print(f"{tokens:7,d} {name:18s} does not run: {str(fault).splitlines()[0][:80]}")
            del contenders[name]
            torch.cuda.empty_cache()
            continue
        rows[name] = {"tokens": tokens, "name": name, "causal": causal, "share": share, "peak": peak}
    device = torch.device("cuda")
    both = race({name: (partial(gradients, contenders[name][0], inputs), 1.0) for name in rows}, device)
    forward = race({name: (partial(forward_alone, contenders[name][0], inputs), 1.0) for name in rows}, device)
    for name, row in rows.items():
        row |= {"ms": both[name]["ms"], "forward_ms": forward[name]["ms"]}
    for name, row in rows.items():
        after = " causal" if row["causal"] else ""
        row["faster_than"] = {
            one: rows[one + after]["ms"] / row["ms"] for one in ("sdpa", "flash", "cudnn") if one + after in rows
        }
        ratios = "  ".join(f"{one} {ratio:5.2f} x" for one, ratio in row["faster_than"].items())
        took = f"{row['ms']:9.3f} ms ({row['forward_ms']:8.3f} forward)"
        print(f"{tokens:7,d} {name:18s} {took} {row['peak'] / 2**20:9.1f} MiB  share {row['share']:6.2%}  {ratios}", flush=True)
    return list(rows.values())


def share_of(kind: str, tokens: int, given: argparse.Namespace) -> float:
    """Return the share of the scores that exist, or that tiles compute."""
    lists = lists_of(kind, tokens, given)
    if lists is None:
        scores = scores_of(kind, tokens, given)
        return scores.computed_tiles / scores.tiles[0][0].numel()
    return (lists.met + (0 if lists.shared is None else len(lists.shared))) / tokens


def forward_alone(attend: _Attend, inputs: list[torch.Tensor]) -> None:
    """Run the forward without gradients."""
    with torch.no_grad():
        attend(*inputs[:3])


def peak_of(attend: _Attend, inputs: list[torch.Tensor]) -> int:
    """Return the most bytes that a forward and backward allocate beside their inputs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(attend, inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def longer(tokens: int, kinds: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Return which multiples of a length take no more memory than eager attention takes at that length."""

    def peak(length: int, attend: _Attend) -> int:
        inputs = states(length, given)
        gradients(attend, inputs)
        return peak_of(attend, inputs) + sum(each.nbytes for each in inputs)

    budget = peak(tokens, plain)
    found: dict[str, Any] = {"tokens": tokens, "eager": budget, "kinds": {}}
    for kind in kinds:
        torch._dynamo.reset()
        peaks: dict[int, int] = {}
        for times in MULTIPLES:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            attend = attend_of(kind, tokens * times, given)
            tables = torch.cuda.memory_allocated() - before
            peaks[times] = peak(tokens * times, attend) + tables
            if peaks[times] > budget:
                break
        within = max((times for times, size in peaks.items() if size <= budget), default=0)
        found["kinds"][kind] = {"peaks": peaks, "within": within}
        shown = ", ".join(f"{times} x {size / 2**20:.0f} MiB" for times, size in peaks.items())
        print(
            f"eager takes {budget / 2**20:.0f} MiB at {tokens:,}; {kind}: {shown}: at least {within} x as long fits", flush=True
        )
    return found


if __name__ == "__main__":
    main()
