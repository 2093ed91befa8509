"""The arguments of each program, from the lists in ``keys/``, which ``tests/corpus/argument_names.py`` makes.

A star behind a name says that the argument moves memory and that only some readers know it: where a file switches it on and
its reader does not ask for it, the plan lists it (:meth:`.builder.Builder.setup`). Names without a star are read, or move none.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

#: Programs with a list.
LISTED = ("hf-trainer", "trl", "llama-factory", "axolotl", "ms-swift", "open-instruct")


#: What marks an argument that moves memory.
_STAR = "*"


@cache
def _lines(name: str) -> tuple[str, ...]:
    text = (files("zeroplan.interop.programs") / "keys" / f"{name}.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


@cache
def names_in(name: str) -> frozenset[str]:
    """Return the names of one list."""
    return frozenset(line.removesuffix(_STAR).strip() for line in _lines(name))


@cache
def moving_in(name: str) -> frozenset[str]:
    """Return the names of one list that move memory."""
    return frozenset(line.removesuffix(_STAR).strip() for line in _lines(name) if line.endswith(_STAR))


@cache
def moving_of(*programs: str) -> frozenset[str]:
    """Return the arguments of these programs together that move memory."""
    return frozenset().union(*(moving_in(name) for name in (*programs, "older")))


@cache
def arguments_of(*programs: str) -> frozenset[str]:
    """Return every argument of these programs together, with those of older versions."""
    return frozenset().union(*(names_in(name) for name in (*programs, "older")))


#: Names that programs and scripts have for adapters, their base, and the length of a sample.
_TELLING = frozenset(
    (
        *("lora_rank", "lora_r", "lora_dim", "lora_target", "lora_targets", "lora_target_modules", "target_modules"),
        *("use_lora", "lora_enable", "use_peft", "use_qlora", "q_lora", "train_mode", "train_type", "tuner_type", "sft_type"),
        *("finetuning_type", "quantization_bit", "bits", "cutoff_len", "adapter", "modules_to_save", "trainable"),
        *("load_in_kbits", "block_size", "max_seq_length", "max_seq_len", "freeze_vision_tower", "model_id"),
    )
)


def keys_of_scripts() -> frozenset[str]:
    """The names that scripts of one's own have for adapters, lengths and the model, beside the Trainer's arguments."""
    return _TELLING | {"model_name_or_path", "model_max_length", "lora_enable", "lora_dropout", "torch_dtype", "dtype"}


def telling_of_others(keys: Iterable[str], *programs: str) -> frozenset[str]:
    """Return those keys that tell of adapters or lengths and that none of these programs has.

    Their parsers refuse such a file, so it belongs to another program or to a script of its own.
    """
    return (_TELLING & set(keys)) - arguments_of(*programs)


@cache
def only_of(program: str) -> frozenset[str]:
    """The arguments that one program has and no other that is listed."""
    return names_in(program).difference(*(names_in(name) for name in LISTED if name != program))
