"""accelerate: the YAML of ``accelerate config``: which engine, how many processes; batches and the model are the script's.

Source: accelerate 1.15, ``commands/config/config_args.py``, ``commands/launch.py`` (defaults), ``utils/launch.py`` and
``utils/dataclasses.py`` (``DeepSpeedPlugin``, ``FullyShardedDataParallelPlugin``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.builder import Builder, Keys
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.shell import Command
from zeroplan.interop.programs.trainer import TRANSFORMERS_TP, refuse_cpu, set_fsdp
from zeroplan.interop.setups import Setup

UNKNOWN, LESS = Effect.UNKNOWN, Effect.LESS
_ONLY = ("distributed_type", "compute_environment", "main_training_function", "downcast_bf16", "rdzv_backend", "num_machines")
_CPU = ("MULTI_CPU", "XPU", "MULTI_XPU", "NPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "XLA", "TPU", "MULTI_NEURON")


class Accelerate(Program):
    """A config of ``accelerate launch``."""

    name = "accelerate"
    title = "accelerate"
    version = "1.15"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the document's keys of accelerate's ClusterConfig."""
        return document.has(*_ONLY) if document.command is None else ()

    def read(self, document: Document) -> Setup:
        """Read the run as far as the launcher decides it."""
        run = Builder(document, self.name, self.label)
        kind = (run.word("distributed_type") or "no").upper()
        if kind in ("MULTI_CPU",):
            raise BadInput(
                "asks for training on the CPU", where=f"{run.name}: distributed_type", remedy="plans are of runs on GPUs"
            )
        refuse_cpu(run, "use_cpu")
        if kind in _CPU:
            raise BadInput(
                f"{kind} is no GPU", where=f"{run.name}: distributed_type", remedy="plans are of runs on NVIDIA GPUs"
            )
        _machine(run, alone=kind == "NO")
        mode = run.word("mixed_precision")
        if mode in ("bf16", "fp16"):
            run.set("dtype", mode, "mixed_precision")
        elif mode == "fp8":
            run.set("dtype", "bf16", "mixed_precision")
            _float8(run, kind)
        elif mode == "no":
            run.set("dtype", "fp32", "mixed_precision")
        fsdp_version = 0
        if kind == "DEEPSPEED":
            self._deepspeed(run)
        elif kind == "FSDP":
            fsdp_version = self._fsdp(run)
        elif kind == "MEGATRON_LM":
            run.set("engine", "ddp", "distributed_type")
            run.leave_out("distributed_type", UNKNOWN, "Megatron-LM's engine; DDP's figures stand in")
        else:
            run.set("engine", "ddp", "distributed_type")
        _layout(run, fsdp_version)
        _compiled(run, fsdp_version)
        if run.block("fp8_config").data and mode != "fp8":
            run.assume("fp8_config is not used, since mixed_precision is not fp8")
        return run.setup()

    def _deepspeed(self, run: Builder) -> None:
        """Set the named ds_config, or the one that accelerate makes of its own keys."""
        run.set("engine", "deepspeed", "distributed_type")
        block = run.block("deepspeed_config")
        inner = Builder(Document(block.data, block.name, run.document.folder), self.name, self.label)
        config = inner.ds_config("deepspeed_config_file")
        if config is None:
            config = plugin_config(block)
        run.set("ds_config", config, "deepspeed_config")
        init = block.flag("zero3_init_flag")
        stage = config.get("zero_optimization", {})
        stage = stage.get("stage") if isinstance(stage, dict) else stage
        run.set(
            "zero_init", stage == 3 if init is None else init, "deepspeed_config.zero3_init_flag" if init is not None else ""
        )

    def _fsdp(self, run: Builder) -> int:
        """Set FSDP's fields; return its version, 1 or 2."""
        block = run.block("fsdp_config")
        plain = Keys({key.removeprefix("fsdp_"): value for key, value in block.data.items()}, block.name)
        version = plain.number("version")
        if version is None:
            run.assume("fsdp_version 1")
        strategy = plain.word("reshard_after_forward") if version == 2 else plain.word("sharding_strategy")
        names = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
        set_fsdp(
            run,
            "fsdp_config",
            version=version or 1,
            reshard=names.get(strategy or "", strategy or "true"),
            offload=bool(plain.flag("offload_params")),
            hybrid="hybrid" in (strategy or ""),
            checkpointing=plain.flag("activation_checkpointing"),
            options=plain,
            wraps="NO_WRAP",
        )
        return version or 1


#: Why accelerate's Ulysses has no plan under another engine.
ULYSSES = "Ulysses' sequence parallelism is planned for DeepSpeed alone"


