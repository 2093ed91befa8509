"""Builds a Setup from a document: reads keys with types, and remembers which were read, assumed, or left out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import parse_json
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.ds_config.source import load_source
from zeroplan.interop.programs.document import Document, find_named_file
from zeroplan.interop.programs.known import arguments_of, moving_of
from zeroplan.interop.setups import Setup
from zeroplan.interop.training import read_training
from zeroplan.run.ask import OPTIONS, Ask
from zeroplan.techniques.liger import LigerTechnique
from zeroplan.techniques.table import TABLE

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_QUANTISED = re.compile(r"(?i)(^|[-_./])(awq|gptq|aqlm|bnb|[248][-_]?bit|int[48]|fp8|nf4|mxfp4|gguf|hqq|eetq)($|[-_./])")
#: Words in names of unknown keys that speak of memory; a file has them from another program, version or script.
_SPEAKING = re.compile(
    r"dpo|orpo|kto|simpo|grpo|ppo|reward_model|teacher|ref_model|reference|distill|quant|[48]_?bit|nf4|int[48]|fp8|offload|paral"
    r"|unsloth|liger|galore|freeze|frozen|spectrum|_degree|(tp|sp|cp|pp|ep)_size|packing|lora|adapter|peft|flash|attn|attention"
    r"|modules_to_save|trainable|load_in|kbits|num_labels|\blisa|_lisa|unfreeze|trainable_params|ema\b|activation_offload"
    r"|checkpointing|compile|max_(seq|source|target|model)?_?len|seq_len|block_size|memory|budget|vision|image|moe|expert"
    r"|(input|base|init|source|prev|llm|language|pretrain(ed)?)_(model|ckpt|checkpoint)"
)
#: Keys by which programs lay samples end to end, up to one length.
_PACKED = ("packing", "neat_packing", "sample_packing", "streaming")
_SPEAKING_VALUE = re.compile(r"q?lora|dora|[48]_?bit|int[48]|nf4|fp8|dpo|kto|orpo|grpo|ppo|rm|reward")
#: Keys that are not the program's are listed up to this number.
_MOST_UNKNOWN = 20


class Keys:
    """A mapping read with types: a value of another type is bad input that names the key.

    Attributes:
        casts: whether the program makes a number or a truth value of a text. argparse, pydantic and OmegaConf do; the Trainer
            takes the values of a file as they stand (``HfArgumentParser.parse_dict``), where ``"4"`` ends the run and
            ``"false"`` is true.
    """

    casts = True
    #: What decides variables of the shell that no text tells, by name.
    why: Mapping[str, str] = MappingProxyType({})

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name
        self.read: set[str] = set()

    def value(self, key: str) -> Any:
        """The value as it stands; null and ``auto`` are None."""
        self.read.add(key)
        value = self.data.get(key)
        return None if isinstance(value, str) and value.strip().lower() in ("auto", "none", "null", "") else value

    def _require_cast(self, key: str) -> None:
        """Refuse a text for a number or a truth value where the program does not cast it."""
        if not self.casts:
            raise self.bad(key, "is a text, which the Trainer takes as it stands", "write it without quotes")

    def number(self, key: str, *, least: int = 1) -> int | None:
        """A whole number; a float without a fraction is taken, and text with digits where the program casts it."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, str) and value.strip().isdigit() and len(value) < 20:
            self._require_cast(key)
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 31:
            raise self.bad(key, f"is no whole number from {least} on", f"write {least} or more")
        return value

    def amount(self, key: str) -> float | None:
        """Read a number."""
        value = self.value(key)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.bad(key, "is no number", "write a number") from None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.bad(key, "is no number", "write a number")
        return value

    def flag(self, key: str) -> bool | None:
        """Read true or false, also in YAML 1.1's other words."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return value
        if str(value).strip().lower() in _YES + _NO:
            if isinstance(value, str):
                self._require_cast(key)
            return str(value).strip().lower() in _YES
        raise self.bad(key, "is neither true nor false", "write true or false")

    def text(self, key: str) -> str | None:
        """A string; the empty one is None."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.bad(key, "is no string", "write one name or path")
        return value.strip()

    def word(self, key: str) -> str | None:
        """Read a string in lower case; YAML 1.1 reads ``NO`` as false and ``1.0`` as a number."""
        value = self.value(key)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, int | float):
            return str(value)
        text = self.text(key)
        return None if text is None else text.lower()

    def texts(self, key: str) -> tuple[str, ...]:
        """Read a list of strings, or one with commas."""
        value = self.value(key)
        if value is None:
            return ()
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise self.bad(key, "is no list of names", "write [q_proj, v_proj]")
        return tuple(part.strip() for part in parts if part.strip())

    def block(self, key: str) -> Keys:
        """A nested mapping, empty where missing; a string that holds JSON is read as such."""
        value = self.value(key)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = parse_json(value, f"{self.name}: {key}")
        if value is None or value is False:
            value = {}
        if not isinstance(value, Mapping):
            raise self.bad(key, "is no mapping", "write keys and values below it")
        return Keys(value, f"{self.name}: {key}")

    def on(self, key: str) -> bool:
        """Whether the file switches a key on: any value but null, false, 0, an empty text or list."""
        value = self.value(key)
        return value not in (None, False, 0, [], {}) and str(value).lower() not in _NO

    def bad(self, key: str, what: str, remedy: str) -> BadInput:
        """Make the error for a value of a wrong type."""
        said = str(self.data.get(key))
        if "$" in said:
            name = re.search(r"\$\W*(\w+)", said)
            why = self.why.get(name[1]) if name else None
            what, remedy = f"is a variable ({why})" if why else "is a variable", "put its value in"
        return BadInput(f"{said[:40]!r} {what}", where=f"{self.name}: {key}", remedy=remedy)


