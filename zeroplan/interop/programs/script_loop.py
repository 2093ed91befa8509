"""A Python script with a training loop of its own: over accelerate, DeepSpeed's engine, FSDP2, FSDP, DDP, or torch alone.

Nothing of it is run. Read are the model, the loaders, the dtypes, the optimizer's class, accumulation, checkpointing, and what
shards or wraps; what the text does not tell, and what a plan of a plain step does not hold, is listed by line.

Source: accelerate 1.15 (``Accelerator.__init__``), DeepSpeed 0.19.8 (``deepspeed.initialize``, ``zero.Init``), torch 2.11
(``fully_shard``, ``FullyShardedDataParallel``, ``autocast``).
"""

from __future__ import annotations

import ast
from typing import Any

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.script import ARGUMENTS
from zeroplan.interop.programs.script_adapters import take_adapters
from zeroplan.interop.programs.script_deeds import TRAINERS, list_deeds
from zeroplan.interop.programs.script_loaders import loader_batches
from zeroplan.interop.programs.script_model import take_model
from zeroplan.interop.programs.script_reader import Reader, RunScript
from zeroplan.interop.programs.script_steps import list_steps
from zeroplan.interop.programs.script_syntax import UNKNOWN, base_name, called, holds_unknown

MORE, LESS, UNSURE = Effect.MORE, Effect.LESS, Effect.UNKNOWN
#: What wraps or shards a model, and the engine that it is.
_WRAPPERS = {
    "fully_shard": "fsdp2",
    "FullyShardedDataParallel": "fsdp",
    "FSDP": "fsdp",
    "DistributedDataParallel": "ddp",
    "DDP": "ddp",
}
#: Layouts that the text of a loop does not tell well enough.
_LAYOUTS = (
    "parallelize_module",
    "context_parallel",
    "DataParallel",
    "replicate",
    "pipeline",
    "ScheduleGPipe",
    "Schedule1F1B",
    "LocalSGD",
)
_HALVES = ("bfloat16", "float16", "bf16", "fp16")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32"}


def is_loop(reader: Reader) -> bool:
    """Whether a script trains by a loop of its own: it makes no arguments and no trainer, and passes backward."""
    if reader.named(*ARGUMENTS, *TRAINERS, "HfArgumentParser", "TrlParser", "Fabric", "LightningCLI"):
        return False
    return any(reader.values.name_of(call.func) == "backward" or initializes(reader, call) for call in reader.calls) or bool(
        reader.named("Accelerator")
    )


def initializes(reader: Reader, call: ast.Call) -> bool:
    """Whether a call makes DeepSpeed's engine."""
    return reader.values.name_of(call.func) == "initialize" and base_name(call.func) in ("deepspeed", "ds")


