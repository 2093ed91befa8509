"""What Liger's fused losses of preferences allocate: DPO's, ORPO's, CPO's, SimPO's and KTO's, alone, over hidden states.

    python -m benchmarks.kernels.liger_preferences OUT.jsonl [--seconds 200]

A row a case: shapes, what is allocated before the loss (hidden states, the head's weight and labels), its peak in the forward,
what stays for the backward, and the peak of the backward. Each case runs three times, and the third is written: the first
compiles. Every allocation of the third forward of 1 MiB and more follows, in order. Needs a GPU, torch and liger-kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

#: Kind, samples (of pairs: both), tokens, width, words, dtype of the weight, whether autocast runs, a reference.
CASES = [
    ("dpo", 4, 512, 2048, 32000, "bf16", False, True),
    ("dpo", 2, 1024, 2048, 128256, "bf16", False, True),
    ("dpo", 8, 256, 1024, 50000, "bf16", False, True),
    ("dpo", 4, 512, 2048, 32000, "fp32", True, True),
    ("dpo", 4, 512, 2048, 32000, "bf16", False, False),
    ("orpo", 4, 512, 2048, 32000, "bf16", False, False),
    ("orpo", 2, 1024, 2048, 128256, "bf16", False, False),
    ("orpo", 4, 512, 2048, 32000, "fp32", True, False),
    ("simpo", 4, 512, 2048, 32000, "bf16", False, False),
    ("cpo", 4, 512, 2048, 32000, "bf16", False, False),
    ("kto", 4, 512, 2048, 32000, "bf16", False, True),
    ("kto", 2, 1024, 2048, 128256, "bf16", False, True),
]
_LEAST = 1 << 20


def loss_of(kind: str, reference: bool) -> Any:
    """Return Liger's module of a loss, as TRL made it."""
    from liger_kernel import chunked_loss

    names = {"dpo": "DPO", "orpo": "ORPO", "cpo": "CPO", "simpo": "SimPO", "kto": "KTO"}
    made = getattr(chunked_loss, f"LigerFusedLinear{names[kind]}Loss")
    return made(use_ref_model=reference) if kind in ("dpo", "kto") else made()


def run(case: tuple[Any, ...], device: Any) -> dict[str, Any]:
    """Run one case three times; return the row of the third."""
    import torch

    kind, samples, tokens, width, words, dtype, autocasts, reference = case
    of = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(words, width, dtype=of, device=device) * 0.02)
    other = weight.detach().clone() if reference else None
    labels = torch.randint(0, words, (samples, tokens), device=device)
    wanted = torch.arange(samples, device=device) % 2 == 0
    loss_module = loss_of(kind, reference)
    row: dict[str, Any] = {}
    for turn in range(3):
        weight.grad = None
        hidden = torch.randn(samples, tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        second = torch.randn(samples, tokens, width, dtype=torch.bfloat16, device=device) if reference else None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if turn == 2:
            torch.cuda.memory._record_memory_history(max_entries=20000, context=None)
        scope = torch.autocast("cuda", torch.bfloat16) if autocasts else contextlib.nullcontext()
        with scope:
            if kind == "kto":
                out = loss_module(hidden, weight, labels, preference_labels=wanted, ref_input=second, ref_weight=other)
            elif reference:
                out = loss_module(weight, hidden, labels, ref_input=second, ref_weight=other)
            else:
                out = loss_module(weight, hidden, labels)
            loss = out[0] if isinstance(out, tuple) else out
        torch.cuda.synchronize()
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        events = []
        if turn == 2:
            traces = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
            large = (one for one in traces if one["size"] >= _LEAST and one["action"] in ("alloc", "free_completed"))
            events = [(one["action"], one["size"]) for one in large]
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
        row = {
            "kind": kind,
            "samples": samples,
            "tokens": tokens,
            "width": width,
            "words": words,
            "dtype": dtype,
            "autocast": autocasts,
            "reference": reference,
            "before": before,
            "forward_peak": peak - before,
            "kept": after - before,
            "backward_peak": torch.cuda.max_memory_allocated() - before,
            "events": events,
        }
        del out, loss, hidden, second
    return row


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    import torch

    begun = time.monotonic()
    for case in CASES:
        if time.monotonic() - begun > args.seconds:
            break
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        try:
            row = run(case, torch.device("cuda"))
        except Exception as error:  # a case that Liger itself refuses
            row = {"kind": case[0], "error": f"{type(error).__name__}: {str(error)[:300]}"}
        row["gpu"], row["torch"] = torch.cuda.get_device_name(), torch.__version__
        with args.out.open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
