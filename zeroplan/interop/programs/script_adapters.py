"""The adapters that a Python script puts into its model."""

from __future__ import annotations

import ast
import re
from typing import Any

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.script_reader import Reader
from zeroplan.interop.programs.script_syntax import base_name, holds_unknown
from zeroplan.models.lora_targets import PEFT_DEFAULT
from zeroplan.techniques.table import keys_of

#: Of adapters, quantisation and models: keywords that are read.
_OF_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "lora_dropout": "lora_dropout"}
_BESIDE_LORA = (
    "target_parameters",
    "layers_to_transform",
    "rank_pattern",
    "trainable_token_indices",
)
#: Those that move nothing that a plan holds; ``init_lora_weights`` by its value.
_HARMLESS = (
    *("task_type", "inference_mode", "lora_alpha", "use_rslora", "fan_in_fan_out", "base_model_name_or_path", "revision"),
    *("peft_type", "alpha_pattern"),
)
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal")
#: Functions that put adapters into a model.
_WRAPPING = ("get_peft_model", "add_adapter", "inject_adapter_in_model")


def take_adapters(reader: Reader, trainer: ast.Call | None, program: str) -> None:
    """Take the one LoraConfig that the trainer, or a function that puts adapters into a model, gets."""
    configs = reader.named("LoraConfig")
    others = [
        call
        for call in reader.calls
        if re.fullmatch(r"\w+Config", reader.values.name_of(call.func)) and _tunes(reader.values.name_of(call.func))
    ]
    for call in others:
        reader.leave_out(
            "adapters",
            call,
            Effect.UNKNOWN,
            f"{reader.values.name_of(call.func)} is not modelled; all weights count as trained",
        )
    if len(configs) > 1:
        reader.leave_out("adapters", configs[1], Effect.UNKNOWN, "several LoraConfigs; all weights count as trained")
    loaded = [
        call
        for call in reader.calls
        if reader.values.name_of(call.func) == "from_pretrained" and base_name(call.func) == "PeftModel"
    ]
    if loaded:
        reader.leave_out("adapters", loaded[0], Effect.UNKNOWN, "adapters of a checkpoint; all weights count as trained")
    if len(configs) != 1:
        wrapped = [one for one in reader.calls if reader.values.name_of(one.func) in _WRAPPING]
        if wrapped and not configs:
            says = "adapters that are not read; all weights count as trained"
            reader.leave_out("adapters", wrapped[0], Effect.UNKNOWN, says)
        return
    call = configs[0]
    takes = [one for one in reader.calls if reader.values.name_of(one.func) in _WRAPPING]
    takes += [] if trainer is None else [trainer]
    given = [word.value for one in takes for word in one.keywords if word.arg in ("peft_config", "adapter_config")]
    given += [one.args[1] for one in takes if one is not trainer and len(one.args) > 1]
    given = [one.body if isinstance(one, ast.IfExp) and reader.values.of(one.test) is True else one for one in given]
    if not any(reader.values.node(one) is call for one in given):
        sure = not [one for one in given if not (isinstance(one, ast.Constant) and one.value is None)]
        says = "a LoraConfig that nothing takes; all weights count as trained"
        reader.leave_out("adapters", call, Effect.LESS if sure else Effect.UNKNOWN, says)
        return
    doubt = next((one for one in (call, *takes) if reader.values.reached(one) is None), None)
    if doubt is not None:
        reader.leave_out("adapters", doubt, Effect.UNKNOWN, "on a condition that the text does not tell")
    reader.data["use_peft" if program == "trl" else "use_lora"] = True
    techniques = keys_of("peft")
    own: dict[str, Any] = {"lora_r": 8, "lora_target_modules": PEFT_DEFAULT, "lora_dropout": 0.0}
    for key, value, node in reader.values.keywords(call):
        if key in techniques and not holds_unknown(value):
            own[key] = value
        elif key in _OF_LORA and not holds_unknown(value):
            own[_OF_LORA[key]] = PEFT_DEFAULT if key == "target_modules" and value is None else value
        elif (key == "bias" and value == "none") or (key == "init_lora_weights" and value in _PLAIN_BEGINNINGS):
            continue
        elif key in _OF_LORA or key in techniques or (key not in _HARMLESS and (value or key == "init_lora_weights")):
            effect = Effect.MORE if key in _BESIDE_LORA else Effect.UNKNOWN
            reader.leave_out(f"LoraConfig.{key.strip('*')}", node, effect, f"{ast.unparse(node)[:50]} is not in the figures")
    reader.data |= own


def _tunes(name: str) -> bool:
    words = ("Prefix", "Prompt", "IA3", "AdaLora", "Vera", "LoHa", "LoKr", "OFT", "BOFT", "PTuning", "FourierFT", "VBLoRA")
    return name.startswith(words)
