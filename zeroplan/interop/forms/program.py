"""The shared part of forms: adapters, and what no file can tell a program, so that the user's own has to do it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.workload import Attention, Compilation, QuantizedBase, Workload
from zeroplan.interop.forms.configuration import Configuration, json_text
from zeroplan.interop.training import ADAPTERS as ADAPTER_VALUES
from zeroplan.techniques.quantized_base import QUANTIZED_BASE
from zeroplan.techniques.table import techniques_of

#: Without reentrant checkpointing no input needs a gradient, and hooks of ZeRO and FSDP see every recomputation.
CHECKPOINTING = {"use_reentrant": False}
ADAPTERS = "adapter_config.json"
_ATTENTION = {Attention.SDPA: "sdpa", Attention.EAGER: "eager", Attention.FLASH: "flash_attention_2"}

#: Where a ds_config has the learning rate.
_RATE = "optimizer.params.lr"


def attention(workload: Workload) -> str:
    """Return the name of the attention implementation in transformers."""
    return _ATTENTION[workload.numerics.attn]


def adapter_files(one: Configuration) -> dict[str, str]:
    """Return peft's ``adapter_config.json``, which ``LoraConfig.from_pretrained(folder)`` reads; nothing without LoRA.

    It says what decides memory and speed, and the scale and the dropout of the run in use. ``task_type`` stays at peft's
    default, and so does ``lora_alpha`` where no file says it.
    """
    work = one.workload
    if work.lora_rank is None:
        return {}
    config: dict[str, Any] = {}
    for technique, value in techniques_of(work):
        config |= technique.written(value, "peft")
    said = {name: value for name, value in one.training.values.items() if name in ADAPTER_VALUES}
    return {one.sibling(ADAPTERS): json_text(config | {"lora_dropout": 0.0, "bias": "none"} | said)}


def asked_for(one: Configuration, *, model: bool = True) -> dict[str, Any]:
    """Return the keys of the form's program that ask for the run's techniques; without `model` none of those that a script
    sees to as it makes the model: adapters and a quantised base.
    """
    found: dict[str, Any] = {}
    for technique, value in techniques_of(one.workload):
        if model or not (technique.in_forms or technique.written(value, "peft")):
            found |= technique.written(value, one.program)
    return found


def training_notes(one: Configuration, taken: Iterable[str] = (), *, where: str = _RATE) -> tuple[str, ...]:
    """Return the notes on what moves training and no plan holds: `taken` are the values of the run in use that the files hold,
    and `where` the place of a learning rate, which no form makes up: a note where :func:`must_learn` says nothing.
    """
    held = {*taken, *(ADAPTER_VALUES if one.workload.lora_rank is not None else ())}
    scheduled = one.ds_config is not None and "scheduler" in one.ds_config
    said = one.training.left_out(held, scheduled=scheduled)
    if one.training.file and one.workload.lora_rank is not None and "lora_alpha" not in one.training.values:
        said = (*said, f"{one.training.file} says no lora_alpha: peft's default of 8 holds, your program's may be another")
    if "learning_rate" in held or (where == _RATE and must_learn(one)):
        return said
    return (*said, f"no learning rate is written, so the program's default holds: set yours by {where}")


def must_learn(one: Configuration) -> tuple[str, ...]:
    """Return that a ds_config which makes a program's optimizer has no learning rate yet."""
    made = "optimizer" in one.explicit and "learning_rate" not in one.carried and not one.new_script
    return (f"set {_RATE}: without it the default of the optimizer holds, 0.001 of Adam",) if made else ()


def folder_of(one: Configuration) -> str:
    """The main file's folder, as a path that can be opened."""
    return one.sibling("").rstrip("/") or ("/" if one.output.startswith("/") else ".")


def must_load(one: Configuration) -> tuple[str, ...]:
    """Sentences on the data and on the model as it is loaded."""
    work = one.workload
    said = [*must_feed(one)]
    if work.numerics.attn is not Attention.SDPA:
        said.append(f'load the model with attn_implementation="{attention(work)}"')
    return (*said, *must_quantize(one), *must_else(one))


def must_quantize(one: Configuration) -> tuple[str, ...]:
    """A sentence on a quantised base, unless the program has keys for it."""
    base = one.workload.technique(QuantizedBase)
    return () if base is None or QUANTIZED_BASE.written(base, one.program) else QUANTIZED_BASE.instructions(base)


def must_feed(one: Configuration) -> tuple[str, ...]:
    """Return the sentence on the lengths of the data."""
    work = one.workload
    if work.batch.lengths:
        return (f"pad each batch to its longest sample, and cut samples at {work.batch.seq_len} tokens",)
    if work.batch.target_len is not None:
        return (f"make sources of {work.batch.seq_len} tokens and targets of {work.batch.target_len}",)
    return (f"make sequences of {work.batch.seq_len} tokens",)


def must_else(one: Configuration) -> tuple[str, ...]:
    """Return sentences on what the plan holds beside a plain step, which no file says and no script of ours does."""
    work = one.workload
    adapts, said = work.lora_rank is not None, []
    if work.batch.pairs:
        said.append("train on pairs of a chosen and a rejected answer, a pair a sample")
    if work.batch.labelled_share is not None:
        said.append(f"compute the head of labelled tokens alone, {100 * work.batch.labelled_share:g} % of all")
    for technique, value in techniques_of(work):
        asked = technique.written(value, one.program) or (adapts and technique.written(value, "peft"))
        if not technique.in_forms and not asked:
            said += technique.instructions(value)
    return tuple(said)


def must_adapt(one: Configuration) -> tuple[str, ...]:
    """A sentence on adapters, where there are any."""
    if one.workload.lora_rank is None:
        return ()
    return (f'add the adapters: get_peft_model(model, LoraConfig.from_pretrained("{folder_of(one)}"))',)


def must_checkpoint(one: Configuration) -> tuple[str, ...]:
    """Return a sentence on gradient checkpointing, for programs that no file tells of it."""
    if one.workload.gradient_checkpointing:
        return ('call model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',)
    return ("leave gradient checkpointing off",)


def must_compile(one: Configuration) -> tuple[str, ...]:
    """Return a sentence on ``torch.compile``, where an engine with ``compile()`` compiles anything."""
    if one.workload.compile is None:
        return ()
    if one.workload.compile is Compilation.MODEL:
        return ("compile the model: engine.compile()",)
    if one.workload.compile is Compilation.CHECKPOINTED:
        return ("compile blocks around their checkpoints, before the model is wrapped: zeroplan_runtime.compile_blocks(model)",)
    return ("compile each block of the model, before it is wrapped: block.compile()",)


def must_bring_optimizer(one: Configuration) -> tuple[str, ...]:
    """Return a sentence on the optimizer, where the ds_config names none."""
    if "optimizer" in one.explicit:
        return ()
    return (f"bring the optimizer: {find_optimizer(one.workload.numerics.optimizer).name}",)
