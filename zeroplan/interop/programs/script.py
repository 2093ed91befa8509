"""A Python script that builds the arguments of the HF Trainer or of TRL: what its text tells of the run.

Nothing of it is run. What the text does not tell, or does beside the arguments (freezes, patches, compiles), is listed by line
among what is left out; a script that trains by a loop of its own, or several times, is refused.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from zeroplan.core.errors import BadInput
from zeroplan.core.tasks import Task
from zeroplan.core.unmodelled import Effect, Unmodelled
from zeroplan.interop.programs.known import arguments_of
from zeroplan.interop.programs.script_values import UNKNOWN, Values, base_name, called
from zeroplan.models.lora_targets import PEFT_DEFAULT

#: Classes of arguments, with the program that reads them.
_ARGUMENTS = {
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), "hf-trainer"),
    **dict.fromkeys(("SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "CPOConfig", "RewardConfig", "GRPOConfig"), "trl"),
    "RLOOConfig": "trl",
}
_TRAINERS = (
    *("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer"),
    *("GRPOTrainer", "RLOOTrainer"),
)
_TASK = re.compile(r"^(SFT|DPO|KTO|ORPO|CPO|Reward|GRPO|RLOO)(Trainer|Config)$")
#: Loops of one's own, by what they call.
_LOOPS = {"Accelerator": "accelerate", "fully_shard": "FSDP2", "FullyShardedDataParallel": "FSDP", "Fabric": "Fabric"}
_HEADS = {
    "AutoModelForSequenceClassification": Task.SEQUENCE_CLASSIFICATION,
    "AutoModelForTokenClassification": Task.TOKEN_CLASSIFICATION,
    "AutoModelForQuestionAnswering": Task.QUESTION_ANSWERING,
    "AutoModelForMaskedLM": Task.MASKED_LM,
    "AutoModelForSeq2SeqLM": Task.SEQ2SEQ,
    "AutoModelForImageClassification": Task.IMAGE_CLASSIFICATION,
}
_PLAIN_MODEL = re.compile(r"^AutoModelForCausalLM$|ForCausalLM$|LMHeadModel$")
_NO_MODEL = re.compile(r"Tokenizer|Processor|FeatureExtractor|Config$|Generation|Dataset")
#: Arguments that move no memory, or none that a plan counts.
_HARMLESS = re.compile(
    r"output_dir|run_name|report_to|logging|learning_rate|warmup|weight_decay|lr_scheduler|seed|num_train_epochs|max_steps|save_"
    r"|hub_|push_to_hub|adam_|max_grad_norm|disable_tqdm|dataloader|remove_unused|load_best|metric_for|greater_is|label_names"
    r"|group_by|ddp_find|eval_steps|dataset_|beta$|tf32|log_level|ignore_data|full_determinism|include_|project|do_train|trackio"
)
#: Of adapters, quantisation and models: keywords that are read.
_OF_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "lora_dropout": "lora_dropout"}
_BESIDE_LORA = (
    "modules_to_save",
    "use_dora",
    "target_parameters",
    "layers_to_transform",
    "rank_pattern",
    "trainable_token_indices",
)
#: Functions that put adapters into a model.
_WRAPPING = ("get_peft_model", "add_adapter", "inject_adapter_in_model")
_PATCHES = re.compile(r"liger|monkey|_patch|patch_|unsloth|^replace_\w*(attn|attention|forward)|flash_attn_monkey")
_CASTS = ("bfloat16", "float16", "float32", "half", "float")
#: Fields by which arguments and adapters change after they are made.
_ASSIGNED = arguments_of("hf-trainer", "trl") | {"r", "target_modules", "lora_dropout", "modules_to_save"}
_OVERRIDES = frozenset(
    ("compute_loss", "training_step", "create_optimizer", "create_optimizer_and_scheduler", "prediction_step", "_wrap_model")
)


@dataclass(frozen=True, slots=True)
class RunScript:
    """What a script's text says of its run.

    Attributes:
        program: the short name of the program whose arguments it builds.
        data: arguments by name, adapters and quantisation by the names that the program's files have.
        task: what it does, where its trainer tells.
        head: the head of its model, where the class tells.
        left_out: what the text does not tell, and what it does that no plan holds.
        assumed: what was taken for granted, one clause each.
        open: fields that no line tells, with what is missing.
    """

    program: str
    data: Mapping[str, Any]
    task: str = ""
    head: str | None = None
    left_out: tuple[Unmodelled, ...] = ()
    assumed: tuple[str, ...] = ()
    open: Mapping[str, str] = field(default_factory=dict)


def parsed(text: str, name: str) -> ast.Module:
    """Parse a script's text.

    Raises:
        BadInput: it is no Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadInput("is no Python that can be parsed", where=name, remedy="mend it, or give the run's arguments") from None


