"""AdamW in 8 and 4 bits on one GPU: the kernel beside bitsandbytes, torchao, torch's fused AdamW and a plain copy.

    python -m benchmarks.kernels.adamw_blockwise [--numel 400000000] [--out FOLDER] [--steps 600]

Correctness first: the kernel's bits are the torch path's. Then, of each optimizer that this machine has, the time of a step
and the bytes of its states on one fp32 tensor with an fp32 gradient, which all of them take; of ours also with a bf16 gradient
and a bf16 parameter written, as the runtime steps. Then the loss of a small language model after the same steps from the same
start. A peer that is missing is named and left out. Ratios are ours over a peer's: below 1 is faster, smaller or better.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.kernels.measure import Contender, machine, race, save, show, use_path
from benchmarks.kernels.tune import tune
from zeroplan_runtime import initialize, kernels
from zeroplan_runtime.kernels import backends, cuda_backend, torch_backend
from zeroplan_runtime.kernels.cuda_backend import KernelConfig

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FORMATS = {8: kernels.block_format(8, 256), 4: kernels.block_format(4, 128)}
#: Optimizers of other packages, by the name in the tables: bits, module and class.
PEERS = {
    "bitsandbytes 8-bit": (8, "bitsandbytes.optim", "AdamW8bit"),
    "torchao 8-bit": (8, "torchao.optim", "AdamW8bit"),
    "torchao 4-bit": (4, "torchao.optim", "AdamW4bit"),
}
TORCH = "torch fused, fp32 states"
VOCAB, WIDTH, LENGTH, BATCH = 256, 128, 64, 32

Made = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def states(n: int, bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeroed codes of both moments, and scales."""
    kept = FORMATS[bits]
    first, second = (torch.zeros(n // kept.codes_a_byte, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second, torch.zeros(2 * kept.blocks(n), device=device)


def step_ours(
    p: torch.Tensor,
    grad: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bits: int,
    number: int,
    out: torch.Tensor | None = None,
    scalars: torch.Tensor | None = None,
) -> None:
    """Step number `number` of the runtime's kernel; `kept` are :func:`states`."""
    first, second, scales = kept
    kernels.adamw_blockwise(p, grad, first, second, scales, FORMATS[bits], step=number, param_out=out, scalars=scalars, **HYPER)


def check(device: torch.device) -> None:
    """The kernel's bits are the torch path's after several steps, for every dtype of gradients and of what is written."""
    n = 256 * 5001
    start = torch.randn(n, device=device)
    for bits in FORMATS:
        for dtype, written in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, None)):
            grads = [(torch.randn(n, device=device) * 10 ** (torch.rand(n, device=device) * 6 - 6)).to(dtype) for _ in range(4)]
            made = []
            for path in (cuda_backend, torch_backend):
                use_path(path)
                p, kept = start.clone(), states(n, bits, device)
                out = None if written is None else torch.zeros(n, dtype=written, device=device)
                for i, grad in enumerate(grads):
                    step_ours(p, grad, kept, bits, i + 1, out)
                made.append((p, *kept, *(() if out is None else (out,))))
            use_path(None)
            same = all(torch.equal(a, b) for a, b in zip(*made, strict=True))
            assert same, f"kernel and torch path differ: {bits} bits, {dtype}"
    print("correct: bits of the torch path, 8 and 4 bits, fp32, bf16 and fp16 gradients")


def peers() -> dict[str, tuple[int, Made]]:
    """The other packages' optimizers that can be imported here; the others are named."""
    found: dict[str, tuple[int, Made]] = {}
    for name, (bits, module, kind) in PEERS.items():
        try:
            made = getattr(importlib.import_module(module), kind)
        except Exception as fault:  # not installed, or its libraries do not load
            print(f"{name} does not run here: {type(fault).__name__}: {str(fault)[:100]}")
            continue
        found[name] = (bits, partial(made, **HYPER))
    return found


def contender(made: Made, n: int, size: float, device: torch.device) -> tuple[Contender, int]:
    """A peer's step over one fp32 tensor of n elements, and the bytes of the states that its first step leaves."""
    leaf = nn.Parameter(torch.randn(n, device=device))
    leaf.grad = torch.randn(n, device=device)
    optimizer = made([leaf])
    before = torch.cuda.memory_allocated(device)
    optimizer.step()
    torch.cuda.synchronize(device)
    return (optimizer.step, size * n), torch.cuda.memory_allocated(device) - before


