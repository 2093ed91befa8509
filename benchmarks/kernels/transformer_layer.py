"""BERT-large's layers, forward and backward, on one GPU: transformers' own, eager and compiled, and the fused ones.

    python -m benchmarks.kernels.transformer_layer [--shapes 64x128,16x512] [--layers 24] [--out FOLDER]

First the fused layers' outputs and gradients are held against fp32 ones by transformers, beside the errors of transformers' own
bf16, and each flag's against those without. Then forward and backward of all layers are timed in turn, with dropout, in bf16.
Last comes memory for each flag, with few layers: what is kept at the forward's end, and the peak, beside what a trace plans.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.kernels.measure import machine, race, save
from zeroplan.tape.expanded import ExpandedTape, Mark, Op
from zeroplan.tape.options import TraceOptions
from zeroplan.tape.sizes import KernelDevice, align
from zeroplan.trace.example import trace_example
from zeroplan_runtime.techniques.transformer import DeepSpeedTransformerLayer, use_transformer_layer

FLAGS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")
#: What is measured for memory: by name, the flags, and with all scores where attention is not fused.
MEMORY: dict[str, dict[str, bool]] = {
    "no flag": {},
    **{flag: {flag: True} for flag in FLAGS},
    "all flags": dict.fromkeys(FLAGS, True),
    "all scores": {"fused_attention": False},
    "all scores, attn_dropout_checkpoint": {"fused_attention": False, "attn_dropout_checkpoint": True},
}
#: The allocator rounds each block up to a multiple of these bytes.
_BLOCK = 512


class Layers(nn.Module):
    """BERT-large's encoder over hidden states; its output's mean stands for a loss."""

    def __init__(self, layers: int, *, dropout: float, attention: str = "sdpa") -> None:
        super().__init__()
        import transformers

        config = transformers.BertConfig(
            hidden_size=1024,
            num_hidden_layers=layers,
            num_attention_heads=16,
            intermediate_size=4096,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            attn_implementation=attention,
        )
        bert = transformers.BertModel(config, add_pooling_layer=False)
        self.layer = bert.encoder.layer

    def forward(self, hidden_states: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sum of the output times `weights`, both [samples, tokens, hidden]."""
        for layer in self.layer:
            hidden_states = layer(hidden_states)
        return (hidden_states * weights).sum()


def main() -> None:
    """Check the layers, time them, and measure their memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="64x128,16x512", help="samples x tokens, with commas between")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--memory-layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = [tuple(int(one) for one in shape.split("x")) for shape in given.shapes.split(",")]
    checks = check(device)
    rows: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    for samples, tokens in shapes:
        rows += timed(samples, tokens, given, device)
        memory += remembered(samples, tokens, given, device)
    shape = {"layers": given.layers, "memory_layers": given.memory_layers, "dropout": given.dropout}
    content = {"machine": machine(device), "shape": shape, "checks": checks, "rows": rows, "memory": memory}
    save("kernels_transformer_layer", content, given.out)


def batch(samples: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Return hidden states and the weights of the loss; numbers drawn on the host, so that they are the same anywhere."""
    generator = torch.Generator().manual_seed(1)
    made = (torch.randn(samples, tokens, 1024, generator=generator).to(device, dtype) for _ in range(2))
    hidden, weights = made
    return hidden.requires_grad_(), weights


