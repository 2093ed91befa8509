"""What a Llama's step cannot do without: its products at the card's own rate, and the bytes of everything else.

The products and the attention of a step are run by themselves on the same card, each at its size. Of what is beside them only
the bytes count: every input read once, every output written once, at the rate of a large copy on that card. A fusion that
saves an output lowers no bound here: what one block's kernels have to hand on is named in :func:`least_bytes`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.step.case import SHAPES

_TIMES = 10
#: Sets of factors that a product takes in turn, so that none is found in the card's cache.
_SETS = 3
_HALF = 2  # bytes of an element of activations, 16-bit parameters and gradients
_WIDE = 4  # of a master or a state


def products_of(shape: str, tokens: int) -> list[tuple[str, int, int, int]]:
    """Return the linear layers of one forward: name, outputs, inputs, and how often a step has them; all over `tokens` rows."""
    config = SHAPES[shape]
    width, middle, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    return [
        ("query", queries, width, layers),
        ("key, value", keys, width, 2 * layers),
        ("output", width, queries, layers),
        ("gate, up", middle, width, 2 * layers),
        ("down", width, middle, layers),
        ("head", config["vocab_size"], width, 1),
    ]


def least_products(shape: str, micro: int, seq: int, device: Any, *, checkpointing: bool, within: bool) -> dict[str, Any]:
    """Time each product and the attention by itself.

    Args:
        shape: a Llama's of :data:`SHAPES`.
        micro: samples of a micro batch.
        seq: tokens of a sample.
        device: where.
        checkpointing: blocks run their forwards twice.
        within: the second time without the down projection, which the backward does not read.

    Returns:
        Milliseconds of a step's ``products_ms`` and ``attention_ms``, ``tflops`` of the products, and a row a kind.
    """
    import torch

    tokens, rows, products, flops = micro * seq, [], 0.0, 0.0
    for name, outputs, inputs, times in products_of(shape, tokens):
        in_block = name != "head"
        again = checkpointing and in_block and not (within and name == "down")
        makes = {
            "forward": ((tokens, inputs), (inputs, outputs)),
            "grad x": ((tokens, outputs), (outputs, inputs)),
            "grad w": ((outputs, tokens), (tokens, inputs)),
        }
        for kind, (left, right) in makes.items():
            count = times * (2 if kind == "forward" and again else 1)
            ms = _product_ms(left, right, kind, device)
            work = 2.0 * tokens * inputs * outputs
            rows.append({"product": name, "of": kind, "times": count, "ms": round(ms, 4), "tflops": round(work / ms / 1e9, 1)})
            products += count * ms
            flops += count * work
    forward, backward = _attention_ms(shape, micro, seq, device)
    layers = SHAPES[shape]["num_hidden_layers"]
    attention = layers * (forward * (2 if checkpointing else 1) + backward)
    rows += [
        {"product": "attention", "of": kind, "times": layers, "ms": round(ms, 4)}
        for kind, ms in (("forward", forward), ("backward", backward))
    ]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "products_ms": round(products, 3),
        "attention_ms": round(attention, 3),
        "tflops": round(flops / products / 1e9, 1),
        "rows": rows,
    }


def _product_ms(left: tuple[int, int], right: tuple[int, int], kind: str, device: Any) -> float:
    """Multiply as a linear layer does: weights lie [out, in], and of `grad w` the first factor is a transpose."""
    import torch

    def made(shape: tuple[int, int], *, turned: bool) -> Any:
        # In place of torch.randn, which makes fp32 first where the generator has no other kernel.
        size = (shape[1], shape[0]) if turned else shape
        tensor = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
        return tensor.t() if turned else tensor

    sets = [(made(left, turned=kind == "grad w"), made(right, turned=kind == "forward")) for _ in range(_SETS)]
    out = torch.empty(left[0], right[1], dtype=torch.bfloat16, device=device)
    return median_ms([lambda a=a, b=b: torch.mm(a, b, out=out) for a, b in sets], device)  # type: ignore[misc]


def _attention_ms(shape: str, micro: int, seq: int, device: Any) -> tuple[float, float]:
    """Time the fused causal attention, forward and backward, over keys and values that several heads share."""
    import torch
    from torch.nn import functional

    config = SHAPES[shape]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v = (
        torch.empty(micro, n, seq, width, dtype=torch.bfloat16, device=device).normal_().requires_grad_()
        for n in (heads, groups, groups)
    )

    def forward() -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    out = forward()
    grad = torch.empty_like(out).normal_()

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return median_ms([forward], device), median_ms([backward], device)


def copy_rate(device: Any) -> float:
    """Return bytes a second of a large copy on the device, read and written."""
    import torch

    size = 1 << 30 if device.type == "cuda" else 1 << 24
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.fill_(1)
    return 2e3 * size / median_ms([lambda: target.copy_(source)], device)


def median_ms(calls: list[Callable[[], Any]], device: Any) -> float:
    """Return the median milliseconds of a call; calls take turns, many in a row between two clocks."""
    import torch

    def run(times: int) -> None:
        for n in range(times):
            calls[n % len(calls)]()

    run(2 * len(calls))
    found: list[float] = []
    for _ in range(5):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(_TIMES)
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / _TIMES)
        else:
            clock = time.perf_counter()
            run(1)
            found.append((time.perf_counter() - clock) * 1e3)
    return statistics.median(found)


def least_bytes(shape: str, micro: int, seq: int, *, ranks: int, checkpointing: bool, stage: int) -> dict[str, int]:
    """Return the fewest bytes that each kind of kernel beside products and attention moves in a step, on one rank.

    Each count names tensors of [tokens, width of the kind], once for each time that one is read or written.
    """
    config = SHAPES[shape]
    tokens, width, middle, layers = micro * seq, config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    vocab, again = config["vocab_size"], 2 if checkpointing else 1
    head = config.get("head_dim") or width // config["num_attention_heads"]
    heads = head * (config["num_attention_heads"] + config["num_key_value_heads"])
    block = sum(out * inputs * times for name, out, inputs, times in products_of(shape, tokens) if name != "head")
    tied = config.get("tie_word_embeddings", False)
    params = block + vocab * width * (1 if tied else 2) + (2 * layers + 1) * width
    own = params // ranks
    # Forward, two a block: the residual and what is added are read, their sum and the norm's result written. Backward: the sum,
    # the gradient of the result and that of the residual are read, one gradient is written.
    norms = 2 * layers * tokens * width * _HALF * (4 * again + 4)
    rotary = layers * tokens * heads * _HALF * (2 * again + 2)  # read and written, both ways
    # Forward: gate and up are read, their product written. Backward: both and the gradient are read, two gradients written.
    swiglu = layers * tokens * middle * _HALF * (3 * again + 5)
    loss = tokens * vocab * _HALF * 3  # the logits are read twice, and once overwritten by their gradient
    embedding = tokens * width * _HALF * 4 + vocab * width * _HALF  # rows out, their gradients added to zeros
    # The gradient is read, master and both moments are read and written, and below stage 3 the 16 bits are written.
    optimizer = own * (_HALF + 6 * _WIDE + (_HALF if stage < 3 else 0))
    norm = own * _HALF
    casts = own * (_WIDE + _HALF) * (2 if stage == 3 else 0)  # a master is read, its 16 bits written, before either gather
    return {
        "norms, residuals": norms,
        "rotary": rotary,
        "swiglu": swiglu,
        "loss": loss,
        "embedding": embedding,
        "optimizer": optimizer,
        "gradient norm": norm,
        "casts for gathers": casts if ranks > 1 else 0,
    }