class Builder(Keys):
    """Keys of one document, and the Setup that grows from them.

    Args:
        document: the file.
        program: the short name of its program.
        title: the program with the version whose defaults hold.
    """

    def __init__(self, document: Document, program: str, title: str) -> None:
        super().__init__(document.data, document.name)
        self.document, self.program, self.title = document, program, title
        if document.command is not None:
            self.why = document.command.why
        self.fields: dict[str, Any] = {}
        self.keys: dict[str, str] = {}
        self.assumed: list[str] = []
        self.left_out: list[Unmodelled] = []
        self.degrees: dict[str, int | bool | str] = {}
        self.open: dict[str, str] = {}
        self.options: dict[str, Any] = {}

    def set(self, field: str, value: Any, key: str = "") -> Any:
        """Give a field of the Setup a value that a key said; without a key, one that follows from others."""
        self.fields[field] = value
        if key:
            self.keys[field] = key
        return value

    def assume(self, clause: str, **fields: Any) -> None:
        """Give fields a default of the program, and list the clause among what was assumed."""
        self.fields |= fields
        if clause not in self.assumed:
            self.assumed.append(clause)

    def take_model(self, *names: str) -> None:
        """The model, by the first of the names that the file has; one that a variable names is left open."""
        for key in names:
            found = self.text(key)
            if found is None:
                continue
            beside = None if self.document.folder is None else self.document.folder / found
            if found.startswith(".") and beside is not None and not os.path.exists(found) and os.path.exists(beside):
                self.set("model", str(beside), key)
            elif "$" in found or "{" in found or "<" in found:
                self.assume(f"no model: {key} is {found[:40]}")
            else:
                self.set("model", found, key)
                if _QUANTISED.search(found):
                    self.leave_out(key, Effect.UNKNOWN, "by its name the checkpoint is quantised; 16 bits are counted")
            return

    def count(self, field: str, *names: str, default: int | None = None) -> int | None:
        """A field that is a whole number, by the first of the names that the file has, else the program's default."""
        for key in names:
            found = self.number(key)
            if found is not None:
                return int(self.set(field, found, key))
        if default is not None:
            self.assume(f"{names[0]} {default}", **{field: default})
        return default

    def degree(self, field: str, value: int | bool | str, key: str) -> None:
        """Give a degree of parallelism that a key says. The key stands among what is left out for verbs without layouts, and
        is taken from there where the layout is planned.
        """
        self.degrees[field] = value
        self.keys[field] = key
        if all(one.key != key for one in self.left_out):
            self.leave_out(key, Effect.UNKNOWN, "such layouts are planned by estimate and explain alone")

    def leave_out(self, key: str, effect: Effect, says: str) -> None:
        """List a key that no field holds."""
        self.read.add(key)
        self.left_out.append(Unmodelled(key, effect, says))

    def leave_out_flags(self, table: Mapping[str, tuple[Effect, str]]) -> None:
        """List each key of the table that the file switches on."""
        for key, (effect, says) in table.items():
            if self.on(key):
                self.leave_out(key, effect, says)

    def take_compile(self, parts: str, key: str, *, backend: str | None, mode: str | None) -> None:
        """Compile `parts` of the model by inductor as it comes; others, and modes such as CUDA graphs, are left out."""
        if (backend or "inductor") == "inductor" and (mode or "default") == "default":
            self.set("compile", parts, key)
        else:
            says = f"graphs by {mode if backend in (None, 'inductor') else backend} keep other tensors than eager ones"
            self.leave_out(key, Effect.UNKNOWN, says[:120])

    def ds_config(self, key: str) -> Mapping[str, Any] | None:
        """Read a ds_config: the object itself, its JSON, or the path of one beside this file or from the working folder."""
        value = self.value(key)
        if value is None or value is False:
            return None
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = parse_json(value, f"{self.name}: {key}")
        if isinstance(value, Mapping):
            found = load_source(value)[0]
        elif isinstance(value, str):
            found = load_source(find_named_file(value, self.document, key))[0]
        else:
            raise self.bad(key, "is neither a path nor an object", "write a ds_config's path")
        return dict(self.set("ds_config", found, key))

    def _take_techniques(self) -> None:
        """Take the keys by which the program asks for techniques that are files of their own."""
        for technique in TABLE:
            kinds = {option.name: option.kind for option in technique.options}
            for key, name in technique.keys.get(self.program, {}).items():
                readers: dict[Any, Callable[[str], Any]] = {
                    bool: self.flag,
                    int: self.number,
                    float: self.amount,
                    object: self.texts,
                }
                value = readers.get(kinds[name], self.text)(key)
                if value not in (None, False, ()):
                    self.options[name], self.keys[name] = value, key

    def setup(self, *programs: str, known: frozenset[str] = frozenset()) -> Setup:
        """Make the Setup. What the file switches on, moves memory, and was not read is listed among what is left out.

        Args:
            programs: the lists that have the program's arguments; none for a program whose keys are nested.
            known: further keys of the program. Those of the file that are neither among all these nor read are listed as
                unknown.
        """
        self._take_techniques()
        says = LigerTechnique.layers_alone(self.program, self.fields.get("task"))
        if self.options.get("liger") and says is not None:
            key = self.keys.pop("liger")
            del self.options["liger"]
            self.options["liger_parts"], self.keys["liger_parts"] = "rope,rms_norm,glu", key
            if says:
                self.leave_out(key, Effect.UNKNOWN, says)
        for key in sorted(moving_of(*programs) & self.data.keys() - self.read) if programs else ():
            if self.on(key):
                self.leave_out(key, Effect.UNKNOWN, "what it does to memory is not in the figures")
        if programs:
            known |= arguments_of(*programs)
        if self.fields.get("optimizer") == "adamw8bit" and self.fields.get("detached_loss"):
            self.set("whole_embedding_states", True)
        strange = [key for key in self.data if key not in self.read and known and key not in known]
        for key in strange:
            if self.on(key) and (
                _SPEAKING.search(key.lower()) or _SPEAKING_VALUE.fullmatch(str(self.data[key]).strip().lower())
            ):
                self.leave_out(key, Effect.UNKNOWN, f"is no key of {self.title.rpartition(' ')[0]}, and it speaks of memory")
        if "seq_len" in self.fields and self.fields.get("task") != "pretrain":
            self.fields.setdefault("dynamic_padding", not any(self.on(key) for key in _PACKED))
        own = {name: self.fields.pop(name) for name in ("task", "method") if name in self.fields}
        typed = {name: OPTIONS[name].typed(value) for name, value in {**self.fields, **self.degrees, **self.options}.items()}
        return Setup(
            program=self.program,
            title=self.title,
            files=(self.name,),
            ask=Ask(**typed).by({name: key for name, key in self.keys.items() if name in OPTIONS}),
            open=self.open,
            training=read_training(self.data, self.name, self.read if programs else None),
            assumed=tuple(self.assumed),
            unmodelled=tuple(self.left_out),
            unknown=tuple(strange[:_MOST_UNKNOWN]),
            **own,
        )
