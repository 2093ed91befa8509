"""Python scripts with a training loop of their own: over accelerate, DeepSpeed, FSDP2, FSDP, DDP, or torch alone.

What their text tells comes from :mod:`zeroplan.interop.programs.script_loop`. Source of what their libraries do: accelerate
1.15, ``accelerator.py``; DeepSpeed 0.19.8, ``runtime/engine.py`` (``_configure_optimizer``: a client comes first); torch
2.11, ``distributed/fsdp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.core.workload import OptimizerKind
from zeroplan.ds_config.source import load_source
from zeroplan.interop.programs.accelerate import plugin_config
from zeroplan.interop.programs.adapters import optimizer_of, set_attention
from zeroplan.interop.programs.builder import Builder, Keys
from zeroplan.interop.programs.document import Document, find_beside
from zeroplan.interop.programs.machine import take_machine
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import set_fsdp, set_script_adapters
from zeroplan.interop.setups import Setup

MORE, UNKNOWN = Effect.MORE, Effect.UNKNOWN
_HALVES = ("bf16", "fp16")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_TITLES = {
    "accelerate": "a loop over accelerate",
    "deepspeed": "a loop over DeepSpeed",
    "fsdp2": "a loop over FSDP2",
    "fsdp": "a loop over FSDP",
    "ddp": "a loop over DDP",
    "torch": "a loop of torch",
}


class OwnLoop(Program):
    """A script with a loop of its own."""

    name = "torch"
    title = "torch"
    version = "2.11"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return nothing: a script is told by its text, as it is loaded."""
        return ()

    def read(self, document: Document) -> Setup:
        """Read the run. Raises BadInput: no script, or values that its libraries refuse."""
        if document.script is None or "over" not in document.data:
            raise BadInput("is no script with a loop of its own", where=document.name, remedy="leave --program out")
        over = document.data["over"]
        run = Builder(document, self.name, _TITLES[over])
        run.value("over")
        run.take_model("model_name_or_path")
        set_attention(run, "attn_implementation")
        set_script_adapters(run)
        if run.flag("gradient_checkpointing"):
            run.set("gradient_checkpointing", True, "gradient_checkpointing_enable")
            kwargs = run.block("gradient_checkpointing_kwargs")
            if (said := kwargs.flag("use_reentrant")) is not None:
                run.set("reentrant", said, "use_reentrant")
        run.set("moved", True)
        self._batches(run, over)
        self._engine(run, over)
        self._precision(run, over)
        self._optimizer(run)
        run.count("seq_len", "max_length")
        take_machine(run)
        run.assume("no saves (--save plans those of the loop)")
        return run.setup()

    def _batches(self, run: Builder, over: str) -> None:
        batch = run.number("batch_size")
        if over != "deepspeed":
            if batch is not None:
                run.set("micro_batch", batch, "DataLoader")
            run.set("grad_accum", run.number("grad_accum") or 1, "grad_accum" if "grad_accum" in run.data else "")
        evaluates = run.number("eval_batch_size")
        if run.flag("evaluates") and evaluates is not None:
            run.set("eval_batch", evaluates, "DataLoader")
            run.assume("evaluation keeps no logits")

    def _engine(self, run: Builder, over: str) -> None:
        if over == "deepspeed":
            self._deepspeed(run)
        elif over == "fsdp2":
            run.set("engine", "fsdp2", "fully_shard")
            run.set("stage", 3 if run.data.get("reshard") else 2, "reshard_after_forward")
            if run.flag("offload"):
                run.set("offload_optimizer", "cpu", "offload_policy")
                run.set("offload_param", "cpu", "offload_policy")
        elif over == "fsdp":
            strategy = str(run.value("sharding_strategy") or "full_shard")
            set_fsdp(
                run,
                "FSDP",
                version=1,
                reshard=strategy,
                offload=bool(run.flag("offload")),
                hybrid="hybrid" in strategy,
                checkpointing=None,
            )
            run.set("one_unit", not run.flag("wraps"))
        elif over == "accelerate" and "plugin" in run.data:
            self._plugin(run)
        else:
            run.set("engine", "ddp")
            if over == "accelerate":
                run.assume("DDP: no config of accelerate says another engine")
            elif over == "torch":
                run.assume("one GPU", gpus=1)

    def _deepspeed(self, run: Builder) -> None:
        run.set("engine", "deepspeed", "deepspeed.initialize")
        run.set("zero_init", bool(run.flag("zero_init")), "deepspeed.zero.Init")
        config, batch = run.value("ds_config"), run.number("batch_size")
        if config is None:
            if batch is not None:
                run.set("micro_batch", batch, "DataLoader")
            return
        found = _config(run, config)
        run.set("ds_config", found, "deepspeed.initialize")
        said = found.get("train_micro_batch_size_per_gpu")
        if batch is not None and not run.flag("own_loader"):
            if said in (None, "auto"):
                run.leave_out(
                    "train_micro_batch_size_per_gpu", UNKNOWN, f"the loader gives {batch} samples; the ds_config is open"
                )
            elif said != batch:
                says = f"the loader gives {batch} samples a pass, the ds_config says {said}, which is planned"
                run.leave_out("train_micro_batch_size_per_gpu", UNKNOWN, says)
        if "optim" in run.data and run.flag("client"):
            run.fields["ds_config"] = {key: value for key, value in found.items() if key != "optimizer"}

    def _plugin(self, run: Builder) -> None:
        """The ds_config of accelerate's DeepSpeedPlugin. Source: accelerate 1.15, utils/dataclasses.py (DeepSpeedPlugin)."""
        words = dict(run.block("plugin").data)
        config = words.pop("hf_ds_config", None)
        names = {"zero_stage", "gradient_accumulation_steps", "gradient_clipping"}
        names |= {"offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"}
        init = words.pop("zero3_init_flag", None)
        if others := sorted(words.keys() - names):
            run.leave_out("deepspeed_plugin", UNKNOWN, f"{', '.join(others)[:60]} of the plugin is not read")
        found = _config(run, config) if config is not None else plugin_config(Keys(words, f"{run.name}: DeepSpeedPlugin"))
        run.set("engine", "deepspeed", "deepspeed_plugin")
        run.set("ds_config", found, "deepspeed_plugin")
        section = found.get("zero_optimization")
        stage = section.get("stage") if isinstance(section, Mapping) else None
        run.set("zero_init", stage == 3 if init is None else bool(init))

    def _precision(self, run: Builder, over: str) -> None:
        """Set the dtypes: of the products by autocast, a policy or accelerate, and of the weights as they are loaded."""
        said, weights = run.word("arithmetic"), _DTYPES.get(str(run.value("dtype") or "float32"))
        if weights is None:
            run.leave_out("dtype", UNKNOWN, f"weights in {str(run.data['dtype'])[:20]} are counted in fp32")
            weights = "fp32"
        run.set("model_dtype", weights, "dtype" if "dtype" in run.data else "")
        if over == "deepspeed":
            if said is not None:
                run.leave_out("autocast", UNKNOWN, "autocast beside DeepSpeed's own precision is not read")
            return
        if said in _HALVES:
            run.set("dtype", said, "autocast" if run.flag("autocast") else "mixed precision")
            if over in ("fsdp2", "fsdp"):
                self._policy(run, over, said, weights)
        elif weights in _HALVES:
            run.set("dtype", weights, "dtype")
            run.set("autocast", False)
        elif said == "fp32":
            run.set("dtype", "fp32", "mixed precision")
        else:
            run.assume("products in fp32: no line says another precision", dtype="fp32")

    def _policy(self, run: Builder, over: str, said: str, weights: str) -> None:
        if run.flag("autocast"):
            run.leave_out("autocast", UNKNOWN, "autocast over shards, whose gathered weights are not cast; a policy is counted")
            return
        if weights in _HALVES:
            run.leave_out("dtype", UNKNOWN, f"shards in {weights}, as loaded; fp32 ones are counted")
        run.fields["model_dtype"] = "fp32"
        reduced = run.word("reduce_dtype")
        if over == "fsdp2":
            run.set("reduce_dtype", "products" if reduced is None else reduced, "mp_policy")
        elif reduced is not None and reduced != said:
            run.leave_out("mixed precision", UNKNOWN, f"gradients reduced in {reduced}; {said} is counted")

    def _optimizer(self, run: Builder) -> None:
        name = run.word("optim")
        if name is None:
            if "ds_config" not in run.fields:
                run.set("optimizer", "adamw")
            return
        try:
            row, kind = optimizer_of(run, "optim", name)
        except BadInput:
            run.leave_out("optim", UNKNOWN, f"{name[:40]} is not known; AdamW is counted")
            row, kind = "adamw", None
        run.set("optimizer", row, "optim")
        asked = run.word("optim_kind")
        run.set("optimizer_kind", OptimizerKind(asked).value if asked else kind)


def _config(run: Builder, config: Any) -> dict[str, Any]:
    path = config if isinstance(config, Mapping) else find_beside(str(config), run.document, "deepspeed.initialize")
    return dict(load_source(path)[0])
