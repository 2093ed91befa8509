"""Keys of a model that programs share: adapters, quantised base weights, and the attention implementation."""

from __future__ import annotations

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.builder import Builder
from zeroplan.models.lora_targets import PEFT_DEFAULT, is_pattern

_FLASH = ("flash", "fa2", "fa3", "kernels-community/flash", "kernels-community/vllm-flash")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_ALL = ("all", "all-linear", "auto", ".*", "default")


def set_attention(run: Builder, key: str) -> None:
    """sdpa, flash or eager from transformers' and others' names; the default is transformers' own choice, sdpa."""
    name = run.word(key)
    if name is None:
        return
    if name.startswith(_FLASH):
        run.set("attn", "flash", key)
    elif name in ("sdpa", "eager"):
        run.set("attn", name, key)
    elif name in ("disabled", "off", "no"):
        run.set("attn", "eager", key)
    else:
        run.leave_out(key, Effect.UNKNOWN, f"attention {name[:40]!r} is not modelled; sdpa is counted")


def set_weights_dtype(run: Builder, *, default: str) -> None:
    """Set the dtype in which ``from_pretrained`` gives the weights, by ``dtype`` or its older name.

    Args:
        run: the builder, whose arithmetic is known.
        default: the clause that says why weights are in fp32 where neither key is there.
    """
    key = next((name for name in ("dtype", "torch_dtype") if name in run.data), None)
    said = run.word(key) if key is not None else None
    if key is None:
        run.assume(default, model_dtype="fp32")
    elif said is None:
        run.assume(f"{key} auto: weights in the arithmetic's dtype", model_dtype=run.fields["dtype"])
    elif said.removeprefix("torch.") in _DTYPES:
        run.set("model_dtype", _DTYPES[said.removeprefix("torch.")], key)
    else:
        raise run.bad(key, "is no dtype that weights are loaded in", "write bfloat16, float16, float32 or auto")


def set_quantisation(run: Builder) -> bool:
    """Return whether bitsandbytes holds the base weights in 4 or 8 bits, which plans do not model."""
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if run.flag(key):
            leave_out_quantisation(run, key, bits)
            return True
    return False


def leave_out_quantisation(run: Builder, key: str, bits: int | str) -> None:
    """List quantised base weights: fewer bytes in the weights, and layers that are dequantised for each product."""
    run.leave_out(key, Effect.UNKNOWN, f"base weights in {bits} bits are counted in 16, and their dequantised copies are not")


def set_adapters(
    run: Builder, *, rank: str, targets: str, default_rank: int, quantised: bool, method: str = "lora", everywhere: bool = True
) -> None:
    """Set LoRA's rank and targets.

    Args:
        run: the builder.
        rank: the key of the rank.
        targets: the key of the targets.
        default_rank: the program's.
        quantised: whether the base weights are.
        method: LoRA, or another name for the same matrices.
        everywhere: without targets all linear layers are adapted; else those that peft lists for the architecture.
    """
    run.set("method", f"q{method}" if quantised and method == "lora" else method)
    run.count("lora_rank", rank, default=default_rank)
    set_targets(run, targets, everywhere=everywhere)


def set_targets(run: Builder, key: str, *, everywhere: bool) -> None:
    """Set LoRA's targets: names, one regular expression on full names, or all linear layers.

    Args:
        run: the builder.
        key: the key of the targets.
        everywhere: without targets all linear layers are adapted; else those that peft lists for the architecture.
    """
    value = run.value(key)
    if isinstance(value, str) and value.strip().lower() not in _ALL and is_pattern(value):
        run.set("lora_targets", (value,), key)
        return
    found = run.texts(key)
    if not found and everywhere:
        run.assume(f"{key}: all linear layers")
    elif not found:
        run.assume(f"{key}: those of peft for the model", lora_targets=(PEFT_DEFAULT,))
    elif any(name.lower() in _ALL for name in found):
        run.set("lora_targets", (), key)
    else:
        run.set("lora_targets", found, key)
