"""The model that a Python script loads, and how: its head, dtype and quantisation."""

from __future__ import annotations

import ast
import re

from zeroplan.core.tasks import Task
from zeroplan.core.unmodelled import OVER_GPUS, Effect
from zeroplan.interop.programs.script_reader import Reader, first_argument
from zeroplan.interop.programs.script_syntax import called, holds_unknown

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


def take_model(reader: Reader, trainer: ast.Call | None, program: str) -> str | None:
    """Take the model that the script loads; return its head, where the class tells one."""
    loads = [call for call in reader.calls if reader.values.name_of(call.func) == "from_pretrained" and _loads_model(call)]
    made = [call for call in reader.calls if reader.values.name_of(call.func) == "from_config"]
    if not loads:
        return _model_of_trainer(reader, trainer, made, program)
    for call in loads[1:]:
        reader.leave_out("models", call, Effect.UNKNOWN, "several models are loaded; the first is planned")
    first = loads[0]
    value = reader.values.of(first_argument(first, "pretrained_model_name_or_path"))
    if isinstance(value, str):
        reader.data["model_name_or_path"] = value
    else:
        reader.assumed.append(f"no model: line {first.lineno} does not tell it")
    _loading(reader, first, program)
    kind = called(first.func.value) if isinstance(first.func, ast.Attribute) else ""
    if "Unsloth" in kind or kind.startswith("Fast"):
        reader.refuse(f"trains by Unsloth (line {first.lineno}), whose kernels are not modelled")
    if kind in _HEADS:
        return _HEADS[kind].value
    if not _PLAIN_MODEL.search(kind):
        reader.leave_out(
            "model", first, Effect.UNKNOWN, f"the head of {kind[:40]} is not known; that of its checkpoint is counted"
        )
    return None


def _loads_model(call: ast.Call) -> bool:
    owner = called(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return not _NO_MODEL.search(owner) and owner != "PeftModel"


def _model_of_trainer(reader: Reader, trainer: ast.Call | None, made: list[ast.Call], program: str) -> str | None:
    given = None if trainer is None else first_argument(trainer, "model")
    value = reader.values.of(given)
    if program == "trl" and isinstance(value, str):
        reader.data["model_name_or_path"] = value
    elif made:
        reader.assumed.append(f"no model: line {made[0].lineno} makes it from a config")
    elif trainer is not None:
        reader.leave_out("model", trainer, Effect.UNKNOWN, "the script's own model is not read; MODEL is planned in its place")
    return None


def _loading(reader: Reader, call: ast.Call, program: str) -> None:
    """Read how the model is loaded."""
    dtype = False
    for key, value, node in reader.values.keywords(call):
        if key in ("torch_dtype", "dtype"):
            dtype = True
            if holds_unknown(value) or not isinstance(value, str):
                reader.leave_out("dtype", node, Effect.UNKNOWN, f"{ast.unparse(node)[:50]} is not told")
            else:
                reader.data["dtype"] = value
        elif key in ("load_in_4bit", "load_in_8bit", "attn_implementation"):
            reader.argument(key, value, node)
        elif key == "quantization_config":
            _quantisation(reader, node, program)
        elif key == "device_map" and value is not None and not _on_one_gpu(reader.values.node(node)):
            laid = value in ("auto", "balanced", "balanced_low_0", "sequential")
            if (
                laid
            ):  # each card has some of what is counted on one, and copies of what passes between two, which are far smaller
                reader.leave_out(OVER_GPUS, node, Effect.LESS, "layers lie over all visible GPUs; all are counted on one")
            else:
                reader.leave_out(key, node, Effect.UNKNOWN, "where its layers lie is not told")
        elif key in ("use_flash_attention_2", "attn_impl", "num_labels", "max_memory", "**", "ignore_mismatched_sizes"):
            if key == "use_flash_attention_2" and value is True:
                reader.data["attn_implementation"] = "flash_attention_2"
            elif key != "ignore_mismatched_sizes" and (key != "num_labels" or not isinstance(value, int)):
                reader.leave_out(key, node, Effect.UNKNOWN, "how the model is loaded is not told")
    if not dtype:
        reader.data["dtype"] = "float32"
        says = "fp32 weights are counted; transformers 5 loads those of the checkpoint, often 16 bits"
        reader.leave_out("dtype", call, Effect.LESS, says)


def _on_one_gpu(node: ast.AST | None) -> bool:
    """Whether a ``device_map`` puts the whole model on one GPU, which the process picks: ``{"": local_rank}``."""
    if not isinstance(node, ast.Dict) or len(node.keys) != 1:
        return False
    (key,), (place,) = node.keys, node.values
    elsewhere = isinstance(place, ast.Constant) and place.value in ("cpu", "disk", "meta")
    return isinstance(key, ast.Constant) and key.value == "" and not elsewhere


def _quantisation(reader: Reader, node: ast.expr, program: str) -> None:
    made = reader.values.node(node)
    if not isinstance(made, ast.Call) or reader.values.name_of(made.func) != "BitsAndBytesConfig":
        if reader.values.of(node) is not None:
            reader.leave_out("quantization_config", node, Effect.UNKNOWN, "this quantisation is not read")
        return
    nested = "use_bnb_nested_quant" if program == "trl" else "bnb_4bit_use_double_quant"
    for key, value, one in reader.values.keywords(made):
        if key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_storage"):
            reader.argument(key, value, one)
        elif key == "bnb_4bit_use_double_quant":
            reader.argument(nested, value, one)
        elif key not in ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "llm_int8_threshold"):
            reader.leave_out(key, one, Effect.UNKNOWN, "what it does to the quantised base is not in the figures")
