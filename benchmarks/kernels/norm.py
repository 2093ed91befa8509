"""The gradient norm and the casts on one GPU, beside torch's and a plain copy.

    python -m benchmarks.kernels.norm [--numel 400000000] [--out FOLDER]

Target: the norm of bf16 gradients reads at 90 % of the bandwidth, at least, that a copy of as many bytes reaches.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.measure import Contender, machine, race, save, show, start, use_tuned
from zeroplan_runtime import kernels

TARGET = 0.90


def check(device: torch.device) -> None:
    """The norm against fp64, twice with the same bits; an infinity is seen; casts as torch's."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grad = torch.randn(7_000_003, device=device).to(dtype)
        scalars = torch.zeros(16, device=device)
        norms = [float(kernels.grad_norm(grad, scalars, may_skip=True)) for _ in range(2)]
        want = float(grad.double().norm())
        assert norms[0] == norms[1]
        assert abs(norms[0] - want) < 1e-6 * want, (norms, want)
        assert float(scalars[kernels.SKIP]) == 0.0
        grad[5_000_001] = float("inf")
        kernels.grad_norm(grad, scalars, may_skip=True)
        assert float(scalars[kernels.SKIP]) == 1.0
    wide = torch.randn(7_000_003, device=device)
    assert torch.equal(kernels.cast(wide, torch.empty_like(wide, dtype=torch.bfloat16)), wide.bfloat16())
    print("correct: within 1e-6 of fp64, the same bits twice, infinities seen; casts as torch's")


def contenders(n: int, device: torch.device) -> dict[str, Contender]:
    """Return the implementations that run here, by name."""
    wide = torch.randn(n, device=device)
    half = wide.bfloat16()
    back = torch.empty_like(wide)
    out = torch.empty_like(half)
    scalars = torch.zeros(16, device=device)
    return {
        "copy": (lambda: out.copy_(half), 4.0 * n),
        "zeroplan grad_norm bf16": (lambda: kernels.grad_norm(half, scalars, max_norm=1.0, may_skip=True), 2.0 * n),
        "torch vector_norm bf16": (lambda: torch.linalg.vector_norm(half, dtype=torch.float32), 2.0 * n),
        "zeroplan grad_norm fp32": (lambda: kernels.grad_norm(wide, scalars, max_norm=1.0, may_skip=True), 4.0 * n),
        "torch vector_norm fp32": (lambda: torch.linalg.vector_norm(wide), 4.0 * n),
        "zeroplan cast fp32 to bf16": (lambda: kernels.cast(wide, out), 6.0 * n),
        "torch cast fp32 to bf16": (lambda: out.copy_(wide), 6.0 * n),
        "zeroplan cast bf16 to fp32": (lambda: kernels.cast(half, back), 6.0 * n),
        "torch cast bf16 to fp32": (lambda: back.copy_(half), 6.0 * n),
    }


def main() -> int:
    given, device = start(__doc__), torch.device("cuda")
    use_tuned(given.tuned)
    check(device)
    rows = race(contenders(given.numel, device), device)
    show(f"Norm and casts, {given.numel / 1e6:.0f} M elements", rows, "copy")
    share = rows["zeroplan grad_norm bf16"]["gb_per_s"] / rows["copy"]["gb_per_s"]
    print(f"norm: share of the copy's bandwidth {share:.1%}, target {TARGET:.0%}")
    result = {"machine": machine(device), "numel": given.numel, "rows": rows, "share_of_copy": share, "target": TARGET}
    save("kernels_norm", result, given.out)
    return 0 if share >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