def tune_launches(n: int, device: torch.device) -> dict[str, Any]:
    """Finds the fastest launch shapes of both formats, with bf16 gradients and a bf16 parameter written; prints the best."""
    p, grad = torch.randn(n, device=device), torch.randn(n, device=device).bfloat16()
    out = torch.empty(n, dtype=torch.bfloat16, device=device)
    shapes = [
        KernelConfig(threads=t, unroll=u, blocks=b) for t, u, b in product((128, 256, 512, 1024), (1, 2), (1, 2, 3, 4, 6, 8))
    ]
    found = {}
    for bits in FORMATS:
        kept = states(n, bits, device)
        size = 12.0 * n + 2 * sum(t.numel() * t.element_size() for t in kept)
        call = partial(step_ours, p, grad, kept, bits, 10, out)
        rows = tune("adam_blockwise", call, size, shapes, [(load, store) for load in (0, 1) for store in (0, 1)])
        found[f"{bits}-bit"] = [{"gb_per_s": speed, **asdict(config)} for speed, config in rows[:10]]
    return found


def compare_steps(n: int, device: torch.device, others: dict[str, tuple[int, Made]]) -> dict[str, Any]:
    """Times a step of each and counts the bytes of its states; prints both."""
    made: dict[str, Contender] = {}
    held: dict[str, int] = {}
    source, target = torch.ones(7 * n, dtype=torch.uint8, device=device), torch.empty(7 * n, dtype=torch.uint8, device=device)
    made["copy"] = (lambda: target.copy_(source), 14.0 * n)
    p, scalars = torch.randn(n, device=device), torch.tensor([0.0, 1.0, 0.999, 0.0], device=device)
    grads = {dtype: torch.randn(n, device=device).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    out = torch.empty(n, dtype=torch.bfloat16, device=device)
    for bits in FORMATS:
        kept = states(n, bits, device)
        held[f"zeroplan {bits}-bit"] = sum(t.numel() * t.element_size() for t in kept)
        for label, grad, written in (("", grads[torch.float32], None), (", bf16", grads[torch.bfloat16], out)):
            size = 8.0 + grad.element_size() + (0 if written is None else 2) + 2 * held[f"zeroplan {bits}-bit"] / n
            made[f"zeroplan {bits}-bit{label}"] = (partial(step_ours, p, grad, kept, bits, 10, written, scalars), size * n)
    m, v = torch.zeros(n, device=device), torch.zeros(n, device=device)

    def whole() -> None:
        kernels.adamw(p, grads[torch.bfloat16], m, v, step=10, param_out=out, scalars=scalars, **HYPER)

    made["zeroplan fp32 states, bf16"] = (whole, 28.0 * n)
    made[TORCH], held[TORCH] = contender(lambda params: torch.optim.AdamW(params, fused=True, **HYPER), n, 28.0, device)
    for name, (bits, optimizer) in others.items():
        try:
            made[name], held[name] = contender(optimizer, n, 12.0 + 4 * bits / 8, device)
        except Exception as fault:  # its kernels do not run on this GPU
            print(f"{name} does not step here: {type(fault).__name__}: {str(fault)[:100]}")
    rows = race(made, device)
    show(f"one step of {n / 1e6:.0f} M parameters", rows, "copy")
    print("\nbytes of states a parameter")
    for name, count in held.items():
        print(f"  {name:38s} {count / n:7.4f}")
    return {"rows": rows, "state_bytes": held}


class Model(nn.Module):
    """A causal language model of two blocks over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
        self.blocks, self.norm = nn.ModuleList(layers), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of the next tokens; `tokens`: [batch, LENGTH + 1]."""
        x = self.embed(tokens[:, :-1]) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def batches(steps: int, device: torch.device) -> list[torch.Tensor]:
    """Text of a fixed random source: each token has four likely followers, which depend on it and the one before."""
    make = torch.Generator().manual_seed(1)
    followers = torch.randint(0, VOCAB, (VOCAB, 4), generator=make)
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=make)
        choice = (torch.rand(BATCH, LENGTH + 1, generator=make) ** 2 * 4).long()
        for i in range(2, LENGTH + 1):
            tokens[:, i] = followers[(tokens[:, i - 1] + 7 * (tokens[:, i - 2] % 3)) % VOCAB, choice[:, i]]
        found.append(tokens.to(device))
    return found


