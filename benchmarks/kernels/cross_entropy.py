"""The head and the loss of a language model on one device: whole logits, chunks of them, and Liger's fused form.

    python -m benchmarks.kernels.cross_entropy [--rows 8192] [--width 2048] [--vocab 128256] [--out FOLDER]

Each computes the mean cross entropy of ``x Wᵀ`` in bf16 and the gradients of `x` and W, which are held against fp32 products
first. Liger takes part where liger_kernel can be imported. Times are of forward and backward; the peak is what torch allocated
beside the inputs and both gradients.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.kernels.measure import machine, race, save
from zeroplan.core.losses import IGNORED_LABEL
from zeroplan_runtime.techniques.chunked_cross_entropy import LinearCrossEntropy
from zeroplan_runtime.techniques.fused_loss import causal_lm_loss

CHUNKS = (512, 1024, 2048, 4096)
_Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def forms() -> dict[str, _Loss]:
    """Return the loss functions of hidden states [rows, width], the weight [vocab, width] and labels [rows]."""

    def in_chunks(tokens: int) -> _Loss:
        def loss(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            count = labels.ne(IGNORED_LABEL).sum()
            found: torch.Tensor = LinearCrossEntropy.apply(x, weight, None, labels, count, IGNORED_LABEL, tokens, None)
            return found

        return loss

    def whole(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return causal_lm_loss(functional.linear(x, weight)[None], labels[None], len(weight), shift_labels=labels[None])

    made: dict[str, _Loss] = {
        "torch, logits in fp32": lambda x, w, labels: functional.cross_entropy(functional.linear(x, w).float(), labels),
        "ours, whole logits": whole,
        **{f"ours, {tokens} tokens at a time": in_chunks(tokens) for tokens in CHUNKS},
    }
    if importlib.util.find_spec("liger_kernel"):
        liger = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        made["liger_kernel"] = lambda x, w, labels: liger(w, x, labels)
    return made


def main() -> None:
    """Checks every form, then times them in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(given.rows, given.width, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(given.vocab, given.width, device=device) / given.width**0.5).bfloat16().requires_grad_()
    labels = torch.randint(0, given.vocab, (given.rows,), device=device)
    exact = _gradients(lambda a, w, one: functional.cross_entropy(a.float() @ w.float().t(), one), x, weight, labels)
    rows: dict[str, dict[str, float]] = {}
    for name, loss in forms().items():
        _reset(device)
        before = _allocated(device)
        found = _gradients(loss, x, weight, labels)
        results = sum(one.nbytes for one in found)
        peak = (torch.cuda.max_memory_allocated() - before - results) / 2**20 if device.type == "cuda" else float("nan")
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, exact, strict=True)]
        if max(errors) > 0.02:
            raise SystemExit(f"{name}: the loss and the gradients differ by {errors} of their norms")
        rows[name] = {"peak_mib": peak, "loss_error": errors[0], "x_error": errors[1], "weight_error": errors[2]}
    del exact, found

    def timed(loss: _Loss) -> Callable[[], object]:
        return lambda: _gradients(loss, x, weight, labels)

    size = 6.0 * given.rows * given.width * given.vocab  # of the three products, for a rate in FLOPs a second
    for name, times in race({name: (timed(loss), size) for name, loss in forms().items()}, device).items():
        rows[name] |= {"ms": times["ms"], "tflops": times["gb_per_s"] / 1e3}
    base = rows["ours, whole logits"]
    for name, row in rows.items():
        took, off = f"{row['ms']:9.2f} ms {row['ms'] / base['ms']:6.2f} x", f"dW {row['weight_error']:.1e}"
        print(f"{name:28s} {took} {row['peak_mib']:9.1f} MiB  {off}")
    shape = [given.rows, given.width, given.vocab]
    save("kernels_cross_entropy", {"machine": machine(device), "shape": shape, "rows": rows}, given.out)


def _gradients(
    loss: _Loss, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss and the gradients of `x` and `weight`."""
    value = loss(x, weight, labels)
    grad_x, grad_weight = torch.autograd.grad(value, (x, weight))
    return value.detach(), grad_x, grad_weight


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
