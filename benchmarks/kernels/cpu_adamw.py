"""AdamW on the CPU: the native routine beside torch's fused AdamW, DeepSpeedCPUAdam and a plain read-modify-write.

    python -m benchmarks.kernels.cpu_adamw [--numel 100000000] [--threads N] [--out FOLDER]

Targets: at least torch's and DeepSpeed's bandwidth, and within 15 % of the read-modify-write's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.measure import Contender, machine, race, save, show, use_path
from zeroplan_runtime import kernels
from zeroplan_runtime.kernels import native_backend, torch_backend

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TARGET = 0.85


def check() -> None:
    """The native routine's bits are the torch path's on every instruction set that this processor has."""
    n = 300_007
    start, grad = torch.randn(n), torch.randn(n).bfloat16()
    made = []
    for path, instructions in (
        (torch_backend, None),
        (native_backend, "plain"),
        (native_backend, "avx2"),
        (native_backend, "avx512"),
    ):
        if instructions and not native_backend.use_instructions(instructions):
            continue
        use_path(path)
        p, m, v, out = start.clone(), torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.bfloat16)
        for step in (1, 2, 3):
            kernels.adamw(p, grad, m, v, step=step, param_out=out, **HYPER)
        made.append((p, m, v, out))
    native_backend.use_instructions(None)
    use_path(None)
    assert all(torch.equal(a, b) for other in made[1:] for a, b in zip(made[0], other, strict=True))
    print(f"correct: the bits of the torch path; {native_backend.instructions()} in use")


def contenders(n: int) -> dict[str, Contender]:
    """Return the implementations that run here, by name."""
    p, m, v = torch.randn(n), torch.randn(n) * 0.01, torch.rand(n) * 0.01
    half, out = torch.randn(n).bfloat16(), torch.zeros(n, dtype=torch.bfloat16)
    leaf = torch.nn.Parameter(torch.randn(n))
    leaf.grad = wide = torch.randn(n)
    peer = torch.optim.AdamW([leaf], fused=True, **HYPER)
    made: dict[str, Contender] = {
        "read-modify-write": (lambda: p.mul_(1.0000001), 8.0 * n),
        "zeroplan bf16 gradient, bf16 out": (
            lambda: kernels.adamw(p, half, m, v, step=10, param_out=out, **HYPER),
            28.0 * n,
        ),
        "zeroplan fp32 gradient, no out": (lambda: kernels.adamw(p, wide, m, v, step=10, **HYPER), 28.0 * n),
        "torch fused, fp32 gradient, no out": (peer.step, 28.0 * n),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        theirs = DeepSpeedCPUAdam([leaf], **HYPER)
        theirs.step()
        made["DeepSpeedCPUAdam, fp32, no out"] = (theirs.step, 28.0 * n)
    except Exception as fault:  # not installed, or its extension does not build
        print(f"DeepSpeedCPUAdam does not run here: {type(fault).__name__}: {str(fault)[:100]}")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if native_backend.library() is None:
        print("libzeroplan_cpu is not built")
        return 2
    check()
    device = torch.device("cpu")
    rows = race(contenders(given.numel), device, rounds=5, times=3)
    show(f"AdamW on the CPU, {given.numel / 1e6:.0f} M parameters, {given.threads} threads", rows, "read-modify-write")
    share = rows["zeroplan bf16 gradient, bf16 out"]["gb_per_s"] / rows["read-modify-write"]["gb_per_s"]
    peers = {name: row["gb_per_s"] for name, row in rows.items() if name.startswith(("torch", "DeepSpeed"))}
    best = max(peers, key=lambda name: peers[name])
    ratio = rows["zeroplan fp32 gradient, no out"]["gb_per_s"] / peers[best]
    print(
        f"share of read-modify-write {share:.1%}, target {TARGET:.0%}; the same work as {best}: {ratio:.2f} times its bandwidth"
    )
    result = {"machine": machine(device), "instructions": native_backend.instructions(), "numel": given.numel, "rows": rows}
    save("kernels_cpu_adamw", {**result, "share_of_rmw": share, "ratio_to_best_peer": ratio}, given.out)
    return 0 if share >= TARGET and ratio >= 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