def _layout(run: Builder, fsdp_version: int) -> None:
    """Read ``parallelism_config``; flags of the launcher have its keys with a prefix. `fsdp_version` is 0 without FSDP.

    Source: accelerate 1.15, parallelism_config.py (ParallelismConfig).
    """
    block = run.block("parallelism_config")
    prefix = "parallelism_config_"
    sizes = Keys({key.removeprefix(prefix): value for key, value in block.data.items()}, block.name)
    written = {key.removeprefix(prefix): f"parallelism_config.{key}" for key in block.data}
    degrees = {key: sizes.number(key) or 1 for key in _SIZES}
    if degrees["tp_size"] > 1:
        run.leave_out(written["tp_size"], UNKNOWN, TRANSFORMERS_TP)
    _require_ranks(run, degrees)
    if degrees["sp_size"] > 1:
        _ulysses(run, sizes, degrees, written)
    replicas, ring = degrees["dp_replicate_size"], degrees["cp_size"]
    if replicas > 1 and (fsdp_version != 2 or degrees["dp_shard_size"] == ring == 1):
        if fsdp_version or max(degrees["dp_shard_size"], ring) > 1:
            run.leave_out(written["dp_replicate_size"], UNKNOWN, "replicas of the shard group are planned for FSDP 2 alone")
    elif replicas > 1:
        run.degree("dp_replicate", replicas, written["dp_replicate_size"])
        run.set("dp_shard", degrees["dp_shard_size"], written.get("dp_shard_size", "parallelism_config"))
    if ring == 1:
        return
    if fsdp_version != 2:
        run.leave_out(written["cp_size"], UNKNOWN, "context parallelism is planned for FSDP 2 alone")
        return
    run.degree("cp", ring, written["cp_size"])
    if (sizes.word("cp_comm_strategy") or "allgather") != "allgather":
        run.leave_out(written["cp_comm_strategy"], UNKNOWN, "the ring that gathers keys and values at once is planned")


def _ulysses(run: Builder, sizes: Keys, degrees: Mapping[str, int], written: Mapping[str, str]) -> None:
    """Read Ulysses' degree, and the attention, which has to be the model's own.

    Raises:
        BadInput: a ring beside it. Source: accelerate 1.15, parallelism_config.py (``__post_init__``).
    """
    if degrees["cp_size"] > 1:
        raise BadInput(
            f"sp_size {degrees['sp_size']} and cp_size {degrees['cp_size']} exclude each other",
            where=f"{run.name}: parallelism_config",
            remedy="leave one of them at 1",
        )
    if "ds_config" not in run.fields or degrees["tp_size"] > 1:
        run.leave_out(written["sp_size"], UNKNOWN, ULYSSES)
        return
    run.degree("ulysses", degrees["sp_size"], written["sp_size"])
    attention = sizes.word("sp_attn_implementation") or "sdpa"
    if "flash" in attention:
        run.set("attn", "flash", written["sp_attn_implementation"])


_SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size", "sp_size")


def _require_ranks(run: Builder, degrees: Mapping[str, int]) -> None:
    """Refuse sizes whose product is not the number of processes; DeepSpeed makes its groups of ``sp_size`` itself.

    Raises:
        BadInput: naming the product. Source: accelerate 1.15, parallelism_config.py (_validate_accelerator).
    """
    gpus, product = run.fields.get("gpus"), math.prod(degrees.values())
    if gpus is None or product == 1 or degrees["sp_size"] > 1:
        return
    processes = gpus * run.fields.get("nodes", 1)
    if product != processes:
        said = " × ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)
        raise BadInput(
            f"{said} is {product}, and there are {processes} processes",
            where=f"{run.name}: parallelism_config",
            remedy=f"make the product {processes}; accelerate does not infer dp_shard_size",
        )


def launch_document(command: Command, document: Document) -> Document | None:
    """Return the flags of ``accelerate launch`` as its YAML would say them; None without flags that decide the engine."""
    flags = dict(command.launch_flags)
    kind = next((name for flag, name in _SWITCHES.items() if flags.get(flag)), None)
    if kind is None and not any(key.startswith(_DECIDING) for key in flags):
        return None
    said: dict[str, Any] = {"distributed_type": kind or "MULTI_GPU", "compute_environment": "LOCAL_MACHINE"}
    said |= {key: flags[key] for key in ("mixed_precision", "use_cpu") if key in flags}
    processes = command.processes or (command.gpus * (command.nodes or 1) if command.gpus else None)
    if processes is not None:
        said |= {"num_processes": processes, "num_machines": command.nodes or 1}
    for block, prefix in (("parallelism_config", "parallelism_config_"), ("dynamo_config", "dynamo_"), ("fp8_config", "fp8_")):
        inside = {key: value for key, value in flags.items() if key.startswith(prefix)}
        if inside:
            said[block] = inside
    sections = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config"}
    if kind in sections:
        own = {key: value for key, value in flags.items() if kind != "FSDP" or key.startswith("fsdp_")}
        said[sections[kind]] = own
    return Document(said, document.name, document.folder)


