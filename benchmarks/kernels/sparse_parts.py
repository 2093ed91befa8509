"""Where the time of block-sparse attention goes on one GPU: FlexAttention, kernels of lists, dense parts, and launch shapes.

python -m benchmarks.kernels.sparse_parts [--seconds 85] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.kernels import sparse_attention as bench
from benchmarks.kernels.measure import call_cost, machine, race, save
from zeroplan_runtime.techniques.sparse_attention import block_attention as blocks
from zeroplan_runtime.techniques.sparse_attention.block_attention import BlockLists, Shape, block_attention
from zeroplan_runtime.techniques.sparse_attention.tiles import SparseScores

_KINDS = ("fixed", "fixed_window16", "bigbird", "bigbird_64", "bslongformer", "sliding_window", "fixed_causal")


def main() -> None:
    """Runs every section that the time allows, and saves after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=85.0)
    parser.add_argument("--sections", default="checks,dense_parts,listed,present,shapes")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.batch, given.heads, given.width, given.tile, given.autotune = 1, 16, 64, 128, False
    begin = time.monotonic()
    found: dict[str, Any] = {"machine": machine(torch.device("cuda"))}
    sections = {one.__name__: one for one in (checks, dense_parts, listed, present, shapes)}
    for section in (sections[name] for name in given.sections.split(",")):
        if time.monotonic() - begin > given.seconds - 10:
            break
        one: dict[str, Any] = {}
        found[section.__name__] = one
        try:
            section(given, one, begin + given.seconds)
        except Exception as fault:  # the other sections still tell something
            one["fault"] = f"{type(fault).__name__}: {fault}"[:1500]
        found["seconds"] = time.monotonic() - begin
        print(section.__name__, one if len(str(one)) < 3000 else str(one)[:3000], flush=True)
        save("sparse_parts", found, given.out)


def lists_of(kind: str, tokens: int, given: Any) -> BlockLists | None:
    """Return a kind's lists on the GPU."""
    config, causal = bench.config_of(kind, given.heads)
    lists = BlockLists.of(SparseScores.make(config, tokens, causal=causal), shares=config.moves_keys)
    return lists and lists.to(torch.device("cuda"))


def checks(given: Any, found: dict[str, Any], until: float) -> None:
    """Hold results against fp32 under the layout's mask."""
    for kind, tokens in itertools.product(_KINDS, (1024, 1000)):
        config, causal = bench.config_of(kind, given.heads)
        lists = lists_of(kind, tokens, given)
        assert lists is not None
        padding = None
        if lists.shared is None:
            padding = torch.ones(given.batch, tokens, dtype=torch.bool, device="cuda")
            padding[-1, tokens * 3 // 4 :] = False
        mask = SparseScores.make(config, tokens, causal=causal).dense_mask().cuda().unsqueeze(0)
        if padding is not None:
            mask = mask & padding[:, None, None]
        inputs = bench.states(tokens, given)
        kept = torch.ones(given.batch, 1, tokens, 1, device="cuda") if padding is None else padding[:, None, :, None]
        try:
            ours = bench.gradients(partial(block_attention, lists=lists, padding=padding), inputs, kept)
        except Exception as fault:
            found[f"{kind} {tokens}"] = f"{type(fault).__name__}: {fault}"[:600]
            continue
        wide = [each.detach().float().requires_grad_(i < 3) for i, each in enumerate(inputs)]
        exact = bench.gradients(partial(bench.plain, mask=mask), wide, kept)
        errors = [float((one.float() - other).norm() / other.norm()) for one, other in zip(ours, exact, strict=True)]
        found[f"{kind} {tokens}"] = [round(error, 5) for error in errors]


def _both(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], object]:
    return partial(bench.gradients, attend, inputs)


