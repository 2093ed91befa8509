"""Keys of a model that programs share: adapters, quantised base weights, and the attention implementation."""

from __future__ import annotations

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.builder import Builder
from zeroplan.models.lora_targets import PEFT_DEFAULT, is_pattern

_FLASH = ("flash", "fa2", "fa3", "kernels-community/flash", "kernels-community/vllm-flash")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
#: Values of ``bnb_4bit_quant_storage`` that are no floats.
BYTES = ("uint8", "int8")
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


def set_quantisation(
    run: Builder, key: str, bits: int | str, *, nested: bool, by: str = "bitsandbytes", stored_in_bytes: bool = False
) -> None:
    """Set how the base weights are kept: what bitsandbytes quantises is planned, under engines that can; the rest is left out.

    Args:
        key: the key that asks for it.
        bits: as the file says it.
        nested: whether the scales are quantised in turn.
        stored_in_bytes: whether 4-bit weights lie in bytes, bitsandbytes' default, which FSDP does not shard; else in floats.
    """
    if str(bits) in ("4", "8") and by in ("bitsandbytes", "bnb"):
        run.set("quantize", "int8" if str(bits) == "8" else "nf4" if nested else "nf4-single", key)
        run.set("whole_base", stored_in_bytes)
        return
    run.leave_out(
        key, Effect.UNKNOWN, f"base weights in {bits} bits by {by[:20]} are counted in 16, and their dequantised copies are not"
    )


def set_dropout(run: Builder, default: float, key: str = "lora_dropout") -> None:
    """Set whether adapters drop some of their input: they then keep a copy of it and a mask; `default` is the program's."""
    share = run.amount(key)
    if share is None and default:
        run.assume(f"{key} {default}", lora_dropout=True)
    elif share:
        run.set("lora_dropout", True, key)


def set_adapters(
    run: Builder, *, rank: str, targets: str, default_rank: int, quantised: bool, everywhere: bool = True, dropout: float = 0.0
) -> None:
    """Set LoRA's rank and targets.

    Args:
        rank: the key of the rank.
        targets: the key of the targets.
        default_rank: the program's.
        quantised: whether the base weights are.
        everywhere: without targets all linear layers are adapted; else those that peft lists for the architecture.
        dropout: the program's default of ``lora_dropout``.
    """
    run.set("method", "qlora" if quantised else "lora")
    run.count("lora_rank", rank, default=default_rank)
    set_dropout(run, dropout)
    set_targets(run, targets, everywhere=everywhere)


def set_targets(run: Builder, key: str, *, everywhere: bool) -> None:
    """Set LoRA's targets: names, one regular expression on full names, or all linear layers.

    Args:
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
        if others := [name for name in found if name.lower() not in _ALL]:
            says = f"adapters on {', '.join(others)[:60]} beside all linear layers"
            run.leave_out(key, Effect.MORE, says)
    else:
        run.set("lora_targets", found, key)
