"""AdamW on one GPU: the kernel beside torch's fused AdamW, DeepSpeed's FusedAdam and a plain copy of as many bytes.

    python -m benchmarks.kernels.adamw [--numel 400000000] [--out FOLDER]

Target: at 400 M parameters with bf16 gradients at least 94 % of the copy's bandwidth. Bytes are those that must move: fp32
parameter and two states read and written, the gradient read, the 16-bit parameter written.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernels.measure import Contender, call_cost, machine, race, save, show, start, use_path, use_tuned
from zeroplan_runtime import kernels
from zeroplan_runtime.kernels import cuda_backend, torch_backend

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TARGET = 0.94
#: The contender that the target speaks of.
OURS = "zeroplan bf16 gradient, bf16 out"


def check(device: torch.device) -> None:
    """The kernel's bits are the torch path's, and three steps stay within 1e-6 of torch's own AdamW."""
    n = 3_000_017
    start = torch.randn(n, device=device)
    grads = [torch.randn(n, device=device).bfloat16() for _ in range(3)]
    made = []
    for path in (cuda_backend, torch_backend):
        use_path(path)
        p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        out = torch.full((n,), float("nan"), dtype=torch.bfloat16, device=device)
        for i, grad in enumerate(grads):
            kernels.adamw(p, grad, m, v, step=i + 1, param_out=out, **HYPER)
        made.append((p, m, v, out))
    use_path(None)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True)), "kernel and torch path differ"
    leaf = torch.nn.Parameter(start.clone())
    peer = torch.optim.AdamW([leaf], fused=True, **HYPER)
    for grad in grads:
        leaf.grad = grad.float()
        peer.step()
    drift = float(((leaf.data - made[0][0]) / start.abs().clamp(min=1)).abs().max())
    assert drift < 1e-6, f"off torch's AdamW by {drift}"
    print(f"correct: bits of the torch path; {drift:.1e} from torch's fused AdamW after 3 steps")


def contenders(n: int, device: torch.device) -> dict[str, Contender]:
    """Return the implementations that run here, by name."""
    p, m, v = torch.randn(n, device=device), torch.randn(n, device=device) * 0.01, torch.rand(n, device=device) * 0.01
    scalars = torch.tensor([0.0, 1.0, 0.999, 0.0], device=device)
    made: dict[str, Contender] = {}
    half = 14 * n // 4
    source, target = torch.ones(half, device=device), torch.empty(half, device=device)
    made["copy"] = (lambda: target.copy_(source), 28.0 * n)
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for grad_name, out_name in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"), ("fp32", "no")):
        grad = torch.randn(n, device=device).to(types[grad_name])
        out = torch.empty(n, dtype=types[out_name], device=device) if out_name in types else None
        size = 24.0 + grad.element_size() + (2 if out is not None else 0)

        def ours(grad: torch.Tensor = grad, out: torch.Tensor | None = out) -> None:
            kernels.adamw(p, grad, m, v, step=10, param_out=out, scalars=scalars, **HYPER)

        made[f"zeroplan {grad_name} gradient, {out_name} out"] = (ours, size * n)
    leaf = torch.nn.Parameter(p.clone())
    leaf.grad = torch.randn(n, device=device)
    peer = torch.optim.AdamW([leaf], fused=True, **HYPER)
    made["torch fused, fp32 gradient, no out"] = (peer.step, 28.0 * n)
    try:
        from deepspeed.ops.adam import FusedAdam

        fused = FusedAdam([leaf], **HYPER)
        fused.step()
        made["DeepSpeed FusedAdam, fp32, no out"] = (fused.step, 28.0 * n)
    except Exception as fault:  # not installed, or its extension does not build
        print(f"DeepSpeed's FusedAdam does not run here: {type(fault).__name__}: {str(fault)[:100]}")
    return made


def main() -> int:
    given, device = start(__doc__), torch.device("cuda")
    use_tuned(given.tuned)
    check(device)
    rows = race(contenders(given.numel, device), device)
    show(f"AdamW, {given.numel / 1e6:.0f} M parameters", rows, "copy")
    share = rows[OURS]["gb_per_s"] / rows["copy"]["gb_per_s"]
    small = torch.zeros(1024, device=device)
    cost = call_cost(lambda: kernels.adamw(small, small, small.clone(), small, step=1, **HYPER))
    cost -= call_cost(small.clone)
    print(f"share of the copy's bandwidth {share:.1%}, target {TARGET:.0%}; a call costs the host {cost:.1f} µs")
    result = {"machine": machine(device), "numel": given.numel, "rows": rows, "share_of_copy": share, "target": TARGET}
    save("kernels_adamw", {**result, "call_us": cost}, given.out)
    return 0 if share >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
