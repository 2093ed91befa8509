"""Keys that programs share: adapters, quantised base weights, the attention implementation, optimizers, and 8-bit products.

For 8-bit products (``fp8``) axolotl and LLaMA-Factory give accelerate a ``Float8LinearConfig`` without padding. axolotl
scales by tensor, and accelerate picks the layers. LLaMA-Factory scales by row, and its own filter takes the first linear
layer as well, which is counted in 16 bits: its copies come and go where little else is held.

Source: axolotl, ``utils/fp8.py`` (``build_fp8_linear_config``), ``monkeypatch/trainer_accelerator_args.py``; LLaMA-Factory,
``train/fp8_utils.py`` (``create_fp8_kwargs``).
"""

from __future__ import annotations

from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.unmodelled import Effect
from zeroplan.core.unmodelled_optimizers import unmodelled_optimizer
from zeroplan.core.workload import OptimizerKind
from zeroplan.interop.programs.builder import Builder
from zeroplan.models.lora_targets import PEFT_DEFAULT, is_pattern

_FLASH = ("flash", "fa2", "fa3", "kernels-community/flash", "kernels-community/vllm-flash")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
#: Values of ``bnb_4bit_quant_storage`` that are no floats.
BYTES = ("uint8", "int8")
_SCRIPT_TARGETS = ("lora_target_modules", "lora_targets", "target_modules")
#: How scripts call double quantisation and the dtype in which 4-bit weights are stored.
_NESTED = ("use_nested_quant", "use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quant", "use_double_quant")
_STORAGE = ("bnb_4bit_quant_storage", "bnb_4bit_quant_storage_dtype")
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


def set_dropout(run: Builder, default: float) -> None:
    """Set whether adapters drop some of their input: they then keep a copy of it and a mask; `default` is the program's."""
    share = run.amount("lora_dropout")
    if share is None and default:
        run.assume(f"lora_dropout {default}", lora_dropout=True)
    elif share:
        run.set("lora_dropout", True, "lora_dropout")


def frozen_parts(run: Builder, *, vision: str, projector: str, language: str) -> tuple[str, ...]:
    """Return the parts of a model with images or sound that keys freeze: towers and projector, where no key says otherwise."""
    said = {part: run.flag(key) for part, key in (("vision", vision), ("projector", projector), ("language", language))}
    return tuple(part for part, frozen in said.items() if frozen or (frozen is None and part != "language"))


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


#: Names for which the Trainer, and programs on it, have a class of their own.
_TRAINERS = {"adafactor": "adafactor_transformers"}
#: transformers' and others' names that ask for torch's multi-tensor loops and for its fused kernel.
_FOREACH, _FUSED = ("adamw_torch", "adamw"), ("adamw_torch_fused",)


def set_optimizer(run: Builder, key: str, *, default: str) -> None:
    """Set the run's optimizer from a key, else the program's default; one without a row stands among what is left out."""
    name = run.word(key)
    if name is None:
        run.assume(f"{key} {default}")
        name = default
    else:
        run.keys["optimizer"] = key
    row, kind = optimizer_of(run, key, name)
    run.set("optimizer", row)
    run.set("optimizer_kind", kind)


def optimizer_of(run: Builder, key: str, name: str) -> tuple[str, str | None]:
    """Return the row that stands for an optimizer of that name, and how it walks its tensors where the name says.

    Raises:
        BadInput: a name that no program has.
    """
    plain = name.strip().lower().removeprefix("optimizernames.")
    other = unmodelled_optimizer(plain)
    if other is not None and other.stands_in:
        run.leave_out(key, other.effect, f"{plain} is planned as {other.stands_in}: {other.why}")
        return other.stands_in, None
    row = find_optimizer(_TRAINERS.get(plain, plain), where=f"{run.name}: {key}")
    if row.rest:
        run.leave_out(key, Effect.UNKNOWN, f"{plain}: which parameters the program gives to it is its own choice")
    if plain.startswith("paged"):
        run.leave_out(key, Effect.LESS, "paged states may move to the host; they are counted on the GPU")
    kind = OptimizerKind.FUSED if plain in _FUSED else OptimizerKind.FOREACH if plain in _FOREACH else None
    return row.name, None if kind is None else kind.value


