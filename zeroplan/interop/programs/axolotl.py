"""axolotl: its YAML. Source: axolotl 0.18, ``utils/schemas/``, ``utils/config/__init__.py``, ``loaders/model.py``."""

from __future__ import annotations

import re

from zeroplan.core.float8 import Float8Recipe
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.adapters import set_adapters, set_attention, set_float8, set_optimizer, set_quantisation
from zeroplan.interop.programs.builder import Builder, Keys
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.known import arguments_of
from zeroplan.interop.programs.machine import take_machine
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.trainer import TRANSFORMERS_TP, refuse_cpu, set_compile, set_fsdp, set_saving
from zeroplan.interop.setups import Setup
from zeroplan.techniques.freeze import FreezeRule
from zeroplan.techniques.fused_adapters import FusedAdaptersTechnique
from zeroplan.techniques.liger import LigerTechnique

MORE, LESS, UNKNOWN, NONE = Effect.MORE, Effect.LESS, Effect.UNKNOWN, Effect.NONE
_NOT_MODELLED = {
    "auto_find_batch_size": (LESS, "lowers the batch when memory runs out"),
    "chunked_cross_entropy": (LESS, "the loss is computed in chunks; all logits are counted"),
    "tiled_mlp": (LESS, "MLPs are computed in tiles"),
    "flash_attn_cross_entropy": (LESS, "a fused loss"),
    "flash_attn_rms_norm": (LESS, "fused norms"),
    "flash_attn_fuse_mlp": (LESS, "fused MLPs"),
    "flash_attn_fuse_qkv": (NONE, "q, k and v are one product"),
    "lora_target_parameters": (MORE, "adapters on parameters that are no layers"),
    "relora_steps": (NONE, "adapters are merged and begun anew"),
    "relora": (UNKNOWN, "adapters are merged into the base and begun anew"),
    "noisy_embedding_alpha": (MORE, "noise as large as the embedded batch"),
    "gptq": (UNKNOWN, "base weights quantised by GPTQ"),
    "quantization": (UNKNOWN, "quantised base weights"),
    "qat": (UNKNOWN, "quantisation-aware training"),
    "llama4_linearized_experts": (UNKNOWN, "experts as single layers"),
    "kd_trainer": (MORE, "a teacher's logits beside the model's own"),
    "s2_attention": (UNKNOWN, "shifted sparse attention"),
    "embeddings_skip_upcast": (NONE, "embeddings stay in 16 bits"),
    "reward_model": (MORE, "chosen and rejected samples pass together"),
    "process_reward_model": (UNKNOWN, "a head for rewards"),
    "num_labels": (UNKNOWN, "a head for classes"),
    "reinit_weights": (MORE, "random weights are made in the dtype of the model's config; 16 bits are counted"),
}
_KERNELS = (*FusedAdaptersTechnique.switches, "lora_embedding_kernel")
#: Degrees that no field holds.
_DEGREES = {
    "sequence_parallel_degree": "ranks share each sequence, by rings of flash attention",
    "context_parallel_size": "ranks share each sequence, by rings of flash attention",
    "tensor_parallel_size": TRANSFORMERS_TP,
    "expert_parallel_size": "ranks share the experts",
}
#: Plugins and what they change, by a word of their class's path.
_PLUGINS = {
    "spectrum": (LESS, "only some layers are trained; all are counted as trained"),
    "kernels": (UNKNOWN, "other kernels for experts"),
    "kd": (MORE, "a teacher's logits beside the model's own"),
    "grokfast": (MORE, "a moving average of the gradients"),
    "diffusion": (UNKNOWN, "another loss"),
    "densemixer": (MORE, "all experts run for each token"),
    "expert_parallel": (UNKNOWN, "ranks share the experts"),
}
_ATTENTION = {"flash_attention": "flash", "sdp_attention": "sdpa", "eager_attention": "eager", "flash_optimum": "sdpa"}
_OTHER_ATTENTION = ("xformers_attention", "flex_attention", "sage_attention")
_RL_TASKS = {
    "dpo": "dpo",
    "ipo": "dpo",
    "simpo": "cpo",
    "orpo": "orpo",
    "kto": "kto",
    "grpo": "grpo",
    "gdpo": "grpo",
    "ebft": "ebft",
}


