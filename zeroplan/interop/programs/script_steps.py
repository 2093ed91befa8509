"""The steps of a script's own loop: its optimizer, how it accumulates, and what it keeps or passes beside a plain step."""

from __future__ import annotations

import ast
from typing import Any

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.script_reader import Reader
from zeroplan.interop.programs.script_syntax import UNKNOWN, base_name, called

MORE, LESS, UNSURE = Effect.MORE, Effect.LESS, Effect.UNKNOWN
#: Classes of optimizers, with the names by which programs have them.
_OPTIMIZERS = {
    **{name: name.lower() for name in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Lion", "Muon", "Adafactor")},
    "AdamW8bit": "adamw8bit",
    "Adam8bit": "adam8bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "PagedAdamW": "paged_adamw",
    "Lion8bit": "lion_8bit",
    "PagedLion8bit": "paged_lion_8bit",
    "SGD8bit": "sgd8bit",
    **dict.fromkeys(("DeepSpeedCPUAdam", "FusedAdam"), "adamw"),
}
#: Those of torch, whose arguments say how they walk their tensors.
_TORCHS = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop")
#: Losses of a script's own, which keep tensors as large as the logits.
_LOSSES = ("cross_entropy", "CrossEntropyLoss", "log_softmax", "kl_div", "KLDivLoss", "mse_loss", "MSELoss", "nll_loss")
#: Other states beside the model's own.
_AVERAGES = ("AveragedModel", "EMAModel", "deepcopy")


def list_steps(reader: Reader) -> None:
    """Take the optimizer and the accumulation; list what else a step does."""
    _optimizer(reader)
    _accumulation(reader)
    _passes(reader)
    _beside(reader)


def _optimizer(reader: Reader) -> None:
    made = [call for call in reader.calls if reader.values.name_of(call.func) in _OPTIMIZERS and _is_class(reader, call)]
    dummies = reader.named("DummyOptim")
    if not made:
        if not dummies and not (reader.data.get("over") == "deepspeed" and not reader.data.get("client")):
            node = reader.values.nodes[0]
            reader.leave_out("optimizer", node, UNSURE, "no optimizer that is known is made; AdamW is counted")
        return
    names = {_OPTIMIZERS[reader.values.name_of(call.func)] for call in made}
    first = made[0]
    if len(names) > 1 or (len(made) > 1 and any(reader.values.reached(call) for call in made[1:])):
        reader.leave_out("optimizer", made[1], UNSURE, f"{len(made)} optimizers are made; the first is counted")
    elif dummies:
        reader.data["may_be_config's"] = True
    reader.data["optim"] = _OPTIMIZERS[reader.values.name_of(first.func)]
    _states(reader, first)
    _parameters(reader, first)


def _states(reader: Reader, first: ast.Call) -> None:
    """Set how an optimizer walks its tensors, its numbers, and what decides its states."""
    words = {key: value for key, value, _ in reader.values.keywords(first)}
    if words.get("fused") is UNKNOWN or "**" in words or words.get("foreach") is UNKNOWN:
        reader.leave_out("optimizer.fused", first, UNSURE, "how it walks its tensors is not told")
    kind = _kind(reader, first, words)
    if kind:
        reader.data["optim_kind"] = kind
    if words.get("amsgrad") or (reader.data["optim"] == "sgd" and words.get("momentum") is UNKNOWN):
        reader.leave_out("optimizer", first, UNSURE, "its states follow from an argument that is not read")
    elif reader.data["optim"] == "sgd" and words.get("momentum"):
        reader.data["optim"] = "sgd_momentum"
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay"), ("adam_epsilon", "eps")):
        if isinstance(words.get(key), int | float):
            reader.data[name] = words[key]
    if base_name(first.func) in ("bnb", "bitsandbytes") and not reader.data["optim"].endswith("bit"):
        reader.leave_out("optimizer", first, UNSURE, "how many bits its states have is not told; 32 are counted")


def _kind(reader: Reader, call: ast.Call, words: dict[str, Any]) -> str:
    """How an optimizer walks its tensors: torch's by its arguments; others' where their class tells; empty where none does."""
    if reader.values.name_of(call.func) == "FusedAdam":
        return "fused"
    if reader.values.name_of(call.func) not in _TORCHS or base_name(call.func) in ("bnb", "bitsandbytes", "transformers"):
        return ""
    return "fused" if words.get("fused") is True else "loop" if words.get("foreach") is False else "foreach"


def _is_class(reader: Reader, call: ast.Call) -> bool:
    """Whether an optimizer's name is not one of the script's own functions."""
    return reader.values.name_of(call.func) not in reader.classes


def _parameters(reader: Reader, call: ast.Call) -> None:
    """List an optimizer that steps a part of the model, or what is not told."""
    given = (
        call.args[0] if call.args else next((one.value for one in call.keywords if one.arg in ("params", "model_params")), None)
    )
    node = reader.values.node(given)
    if node is None or isinstance(node, ast.Name):
        reader.leave_out("optimizer.params", call, UNSURE, "which parameters it steps is not told; all are counted")
        return
    owners = [
        one.func.value
        for one in ast.walk(node)
        if isinstance(one, ast.Call)
        and isinstance(one.func, ast.Attribute)
        and one.func.attr in ("parameters", "named_parameters")
    ]
    part = next((one for one in owners if isinstance(one, ast.Attribute) and one.attr not in ("module", "model")), None)
    if part is not None:
        reader.leave_out("optimizer.params", call, UNSURE, f"it steps {ast.unparse(part)[:40]}; all parameters are counted")
    elif not owners and not isinstance(node, ast.List | ast.ListComp | ast.Call | ast.GeneratorExp):
        reader.leave_out("optimizer.params", call, UNSURE, "which parameters it steps is not told; all are counted")


def _accumulation(reader: Reader) -> None:
    """Take the accumulation from the condition around the optimizer's step, where no library has it."""
    if reader.data.get("over") == "deepspeed":
        return
    own = any(reader.values.name_of(call.func) == "accumulate" for call in reader.calls)
    if "grad_accum" in reader.data and own:
        return
    steps = [
        call
        for call in reader.calls
        if called(call.func) == "step" and isinstance(call.func, ast.Attribute) and _steps(ast.unparse(call.func.value))
    ]
    passes = [call for call in reader.calls if called(call.func) == "backward"]
    found = {_passes_a_step(reader, call, passes) for call in steps}
    one = next(iter(found)) if len(found) == 1 else None
    if one is not None and reader.data.get("grad_accum", one) == one:
        reader.data["grad_accum"] = one
    else:
        node = steps[0] if steps else reader.values.nodes[0]
        reader.leave_out("grad_accum", node, UNSURE, "after how many passes it steps is not told")


def _passes_a_step(reader: Reader, step: ast.Call, passes: list[ast.Call]) -> int | None:
    """The passes of a step that stands in one loop with them: all, or each nth by a condition; None for another way."""
    loop = _loop(reader, step)
    if loop is None or any(_loop(reader, one) is not loop for one in passes):
        return None
    first = min((one.lineno for one in passes), default=0)
    if any(isinstance(one, ast.Continue) and first < one.lineno < step.lineno for one in ast.walk(loop)):
        return None
    tests = []
    for parent, child in reader.values.ancestors(step):
        if parent is loop:
            break
        if isinstance(parent, ast.If | ast.IfExp):
            if child is parent.test or any(child is one for one in getattr(parent, "orelse", ())):
                return None
            tests.append(parent.test)
    if not tests:
        return 1
    divided = _divided(tests[0])
    return None if len(tests) > 1 or divided is None else _number(reader.values.of(divided.right))


def _divided(test: ast.expr) -> ast.BinOp | None:
    """The remainder that a condition compares: ``x % n == k``, ``not x % n``, and either ``or`` another condition."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        found = [one for value in test.values if (one := _divided(value)) is not None]
        return found[0] if len(found) == 1 else None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    elif isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        test = test.left
    else:
        return None
    return test if isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod) else None


def _loop(reader: Reader, node: ast.AST) -> ast.AST | None:
    """The loop around a node, within its own function."""
    for parent, _ in reader.values.ancestors(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return None
        if isinstance(parent, ast.For | ast.While | ast.AsyncFor):
            return parent
    return None


def _steps(owner: str) -> bool:
    words = owner.lower()
    return "optim" in words or "scaler" in words or words == "opt"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _passes(reader: Reader) -> None:
    """List passes and losses beyond one forward and backward of the model's own loss."""
    backward = [call for call in reader.calls if called(call.func) == "backward"]
    if not backward:
        reader.refuse("is a Python script that passes nothing backward, so its text tells of no training")
    if len(backward) != 1:
        reader.leave_out("backward", backward[1], UNSURE, f"{len(backward)} calls of backward; a step of one loss is counted")
    elif any(one.arg in ("retain_graph", "create_graph") for one in backward[0].keywords):
        reader.leave_out("backward", backward[0], MORE, "the graph is kept")
    own = next((call for call in reader.calls if reader.values.name_of(call.func) in _LOSSES), None)
    plain = any(isinstance(node, ast.Attribute) and node.attr == "loss" for node in reader.values.nodes)
    if own is not None or not plain:
        node = own if own is not None else backward[0]
        reader.leave_out("loss", node, UNSURE, "a loss of the script's own is not read; the model's own is counted")
    held = _held_outputs(reader)
    if held is not None and own is None:
        says = "what the model returned, its logits among it, is kept in the backward and until the next forward is done"
        reader.leave_out("outputs", held, MORE, says)


def _held_outputs(reader: Reader) -> ast.AST | None:
    """A name that holds all that the model returned, of which a ``.loss`` is then taken, outside an evaluation."""
    for node in reader.values.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "loss" and isinstance(node.value, ast.Name):
            inside = [parent.name for parent, _ in reader.values.ancestors(node) if isinstance(parent, ast.FunctionDef)]
            if not any("eval" in name or "valid" in name for name in inside):
                return node
    return None


def _beside(reader: Reader) -> None:
    for cls in reader.classes.values():
        names = [reader.values.name_of(base) for base in cls.bases]
        if any(
            name == "Module" or name.endswith(("PreTrainedModel", "ForCausalLM", "ForSequenceClassification")) for name in names
        ):
            reader.leave_out(cls.name, cls, UNSURE, "a module of the script's own is not read")
    for node in reader.values.nodes:
        if isinstance(node, ast.Assign) and any(
            "deepspeed_config" in ast.unparse(one) and not isinstance(one, ast.Name) for one in node.targets
        ):
            reader.leave_out("deepspeed_config", node, UNSURE, "what the script assigns to accelerate's ds_config is not read")
    evaluates = False
    for call in reader.calls:
        name = reader.values.name_of(call.func)
        if name == "generate" and isinstance(call.func, ast.Attribute):
            reader.leave_out("generate", call, MORE, "generation, and its cache of keys and values")
        elif name in _AVERAGES and (name != "deepcopy" or "model" in ast.unparse(call)):
            reader.leave_out(name, call, MORE, "a copy of the model beside the trained one")
        elif name == "compile" and isinstance(call.func, ast.Attribute) and base_name(call.func) not in ("torch", "re"):
            reader.leave_out("compile", call, UNSURE, "compiled graphs keep other tensors than eager ones")
        elif name in (
            "register_hook",
            "register_post_accumulate_grad_hook",
            "register_forward_hook",
            "saved_tensors_hooks",
            "save_on_cpu",
        ):
            reader.leave_out(name, call, UNSURE, "what its hooks keep or free is not read")
        evaluates |= name == "eval" and isinstance(call.func, ast.Attribute)
    if evaluates and "eval_batch_size" not in reader.data:
        reader.leave_out("evaluation", reader.values.nodes[0], MORE, "the batches of its evaluation are not told")
    reader.data["evaluates"] = evaluates