_GATHER = "fp8_enable_fsdp_float8_all_gather"
_PADDING = "operands in 8 bits are counted with the copies that padding makes"


def set_float8(run: Builder, recipe: Float8Recipe) -> None:
    """Set 8-bit products where ``fp8`` is on; what other packages do, and weights that are gathered in 8 bits, are left out.

    Args:
        run: the builder, whose engine and arithmetic are known.
        recipe: of the program's own config.
    """
    if not run.flag("fp8"):
        return
    backend = run.word("fp8_backend") or "auto"
    if backend not in ("auto", "torchao"):
        run.leave_out("fp8_backend", Effect.UNKNOWN, f"fp8 products by {backend[:20]}; bf16 ones are counted")
    elif run.fields.get("dtype") != "bf16":
        run.leave_out("fp8", Effect.UNKNOWN, "fp8 products beside another arithmetic than bf16")
    else:
        run.set("fp8", recipe.value, "fp8")
        run.leave_out("fp8", Effect.LESS, _PADDING)
        if run.flag(_GATHER) and recipe is Float8Recipe.TENSORWISE:
            run.leave_out(_GATHER, Effect.UNKNOWN, "weights are gathered in 8 bits; 16 are counted")


def set_script_adapters(run: Builder) -> None:
    """LoRA by the names that scripts commonly give it; whether it is on is a switch or a rank."""
    switches = [key for key in ("use_lora", "use_peft", "lora_enable", "use_qlora") if run.flag(key)]
    off = any(run.flag(key) is False for key in ("use_lora", "use_peft", "lora_enable"))
    ranks = [key for key in ("lora_r", "lora_rank", "lora_dim") if run.number(key, least=0)]
    bits = run.number("bits", least=0)
    if (switches or ranks) and not off:
        run.set("method", "lora")
        if ranks:
            run.count("lora_rank", *ranks)
        else:
            run.set("lora_rank", 8)
            run.leave_out(switches[0], Effect.UNKNOWN, "the script's own default of the rank is not known; 8 is counted")
        set_dropout(run, 0.0)
        targets = [key for key in _SCRIPT_TARGETS if run.value(key) not in (None, [], "")]
        if targets:
            set_targets(run, targets[0], everywhere=True)
        else:
            run.assume("adapters on all linear layers")
    elif any(key.startswith("lora_") for key in run.data) and not off:
        run.leave_out(
            "lora", Effect.LESS, "the script's own switch for LoRA is not known; all parameters are counted as trained"
        )
    _base(run, bits)


def _base(run: Builder, bits: int | None) -> None:
    """Set how the base is quantised, by the names that scripts commonly give it; `bits` is the value of that key."""
    four = next((key for key in ("load_in_4bit", "use_4bit_quantization", "use_qlora") if run.flag(key)), "bits")
    eight = next((key for key in ("load_in_8bit", "use_8bit_quantization") if run.flag(key)), "bits")
    key, said = (four, 4) if four != "bits" or bits == 4 else (eight, 8)
    if key == "bits" and bits not in (4, 8):
        if run.flag("q_lora"):
            run.leave_out("quantisation", Effect.UNKNOWN, "quantised base weights are counted in 16 bits")
        return
    if "lora_rank" not in run.fields:
        run.leave_out("quantisation", Effect.UNKNOWN, "quantised base weights are counted in 16 bits")
        return
    nested = any(run.flag(name) for name in _NESTED)
    storage = next((word for name in _STORAGE if (word := run.word(name))), "")
    set_quantisation(run, key, said, nested=nested, stored_in_bytes=storage in BYTES)
    if said == 4 and not nested:
        run.assume("the base in NF4 without double quantisation")