def results(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the loss, and the gradients of hidden states and parameters."""
    loss = model(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, [inputs[0], *model.parameters()])]


# ---- results ---------------------------------------------------------------------------------------------------------


def check(device: torch.device) -> dict[str, Any]:
    """Hold values, gradients and flags of two layers against fp32.

    Raises:
        SystemExit: when they differ.
    """
    torch.manual_seed(0)
    exact = Layers(2, dropout=0.0).to(device)
    for name, param in exact.named_parameters():
        if "LayerNorm" in name or name.endswith("bias"):  # not what they begin as
            nn.init.normal_(param, mean=1.0 if name.endswith("LayerNorm.weight") else 0.0, std=0.1)
    own = Layers(2, dropout=0.0).to(device, torch.bfloat16)
    fused = Layers(2, dropout=0.0).to(device, torch.bfloat16)
    for model in (own, fused):
        model.load_state_dict(exact.state_dict())
    restore = use_transformer_layer(fused)
    inputs, wide = batch(4, 96, device), batch(4, 96, device, torch.float32)
    loss = fused(*inputs)
    loss.backward()
    grad_hidden = inputs[0].grad
    exact(*wide).backward()
    plain = batch(4, 96, device)
    own(*plain).backward()
    found: dict[str, Any] = {"hidden": {"fused": _error(grad_hidden, wide[0].grad), "own": _error(plain[0].grad, wide[0].grad)}}
    for name, one, theirs, other in (*_pairs(fused.layer[1], own.layer[1], exact.layer[1]),):
        found[name] = {"fused": _error(one, other), "own": _error(theirs, other)}
    for name, errors in found.items():
        print(f"gradient of {name:10s} error over its norm: {errors['fused']:.1e}, of transformers' layers {errors['own']:.1e}")
        if not errors["fused"] < max(2e-2, 1.5 * errors["own"]):
            raise SystemExit(f"the gradient of {name} differs from fp32's by {errors['fused']} of its norm")
    restore()
    found["flags"] = flags_agree(device)
    return found


def _pairs(fused: Any, own: Any, exact: Any) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gradients of each kind of parameter: the fused layer's, transformers' own and fp32's."""

    def of(layer: Any) -> list[torch.Tensor]:
        attention = layer.attention.self
        qkv = [attention.query, attention.key, attention.value]
        modules = [layer.attention.output.dense, layer.attention.output.LayerNorm, layer.intermediate.dense]
        modules += [layer.output.dense, layer.output.LayerNorm]
        made = [torch.cat([each.weight.grad for each in qkv]), torch.cat([each.bias.grad for each in qkv])]
        return made + [grad for module in modules for grad in (module.weight.grad, module.bias.grad)]

    attention = ("attn_qkvw", "attn_qkvb", "attn_ow", "attn_ob", "attn_nw", "attn_nb")
    names = (*attention, "inter_w", "inter_b", "output_w", "output_b", "norm_w", "norm_b")
    ours = [getattr(fused, name).grad for name in names]
    return list(zip(names, ours, of(own), of(exact), strict=True))


def flags_agree(device: torch.device) -> dict[str, float]:
    """Return how far each flag's gradients, with dropout, are from those without: 0 but for the inverted norms.

    Raises:
        SystemExit: when they differ by more.
    """
    torch.manual_seed(0)
    model = Layers(2, dropout=0.1).to(device, torch.bfloat16)
    use_transformer_layer(model)
    inputs = batch(4, 96, device)
    worst: dict[str, float] = {}
    for fused in (True, False):
        base: list[torch.Tensor] = []
        for flags in itertools.product((False, True), repeat=3):
            options = dict(zip(FLAGS, flags, strict=True))
            _set(model, **options, fused_attention=fused)
            torch.manual_seed(5)
            found = results(model, inputs)
            base = base or found
            said = "+".join(name for name, on in options.items() if on) or "no flag"
            off = max(_error(one, other) for one, other in zip(found, base, strict=True))
            worst[said] = max(worst.get(said, 0.0), off)
            # Fused backwards may add up in any order.
            if not off <= (2e-2 if options["normalize_invertible"] else 5e-3 if fused else 1e-3):
                raise SystemExit(f"{said}: gradients differ by {off} of their norms from those without flags")
    print("flags beside none: " + "  ".join(f"{name} {off:.1e}" for name, off in worst.items()), flush=True)
    return worst


def _set(model: nn.Module, **options: bool) -> None:
    for module in model.modules():
        if isinstance(module, DeepSpeedTransformerLayer):
            for name, value in options.items():
                setattr(module.config, name, value)


def _error(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    assert one is not None
    assert other is not None
    return float((one.float() - other.float()).norm() / other.float().norm())


# ---- time ------------------------------------------------------------------------------------------------------------


def timed(samples: int, tokens: int, given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Time forward and backward of all layers; return a row for each contender."""
    torch._dynamo.reset()
    inputs = batch(samples, tokens, device)
    made = contenders(given, device)

    def once(model: nn.Module) -> Callable[[], object]:
        return lambda: results(model, inputs)

    # Of the products alone, forward and backward: 24 H² FLOPs a token and layer and 4 H tokens for scores, three times.
    flops = 3.0 * samples * tokens * given.layers * (24 * 1024**2 + 4 * 1024 * tokens)
    found = race({name: (once(model), flops) for name, model in made.items()}, device, rounds=3, times=4)
    best = min(row["ms"] for name, row in found.items() if name.startswith("transformers, compiled"))
    eager = found["transformers, sdpa"]["ms"]
    rows = []
    print(f"\n{samples} × {tokens} tokens, {given.layers} layers, forward and backward")
    for name, row in found.items():
        one = {"samples": samples, "tokens": tokens, "name": name, "ms": row["ms"], "ms_least": row["ms_least"]}
        one |= {"tflops": row["gb_per_s"] / 1e3, "of_eager": row["ms"] / eager, "of_compiled": row["ms"] / best}
        print(
            f"  {name:34s} {one['ms']:8.2f} ms  {one['tflops']:6.1f} TFLOP/s"
            f"  {one['of_eager']:5.2f} × eager  {one['of_compiled']:5.2f} × compiled",
            flush=True,
        )
        rows.append(one)
    return rows


def contenders(given: argparse.Namespace, device: torch.device) -> dict[str, nn.Module]:
    """Return the models that are timed, by name."""

    def model(attention: str = "sdpa", *, compiled: bool = False, options: dict[str, Any] | None = None) -> nn.Module:
        with device:
            made = Layers(given.layers, dropout=given.dropout, attention=attention)
        made = made.to(torch.bfloat16).train()
        if options is not None:
            use_transformer_layer(made, **options)
        if compiled:
            for layer in made.layer:
                layer.compile(dynamic=False)
        return made

    return {
        "transformers, eager attention": model("eager"),
        "transformers, sdpa": model(),
        "transformers, compiled, sdpa": model(compiled=True),
        "fused": model(options={}),
        "fused, all flags": model(options=dict.fromkeys(FLAGS, True)),
        "fused, compiled": model(options={}, compiled=True),
    }


# ---- memory ----------------------------------------------------------------------------------------------------------


def remembered(samples: int, tokens: int, given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measure what each flag keeps, beside the plan; on a CPU the plan alone."""
    with device:
        model = Layers(given.memory_layers, dropout=given.dropout).to(torch.bfloat16).train()
    use_transformer_layer(model)
    inputs = batch(samples, tokens, device)
    rows = []
    print(f"\n{samples} × {tokens} tokens, {given.memory_layers} layers: MiB kept at the forward's end, and at the peak")
    for name, options in MEMORY.items():
        _set(model, **{**dict.fromkeys(FLAGS, False), "fused_attention": True, **options})
        row: dict[str, Any] = {"samples": samples, "tokens": tokens, "name": name}
        planned = planned_bytes(model, inputs)
        row |= {"planned_kept_mib": planned[0] / 2**20, "planned_peak_mib": planned[1] / 2**20}
        said = f"  {name:38s} planned {row['planned_kept_mib']:9.2f} {row['planned_peak_mib']:9.2f}"
        if device.type == "cuda":
            measured = measured_bytes(model, inputs)
            row |= {"kept_mib": measured[0] / 2**20, "peak_mib": measured[1] / 2**20}
            row |= {"kept_error": planned[0] / measured[0] - 1, "peak_error": planned[1] / measured[1] - 1}
            said += f"  measured {row['kept_mib']:9.2f} ({row['kept_error']:+.2%})"
            said += f" {row['peak_mib']:9.2f} ({row['peak_error']:+.2%})"
        print(said, flush=True)
        rows.append(row)
    return rows


def measured_bytes(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Return bytes that are allocated beside model and inputs at the forward's end, and at the peak of both passes."""
    for _ in range(2):  # the first run compiles kernels and takes cuBLAS's workspace
        model.zero_grad(set_to_none=True)
        inputs[0].grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(*inputs)
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del loss
    model.zero_grad(set_to_none=True)
    inputs[0].grad = None
    return kept, peak


def planned_bytes(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Return the same by a trace of the module, without its run; the batch, which the trace makes, is left out."""
    hidden, weights = inputs
    tape = trace_example(model, {"hidden_states": hidden, "weights": weights}, TraceOptions())
    expanded = tape.expand(hidden.shape[0], hidden.shape[1], None, device=KernelDevice())
    return _at_forward_end(expanded)


def _at_forward_end(tape: ExpandedTape) -> tuple[int, int]:
    sizes: dict[int, int] = {}
    alive = base = kept = peak = 0
    for op, arg, aux, _, _ in tape.events():
        if op == Op.ALLOC:
            sizes[arg] = align(aux, _BLOCK)
            alive += sizes[arg]
        elif op == Op.FREE:
            alive -= sizes.pop(arg, 0)
        elif op == Op.MARK and arg == Mark.FORWARD_BEGIN:
            base = alive
        elif op == Op.MARK and arg == Mark.FORWARD_END:
            kept = alive - base
        peak = max(peak, alive - base)
    return kept, peak


if __name__ == "__main__":
    main()