class LoopReader(Reader):
    """Reads a script with a loop of its own."""

    def read(self) -> RunScript:
        """Read the run. Raises BadInput: names that are not sure, several engines, models of diffusers, or Fabric's loop."""
        if self.values.opaque:
            self.refuse(f"binds names in a way that no text tells (line {self.values.opaque})")
        for node in self.values.nodes:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if any(one.partition(".")[0] == "diffusers" for one in modules):
                self.refuse("trains a model of diffusers, which is not planned")
        self._engine()
        head = take_model(self, None, "torch")
        if "model_name_or_path" not in self.data and not any(one.startswith("no model") for one in self.assumed):
            self.leave_out("model", self.values.nodes[0], UNSURE, "the script's own model is not read; MODEL is planned")
        take_adapters(self, None, "torch")
        list_deeds(self, None)
        self._arithmetic()
        self._checkpoints()
        self._batches()
        list_steps(self)
        return self.found("torch", self.data, head=head)

    # What shards

    def _engine(self) -> None:
        made = self.named("Accelerator")
        begins = [call for call in self.calls if initializes(self, call)]
        wraps = [call for call in self.calls if self.values.name_of(call.func) in _WRAPPERS]
        kinds = dict.fromkeys(_WRAPPERS[self.values.name_of(call.func)] for call in wraps)
        if len(begins) > 1:
            self.refuse(f"makes {len(begins)} engines of DeepSpeed (lines {', '.join(str(one.lineno) for one in begins[:4])})")
        for call in self.calls:
            if self.values.name_of(call.func) in _LAYOUTS:
                self.leave_out(self.values.name_of(call.func), call, UNSURE, "this layout is not read from a script")
        if made:
            self.data["over"] = "accelerate"
            self._accelerator(made[0])
            if begins or wraps:
                self.leave_out("engine", (*begins, *wraps)[0], UNSURE, "accelerate's loop and another engine")
        elif begins:
            self.data["over"] = "deepspeed"
            self._deepspeed(begins[0])
            if wraps:
                self.leave_out("engine", wraps[0], UNSURE, "DeepSpeed's engine and another wrapper")
        elif wraps:
            self._wrapped(wraps, list(kinds))
        else:
            self.data["over"] = "torch"

    def _wrapped(self, wraps: list[ast.Call], kinds: list[str]) -> None:
        doubt = next((call for call in wraps if self.values.reached(call) is None), None)
        self.data["over"] = kinds[0]
        if len(kinds) > 1:
            self.leave_out("engine", wraps[-1], UNSURE, f"which of {', '.join(kinds)} wraps the model is not told")
        elif doubt is not None and kinds[0] != "ddp":
            self.leave_out("engine", doubt, UNSURE, "it is wrapped on a condition that the text does not tell")
        own = [call for call in wraps if _WRAPPERS[self.values.name_of(call.func)] == kinds[0]]
        {"fsdp2": self._fsdp2, "fsdp": self._fsdp, "ddp": self._ddp}[kinds[0]](own)

    def _words(self, call: ast.Call) -> dict[str, tuple[Any, ast.expr]]:
        found = {key: (value, node) for key, value, node in self.values.keywords(call)}
        for one in call.keywords:  # objects in a dict that is spread: its own expressions, where nothing changes it
            spread = self.values.node(one.value) if one.arg is None else None
            if isinstance(spread, ast.Dict) and not (isinstance(one.value, ast.Name) and self.values.changed(one.value.id)):
                for key, item in zip(spread.keys, spread.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in found:
                        found[key.value] = (self.values.of(item), item)
        return found

    def _given(self, calls: list[ast.Call]) -> dict[str, tuple[Any, ast.expr]]:
        """The keywords of several calls; a value in which they differ is unknown."""
        found: dict[str, tuple[Any, ast.expr]] = {}
        for call in calls:
            for key, (value, node) in self._words(call).items():
                same = key not in found or ast.dump(found[key][1]) == ast.dump(node)
                found[key] = (value, node) if same else (UNKNOWN, ast.Constant("several values"))
        return found

    def _fsdp2(self, calls: list[ast.Call]) -> None:
        given = self._given(calls)
        said = [self._words(call).get("reshard_after_forward", (None, call))[0] for call in calls]
        reshards = {one if one is None or isinstance(one, bool) else "other" for one in said}
        inside = [call for call in calls if self.values.in_loop(call)]
        if not inside:
            self.leave_out("fully_shard", calls[0], MORE, "no call in a loop over blocks: the model may be one unit")
        if "other" in reshards or len(reshards - {None}) > 1:
            self.leave_out("reshard_after_forward", calls[0], UNSURE, "it is not told, or differs; parameters are freed here")
        self.data["reshard"] = reshards != {False}
        policy = given.get("mp_policy")
        if policy is not None:
            self._policy(policy, calls[0], ("cast_forward_inputs",))
        offload = given.get("offload_policy")
        if offload is not None and offload[0] is not None:
            made = self.values.node(offload[1])
            if isinstance(made, ast.Call) and self.values.name_of(made.func) == "CPUOffloadPolicy":
                self.data["offload"] = True
            else:
                self.leave_out("offload_policy", calls[0], UNSURE, f"{ast.unparse(offload[1])[:50]} is not told")
        self._others(given, ("reshard_after_forward", "mp_policy", "offload_policy"), "fully_shard", calls[0])

    def _fsdp(self, calls: list[ast.Call]) -> None:
        given = self._given(calls)
        strategy = given.get("sharding_strategy")
        if strategy is not None and isinstance(strategy[1], ast.Attribute):
            self.data["sharding_strategy"] = strategy[1].attr.lower()
        elif strategy is not None:
            self.leave_out("sharding_strategy", calls[0], UNSURE, f"{ast.unparse(strategy[1])[:50]} is not told")
        wrap = given.get("auto_wrap_policy")
        self.data["wraps"] = wrap is not None and not (isinstance(wrap[1], ast.Constant) and wrap[1].value is None)
        if self.data["wraps"] and wrap is not None:
            text = ast.unparse(self.values.node(wrap[1]) or wrap[1])
            if "transformer_auto_wrap_policy" not in text and "ModuleWrapPolicy" not in text:
                self.leave_out("auto_wrap_policy", calls[0], UNSURE, f"{text[:50]}: units are not told; blocks are counted")
        policy = given.get("mixed_precision")
        if policy is not None:
            self._policy(policy, calls[0], ("buffer_dtype", "cast_forward_inputs", "keep_low_precision_grads"))
        offload = given.get("cpu_offload")
        if offload is not None and offload[0] is not None:
            self.data["offload"] = True
            self.leave_out("cpu_offload", calls[0], UNSURE, "FSDP 1 with its parameters on the host is planned as FSDP 2")
        read = ("sharding_strategy", "auto_wrap_policy", "mixed_precision", "cpu_offload", "device_id", "sync_module_states")
        self._others(given, (*read, "use_orig_params", "param_init_fn", "limit_all_gathers"), "FSDP", calls[0])

    def _ddp(self, calls: list[ast.Call]) -> None:
        read = ("device_ids", "output_device", "find_unused_parameters", "broadcast_buffers", "process_group")
        self._others(self._given(calls), read, "DDP", calls[0])

    def _others(self, given: dict[str, Any], read: tuple[str, ...], what: str, call: ast.Call) -> None:
        for key, (value, _) in given.items():
            if key not in read and value is not None:
                self.leave_out(f"{what}.{key.strip('*')}", call, UNSURE, "what it does to memory is not read")

    def _policy(self, given: tuple[Any, ast.expr], call: ast.Call, harmless: tuple[str, ...]) -> None:
        """Take the dtypes of a policy of mixed precision."""
        made = self.values.node(given[1])
        words = self._words(made) if isinstance(made, ast.Call) and not made.args else None
        if isinstance(made, ast.Constant) and made.value is None:
            return
        if words is None or any(
            not isinstance(value, str) for key, (value, _) in words.items() if key in ("param_dtype", "reduce_dtype")
        ):
            self.leave_out("mixed precision", call, UNSURE, f"{ast.unparse(given[1])[:50]} is not told")
            return
        if "param_dtype" in words:
            self.data["arithmetic"] = _SHORT.get(words["param_dtype"][0], words["param_dtype"][0])
        if "reduce_dtype" in words:
            self.data["reduce_dtype"] = _SHORT.get(words["reduce_dtype"][0], words["reduce_dtype"][0])
        self._others(words, ("param_dtype", "reduce_dtype", *harmless), "mixed precision", call)

    def _deepspeed(self, call: ast.Call) -> None:
        """Take the ds_config: a dict, a path, or what a parser's ``--deepspeed_config`` holds."""
        words = self._words(call)
        value, node = words.get("config", words.get("config_params", (None, call)))
        if value is None and node is call and (len(call.args) > 7):
            value, node = self.values.of(call.args[7]), call.args[7]
        if value is None or (value is UNKNOWN and called(node if isinstance(node, ast.expr) else None) == "deepspeed_config"):
            asked = self.values.flag("deepspeed_config")  # of deepspeed.add_config_arguments
            value = UNKNOWN if asked is None else asked
        if isinstance(value, str | dict) and not holds_unknown(value):
            self.data["ds_config"] = value
        else:
            self.open["ds_config"] = (
                f"line {node.lineno} does not tell the ds_config; --from ds_config.json beside the script does"
            )
        self.data["client"] = "optimizer" in words
        self.data["own_loader"] = "training_data" in words
        inits = [one for one in self.calls if self.values.name_of(one.func) == "Init" and "zero" in ast.unparse(one.func)]
        kept = [one for one in self.calls if self.values.name_of(one.func) == "HfDeepSpeedConfig"]
        self.data["zero_init"] = bool(inits or kept)
        doubt = next((one for one in (*inits, *kept) if self.values.reached(one) is None), None)
        if doubt is not None:
            self.leave_out("zero.Init", doubt, UNSURE, "on a condition that the text does not tell")
        for one in self.calls:
            if self.values.name_of(one.func) == "configure" and "checkpointing" in ast.unparse(one.func):
                self.leave_out("deepspeed.checkpointing", one, UNSURE, "recomputation by DeepSpeed's own functions is not read")

    def _accelerator(self, call: ast.Call) -> None:
        read = ("mixed_precision", "gradient_accumulation_steps", "deepspeed_plugin", "gradient_accumulation_plugin")
        harmless = (
            "log_with",
            "project_config",
            "project_dir",
            "cpu",
            "step_scheduler_with_optimizer",
            "rng_types",
            "even_batches",
        )
        for key, (value, node) in self._words(call).items():
            if key == "mixed_precision" and (value in (*_HALVES, "no") if isinstance(value, str) else False):
                self.data["arithmetic"] = _SHORT.get(value, value)
            elif key == "gradient_accumulation_steps" and isinstance(value, int):
                self.data["grad_accum"] = value
            elif key == "gradient_accumulation_plugin":
                self._accumulation_plugin(node)
            elif key == "deepspeed_plugin":
                self._plugin(node)
            elif key == "split_batches" and value is False:
                continue
            elif key == "kwargs_handlers" or (key in harmless) or value is None:
                self._handlers(node) if key == "kwargs_handlers" else None
            elif key in read:
                self.leave_out(f"Accelerator.{key}", node, UNSURE, f"{ast.unparse(node)[:50]} is not told")
            else:
                self.leave_out(f"Accelerator.{key.strip('*')}", node, UNSURE, "what it does to the run is not read")

    def _handlers(self, node: ast.expr) -> None:
        """List handlers that change what a step holds: all but a few that do not."""
        listed = self.values.node(node)
        for one in listed.elts if isinstance(listed, ast.List | ast.Tuple) else [node]:
            made = self.values.node(one)
            name = self.values.name_of(made.func) if isinstance(made, ast.Call) else ""
            words = set(self._words(made)) if isinstance(made, ast.Call) else set()
            plain = name == "DistributedDataParallelKwargs" and words <= {"find_unused_parameters", "broadcast_buffers"}
            if not plain and name not in ("InitProcessGroupKwargs", "ProfileKwargs", "GradScalerKwargs"):
                self.leave_out("kwargs_handlers", one, UNSURE, f"{ast.unparse(made or one)[:50]} is not read")

    def _accumulation_plugin(self, node: ast.expr) -> None:
        made = self.values.node(node)
        steps = self._words(made).get("num_steps", (UNKNOWN, node))[0] if isinstance(made, ast.Call) else UNKNOWN
        if isinstance(steps, int):
            self.data["grad_accum"] = steps
        else:
            self.leave_out("grad_accum", node, UNSURE, f"{ast.unparse(node)[:50]} is not told")

    def _plugin(self, node: ast.expr) -> None:
        """Take the ds_config of a DeepSpeedPlugin: the one that it names, or its own arguments."""
        made = self.values.node(node)
        if not isinstance(made, ast.Call) or self.values.name_of(made.func) != "DeepSpeedPlugin":
            self.leave_out("deepspeed_plugin", node, UNSURE, f"{ast.unparse(node)[:50]} is not told")
            return
        words = {key: value for key, (value, _) in self._words(made).items()}
        if holds_unknown(words) or made.args:
            self.leave_out("deepspeed_plugin", node, UNSURE, "its arguments are not told")
            return
        self.data["plugin"] = words

    # What the model computes in, and keeps

    def _arithmetic(self) -> None:
        """Take the dtype of autocast; without one the products are in the dtype of the weights."""
        calls = [
            call
            for call in self.calls
            if self.values.name_of(call.func) == "autocast" and base_name(call.func) != "accelerator"
        ]
        calls = [call for call in calls if not self._of_evaluation(call)]
        for call in calls:
            words = self._words(call)
            value = words["dtype"][0] if "dtype" in words else self.values.of(call.args[1]) if len(call.args) > 1 else "float16"
            on = words.get("enabled", (True, call))[0]
            said = _SHORT.get(value) if isinstance(value, str) else None
            if said is None or on is not True or self.data.get("arithmetic", said) != said:
                self.leave_out("autocast", call, UNSURE, f"{ast.unparse(call)[:50]} is not told")
            elif said != "fp32":
                self.data["arithmetic"] = said
                self.data["autocast"] = True
        for call in self.calls:
            if self.values.name_of(call.func) in ("set_default_dtype", "set_default_tensor_type"):
                self.leave_out("set_default_dtype", call, UNSURE, "weights are made in another dtype")

    def _of_evaluation(self, call: ast.Call) -> bool:
        return any(
            isinstance(parent, ast.FunctionDef) and ("eval" in parent.name or "val" in parent.name)
            for parent, _ in self.values.ancestors(call)
        )

    def _checkpoints(self) -> None:
        for call in self.calls:
            name = self.values.name_of(call.func)
            if name == "apply_activation_checkpointing":
                self.data["gradient_checkpointing"] = True
                sure = self.values.reached(call) is True
                check = self._words(call).get("check_fn")
                text = "" if check is None else ast.unparse(self.values.node(check[1]) or check[1])
                if not sure or not ("Layer" in text or "Block" in text):
                    self.leave_out(name, call, UNSURE, "which modules are recomputed is not told; blocks are counted")
            elif name in ("checkpoint", "checkpoint_sequential", "checkpoint_wrapper") and not self._is_saved(call):
                self.leave_out(name, call, UNSURE, "which modules are recomputed is not told")

    def _is_saved(self, call: ast.Call) -> bool:
        """Whether ``checkpoint`` is a file's, not a function's that runs again: it has no function as its first argument."""
        return not call.args or isinstance(call.args[0], ast.Constant)

    def _batches(self) -> None:
        found = loader_batches(self)
        if "batch_size" in found:
            self.data["batch_size"] = found["batch_size"]
        elif not self.data.get("own_loader"):
            self.open["micro_batch"] = "no line tells the samples of a pass; --micro-batch does"
        if "val_batch_size" in found:
            self.data["eval_batch_size"] = found["val_batch_size"]
        lengths = self.cut_lengths()
        if len(lengths) == 1:
            ((length, line),) = lengths.items()
            self.data["max_length"] = length
            self.assumed.append(f"samples of {length} tokens, to which line {line} cuts them")
        else:
            self.open["seq_len"] = "no line tells the length of a sample; --seq-len does"