class Axolotl(Program):
    """A YAML with ``base_model``: full fine-tuning unless ``adapter``; weights in the dtype of the arithmetic."""

    name = "axolotl"
    title = "axolotl"
    version = "0.18"

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the document's keys of axolotl's own, where it has a ``base_model``."""
        if "base_model" not in document.data:
            return ()
        own = (
            "datasets",
            "sequence_len",
            "micro_batch_size",
            "adapter",
            "sample_packing",
            "val_set_size",
            "load_in_8bit",
            "rl",
        )
        found = document.has(*own)
        return ("base_model", *found) if found or document.has(*arguments_of(self.name)) else ()

    def read(self, document: Document) -> Setup:
        """Read the run."""
        run = Builder(document, self.name, self.label)
        refuse_cpu(run, "use_cpu")
        run.take_model("base_model")
        self._task(run)
        run.count("micro_batch", "micro_batch_size", default=1)
        whole, micro = run.number("batch_size"), run.fields["micro_batch"]
        if whole and run.number("gradient_accumulation_steps") is None:
            run.set("grad_accum", max(1, whole // micro), "batch_size")
        else:
            run.count("grad_accum", "gradient_accumulation_steps", default=1)
        run.count("seq_len", "sequence_len", default=512)
        self._precision(run)
        self._attention(run)
        run.set("detached_loss", True)
        run.set("moved", True)
        set_optimizer(run, "optimizer", default="adamw_torch_fused")
        again = run.value("gradient_checkpointing")
        if again is None:
            run.assume("gradient_checkpointing false", gradient_checkpointing=False)
        elif isinstance(again, str) and again.lower().startswith("offload"):
            run.set("gradient_checkpointing", True, "gradient_checkpointing")
            run.leave_out("gradient_checkpointing", LESS, "checkpoints wait on the host; they are counted on the GPU")
        else:
            run.set("gradient_checkpointing", bool(run.flag("gradient_checkpointing")), "gradient_checkpointing")
        if run.fields["gradient_checkpointing"]:
            said = run.block("gradient_checkpointing_kwargs").flag("use_reentrant")
            run.set("reentrant", bool(said), "" if said is None else "gradient_checkpointing_kwargs")
        if run.word("activation_offloading") == "legacy":  # the function that Unsloth wrote; others are TRL's
            run.set("offload_checkpoints", True, "activation_offloading")
        elif run.on("activation_offloading"):
            run.leave_out("activation_offloading", LESS, "activations wait on the host between forward and backward")
        fsdp_version = self._sharding(run)
        self._adapter(run)
        self._layout(run, fsdp_version)
        run.leave_out_flags(_NOT_MODELLED)
        set_float8(run, Float8Recipe.TENSORWISE)
        set_compile(run)
        for plugin in run.texts("plugins"):
            if ".liger." in f".{plugin.lower()}.":
                parts = dict.fromkeys(part for key, part in LigerTechnique.plugin.items() if run.flag(key))
                run.set("liger_parts", ",".join(parts), "plugins")
            elif ".cut_cross_entropy." in f".{plugin.lower()}.":
                run.set("cut_cross_entropy", run.flag("cut_cross_entropy") is not False, "plugins")
            word = next((word for word in _PLUGINS if f".{word}." in f".{plugin.lower()}."), None)
            if word is not None:
                run.leave_out("plugins", *_PLUGINS[word])
        self._evaluation(run)
        set_saving(run, "saves_per_epoch")
        take_machine(run)
        return run.setup(self.name)

    def _task(self, run: Builder) -> None:
        method = run.word("rl")
        if method is None:
            run.assume("SFT, since rl is not set", task="sft")
            return
        run.set("task", _RL_TASKS.get(method, method), "rl")
        run.leave_out("rl", MORE, f"{method}: pairs of samples, a reference model or generation beside the trained model")

    def _precision(self, run: Builder) -> None:
        """Set the dtypes: base weights load in ``torch_dtype``, which bf16, fp16 or neither decides (``utils/config``)."""
        bf16, fp16 = run.value("bf16"), run.flag("fp16")
        if isinstance(bf16, str) and bf16.lower() == "full":
            dtype, key = "bf16", "bf16"
        elif run.flag("bfloat16"):
            dtype, key = "bf16", "bfloat16"
        elif run.flag("float16"):
            dtype, key = "fp16", "float16"
        elif run.data.get("bf16") in (None, "auto") and not fp16:
            dtype, key = "bf16", "bf16" if "bf16" in run.data else ""
            if not key:
                run.assume("bf16 auto")
        elif run.flag("bf16"):
            dtype, key = "bf16", "bf16"
        else:
            dtype, key = ("fp16", "fp16") if fp16 else ("fp32", "bf16")
        run.set("dtype", dtype, key)
        run.set("model_dtype", dtype, key)

    def _attention(self, run: Builder) -> None:
        if run.text("attn_implementation"):
            set_attention(run, "attn_implementation")
        for key, kind in _ATTENTION.items():
            if run.flag(key):
                run.set("attn", kind, key)
        for key in _OTHER_ATTENTION:
            if run.flag(key):
                run.leave_out(key, UNKNOWN, "this attention is not modelled; sdpa is counted")

    def _sharding(self, run: Builder) -> int:
        """Set the engine; return the version of FSDP, 0 for another engine."""
        if run.ds_config("deepspeed") is not None:
            if run.value("fsdp"):
                raise run.bad("fsdp", "stands beside deepspeed, and axolotl takes one of the two", "remove one")
            run.set("engine", "deepspeed", "deepspeed")
            run.set("zero_init", True)
            return 0
        old = run.value("fsdp")
        words = [str(word).lower() for word in (old if isinstance(old, list) else str(old or "").split())]
        block = run.block("fsdp_config")
        plain = {key.removeprefix("fsdp_"): value for key, value in block.data.items()}
        if not words and not plain:
            run.set("engine", "ddp")
            return 0
        options = Keys(plain, block.name)
        version = run.number("fsdp_version") or options.number("version") or 1
        set_fsdp(
            run,
            "fsdp" if words else "fsdp_config",
            version=version,
            reshard=options.word("reshard_after_forward") or options.word("sharding_strategy") or "true",
            offload="offload" in words or bool(options.flag("offload_params")),
            hybrid=any("hybrid" in word for word in words),
            checkpointing=options.flag("activation_checkpointing"),
            options=options,
            wraps="TRANSFORMER_BASED_WRAP" if "auto_wrap" in words else "",
        )
        return version

    def _layout(self, run: Builder, fsdp_version: int) -> None:
        """Set the replicas of FSDP 2's shard group; ranks that neither size names are replicas, too.

        Source: axolotl 0.18, utils/distributed.py (_get_parallel_config_kwargs).
        """
        shared = False
        for key, says in _DEGREES.items():
            if (run.number(key, least=0) or 1) > 1:
                run.leave_out(key, UNKNOWN, says)
                shared = True
        shards, replicas = run.number("dp_shard_size", least=0) or 0, run.number("dp_replicate_size", least=0) or 1
        if fsdp_version != 2:
            if replicas > 1:
                run.leave_out("dp_replicate_size", UNKNOWN, "replicas of the shard group are planned for FSDP 2 alone")
        elif shared and (replicas > 1 or shards):
            run.leave_out("dp_replicate_size", UNKNOWN, "replicas of ranks that share samples or matrices")
        elif replicas > 1:
            run.degree("dp_replicate", replicas, "dp_replicate_size")
            if shards:
                run.set("dp_shard", shards, "dp_shard_size")
        elif shards:
            run.set("dp_shard", shards, "dp_shard_size")
            run.set("replicates", True)
            run.leave_out("dp_shard_size", MORE, "ranks beyond it are replicas, which estimate and explain alone plan")

    def _adapter(self, run: Builder) -> None:
        adapter = run.word("adapter")
        bits = 4 if run.flag("load_in_4bit") else 8 if run.flag("load_in_8bit") else 0
        if adapter in ("lora", "qlora", "dora"):
            if bits or adapter == "qlora":
                nested = "bnb_config_kwargs" not in run.data
                set_quantisation(run, "load_in_8bit" if bits == 8 else "load_in_4bit", bits or 4, nested=nested)
            if run.flag("lora_target_linear"):
                run.data = {**run.data, "lora_target_modules": "all-linear"}
            set_adapters(
                run, rank="lora_r", targets="lora_target_modules", default_rank=8, quantised=bool(bits), everywhere=False
            )
            self._kernels(run, adapter, bits)
            return
        run.set("method", adapter or "full")
        if not adapter:
            self._freezes(run)
        if adapter:
            run.leave_out("adapter", UNKNOWN, f"{adapter} is not modelled; all parameters are counted as trained")
        elif "adapter" not in run.data:
            run.assume("full fine-tuning, since adapter is not set")

    def _freezes(self, run: Builder) -> None:
        """Set what is frozen: towers, and all but the parameters whose names begin as a pattern says, a period being one."""
        patterns = run.texts("unfrozen_parameters")
        if any(pattern.endswith("]") and "[" in pattern and ":" in pattern for pattern in patterns):
            run.leave_out("unfrozen_parameters", LESS, "rows of parameters are trained; all are counted as trained")
            patterns = ()
        literal = tuple(re.sub(r"\.(?!\+)", r"\.", pattern) for pattern in patterns)
        towers = ("vision", "projector") if run.flag("freeze_mm_modules") else ()
        if towers or literal:
            key = "freeze_mm_modules" if towers else "unfrozen_parameters"
            to_inputs = any(name in pattern for name in ("lm_head", "embed_tokens") for pattern in patterns)
            run.set("freeze_rule", FreezeRule(key, towers, patterns=literal or None, to_inputs=to_inputs), key)

    def _kernels(self, run: Builder, adapter: str, bits: int) -> None:
        """Set the parts whose adapters are fused: those that are on, or all where no key of them is set.

        Source: axolotl 0.18, utils/schemas/config.py (check_auto_enable_lora_kernels)
        """
        switches = FusedAdaptersTechnique.switches
        key = next((key for key in switches if run.flag(key)), "lora_*_kernel")
        parts = [part for key, part in switches.items() if run.flag(key)]
        said = run.on("rl") or run.on("trust_remote_code") or any(run.value(key) is not None for key in _KERNELS)
        if adapter == "dora" or said or (adapter == "lora" and bits == 8) or run.fields.get("fsdp_version") == 1:
            parts = parts if adapter != "dora" else []
        else:
            parts = [*switches.values()]
            run.assume("fused adapters, since no lora_*_kernel is set")
        if parts:
            run.set("fused_adapters", ",".join(parts), key)

    def _evaluation(self, run: Builder) -> None:
        """Evaluation between steps, of as many samples as the micro batch has. ``evals_per_epoch`` becomes steps.

        Source: axolotl 0.18, TrainerBuilderBase._configure_save_and_eval_strategy and normalize_config; the Trainer's
        ``eval_strategy`` is ``no`` where none of the keys is set.
        """
        data = "test_datasets" if run.on("test_datasets") else "val_set_size"
        if not run.on("test_datasets") and not run.amount("val_set_size"):
            return
        strategy = run.word("eval_strategy") or run.word("evaluation_strategy") or "no"
        often = [key for key in ("evals_per_epoch", "eval_steps") if run.on(key)]
        if often or strategy not in ("no", "never"):
            batch = run.number("eval_batch_size")
            run.set("eval_batch", batch or run.fields["micro_batch"], "eval_batch_size" if batch else data)
