"""torchtitan: its TOML, command lines of ``torchtitan.train``, and the Python configs of newer versions.

Keys are read by their dotted names, as torchtitan's command line has them, in the words of 2024 (``[training] batch_size``), of
the last version with TOML, and of 2026 (``num_tokens_per_microbatch_per_dp_rank``).

Sources: torchtitan of 23 February 2026, ``torchtitan/config/job_config.py``, ``distributed/parallel_dims.py``,
``distributed/pipeline_parallel.py``, ``models/*/__init__.py`` (flavors), ``models/llama3/infra/parallelize.py``; of 21 August
2026, ``torchtitan/config/configs.py``.

Source: torchtitan of 23 February 2026, ``torchtitan/models/*/__init__.py``, by their dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import NODE_GPUS
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.adapters import optimizer_of
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.machine import take_machine
from zeroplan.interop.programs.program import Program
from zeroplan.interop.setups import Setup

#: By model, then flavor in lower case.
_HUB = {
    "llama3": {
        "8b": "meta-llama/Llama-3.1-8B",
        "70b": "meta-llama/Llama-3.1-70B",
        "405b": "meta-llama/Llama-3.1-405B",
    },
    "deepseek_v3": {
        "16b": "deepseek-ai/DeepSeek-V2-Lite",
        "236b": "deepseek-ai/DeepSeek-V2",
        "671b": "deepseek-ai/DeepSeek-V3",
    },
    "qwen3": {
        **{size: f"Qwen/Qwen3-{size.upper()}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
        "30b-a3b": "Qwen/Qwen3-30B-A3B",
        "235b-a22b": "Qwen/Qwen3-235B-A22B",
    },
}
#: Ends of flavors that choose an attention; the shape is the same.
_ATTENTIONS = ("_flex_attn", "_flex", "_varlen_attn", "_varlen")
#: 256 channels, 6 blocks, 16 heads; an MLP of 768, which is 8/3 × 256 rounded up to 256.
_DEBUG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "_name_or_path": "torchtitan llama3 debugmodel",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def model_of(name: str, flavor: str) -> str | Mapping[str, Any] | None:
    """Return the id or the config of a flavor; None for one that is not known.

    Args:
        name: ``model.name``, such as ``llama3``; a suffix such as ``_ft`` names another program over the same model.
        flavor: ``model.flavor`` in lower case, such as ``8b``.
    """
    family = next((known for known in _HUB if name == known or name.startswith(f"{known}_")), None)
    for end in _ATTENTIONS:
        flavor = flavor.removesuffix(end)
    if family is None:
        return None
    if family == "llama3" and flavor == "debugmodel":
        return _DEBUG
    return _HUB[family].get(flavor)


MORE, LESS, NONE, UNKNOWN = Effect.MORE, Effect.LESS, Effect.NONE, Effect.UNKNOWN
_NOT_MODELLED = {
    "parallelism.disable_loss_parallel": (MORE, "the logits are gathered; each rank's part is counted"),
    "training.disable_loss_parallel": (MORE, "the logits are gathered; each rank's part is counted"),
    "parallelism.enable_async_tensor_parallel": (UNKNOWN, "products overlap with their collectives in symmetric memory"),
    "experimental.enable_async_tensor_parallel": (UNKNOWN, "products overlap with their collectives in symmetric memory"),
    "compile.enable_async_tensor_parallel": (UNKNOWN, "products overlap with their collectives in symmetric memory"),
    "parallelism.enable_fsdp_symm_mem": (MORE, "FSDP's collectives in symmetric memory"),
    "parallelism.module_fqns_per_model_part": (UNKNOWN, "stages by names of modules; blocks are divided evenly"),
    "parallelism.pipeline_parallel_split_points": (UNKNOWN, "stages by names of modules; blocks are divided evenly"),
    "experimental.pipeline_parallel_split_points": (UNKNOWN, "stages by names of modules; blocks are divided evenly"),
    "parallelism.pipeline_parallel_layers_per_stage": (UNKNOWN, "stages of so many blocks; blocks are divided evenly"),
    "parallelism.pipeline_parallel_schedule_csv": (UNKNOWN, "a schedule from a file"),
    "optimizer.early_step_in_backward": (LESS, "each parameter is stepped in the backward"),
    "quantize.grouped_mm.float8.fqns": (UNKNOWN, "experts' products in float8"),
    "quantize.grouped_mm.mx.fqns": (UNKNOWN, "experts' products in MXFP8"),
    "fault_tolerance.enable": (UNKNOWN, "replicas by torchft"),
    "validation.enable": (UNKNOWN, "validation batches are not in the figures"),
    "training.disable_cuda_graphs": (NONE, "no CUDA graphs, as planned"),
}
_COMPILED = ("compile.enable", "training.compile")
_CONVERTED = ("model.converters", "quantize.converters")
#: Schedules of torch's, and the chunks that each rank has.
_SCHEDULES = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("1f1b", 2),
    "loopedbfs": ("gpipe", 2),
    "interleavedzerobubble": ("zero-bubble", 2),
    "zbvzerobubble": ("zbv", 2),
    "dualpipev": ("dualpipev", 2),
}
#: Names of one degree in the sections of different years.
_NAMES = {
    "tp": ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
    "cp": ("parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
    "pp": ("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
    "shard": ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", "training.data_parallel_degree"),
    "ep": ("parallelism.expert_parallel_degree",),
    "etp": ("parallelism.expert_tensor_parallel_degree",),
    "replicate": ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_KINDS = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}


class Torchtitan(Program):
    """FSDP 2 with layouts; DDP where all data-parallel ranks are replicas."""

    name = "torchtitan"
    title = "torchtitan"
    version = "of February 2026"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the program's name on a command line, or keys of sections that only torchtitan has."""
        if started := document.starts("torchtitan.train", "torchtitan/train.py"):
            return started
        own = ("parallelism.", "activation_checkpoint.", "model.flavor", "training.data_parallel_", "training.local_batch_size")
        return tuple(key for key in _flat(document.data) if key.startswith(own) or key == "job.config_file")

    def read(self, document: Document) -> Setup:
        """Read the run. Its model code is torchtitan's own, so activations of transformers' model of that shape stand in."""
        run = Builder(replace(document, data=_flat(document.data)), self.name, self.label)
        run.set("task", "pretrain")
        self._model(run)
        self._batch(run)
        self._precision(run)
        self._optimizer(run)
        self._checkpointing(run)
        self._layout(run)
        for key in _COMPILED:
            if run.flag(key):
                self._compile(run, key)
        for key in _CONVERTED:
            if found := run.value(key):
                run.leave_out(
                    key, UNKNOWN, f"{', '.join(map(str, found)) if isinstance(found, list) else found}: 16 bits are counted"
                )
        if run.on("loss.chunked"):
            run.leave_out("loss", LESS, "the logits of one chunk are kept at a time; all are counted")
        run.leave_out_flags(_NOT_MODELLED)
        run.leave_out("model.name", UNKNOWN, "torchtitan's own model code keeps other tensors than transformers'")
        return run.setup(self.name)

    def _model(self, run: Builder) -> None:
        name, flavor = run.text("model.name"), run.word("model.flavor")
        found = model_of(name or "llama3", flavor or "")
        if found is not None:
            run.set("model", found, "model.flavor")
        elif flavor:
            run.assume(f"no model: {name or 'llama3'} {flavor} has no config here")

    def _batch(self, run: Builder) -> None:
        """Set batch and length: samples of ``seq_len``, or tokens packed up to ``max_context_length``."""
        tokens, context = (
            run.number("training.num_tokens_per_microbatch_per_dp_rank"),
            run.number("training.max_context_length"),
        )
        if tokens is not None or context is not None:
            tokens, context = tokens or 16384, context or 2048
            samples = tokens // context if tokens % context == 0 else 1
            run.set("seq_len", tokens // samples, "training.max_context_length")
            run.set("micro_batch", samples, "training.num_tokens_per_microbatch_per_dp_rank")
            if (step := run.number("training.num_tokens_per_train_step", least=-1)) is not None and step > 0:
                run.set("global_batch", step * samples // tokens, "training.num_tokens_per_train_step")
            return
        run.count("seq_len", "training.seq_len", default=2048)
        run.count("micro_batch", "training.local_batch_size", "training.batch_size", default=8)
        whole = run.number("training.global_batch_size", least=-1)
        if whole is not None and whole > 0:
            run.set("global_batch", whole, "training.global_batch_size")

    def _precision(self, run: Builder) -> None:
        """Set the dtypes: fp32 parameters that FSDP gathers in ``mixed_precision_param``, or all of it in ``dtype``."""
        kept = _DTYPES.get(run.word("training.dtype") or "float32", "fp32")
        dtype = _DTYPES.get(run.word("training.mixed_precision_param") or "bfloat16", "bf16")
        run.set("dtype", kept if kept != "fp32" else dtype, "training.mixed_precision_param")
        run.set("model_dtype", kept, "training.dtype")
        run.set("autocast", kept == "fp32")
        reduce = _DTYPES.get(run.word("training.mixed_precision_reduce") or "float32", "fp32")
        if reduce != "fp32" or kept != "fp32":
            run.set("reduce_dtype", reduce, "training.mixed_precision_reduce")
        if run.flag("training.enable_cpu_offload"):
            run.set("offload_optimizer", "cpu", "training.enable_cpu_offload")
            run.set("offload_param", "cpu", "training.enable_cpu_offload")

    def _optimizer(self, run: Builder) -> None:
        name = run.word("optimizer.name") or "adamw"
        row, _ = optimizer_of(run, "optimizer.name", name)
        run.set("optimizer", row, "optimizer.name")
        fused = run.flag("optimizer.fused")  # of 2024
        kind = run.word("optimizer.implementation") or ("foreach" if fused is False else "fused")
        run.set("optimizer_kind", _KINDS.get(kind, "fused"), "optimizer.implementation")

    def _checkpointing(self, run: Builder) -> None:
        """Set the recomputation: of whole blocks, of each k-th one, or by operators."""
        key, option_key = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
        said, option = run.data.get(key), run.word(option_key) or "2"  # none is a mode here
        run.read.add(key)
        mode = str(said).strip().lower()
        if said is None:
            run.assume("activation_checkpoint.mode selective, every second block")
            mode = "selective"
        if mode == "memory_budget":
            run.leave_out(key, LESS, "the compiler recomputes what a budget leaves out; nothing is recomputed in the figures")
        elif mode not in ("none", "full", "selective"):
            raise BadInput(f"{mode[:40]!r} is no mode", where=f"{run.name}: {key}", remedy="use none, full or selective")
        run.set("gradient_checkpointing", mode in ("full", "selective"), key)
        if mode != "selective":
            return
        if option == "op":
            run.set("checkpoint_policy", "op", option_key)
        elif option.isdigit() and int(option) > 0:
            run.set("checkpoint_policy", f"every:{option}" if int(option) > 1 else "full", option_key)
        else:
            raise BadInput(f"{option[:40]!r} is no option", where=f"{run.name}: {option_key}", remedy="use op, or a number")

    def _degree(self, run: Builder, name: str, *, least: int = 1) -> tuple[int | None, str]:
        """Return a degree and the key that says it."""
        for key in _NAMES[name]:
            if (found := run.number(key, least=least)) is not None:
                return found, key
        return None, _NAMES[name][0]

    def _compile(self, run: Builder, key: str) -> None:
        """Blocks compiled one by one, and the loss. Source: ``apply_compile`` of torchtitan's ``parallelize.py``."""
        parts = "checkpointed-blocks" if run.fields.get("gradient_checkpointing") else "blocks"
        run.take_compile(parts, key, backend=run.word("compile.backend"), mode=None)
        run.leave_out("compile.components", LESS, "the compiled loss keeps fewer tensors; the eager one is counted")

    def _layout(self, run: Builder) -> None:
        """Set engine and degrees. Without a shard degree it is what the others leave of the ranks."""
        take_machine(run)
        tensor, tensor_key = self._degree(run, "tp")
        context, context_key = self._degree(run, "cp")
        stages, stage_key = self._degree(run, "pp")
        replicas, replica_key = self._degree(run, "replicate")
        shards, shard_key = self._degree(run, "shard", least=-1)
        if shards == 0:
            raise BadInput("0 is no degree", where=f"{run.name}: {shard_key}", remedy="use -1 for what remains, or 1 and more")
        degrees = [one or 1 for one in (tensor, context, stages, replicas)]
        if shards is not None and shards > 0:
            run.set("dp_shard", shards, shard_key)
            _assume_ranks(run, math.prod((shards, *degrees)))
        if shards == 1 and max(degrees[:3]) == 1 and degrees[3] > 1:
            run.set("engine", "ddp", replica_key)
            run.set("stage", 0)
            run.degrees.clear()
            run.fields["dp_shard"] = None
            run.set("autocast", True)
            return
        run.set("engine", "fsdp2")
        run.set("sync_each", True)  # its loop never delays a reduction
        for field, value, key in (
            ("tp", tensor, tensor_key),
            ("cp", context, context_key),
            ("dp_replicate", replicas, replica_key),
        ):
            if value is not None and value > 1:
                run.degree(field, value, key)
        self._experts(run)
        self._sequence(run, tensor_key, tensor or 1, stages or 1)
        if (run.word("parallelism.context_parallel_rotate_method") or "allgather") != "allgather":
            run.leave_out(
                "parallelism.context_parallel_rotate_method", UNKNOWN, "keys and values are gathered at once in the figures"
            )
        policy = run.word("parallelism.fsdp_reshard_after_forward") or "default"
        keeps = policy == "never" or (policy == "default" and (stages or 1) > 1)
        run.set("stage", 2 if keeps else 3, "parallelism.fsdp_reshard_after_forward")
        if (stages or 1) == 1:
            run.set("accelerate_units", True)  # embedding, and norm with head, are units of their own here, too
            return
        run.degree("pp", stages or 1, stage_key)
        self._pipeline(run)

    def _experts(self, run: Builder) -> None:
        """Set the degrees of experts. A dense model has none, and without `ep` its tensor parallelism says theirs.

        Source: torchtitan, ``models/llama4/parallelize.py`` (``apply_moe_ep_tp``).
        """
        (shared, key), (matrices, matrices_key) = self._degree(run, "ep"), self._degree(run, "etp")
        dense = (run.text("model.name") or "llama3").startswith("llama3")
        if shared is not None and shared > 1:
            if dense:
                run.leave_out(key, NONE, "the model has no experts")
            else:
                run.degree("ep", shared, key)
        if matrices is not None and matrices > 1:
            if dense or (shared or 1) == 1:
                run.leave_out(matrices_key, NONE, "without shared experts tensor parallelism says it")
            else:
                run.degree("etp", matrices, matrices_key)

    def _sequence(self, run: Builder, key: str, tensor: int, stages: int) -> None:
        """Set sequence parallelism, which goes with torchtitan's tensor parallelism unless it is switched off."""
        if tensor == 1 or run.flag("parallelism.enable_sequence_parallel") is False:
            return
        if stages == 1:
            run.degree("sp", value=True, key=key)
        else:
            run.leave_out("sequence parallelism", UNKNOWN, "on pipeline stages whole tokens are planned between the matrices")

    def _pipeline(self, run: Builder) -> None:
        """Set schedule and micro batches of the pipeline: a rank's batch, divided."""
        keys = ("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
        key = next((one for one in keys if run.word(one)), keys[0])
        name = run.word(key) or "1f1b"
        if name not in _SCHEDULES:
            raise BadInput(
                f"the schedule {name[:40]} is not modelled", where=f"{run.name}: {key}", remedy="use 1F1B or Interleaved1F1B"
            )
        schedule, chunks = _SCHEDULES[name]
        run.degree("schedule", schedule, key)
        if chunks > 1:
            run.degree("vpp", chunks, key)
        for edge in ("first", "last"):
            name = f"parallelism.pipeline_parallel_{edge}_stage_less_layers"
            if run.number(name, least=0) not in (None, 1):
                run.leave_out(name, UNKNOWN, "embedding and head count as one block each in the figures")
        if "global_batch" in run.fields:
            run.leave_out(run.keys["global_batch"], UNKNOWN, "accumulation over several passes of a pipeline is not planned")
            del run.fields["global_batch"]
        counted = run.number("parallelism.num_pp_microbatches")
        if counted is not None:
            run.set("grad_accum", counted, "parallelism.num_pp_microbatches")
            return
        size_key, whole = "parallelism.pipeline_parallel_microbatch_size", run.fields["micro_batch"]
        size = run.number(size_key) or 1
        if whole % size:
            batch_key = run.keys.get("micro_batch", "training.local_batch_size")
            raise BadInput(
                f"{size} does not divide {batch_key} {whole}", where=f"{run.name}: {size_key}", remedy="use a divisor"
            )
        run.set("micro_batch", size, size_key)
        run.set("grad_accum", whole // size, run.keys.get("micro_batch", ""))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted names; sections of a file, and flags, whose names have dots already and win."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= {name: one for name, one in _flat(value, f"{prefix}{key}.").items() if name not in data}
        else:
            found[f"{prefix}{key}"] = value
    return found


def _assume_ranks(run: Builder, product: int) -> None:
    """Take the product of the degrees for the ranks, where nothing else says how many there are and nodes can hold them."""
    if run.fields.get("gpus") is None and (product <= NODE_GPUS or product % NODE_GPUS == 0):
        shape = {"gpus": min(product, NODE_GPUS), "nodes": max(1, product // NODE_GPUS)}
        run.assume(f"{product} ranks, the product of the degrees", **shape)