class ScriptReader:
    """Reads one script, and lists what it leaves out.

    Args:
        values: what the text tells.
        name: of the file.
    """

    def __init__(self, values: Values, name: str) -> None:
        self.values, self.name = values, name
        self.calls = [node for node in values.nodes if isinstance(node, ast.Call) and values.reached(node) is not False]
        self.data: dict[str, Any] = {}
        self.left_out: list[Unmodelled] = []
        self.assumed: list[str] = []
        self.open: dict[str, str] = {}
        self.classes = {node.name: node for node in values.nodes if isinstance(node, ast.ClassDef)}

    def named(self, *names: str) -> list[ast.Call]:
        """Calls of these names, or of classes of the file that derive from one."""
        own = {cls.name for cls in self.classes.values() if any(self.values.name_of(base) in names for base in cls.bases)}
        return [call for call in self.calls if self.values.name_of(call.func) in names or self.values.name_of(call.func) in own]

    def kind(self, call: ast.Call) -> str:
        """The library's class that a call makes, also by a class of the file."""
        name = self.values.name_of(call.func)
        cls = self.classes.get(name)
        return name if cls is None else next((self.values.name_of(base) for base in cls.bases), name)

    def leave_out(self, key: str, node: ast.AST, effect: Effect, says: str) -> None:
        """List what no plan holds, by the line of its node; once for each key."""
        if all(one.key != key for one in self.left_out):
            self.left_out.append(Unmodelled(key, effect, f"line {getattr(node, 'lineno', 0)}: {says}"[:120]))

    def read(self) -> RunScript:
        """Read the run."""
        if self.values.opaque:
            self.refuse(f"binds names in a way that no text tells (line {self.values.opaque})")
        found = self.named(*_ARGUMENTS)
        if len(found) != 1:
            self._refuse_no_arguments(found)
        call = found[0]
        if self.values.in_loop(call):
            self.refuse(f"makes its arguments in a loop (line {call.lineno})")
        kind = self.kind(call)
        trainers = self.named(*_TRAINERS)
        if len(trainers) > 1:
            self.refuse(f"trains {len(trainers)} times (lines {', '.join(str(one.lineno) for one in trainers[:4])})")
        trainer = trainers[0] if trainers else None
        if trainer is not None and self.values.in_loop(trainer):
            self.refuse(f"trains in a loop (line {trainer.lineno})")
        told = next((match for one in (trainer, call) if one is not None and (match := _TASK.match(self.kind(one)))), None)
        program = "trl" if told is not None else _ARGUMENTS[kind]
        self._arguments(call, kind, program)
        head = self.model(trainer, program)
        self.adapters(trainer, program)
        self._lengths(trainer, program)
        self.deeds(trainer)
        return self.found(program, self.data, head=head, task=told[1].lower() if told is not None else "")

    def found(self, program: str, data: Mapping[str, Any], *, head: str | None, task: str = "") -> RunScript:
        """Return what was read, with the parser's defaults among what was assumed."""
        if self.values.taken:
            defaults = sorted(self.values.taken)
            self.assumed.append(f"the defaults of {', '.join(f'--{one}' for one in defaults[:6])}")
        return RunScript(
            program=program,
            data=data,
            task=task,
            head=head,
            left_out=tuple(self.left_out),
            assumed=tuple(self.assumed),
            open=self.open,
        )

    def refuse(self, what: str) -> NoReturn:
        """Refuse the script.

        Raises:
            BadInput: always.
        """
        remedy = "give the command line that starts it in a .sh file, its ds_config, or its arguments as JSON or YAML"
        raise BadInput(what, where=self.name, remedy=remedy)

    def _refuse_no_arguments(self, found: list[ast.Call]) -> NoReturn:
        if found:
            self.refuse(f"builds {len(found)} sets of arguments (lines {', '.join(str(one.lineno) for one in found[:4])})")
        loop = next((call for call in self.calls if self.values.name_of(call.func) in _LOOPS or self._initializes(call)), None)
        if loop is not None:
            title = _LOOPS.get(self.values.name_of(loop.func), "DeepSpeed")
            self.refuse(f"is a Python script with a loop of its own over {title} (line {loop.lineno}), which is not read")
        from_words = [call for call in self.calls if self.values.name_of(call.func) in ("HfArgumentParser", "TrlParser")]
        if from_words:
            self.refuse(f"is a Python script that takes its arguments from the command line (line {from_words[0].lineno})")
        self.refuse("is a Python script that builds no arguments of the Trainer and no PipelineModule")

    def _initializes(self, call: ast.Call) -> bool:
        return self.values.name_of(call.func) == "initialize" and base_name(call.func) in ("deepspeed", "ds")

    # The arguments

    def _arguments(self, call: ast.Call, kind: str, program: str) -> None:
        cls = self.classes.get(self.values.name_of(call.func))
        if cls is not None:
            self.leave_out(cls.name, cls, Effect.UNKNOWN, f"{cls.name} may change the defaults of {kind}")
        if call.args and self.values.of(call.args[0]) is UNKNOWN and not isinstance(call.args[0], ast.Attribute):
            self.leave_out("arguments", call, Effect.UNKNOWN, "positional arguments are not read")
        for key, value, node in self.values.keywords(call):
            self._argument(key, value, node)
        if program == "trl" and _ARGUMENTS[kind] == "hf-trainer":  # SFTTrainer takes the Trainer's values, defaults too
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

    def _argument(self, key: str, value: Any, node: ast.expr) -> None:
        if holds_unknown(value):
            if key == "**" or not _HARMLESS.match(key):
                self.leave_out(
                    "arguments" if key == "**" else key, node, Effect.UNKNOWN, f"{ast.unparse(node)[:50]} is not told"
                )
            return
        if value is not None:
            self.data[key] = value

    # The model

    def model(self, trainer: ast.Call | None, program: str) -> str | None:
        """Take the model that the script loads; return its head, where the class tells one."""
        loads = [call for call in self.calls if self.values.name_of(call.func) == "from_pretrained" and self._loads_model(call)]
        made = [call for call in self.calls if self.values.name_of(call.func) == "from_config"]
        if not loads:
            return self._model_of_trainer(trainer, made, program)
        for call in loads[1:]:
            self.leave_out("models", call, Effect.UNKNOWN, "several models are loaded; the first is planned")
        first = loads[0]
        value = self.values.of(_first(first, "pretrained_model_name_or_path"))
        if isinstance(value, str):
            self.data["model_name_or_path"] = value
        else:
            self.assumed.append(f"no model: line {first.lineno} does not tell it")
        self._loading(first, program)
        kind = called(first.func.value) if isinstance(first.func, ast.Attribute) else ""
        if "Unsloth" in kind or kind.startswith("Fast"):
            self.refuse(f"trains by Unsloth (line {first.lineno}), whose kernels are not modelled")
        if kind in _HEADS:
            return _HEADS[kind].value
        if not _PLAIN_MODEL.search(kind):
            self.leave_out(
                "model", first, Effect.UNKNOWN, f"the head of {kind[:40]} is not known; that of its checkpoint is counted"
            )
        return None

    def _loads_model(self, call: ast.Call) -> bool:
        owner = called(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        return not _NO_MODEL.search(owner) and owner != "PeftModel"

    def _model_of_trainer(self, trainer: ast.Call | None, made: list[ast.Call], program: str) -> str | None:
        given = None if trainer is None else _first(trainer, "model")
        value = self.values.of(given)
        if program == "trl" and isinstance(value, str):
            self.data["model_name_or_path"] = value
        elif made:
            self.assumed.append(f"no model: line {made[0].lineno} makes it from a config")
        elif trainer is not None:
            self.leave_out(
                "model", trainer, Effect.UNKNOWN, "the script's own model is not read; MODEL is planned in its place"
            )
        return None

    def _loading(self, call: ast.Call, program: str) -> None:
        """Read how the model is loaded."""
        dtype = False
        for key, value, node in self.values.keywords(call):
            if key in ("torch_dtype", "dtype"):
                dtype = True
                if holds_unknown(value) or not isinstance(value, str):
                    self.leave_out("dtype", node, Effect.UNKNOWN, f"{ast.unparse(node)[:50]} is not told")
                else:
                    self.data["dtype"] = value
            elif key in ("load_in_4bit", "load_in_8bit", "attn_implementation"):
                self._argument(key, value, node)
            elif key == "quantization_config":
                self._quantisation(node, program)
            elif key == "device_map" and value not in (None, {"": 0}):
                self.leave_out("device_map", node, Effect.UNKNOWN, "the model is laid over all visible GPUs; one holds it here")
            elif key in ("use_flash_attention_2", "attn_impl", "num_labels", "max_memory", "**", "ignore_mismatched_sizes"):
                if key == "use_flash_attention_2" and value is True:
                    self.data["attn_implementation"] = "flash_attention_2"
                elif key != "ignore_mismatched_sizes" and (key != "num_labels" or not isinstance(value, int)):
                    self.leave_out(key, node, Effect.UNKNOWN, "how the model is loaded is not told")
        if not dtype:
            self.data["dtype"] = "float32"
            says = "fp32 weights are counted; transformers 5 loads those of the checkpoint, often 16 bits"
            self.leave_out("dtype", call, Effect.LESS, says)

    def _quantisation(self, node: ast.expr, program: str) -> None:
        made = self.values.node(node)
        if not isinstance(made, ast.Call) or self.values.name_of(made.func) != "BitsAndBytesConfig":
            if self.values.of(node) is not None:
                self.leave_out("quantization_config", node, Effect.UNKNOWN, "this quantisation is not read")
            return
        nested = "use_bnb_nested_quant" if program == "trl" else "bnb_4bit_use_double_quant"
        for key, value, one in self.values.keywords(made):
            if key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_storage"):
                self._argument(key, value, one)
            elif key == "bnb_4bit_use_double_quant":
                self._argument(nested, value, one)
            elif key not in ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "llm_int8_threshold"):
                self.leave_out(key, one, Effect.UNKNOWN, "what it does to the quantised base is not in the figures")

    # Adapters

    def adapters(self, trainer: ast.Call | None, program: str) -> None:
        """Take the one LoraConfig that the trainer, or a function that puts adapters into a model, gets."""
        configs = self.named("LoraConfig")
        others = [
            call
            for call in self.calls
            if re.fullmatch(r"\w+Config", self.values.name_of(call.func)) and self._tunes(self.values.name_of(call.func))
        ]
        for call in others:
            self.leave_out(
                "adapters",
                call,
                Effect.UNKNOWN,
                f"{self.values.name_of(call.func)} is not modelled; all weights count as trained",
            )
        if len(configs) > 1:
            self.leave_out("adapters", configs[1], Effect.UNKNOWN, "several LoraConfigs; all weights count as trained")
        loaded = [
            call
            for call in self.calls
            if self.values.name_of(call.func) == "from_pretrained" and base_name(call.func) == "PeftModel"
        ]
        if loaded:
            self.leave_out("adapters", loaded[0], Effect.UNKNOWN, "adapters of a checkpoint; all weights count as trained")
        if len(configs) != 1:
            return
        call = configs[0]
        takes = [one for one in self.calls if self.values.name_of(one.func) in _WRAPPING]
        takes += [] if trainer is None else [trainer]
        given = [word.value for one in takes for word in one.keywords if word.arg in ("peft_config", "adapter_config")]
        given += [one.args[1] for one in takes if one is not trainer and len(one.args) > 1]
        given = [one.body if isinstance(one, ast.IfExp) and self.values.of(one.test) is True else one for one in given]
        if not any(self.values.node(one) is call for one in given):
            sure = not [one for one in given if not (isinstance(one, ast.Constant) and one.value is None)]
            says = "a LoraConfig that nothing takes; all weights count as trained"
            self.leave_out("adapters", call, Effect.LESS if sure else Effect.UNKNOWN, says)
            return
        doubt = next((one for one in (call, *takes) if self.values.reached(one) is None), None)
        if doubt is not None:
            self.leave_out("adapters", doubt, Effect.UNKNOWN, "on a condition that the text does not tell")
        self.data["use_peft" if program == "trl" else "use_lora"] = True
        own: dict[str, Any] = {"lora_r": 8, "lora_target_modules": PEFT_DEFAULT, "lora_dropout": 0.0}
        for key, value, node in self.values.keywords(call):
            if key in _OF_LORA and not holds_unknown(value):
                own[_OF_LORA[key]] = PEFT_DEFAULT if key == "target_modules" and value is None else value
            elif key in _OF_LORA or key == "**" or (key in _BESIDE_LORA and value):
                effect = Effect.MORE if key in _BESIDE_LORA else Effect.UNKNOWN
                self.leave_out(f"LoraConfig.{key.strip('*')}", node, effect, f"{ast.unparse(node)[:50]} is not in the figures")
        self.data |= own

    def _tunes(self, name: str) -> bool:
        words = ("Prefix", "Prompt", "IA3", "AdaLora", "Vera", "LoHa", "LoKr", "OFT", "BOFT", "PTuning", "FourierFT", "VBLoRA")
        return name.startswith(words)

    # Lengths

    def _lengths(self, trainer: ast.Call | None, program: str) -> None:
        """Take the length that the trainer, or every call of a tokenizer, cuts samples to."""
        if trainer is not None and program == "trl":
            for key, value, node in self.values.keywords(trainer):
                if key in ("max_seq_length", "max_length", "packing", "max_prompt_length"):
                    self._argument(key, value, node)
        if program == "trl":
            if self._holds_length() or self.data.get("packing"):
                return
            return
        lengths = self.cut_lengths()
        if len(lengths) == 1:
            ((length, line),) = lengths.items()
            self.data["max_length"] = length
            self.assumed.append(f"samples of {length} tokens, to which line {line} cuts them")
        elif not self._holds_length():
            self.open["seq_len"] = "no line tells the length of a sample; --seq-len does"

    def cut_lengths(self) -> dict[int, int]:
        """The lengths to which calls cut samples, with a line of each; empty where the text does not tell one of them."""
        found: dict[int, int] = {}
        for call in self.calls:
            if not any(one.arg == "truncation" for one in call.keywords):
                continue
            for key, value, node in self.values.keywords(call):
                if key == "max_length" and (isinstance(value, bool) or not isinstance(value, int)):
                    return {}
                if key == "max_length":
                    found.setdefault(value, node.lineno)
        return found

    def _holds_length(self) -> bool:
        return any(key in self.data for key in ("max_length", "max_seq_length", "model_max_length"))

    # What else it does

    def deeds(self, trainer: ast.Call | None) -> None:
        """List what the script does beside its arguments."""
        for call in self.calls:
            self._deed(call)
        for node in self.values.nodes:
            if isinstance(node, ast.Assign):
                self._assignment(node)
            elif isinstance(node, ast.ClassDef) and any(self.values.name_of(base) in _TRAINERS for base in node.bases):
                own = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and one.name in _OVERRIDES]
                if own:
                    self.leave_out(f"{node.name}.{own[0]}", node, Effect.UNKNOWN, "the trainer's own way of a step is not read")
        if trainer is None:
            return
        for key, value, node in self.values.keywords(trainer):
            if key in (
                "optimizers",
                "optimizer_cls_and_kwargs",
                "model_init",
                "ref_model",
                "reward_model",
                "teacher_model",
                "**",
            ):
                if value is not None:
                    self.leave_out(key.replace("**", "Trainer"), node, Effect.UNKNOWN, "what it gives the trainer is not read")
            elif key == "compute_metrics" and value is not None:
                plain = any(one.arg == "preprocess_logits_for_metrics" for one in trainer.keywords)
                evaluates = str(self.data.get("eval_strategy", self.data.get("evaluation_strategy", "no"))) != "no"
                if evaluates and not plain:
                    self.leave_out(key, node, Effect.MORE, "the evaluation keeps its logits for the metrics (--eval-logits)")

    def _deed(self, call: ast.Call) -> None:
        name = self.values.name_of(call.func)
        if name == "gradient_checkpointing_enable":
            if self.values.reached(call) is None:
                self.leave_out(name, call, Effect.UNKNOWN, "on a condition that the text does not tell")
            self.data["gradient_checkpointing"] = True
            kwargs = next((one.value for one in call.keywords if one.arg == "gradient_checkpointing_kwargs"), None)
            if kwargs is not None:
                self._argument("gradient_checkpointing_kwargs", self.values.of(kwargs), kwargs)
        elif name == "prepare_model_for_kbit_training":
            again = next((self.values.of(one.value) for one in call.keywords if one.arg == "use_gradient_checkpointing"), True)
            if again is True:
                self.data["gradient_checkpointing"] = True
            self.leave_out(name, call, Effect.MORE, "weights that are not quantised are made fp32")
        elif name in ("resize_token_embeddings", "gradient_checkpointing_disable", "merge_and_unload", "add_module"):
            self.leave_out(name, call, Effect.MORE, "what it changes of the model is not in the figures")
        elif name == "requires_grad_":
            off = bool(call.args) and self.values.of(call.args[0]) is False
            self._frozen(call, off=off)
        elif name == "compile" and base_name(call.func) == "torch":
            self.leave_out("torch.compile", call, Effect.UNKNOWN, "compiled graphs keep other tensors than eager ones")
        elif name == "setattr":
            self.leave_out(f"{ast.unparse(call.args[0])[:40]}", call, Effect.UNKNOWN, "fields are set by names that may be any")
        elif name in ("half", "bfloat16") or (name == "to" and self._casts(call)):
            self.leave_out("dtype of the model", call, Effect.UNKNOWN, "weights are cast after they are loaded")
        elif name == "set_per_process_memory_fraction":
            self.leave_out(name, call, Effect.LESS, "the process may take a part of the card alone")
        elif _PATCHES.search(name):
            self.leave_out(name, call, Effect.UNKNOWN, "it replaces code of the model")

    def _assignment(self, node: ast.Assign) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Attribute):
                continue
            path, owner = ast.unparse(target), base_name(target)
            others = ".config." in path or owner in ("self", "tokenizer", "config")
            if target.attr in _ASSIGNED and not others and not _HARMLESS.match(target.attr):
                self.leave_out(path[:60], node, Effect.UNKNOWN, "is assigned after it was made")
            if target.attr == "requires_grad":
                self._frozen(node, off=self.values.of(node.value) is False)
            elif target.attr in ("forward", "__call__", *_OVERRIDES):
                self.leave_out(ast.unparse(target)[:60], node, Effect.UNKNOWN, "it replaces code of the model or the trainer")

    def _casts(self, call: ast.Call) -> bool:
        words = [*call.args, *(one.value for one in call.keywords if one.arg == "dtype")]
        owner = base_name(call.func) if isinstance(call.func, ast.Attribute) else ""
        return "model" in owner.lower() and any(self.values.of(one) in _CASTS for one in words)

    def _frozen(self, node: ast.AST, *, off: bool) -> None:
        if off:
            self.leave_out("requires_grad", node, Effect.LESS, "parameters are frozen; the plan counts them as trained")
        else:
            self.leave_out("requires_grad", node, Effect.UNKNOWN, "which parameters are trained is the script's own choice")


def _first(call: ast.Call, key: str) -> ast.expr | None:
    """A call's first argument, or the one of that name."""
    found = next((one.value for one in call.keywords if one.arg == key), None)
    return found if found is not None else call.args[0] if call.args and not isinstance(call.args[0], ast.Starred) else None


def holds_unknown(value: Any) -> bool:
    """Whether a value, or one within it, is not told."""
    if isinstance(value, dict):
        return any(holds_unknown(one) for one in value.values())
    return any(holds_unknown(one) for one in value) if isinstance(value, list) else value is UNKNOWN
