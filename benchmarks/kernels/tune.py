"""Finds the fastest launch configurations (threads, vector width, unrolling, grid, cache hints), for KERNEL_CONFIGS.

    python -m benchmarks.kernels.tune [--numel 400000000] [--out FOLDER]

Two rounds a kernel: configurations without hints first, then grids and hints around the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from itertools import product
from statistics import median

import torch

from benchmarks.kernels.measure import machine, save, seconds, start
from zeroplan_runtime import kernels
from zeroplan_runtime.kernels import cuda_backend
from zeroplan_runtime.kernels.cuda_backend import KERNEL_CONFIGS, KernelConfig

Row = tuple[float, KernelConfig]


def best_of(name: str, configs: Iterable[KernelConfig], call: Callable[[], object], size: float) -> list[Row]:
    """Times the call under each configuration; gigabytes a second and configuration, best first."""
    rows = []
    for config in dict.fromkeys(configs):
        KERNEL_CONFIGS[name] = config
        seconds(call, torch.device("cuda"), 2)
        rows.append((size / median(seconds(call, torch.device("cuda"), 9)) / 1e9, config))
    return sorted(rows, key=lambda row: -row[0])


def tune(
    name: str, call: Callable[[], object], size: float, grid: Iterable[KernelConfig], hints: Iterable[tuple[int, int]]
) -> list[Row]:
    """Run both rounds for one kernel and return them; leaves KERNEL_CONFIGS as it was."""
    before = KERNEL_CONFIGS[name]
    first = best_of(name, grid, call, size)
    near = [
        replace(config, blocks=blocks, load=load, store=store)
        for (_, config), blocks, (load, store) in product(first[:4], (0, 2, 4, 8, 16), hints)
    ]
    rows = sorted(first + best_of(name, near, call, size), key=lambda row: -row[0])
    KERNEL_CONFIGS[name] = before
    print(f"\n{name} (now {before})")
    for speed, config in [*rows[:6], *rows[-1:]]:
        print(f"  {speed:8.1f} GB/s  {config}")
    return rows


def copy_speed(size: int, device: torch.device) -> float:
    """Gigabytes a second, read and written, of a plain copy of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(seconds(lambda: target.copy_(source), device, 12)[2:]) / 1e9


def main() -> int:
    given, device = start(__doc__, tuned=False), torch.device("cuda")
    n = given.numel
    p, m, v = torch.randn(n, device=device), torch.randn(n, device=device) * 0.01, torch.rand(n, device=device) * 0.01
    grad, out = torch.randn(n, device=device).bfloat16(), torch.empty(n, dtype=torch.bfloat16, device=device)
    scalars = torch.tensor([0.0, 1.0, 0.999, 0.0], device=device)
    copy = copy_speed(14 * n, device)
    print(f"copy {copy:.1f} GB/s")

    def adamw() -> None:
        kernels.adamw(p, grad, m, v, lr=1e-3, step=10, param_out=out, scalars=scalars)

    def norm() -> None:
        cuda_backend.sum_of_squares(grad, scalars, accumulate=False)

    def cast() -> None:
        cuda_backend.cast(p, out, 1.0)

    configs = [
        KernelConfig(t, v, u, b)
        for t, v, u, b in product((128, 256, 512, 1024), (4, 8), (1, 2, 4), (0, 8))
        if t * v * u <= 8192
    ]
    reading = [KernelConfig(t, 8, u, b) for t, u, b in product((256, 512, 1024), (1, 2, 4, 8), (1, 2, 4)) if t * u <= 4096]
    hints = [(load, store) for load in (0, 1) for store in (0, 1)]
    rows = {
        "adam": tune("adam", adamw, 28.0 * n, configs, hints),
        "norm": tune("norm", norm, 2.0 * n, reading, [(0, 0), (1, 0)]),
        "cast": tune("cast", cast, 6.0 * n, configs, [(0, 0), (1, 1)]),
    }
    kept = {name: [{"gb_per_s": speed, **asdict(config)} for speed, config in found] for name, found in rows.items()}
    save("kernels_tune", {"machine": machine(device), "numel": n, "copy_gb_per_s": copy, "rows": kept}, given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
