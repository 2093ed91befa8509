"""Lightning: the YAML of its LightningCLI.

The file holds the trainer; the module, whose loss and optimizer are its own code, is not in it.
Source: Lightning 2.6, ``pytorch/trainer/trainer.py``, ``pytorch/strategies/`` and
``trainer/connectors/accelerator_connector.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.core.workload import OptimizerKind
from zeroplan.ds_config.source import load_source
from zeroplan.interop.programs.adapters import optimizer_of
from zeroplan.interop.programs.builder import Builder, Keys
from zeroplan.interop.programs.document import Document, find_named_file
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import set_fsdp
from zeroplan.interop.setups import Setup
from zeroplan.techniques.table import keys_of

MORE, LESS, UNKNOWN = Effect.MORE, Effect.LESS, Effect.UNKNOWN
#: Arguments of the Trainer of which a section has one, if it is Lightning's.
_OWN = ("accelerator", "strategy", "devices", "precision", "accumulate_grad_batches", "num_nodes")
#: Those of others' sections of that name.
_OTHERS = ("n_gpus_per_node", "nnodes", "total_epochs", "n_gpus")
_PRECISIONS = {
    **dict.fromkeys(("bf16-mixed", "bf16"), ("bf16", "fp32")),
    **dict.fromkeys(("16-mixed", "16"), ("fp16", "fp32")),
    "bf16-true": ("bf16", "bf16"),
    "16-true": ("fp16", "fp16"),
    **dict.fromkeys(("32-true", "32"), ("fp32", "fp32")),
}
#: DeepSpeedStrategy's defaults that stand in the ds_config which it makes (strategies/deepspeed.py, _create_default_config).
_ZERO: dict[str, Any] = {
    "stage": 2,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 200_000_000,
    "reduce_bucket_size": 200_000_000,
    "sub_group_size": 1_000_000_000_000,
}
_OPTIMIZER_BUFFERS = {"optimizer_buffer_count": "buffer_count"}
_PARAM_BUFFERS = {"params_buffer_count": "buffer_count", "params_buffer_size": "buffer_size", "max_in_cpu": "max_in_cpu"}
_CHECKPOINTING = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
#: Callbacks that hold weights or change what a step holds.
_CALLBACKS = {
    "StochasticWeightAveraging": (MORE, "averaged weights beside the model's"),
    "GradientAccumulationScheduler": (UNKNOWN, "accumulation that changes while it trains"),
    "BackboneFinetuning": (LESS, "parts are frozen at first"),
}
_MODELS = ("model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id", "checkpoint")
_BATCHES = ("batch_size", "train_batch_size", "micro_batch_size")
_EVAL_BATCHES = ("val_batch_size", "eval_batch_size")
_LENGTHS = ("max_seq_length", "max_length", "seq_length", "block_size", "max_seq_len")


class Lightning(Program):
    """The sections of LightningCLI's YAML, also below ``fit``."""

    name = "lightning"
    title = "Lightning"
    version = "2.6"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the section of the Trainer, where it has arguments of Lightning's."""
        trainer = _sections(document.data).get("trainer")
        if not isinstance(trainer, Mapping) or any(key in trainer for key in _OTHERS):
            return ()
        return ("trainer",) if any(key in trainer for key in _OWN) else ()

    def read(self, document: Document) -> Setup:
        """Read the run.

        Raises:
            BadInput: as :meth:`Program.read`; a run that is not on GPUs; or a file of NeMo, which has Megatron-Core's layers.
        """
        data = dict(_sections(document.data))
        run = Builder(document, self.name, self.label)
        run.data = data
        trainer = run.block("trainer")
        model = run.block("model") if isinstance(data.get("model"), Mapping) else Keys({}, run.name)
        if any(key in model.data for key in ("micro_batch_size", "megatron_amp_O2", "tensor_model_parallel_size")):
            raise BadInput("is a file of NeMo, on Megatron-Core's layers", where=run.name, remedy="no engine here plans that")
        _machine(run, trainer)
        run.set("grad_accum", 1)
        accumulation = trainer.value("accumulate_grad_batches")
        if isinstance(accumulation, Mapping):
            run.leave_out("trainer.accumulate_grad_batches", UNKNOWN, "accumulation that changes while it trains")
        elif accumulation is not None:
            run.set("grad_accum", trainer.number("accumulate_grad_batches"), "trainer.accumulate_grad_batches")
        _precision(run, trainer)
        _strategy(run, trainer)
        self._module(run, _inits(model))
        _data(run, trainer)
        _optimizer(run)
        techniques = keys_of(self.name)
        for one in _listed(trainer.value("callbacks")):
            name = _class_of(one)
            if name in techniques:
                arguments = one.get("init_args") if isinstance(one, Mapping) else None
                device = arguments.get("device") if isinstance(arguments, Mapping) else None
                run.set(techniques[name], str(device or "cpu"), f"trainer.callbacks.{name}")
            elif name in _CALLBACKS:
                run.leave_out(f"trainer.callbacks.{name}", *_CALLBACKS[name])
        if trainer.value("plugins") not in (None, []):
            run.leave_out("trainer.plugins", UNKNOWN, "what a plugin does to memory is not read")
        run.assume("no saves (--save plans those of its checkpoints)")
        return run.setup()

    def _module(self, run: Builder, model: Keys) -> None:
        for key in _MODELS:
            if isinstance(model.data.get(key), str):
                run.set("model", model.text(key), f"model.{key}")
                break
        run.leave_out("model", UNKNOWN, "the module's own code is no part of the file; MODEL is planned with its own loss")


