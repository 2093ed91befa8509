"""A Python script that builds the arguments of the HF Trainer or of TRL: what its text tells of the run.

Nothing of it is run. What the text does not tell, or does beside the arguments (freezes, patches, compiles), is listed by line
among what is left out; a script that trains by a loop of its own, or several times, is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.script_adapters import take_adapters
from zeroplan.interop.programs.script_model import take_model
from zeroplan.interop.programs.script_reader import Reader, RunScript, parsed
from zeroplan.interop.programs.script_side_effects import TRAINERS, list_side_effects
from zeroplan.interop.programs.script_syntax import UNKNOWN, base_name, called
from zeroplan.interop.programs.script_values import Values

#: Classes of arguments, with the program that reads them.
ARGUMENTS = {
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), "hf-trainer"),
    **dict.fromkeys(("SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "CPOConfig", "RewardConfig", "GRPOConfig"), "trl"),
    "RLOOConfig": "trl",
}
_TASK = re.compile(r"^(SFT|DPO|KTO|ORPO|CPO|Reward|GRPO|RLOO)(Trainer|Config)$")
#: What a script calls that trains by a loop of its own, and no trainer's.
_LOOPS = ("Fabric", "Accelerator", "backward")


def read_script(
    text: str,
    name: str,
    flags: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RunScript:
    """Read a script, started with these flags, further words and variables.

    Raises:
        BadInput: it builds no arguments of the HF Trainer, or several; it trains by code of its own; or names are not sure.
    """
    try:
        return ScriptReader(Values(parsed(text, name), flags, words, environment), name).read()
    except RecursionError:
        raise BadInput("has expressions that are nested too deep", where=name, remedy="give the run's arguments") from None


class ScriptReader(Reader):
    """Reads a script of the Trainer or of TRL."""

    def read(self) -> RunScript:
        """Read the run."""
        if self.values.opaque:
            self.refuse(f"binds names in a way that no text tells (line {self.values.opaque})")
        found = [call for call in self.named(*ARGUMENTS) if not self._foreign(call)]
        if len(found) != 1:
            self._refuse_no_arguments(found)
        call = found[0]
        if self.values.in_loop(call):
            self.refuse(f"makes its arguments in a loop (line {call.lineno})")
        kind = self.kind(call)
        trainers = self.named(*TRAINERS)
        if len(trainers) > 1:
            self.refuse(f"trains {len(trainers)} times (lines {', '.join(str(one.lineno) for one in trainers[:4])})")
        trainer = trainers[0] if trainers else None
        if trainer is not None and self.values.in_loop(trainer):
            self.refuse(f"trains in a loop (line {trainer.lineno})")
        told = next((match for one in (trainer, call) if one is not None and (match := _TASK.match(self.kind(one)))), None)
        program = "trl" if told is not None else ARGUMENTS[kind]
        self._arguments(call, kind, program)
        head = take_model(self, trainer, program)
        take_adapters(self, trainer, program)
        self._lengths(trainer, program)
        list_side_effects(self, trainer)
        return self.found(program, self.data, head=head, task=told[1].lower() if told is not None else "")

    def _foreign(self, call: ast.Call) -> bool:
        """Whether the config that a call makes is another package's of the same name, such as a RewardConfig."""
        name = self.values.name_of(call.func)
        modules = [
            node.module or "."
            for node in self.values.nodes
            if isinstance(node, ast.ImportFrom) and any(name in (one.name, one.asname) for one in node.names)
        ]
        return name.endswith("Config") and any(one.partition(".")[0] not in ("trl", "unsloth") for one in modules)

    def _refuse_no_arguments(self, found: list[ast.Call]) -> NoReturn:
        if found:
            self.refuse(f"builds {len(found)} sets of arguments (lines {', '.join(str(one.lineno) for one in found[:4])})")
        from_words = [call for call in self.calls if self.values.name_of(call.func) in ("HfArgumentParser", "TrlParser")]
        if from_words:
            self.refuse(f"is a Python script that takes its arguments from the command line (line {from_words[0].lineno})")
        loop = next((call for call in self.calls if self._is_loop(call)), None)
        if loop is not None:
            self.refuse(f"trains by a loop of its own (line {loop.lineno}), whose memory is known only by running it")
        module = next(
            (one for one in self.classes.values() if any(called(base) == "LightningModule" for base in one.bases)), None
        )
        if module is not None:
            what = f"trains {module.name[:40]} by Lightning (line {module.lineno}), whose memory is known only by running it"
            self.refuse(what)
        self.refuse("is a Python script that builds no arguments of the Trainer and no PipelineModule")

    def _is_loop(self, call: ast.Call) -> bool:
        name = self.values.name_of(call.func)
        return name in _LOOPS or (name == "initialize" and base_name(call.func) in ("deepspeed", "ds"))

    # The arguments

    def _arguments(self, call: ast.Call, kind: str, program: str) -> None:
        cls = self.classes.get(self.values.name_of(call.func))
        if cls is not None:
            self.leave_out(cls.name, cls, Effect.UNKNOWN, f"{cls.name} may change the defaults of {kind}")
        if call.args and self.values.of(call.args[0]) is UNKNOWN and not isinstance(call.args[0], ast.Attribute):
            self.leave_out("arguments", call, Effect.UNKNOWN, "positional arguments are not read")
        for key, value, node in self.values.keywords(call):
            self.argument(key, value, node)
        if program == "trl" and ARGUMENTS[kind] == "hf-trainer":  # SFTTrainer takes the Trainer's values, defaults too
            self.data.setdefault("gradient_checkpointing", False)
            self.data.setdefault("bf16", False)
        holder = self._holder(call)
        if holder and self.values.changed(holder):
            self.leave_out(
                holder, call, Effect.UNKNOWN, f"fields of {holder} are assigned, or it is handed on, after it is made"
            )
        for other in self.calls:
            if (
                self.values.name_of(other.func) in ("replace", "deepcopy", "copy")
                and other.args
                and called(other.args[0]) == holder != ""
            ):
                self.leave_out(holder, other, Effect.UNKNOWN, f"{holder} is copied with other values")

    def _holder(self, call: ast.Call) -> str:
        for node in self.values.nodes:
            if isinstance(node, ast.Assign) and node.value is call and isinstance(node.targets[0], ast.Name):
                return node.targets[0].id
        return ""

    # Lengths

    def _lengths(self, trainer: ast.Call | None, program: str) -> None:
        """Take the length that the trainer, or every call of a tokenizer, cuts samples to."""
        if program == "trl":
            for key, value, node in self.values.keywords(trainer) if trainer is not None else ():
                if key in ("max_seq_length", "max_length", "packing", "max_prompt_length"):
                    self.argument(key, value, node)
            return
        lengths = self.cut_lengths()
        if len(lengths) == 1:
            ((length, line),) = lengths.items()
            self.data["max_length"] = length
            self.assumed.append(f"samples of {length} tokens, to which line {line} cuts them")
        elif not self._holds_length():
            self.open["seq_len"] = "no line tells the length of a sample; give --seq-len"

    def _holds_length(self) -> bool:
        return any(self.data.get(key) is not None for key in ("max_length", "max_seq_length", "model_max_length"))
