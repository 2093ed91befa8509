"""What a Python script does beside its arguments: freezes, patches, casts, and a trainer's own way of a step."""

from __future__ import annotations

import ast
import re

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.known import arguments_of
from zeroplan.interop.programs.script_reader import HARMLESS, Reader
from zeroplan.interop.programs.script_syntax import base_name

#: Classes that train, of transformers and TRL.
TRAINERS = (
    *("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer"),
    *("GRPOTrainer", "RLOOTrainer"),
)
_PATCHES = re.compile(r"liger|monkey|_patch|patch_|unsloth|^replace_\w*(attn|attention|forward)|flash_attn_monkey")
_CASTS = ("bfloat16", "float16", "float32", "half", "float")
#: Fields by which arguments and adapters change after they are made.
_ASSIGNED = arguments_of("hf-trainer", "trl") | {"r", "target_modules", "lora_dropout", "modules_to_save"}
#: Methods and functions that change the model; TRL's of chat formats add words to its embedding.
_CHANGES = (
    *("resize_token_embeddings", "gradient_checkpointing_disable", "merge_and_unload", "add_module", "setup_chat_format"),
    *("clone_chat_template", "smart_tokenizer_and_embedding_resize"),
)
#: Methods and functions by which a trainer takes steps of its own.
_OVERRIDES = frozenset(
    ("compute_loss", "training_step", "create_optimizer", "create_optimizer_and_scheduler", "prediction_step", "_wrap_model")
)


def list_side_effects(reader: Reader, trainer: ast.Call | None) -> None:
    """List what the script does beside its arguments."""
    for call in reader.calls:
        _side_effect(reader, call)
    for node in reader.values.nodes:
        if isinstance(node, ast.Assign):
            _assignment(reader, node)
        elif isinstance(node, ast.ClassDef) and any(reader.values.name_of(base) in TRAINERS for base in node.bases):
            own = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and one.name in _OVERRIDES]
            if own:
                reader.leave_out(f"{node.name}.{own[0]}", node, Effect.UNKNOWN, "the trainer's own way of a step is not read")
    if trainer is None:
        return
    for key, value, node in reader.values.keywords(trainer):
        if key in (
            "optimizers",
            "optimizer_cls_and_kwargs",
            "model_init",
            "ref_model",
            "reward_model",
            "teacher_model",
            "rollout_func",
            "**",
        ):
            if value is not None:
                reader.leave_out(key.replace("**", "Trainer"), node, Effect.UNKNOWN, "what it gives the trainer is not read")
        elif key == "compute_metrics" and value is not None:
            plain = any(one.arg == "preprocess_logits_for_metrics" for one in trainer.keywords)
            evaluates = str(reader.data.get("eval_strategy", reader.data.get("evaluation_strategy", "no"))) != "no"
            if evaluates and not plain:
                reader.leave_out(key, node, Effect.MORE, "the evaluation keeps its logits for the metrics (--eval-logits)")


def _side_effect(reader: Reader, call: ast.Call) -> None:
    name = reader.values.name_of(call.func)
    if name == "gradient_checkpointing_enable":
        if reader.values.reached(call) is None:
            reader.leave_out(name, call, Effect.UNKNOWN, "on a condition that the text does not tell")
        reader.data["gradient_checkpointing"] = True
        kwargs = next((one.value for one in call.keywords if one.arg == "gradient_checkpointing_kwargs"), None)
        if kwargs is not None:
            reader.argument("gradient_checkpointing_kwargs", reader.values.of(kwargs), kwargs)
    elif name in ("prepare_model_for_kbit_training", "prepare_model_for_int8_training"):
        again = next((reader.values.of(one.value) for one in call.keywords if one.arg == "use_gradient_checkpointing"), True)
        if again is True:
            reader.data["gradient_checkpointing"] = True
        reader.leave_out(name, call, Effect.MORE, "weights that are not quantised are made fp32")
    elif name in _CHANGES:
        reader.leave_out(name, call, Effect.MORE, "what it changes of the model is not in the figures")
    elif name == "requires_grad_":
        off = bool(call.args) and reader.values.of(call.args[0]) is False
        _frozen(reader, call, off=off)
    elif name == "compile" and base_name(call.func) == "torch":
        reader.leave_out("torch.compile", call, Effect.UNKNOWN, "compiled graphs keep other tensors than eager ones")
    elif name == "setattr":
        reader.leave_out(f"{ast.unparse(call.args[0])[:40]}", call, Effect.UNKNOWN, "fields are set by names that may be any")
    elif name in ("half", "bfloat16") or (name == "to" and _casts(reader, call)):
        reader.leave_out("dtype of the model", call, Effect.UNKNOWN, "weights are cast after they are loaded")
    elif name == "set_per_process_memory_fraction":
        reader.leave_out(name, call, Effect.LESS, "the process may take a part of the card alone")
    elif _PATCHES.search(name):
        reader.leave_out(name, call, Effect.UNKNOWN, "it replaces code of the model")


def _assignment(reader: Reader, node: ast.Assign) -> None:
    for target in node.targets:
        if not isinstance(target, ast.Attribute):
            continue
        path, owner = ast.unparse(target), base_name(target)
        others = ".config." in path or owner in ("self", "tokenizer", "config")
        if target.attr in _ASSIGNED and not others and not HARMLESS.match(target.attr):
            reader.leave_out(path[:60], node, Effect.UNKNOWN, "is assigned after it was made")
        if target.attr == "requires_grad":
            _frozen(reader, node, off=reader.values.of(node.value) is False)
        elif target.attr in ("forward", "__call__", *_OVERRIDES):
            reader.leave_out(ast.unparse(target)[:60], node, Effect.UNKNOWN, "it replaces code of the model or the trainer")


def _casts(reader: Reader, call: ast.Call) -> bool:
    words = [*call.args, *(one.value for one in call.keywords if one.arg == "dtype")]
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    made = reader.values.node(call.func.value) if isinstance(call.func, ast.Attribute) else None
    whole = "model" in owner.lower() or (made is not None and "from_pretrained" in ast.unparse(made))
    return whole and any(reader.values.of(one) in _CASTS for one in words)


def _frozen(reader: Reader, node: ast.AST, *, off: bool) -> None:
    if off:
        reader.leave_out("requires_grad", node, Effect.LESS, "parameters are frozen; the plan counts them as trained")
    else:
        reader.leave_out("requires_grad", node, Effect.UNKNOWN, "which parameters are trained is the script's own choice")