def _sections(data: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = data.get("fit")
    return inner if isinstance(inner, Mapping) and "trainer" in inner else data


def _class_of(value: Any) -> str:
    """The class that a section names, without its modules."""
    found = value.get("class_path") if isinstance(value, Mapping) else value
    return found.rpartition(".")[2] if isinstance(found, str) else ""


def _inits(section: Keys) -> Keys:
    """The arguments of a section's class: its ``init_args``, or its own keys where the program names the class."""
    return section.block("init_args") if "class_path" in section.data else section


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _machine(run: Builder, trainer: Keys) -> None:
    """Set GPUs and nodes. Raises BadInput: another accelerator."""
    accelerator = trainer.word("accelerator") or "gpu"  # null, by which `auto` is read, too
    if accelerator not in ("gpu", "cuda"):
        raise BadInput(f"{accelerator[:20]} is no GPU", where=f"{trainer.name}.accelerator", remedy="plans are of runs on GPUs")
    devices = trainer.value("devices")
    if isinstance(devices, str) and "," in devices:
        devices = [one for one in devices.split(",") if one.strip()]
    if isinstance(devices, list):
        run.set("gpus", len(devices), "trainer.devices")
    elif devices is None or str(devices) == "-1":
        run.assume("GPUs open: Lightning takes all of the machine, so give --gpus")
    else:
        run.set("gpus", trainer.number("devices"), "trainer.devices")
    if (nodes := trainer.number("num_nodes")) is not None:
        run.set("nodes", nodes, "trainer.num_nodes")


def _precision(run: Builder, trainer: Keys) -> None:
    said = trainer.word("precision")
    if said is None:
        run.assume("precision 32-true", dtype="fp32", model_dtype="fp32")
        return
    found = _PRECISIONS.get(said.removesuffix(".0"))
    if found is None:
        run.leave_out("trainer.precision", UNKNOWN, f"{said[:30]} is not modelled; bf16-mixed is counted")
        found = _PRECISIONS["bf16-mixed"]
    run.set("dtype", found[0], "trainer.precision")
    run.set("model_dtype", found[1], "trainer.precision")
    run.set("autocast", not said.endswith("-true"))


def _strategy(run: Builder, trainer: Keys) -> None:
    """Set the engine by a strategy's registered name, or by its class with its arguments."""
    key, value = "trainer.strategy", trainer.value("strategy")
    name = _class_of(value)
    options = _inits(trainer.block("strategy")) if isinstance(value, Mapping) else Keys({}, run.name)
    if name.startswith("deepspeed") or name == "DeepSpeedStrategy":
        _deepspeed(run, key, name, options)
    elif name.startswith("fsdp") or name == "FSDPStrategy":
        offloads = name == "fsdp_cpu_offload" or options.on("cpu_offload")
        sharding = options.word("sharding_strategy") or "full_shard"
        again = options.on("activation_checkpointing") or options.on("activation_checkpointing_policy")
        form = options.word("state_dict_type") or "full"
        set_fsdp(
            run,
            key,
            version=1,
            reshard=sharding,
            offload=offloads,
            hybrid=False,
            checkpointing=again or None,
            state_dict=form,
        )
        if not options.on("auto_wrap_policy"):
            run.set("one_unit", True)
        if options.on("mixed_precision"):
            run.leave_out(f"{key}.mixed_precision", UNKNOWN, "dtypes of parameters and reductions by a policy of its own")
    elif name == "ModelParallelStrategy":
        run.set("engine", "fsdp2", key)
        run.set("stage", 3)
        run.leave_out(key, UNKNOWN, "what the module shards in configure_model is its own code; blocks are counted as units")
    else:
        run.set("engine", "ddp", key if value is not None else "")
        if value is not None and not (
            name.startswith("ddp") or name in ("DDPStrategy", "SingleDeviceStrategy", "single_device")
        ):
            run.leave_out(key, UNKNOWN, f"{name[:30] or 'this strategy'} is not modelled; DDP is counted")


def _deepspeed(run: Builder, key: str, name: str, options: Keys) -> None:
    """Set the ds_config that the strategy is given, or makes of its arguments."""
    config = options.value("config")
    if config is not None:
        found = dict(load_source(config if isinstance(config, Mapping) else find_named_file(str(config), run.document, key))[0])
    else:
        stage = next((int(one) for one in name.split("_") if one.isdigit()), 2)
        offload = "_offload" in name
        zero: dict[str, Any] = {**_ZERO, "stage": stage}
        zero |= {one: options.data[one] for one in _ZERO if one in options.data}
        device = "nvme" if name.endswith("nvme") else "cpu"
        if offload or options.flag("offload_optimizer"):
            zero["offload_optimizer"] = _offload(
                options, options.word("offload_optimizer_device") or device, _OPTIMIZER_BUFFERS
            )
        if (offload and stage == 3) or options.flag("offload_parameters"):
            zero["offload_param"] = _offload(options, options.word("offload_params_device") or device, _PARAM_BUFFERS)
        found = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
        if any(options.flag(one) for one in _CHECKPOINTING):
            found["activation_checkpointing"] = {one: True for one in _CHECKPOINTING if options.flag(one)}
    run.set("ds_config", found, key)
    run.set("engine", "deepspeed", key)
    section = found.get("zero_optimization")
    if isinstance(section, Mapping) and section.get("stage") == 3:
        run.leave_out(key, UNKNOWN, "whether the module makes its model in configure_model, sharded, is not in the file")


def _offload(options: Keys, device: str, buffers: Mapping[str, str]) -> dict[str, Any]:
    """A section of what is offloaded; buffers that are not given have DeepSpeed's own defaults, which are Lightning's, too."""
    found: dict[str, Any] = {"device": device, "nvme_path": options.text("nvme_path") or "/local_nvme"}
    found["pin_memory"] = bool(options.flag("pin_memory"))
    return found | {own: options.data[key] for key, own in buffers.items() if key in options.data}


def _data(run: Builder, trainer: Keys) -> None:
    """Take batches and lengths where the data's arguments tell them."""
    data = _inits(run.block("data")) if isinstance(run.data.get("data"), Mapping) else Keys({}, run.name)
    batch = next((key for key in _BATCHES if isinstance(data.data.get(key), int)), None)
    if batch is not None:
        run.set("micro_batch", data.number(batch), f"data.{batch}")
    else:
        run.open["micro_batch"] = "no key tells the samples of a pass; give --micro-batch"
    length = next((key for key in _LENGTHS if isinstance(data.data.get(key), int)), None)
    if length is not None:
        run.set("seq_len", data.number(length), f"data.{length}")
    else:
        run.open["seq_len"] = "no key tells the length of a sample; give --seq-len"
    evaluates = trainer.value("limit_val_batches") not in (0, 0.0)
    again = next((key for key in _EVAL_BATCHES if isinstance(data.data.get(key), int)), None)
    if evaluates and again is not None:
        run.set("eval_batch", data.number(again), f"data.{again}")
    elif evaluates:
        run.assume("no validation (--eval-batch plans that)")


def _optimizer(run: Builder) -> None:
    """Take the optimizer that a section names by its class."""
    name = _class_of(run.value("optimizer")).lower()
    if not name:
        run.leave_out("optimizer", UNKNOWN, "the module's own optimizer is not read; AdamW is counted")
        run.set("optimizer", "adamw")
    else:
        try:
            row, kind = optimizer_of(run, "optimizer", name)
        except BadInput:
            run.leave_out("optimizer", UNKNOWN, f"{name[:40]} is not known; AdamW is counted")
            row, kind = "adamw", None
        run.set("optimizer", row, "optimizer")
        run.set("optimizer_kind", kind or OptimizerKind.FOREACH.value)