def final_loss(data: list[torch.Tensor], device: torch.device, *, ours: str = "", peer: Made | None = None) -> float:
    """The mean loss of the last fiftieth of the steps, from the same start: by the runtime's optimizer, or by a peer's."""
    torch.manual_seed(0)
    model = Model().to(device)
    losses = []
    if ours:
        section = {"type": ours, "params": {**HYPER, "betas": list(HYPER["betas"])}}
        config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "optimizer": section}
        engine, *_ = initialize(model=model, config={**config, "zero_optimization": {"stage": 0}}, device=device)
        for tokens in data:
            losses.append(engine.backward(engine(tokens)).detach())
            engine.step()
        engine.destroy()
    else:
        assert peer is not None
        optimizer = peer(list(model.parameters()))
        for tokens in data:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return float(torch.stack(losses[-max(1, len(losses) // 50) :]).mean())


def compare_losses(steps: int, device: torch.device, others: dict[str, tuple[int, Made]]) -> dict[str, float]:
    """Trains with each and prints the final losses beside that of torch's AdamW."""
    data = batches(steps, device)
    found = {TORCH: final_loss(data, device, peer=lambda params: torch.optim.AdamW(params, fused=True, **HYPER))}
    for kind in ("AdamW", "AdamW8bit", "AdamW4bit"):
        found[f"zeroplan {kind}"] = final_loss(data, device, ours=kind)
    for name, (_, made) in others.items():
        try:
            found[name] = final_loss(data, device, peer=made)
        except Exception as fault:
            print(f"{name} does not train here: {type(fault).__name__}: {str(fault)[:100]}")
    print(f"\nloss after {steps} steps")
    for name, loss in found.items():
        print(f"  {name:38s} {loss:.4f}  {loss / found[TORCH]:.4f} of torch's AdamW")
    return found


def ratios(found: dict[str, Any], losses: dict[str, float]) -> dict[str, dict[str, float]]:
    """Ours over each peer's of as many bits: milliseconds, bytes of states, loss."""
    made: dict[str, dict[str, float]] = {}
    for name, (bits, _, _) in PEERS.items():
        mine = f"zeroplan {bits}-bit"
        if name in found["rows"]:
            made[name] = {
                "ms": found["rows"][mine]["ms"] / found["rows"][name]["ms"],
                "state_bytes": found["state_bytes"][mine] / found["state_bytes"][name],
            }
        if name in losses:
            made.setdefault(name, {})["loss"] = losses[f"zeroplan AdamW{bits}bit"] / losses[name]
    print("\nours over a peer's")
    for name, row in made.items():
        print(f"  {name:38s} " + ", ".join(f"{key} {value:.3f}" for key, value in row.items()))
    return made


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=400_000_000)
    parser.add_argument("--steps", type=int, default=600, help="of the training whose loss is compared")
    parser.add_argument("--tune", action="store_true", help="check, then find the fastest launch shapes, and nothing else")
    parser.add_argument("--loss-only", action="store_true", help="compare losses alone, on any device")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    others = peers()
    if given.loss_only:
        compare_losses(given.steps, device, others)
        return 0
    if fault := backends.cuda_fault(0):
        print(f"the kernels do not run here: {fault}")
        return 2
    check(device)
    if given.tune:
        shapes = tune_launches(given.numel // 256 * 256, device)
        save("kernels_tune_blockwise", {"machine": machine(device), "numel": given.numel, "rows": shapes}, given.out)
        return 0
    found = compare_steps(given.numel // 256 * 256, device, others)
    losses = compare_losses(given.steps, device, others)
    result = {"machine": machine(device), "numel": given.numel, **found, "steps": given.steps, "losses": losses}
    save("kernels_adamw_blockwise", {**result, "ours_over_peers": ratios(found, losses)}, given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