def _float8(run: Builder, kind: str) -> None:
    """Set 8-bit products by torchao, as accelerate asks for them; what other packages do is left out.

    Under FSDP2 weights are gathered in 8 bits as well, unless the file says otherwise, which is not modelled.
    Source: accelerate 1.15, utils/dataclasses.py (``AORecipeKwargs``), utils/ao.py.
    """
    block = run.block("fp8_config")
    backend = block.word("backend") or block.word("fp8_backend") or "by whichever package is installed"
    if backend not in ("ao", "torchao"):
        run.leave_out("mixed_precision", UNKNOWN, f"fp8 products ({backend[:40]}); bf16 ones are counted")
    elif kind in ("DEEPSPEED", "MEGATRON_LM") or (kind == "FSDP" and not _gathers_wide(block)):
        run.leave_out("mixed_precision", UNKNOWN, f"fp8 products by torchao under {kind}; bf16 ones are counted")
    else:
        run.set("fp8", "tensorwise", "mixed_precision")
        padded = next((block.flag(key) for key in ("pad_inner_dim", "fp8_pad_inner_dim") if key in block.data), True)
        if padded is False:
            run.leave_out("fp8_config.pad_inner_dim", LESS, "operands in 8 bits are counted with the copies that padding makes")


def _gathers_wide(block: Keys) -> bool:
    """Whether FSDP2 gathers weights in 16 bits for 8-bit products."""
    keys = [key for key in ("enable_fsdp_float8_all_gather", "fp8_enable_fsdp_float8_all_gather") if key in block.data]
    return bool(keys) and block.flag(keys[0]) is False


#: Beginnings of the flags that decide more than the size of the machine.
_DECIDING = ("mixed_precision", "parallelism_config_", "dynamo_backend", "fp8_")
_SWITCHES = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "cpu": "MULTI_CPU", "use_megatron_lm": "MEGATRON_LM"}


def plugin_config(block: Keys) -> dict[str, Any]:
    """Return the ds_config that accelerate makes of its own keys. Source: ``DeepSpeedPlugin.__post_init__``."""
    zero: dict[str, Any] = {"stage": block.number("zero_stage", least=0)}
    if zero["stage"] is None:
        zero["stage"] = 2
    for ours, theirs in (("offload_optimizer", "offload_optimizer_device"), ("offload_param", "offload_param_device")):
        device = block.text(theirs)
        if device is not None:
            zero[ours] = {"device": device}
            path = block.text(f"{ours}_nvme_path")
            if path is not None:
                zero[ours]["nvme_path"] = path
    config: dict[str, Any] = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": block.number("gradient_accumulation_steps") or "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    clipping = block.amount("gradient_clipping")
    config["gradient_clipping"] = "auto" if clipping is None else clipping
    return config


def _machine(run: Builder, *, alone: bool) -> None:
    """Set the machines and the GPUs of each. Raises BadInput: processes that do not divide by the machines."""
    nodes = run.number("num_machines") or 1
    processes = run.number("num_processes", least=-1)
    if processes is None or processes < 1:
        run.assume(
            "1 process: num_processes is not set" if alone else "num_processes open",
            **({"gpus": 1} if alone else {}),
        )
    else:
        if processes % nodes:
            raise BadInput(
                f"{processes} processes do not divide by {nodes} machines",
                where=f"{run.name}: num_processes",
                remedy=f"write {-(-processes // nodes) * nodes}, all machines' together",
            )
        run.set("gpus", processes // nodes, "num_processes")
        run.set("nodes", nodes, "num_machines")


def _compiled(run: Builder, fsdp_version: int) -> None:
    """Set what ``dynamo_config`` compiles."""
    dynamo = run.block("dynamo_config")
    said = {key.removeprefix("dynamo_"): key for key in dynamo.data}
    if "backend" in said and dynamo.on(said["backend"]):
        regional = "use_regional_compilation" in said and dynamo.on(said["use_regional_compilation"])
        mode = dynamo.word(said["mode"]) if "mode" in said else None
        within = regional and fsdp_version == 2 and run.block("fsdp_config").on("fsdp_activation_checkpointing")
        parts = "checkpointed-blocks" if within else "blocks" if regional else "model"
        run.take_compile(parts, "dynamo_config", backend=dynamo.word(said["backend"]), mode=mode)