def kernels(call: Callable[[], object], times: int = 4) -> dict[str, float]:
    """Return milliseconds of GPU time a call takes, by kernel."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    for event in profile.events():
        if str(event.device_type).endswith("CUDA"):
            spent[event.name[:90]] += event.device_time / 1e3 / times
    return {name: round(ms, 4) for name, ms in sorted(spent.items(), key=lambda item: -item[1])[:14]}


def listed(given: Any, found: dict[str, Any], until: float) -> None:
    """Time the kernels of lists beside dense SDPA."""
    device = torch.device("cuda")
    for tokens in (16384, 4096, 8192):
        inputs = bench.states(tokens, given)
        contenders: dict[str, Any] = {
            "sdpa": functional.scaled_dot_product_attention,
            "sdpa causal": partial(functional.scaled_dot_product_attention, is_causal=True),
        }
        for kind in _KINDS:
            if (lists := lists_of(kind, tokens, given)) is not None:
                contenders[kind] = partial(block_attention, lists=lists)
        working = {}
        for name, attend in contenders.items():
            try:
                bench.gradients(attend, inputs)
                working[name] = attend
            except Exception as fault:
                found[f"{tokens} {name}"] = f"{type(fault).__name__}: {fault}"[:600]
        both = race({name: (_both(attend, inputs), 1.0) for name, attend in working.items()}, device, rounds=3)
        forward = race({n: (partial(bench.forward_alone, a, inputs), 1.0) for n, a in working.items()}, device, rounds=3)
        for name, attend in working.items():
            one: dict[str, Any] = {"ms": both[name]["ms"], "forward_ms": forward[name]["ms"]}
            one["peak_mib"] = bench.peak_of(attend, inputs) / 2**20
            one["host_us"] = call_cost(_both(attend, inputs), 20)
            if tokens == 16384:
                one["kernels"] = kernels(_both(attend, inputs))
            found[f"{tokens} {name}"] = one
            print(tokens, name, one, flush=True)


def dense_parts(given: Any, found: dict[str, Any], until: float) -> None:
    """Time dense attention of all queries with a part of the keys, and of few queries, by torch's operators."""
    device = torch.device("cuda")
    tokens, scale = 16384, given.width**-0.5
    query, key, value, grad = bench.states(tokens, given)
    query, key, value = (each.detach() for each in (query, key, value))
    calls: dict[str, tuple[Callable[[], object], float]] = {}
    for rows, keys in ((tokens, tokens // 4), (tokens, 128), (128, tokens)):
        q, g = (each[:, :, :rows] for each in (query, grad.detach()))
        k, v = (each.transpose(1, 2)[:, :: tokens // keys].contiguous().transpose(1, 2) for each in (key, value))
        for name in ("cudnn", "flash"):
            if name == "cudnn":
                forward = partial(blocks.dense_forward, q, k, v, scale)
                out, lse, *random = forward()
                backward: Callable[[], object] = partial(blocks.dense_backward, g, q, k, v, out, lse, random, scale)
            else:
                operator = torch.ops.aten._scaled_dot_product_flash_attention
                forward = partial(operator, q, k, v, 0.0, False, False, scale=scale)
                out, lse, a, b, c, d, e, f, _ = forward()
                backward = partial(
                    torch.ops.aten._scaled_dot_product_flash_attention_backward,
                    g, q, k, v, out, lse, a, b, c, d, 0.0, False, e, f, scale=scale,
                )  # fmt: skip
            wide = (q[:, :1, :512].float() @ k[:, :1].float().transpose(2, 3) * scale).logsumexp(-1)
            found[f"{name} {rows}x{keys} lse off"] = float((lse[:, :1, :512] - wide).abs().max())
            found[f"{name} {rows}x{keys} lse"] = [list(lse.shape), str(lse.dtype), list(out.stride())]
            backward()
            calls |= {f"{name} {rows}x{keys} forward": (forward, 1.0), f"{name} {rows}x{keys} backward": (backward, 1.0)}
    for name, row in race(calls, device, rounds=3).items():
        found[name] = row["ms"]


def present(given: Any, found: dict[str, Any], until: float) -> None:
    """Profile FlexAttention's way."""
    for tokens, kind in ((16384, "bigbird"), (16384, "fixed"), (4096, "bigbird")):
        if time.monotonic() > until - 25:
            return
        scores = bench.scores_of(kind, tokens, given)
        call = _both(partial(bench.ours, scores=scores, mask=scores.block_mask(), given=given), bench.states(tokens, given))
        call()
        row: dict[str, Any] = {"host_us": call_cost(call, 20), "kernels": kernels(call)}
        found[f"{tokens} {kind}"] = row


def shapes(given: Any, found: dict[str, Any], until: float) -> None:
    """Try steps, warps and stages for each kernel of lists."""
    tokens = 16384
    tried = {
        "bigbird": ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4)),
        "bigbird_64": ((64, 4), (64, 8), (128, 8)),
    }
    for kind, launched in tried.items():
        inputs = bench.states(tokens, given)
        lists = lists_of(kind, tokens, given)
        assert lists is not None
        for name, (step, count), stages in itertools.product(("forward", "queries", "keys"), launched, (2, 1)):
            if time.monotonic() > until - 3:
                return
            if stages == 1 and (step, count) not in ((64, 2), (64, 4)):
                continue
            own = blocks.SHAPES[name][lists.block]
            blocks.SHAPES[name][lists.block] = Shape(step, count, stages)
            try:
                attend = partial(block_attention, lists=lists)
                call = partial(bench.forward_alone, attend, inputs) if name == "forward" else _both(attend, inputs)
                spent = kernels(call, 3)
                entry = {"forward": "forward", "queries": "backward_queries", "keys": "backward_keys"}[name]
                found[f"{kind} {name} step {step} warps {count} stages {stages}"] = spent.get(entry, spent)
            except Exception as fault:
                found[f"{kind} {name} step {step} warps {count} stages {stages}"] = str(fault)[:200]
            finally:
                blocks.SHAPES[name][lists.block] = own


if __name__ == "__main__":
    main()
