"""Megatron-LM: command lines of ``pretrain_gpt.py``, and the files of ``--yaml-cfg``.

The model is what the arguments describe (:mod:`zeroplan.models.megatron`). ``keys/megatron-lm.txt`` has every argument of its
parser, with a star where it moves memory. Those with a star that nothing reads, and names that Megatron-LM does not have, are
listed among what the figures leave out.

Source: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py`` (``validate_args``), ``yaml_arguments.py``,
``tokenizer/tokenizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.float8 import MEGATRON_RECIPES, Float8Recipe
from zeroplan.core.optimizer_row import DEFAULT_OPTIMIZER
from zeroplan.core.optimizers import OPTIMIZERS, STATELESS, known_optimizer
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.known import moving_in, names_in
from zeroplan.interop.programs.machine import take_machine
from zeroplan.interop.programs.program import Program
from zeroplan.interop.programs.refused_files import refuse_megatron_deepspeed
from zeroplan.interop.setups import Setup
from zeroplan.models.megatron import MODEL_TYPE, MegatronModel

MORE, LESS, UNKNOWN = Effect.MORE, Effect.LESS, Effect.UNKNOWN

_SCRIPT = "pretrain_gpt.py"
#: Sections of a YAML file.
_SECTIONS = ("language_model", "model_parallel")
#: Arguments that switch off what is on by default, with the model's key.
_SWITCHED_OFF = {
    "disable_bias_linear": "add_bias_linear",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
    "no_bias_dropout_fusion": "bias_dropout_fusion",
    "no_rope_fusion": "apply_rope_fusion",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_create_attention_mask_in_dataloader": "create_attention_mask_in_dataloader",
}
#: Arguments that are a key of the model's under its own name, by what is read.
_OWN = {one.name: str(one.type) for one in fields(MegatronModel)}
#: Degrees of parallelism, with a request's fields.
_DEGREES = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}
_SPECIAL = (
    "moe_aux_loss_coeff",
    "moe_layer_freq",
    "recompute_modules",
    "num_query_groups",
    "vocab_size",
)
#: The words of tokenizers that have a vocabulary of their own.
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "BertWordPieceLowerCase": 30522}
#: The tokenizer of a script that names none, and the words that are counted for one that is not known.
_TOKENIZER, _WORDS = "GPT2BPETokenizer", 128_256
#: What changes memory and is in no figure.
_NOT_MODELLED = {
    "first_last_layers_bf16": (UNKNOWN, "first and last layers in 16 bits; 8 are counted"),
    "fp8_dot_product_attention": (UNKNOWN, "attention in 8 bits; 16 are counted"),
    "fp8_multi_head_attention": (UNKNOWN, "attention in 8 bits; 16 are counted"),
    "fp4_format": (UNKNOWN, "4-bit products; 16 bits are counted"),
    "use_megatron_fsdp": (UNKNOWN, "Megatron-FSDP shards parameters and gradients; none is sharded in the figures"),
    "use_custom_fsdp": (UNKNOWN, "Megatron-FSDP shards parameters and gradients; none is sharded in the figures"),
    "use_torch_fsdp2": (UNKNOWN, "FSDP2 shards parameters; plan it with --engine fsdp2"),
    "optimizer_cpu_offload": (LESS, "optimizer states on the host"),
    "cpu_offloading_num_layers": (LESS, "activations on the host"),
    "fine_grained_activation_offloading": (LESS, "activations on the host"),
    "use_precision_aware_optimizer": (LESS, "the optimizer keeps masters and states itself, in other dtypes"),
    "main_grads_dtype": (UNKNOWN, "gradients of another dtype"),
    "main_params_dtype": (LESS, "masters of another dtype"),
    "exp_avg_dtype": (LESS, "moments of another dtype"),
    "exp_avg_sq_dtype": (LESS, "moments of another dtype"),
    "mtp_num_layers": (MORE, "layers and logits of multi-token prediction"),
    "tp_comm_overlap": (MORE, "user buffers of overlapped collectives"),
    "use_nccl_ub": (MORE, "registered buffers of NCCL"),
    "distribute_saved_activations": (LESS, "saved inputs are shared by tensor-parallel ranks"),
    "fp32_residual_connection": (MORE, "a residual stream in fp32"),
    "cuda_graph_impl": (MORE, "memory pools of CUDA graphs"),
    "enable_cuda_graph": (MORE, "memory pools of CUDA graphs"),
    "external_cuda_graph": (MORE, "memory pools of CUDA graphs"),
    "num_distributed_optimizer_instances": (MORE, "replicas of the distributed optimizer's shards"),
    "pipeline_model_parallel_layout": (UNKNOWN, "stages by a layout of its own; layers are divided evenly"),
    "microbatch_group_size_per_vp_stage": (UNKNOWN, "rounds of another size in the interleaved schedule"),
    "overlap_moe_expert_parallel_comm": (MORE, "one micro batch more in flight"),
    "delay_wgrad_compute": (MORE, "inputs kept for gradients that are computed later"),
    "defer_embedding_wgrad_compute": (MORE, "inputs kept for the head's gradient"),
    "openai_gelu": (UNKNOWN, "another activation"),
    "squared_relu": (UNKNOWN, "another activation"),
    "quick_geglu": (UNKNOWN, "another activation"),
    "window_size": (UNKNOWN, "attention over a window"),
    "attention_output_gate": (MORE, "a gate behind attention"),
    "heterogeneous_layers_config_path": (UNKNOWN, "layers that differ"),
    "spec": (UNKNOWN, "layers by a specification of its own"),
    "hybrid_override_pattern": (UNKNOWN, "layers of other kinds"),
    "experimental_attention_variant": (UNKNOWN, "another attention"),
    "moe_pad_expert_input_to_capacity": (MORE, "experts' inputs padded to a capacity"),
    "moe_shared_expert_overlap": (UNKNOWN, "shared experts beside the exchange; planned is one after the other"),
    "moe_shared_expert_gate": (MORE, "a gate of the shared experts"),
    "moe_input_jitter_eps": (MORE, "a copy of the router's input"),
    "moe_latent_size": (UNKNOWN, "projections around the experts"),
    "ddp_pad_buckets_for_high_nccl_busbw": (MORE, "buckets with more padding"),
    "nccl_communicator_config_path": (UNKNOWN, "NCCL's buffers"),
    "step_batch_size_schedule": (UNKNOWN, "a batch that grows; the last size is planned"),
    "rampup_batch_size": (UNKNOWN, "a batch that grows; the last size is planned"),
    "perform_rl_step": (MORE, "rollouts beside training"),
    "use_checkpoint_args": (UNKNOWN, "the model's shape is the checkpoint's; the script's is counted"),
    "sft": (UNKNOWN, "samples packed to one length; unpacked ones are counted"),
    "hybrid_layer_pattern": (UNKNOWN, "layers of other kinds"),
    "no_rope_freq": (LESS, "layers without rotary positions"),
    "qk_l2_norm": (MORE, "normalised queries and keys"),
    "freeze_all_layers": (LESS, "frozen layers without gradients and states"),
    "moe_layer_recompute": (LESS, "experts run again in the backward"),
    "moe_enable_deepep": (MORE, "DeepEP's buffers"),
    "enable_mhc_connections": (MORE, "several residual streams"),
    "use_mup": (MORE, "scaled copies of embeddings and logits"),
    "fp16_lm_cross_entropy": (LESS, "a loss in fp16; fp32 is counted"),
    "export_kd_teacher_load": (MORE, "a teacher's weights and logits"),
    "no_fp8_wgrad": (MORE, "inputs kept in 16 bits for weights' gradients"),
}
#: Names by which forks call what has no part in a GPU's memory: data, logs, checkpoints, learning rates. Megatron-LM's own
#: arguments stand in ``keys/megatron-lm.txt``.
_HARMLESS = re.compile(
    r"(log|save|load|wandb|tensorboard|timing|profile|eval|exit|train|valid|test|data|dataloader|tokenizer|ckpt|lr|adam)_.*"
    r"|no_(save|load)_.*|.*_(file|path|dir)"
)
#: Values of arguments that move memory with which they move none: Megatron-LM's own defaults.
_USUAL = {"cp_comm_type": "p2p", "softmax_type": "vanilla", "moe_dispatch_fwd_dtype": "bf16", "moe_combine_bwd_dtype": "bf16"}
#: What Megatron evaluates of a pattern: lists of zeros and ones, repeated and joined.
_PATTERN = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")


class MegatronLm(Program):
    """Megatron-LM's own training script for decoders of text."""

    name = "megatron-lm"
    title = "Megatron-LM"
    version = "core 0.16"

    @staticmethod
    def reads(name: str) -> bool:
        """Return whether what an argument says is read even where it says Megatron's default."""
        return name in _OWN or name in _DEGREES or name in ("group_query_attention", "padded_vocab_size")

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Return the script's name on a command line, or the sections of a YAML file."""
        if document.command is not None:
            started = document.command.program.rpartition("/")[2]
            return (started, *document.has(*_OWN, *_NOT_MODELLED, *_DEGREES)) if started == _SCRIPT else ()
        return _SECTIONS if all(isinstance(document.data.get(name), Mapping) for name in _SECTIONS) else ()

    def could_own(self, document: Document) -> bool:
        """Return whether a script of another name has its arguments."""
        return (
            document.command is not None and len(document.has("tensor_model_parallel_size", "num_layers", "hidden_size")) == 3
        )

    def read(self, document: Document) -> Setup:
        """Read the run. Raises BadInput: as of :meth:`Program.read`."""
        data = dict(map(_apart, *zip(*document.data.items(), strict=True))) if document.data else {}
        for name in _SECTIONS:
            section = data.pop(name, None)
            data |= dict(section) if isinstance(section, Mapping) else {}
        refuse_megatron_deepspeed(data, document.name, document.command.launcher if document.command else "")
        run = Builder(replace(document, data=data), self.name, self.label)
        run.set("task", "pretrain")
        run.set("engine", "megatron")
        run.set("stage", 1 if run.flag("use_distributed_optimizer") else 0, "use_distributed_optimizer")
        take_machine(run)
        self._batch(run)
        self._precision(run)
        model = self._model(run)
        self._layout(run, model)
        run.set("model", model)
        self._others(run)
        return run.setup()

    def _batch(self, run: Builder) -> None:
        if run.count("micro_batch", "micro_batch_size") is None:
            raise BadInput("says no micro batch", where=f"{run.name}: micro_batch_size", remedy="give --micro-batch-size")
        if run.count("seq_len", "seq_length", "encoder_seq_length") is None:
            raise BadInput("says no length of a sample", where=f"{run.name}: seq_length", remedy="give --seq-length")
        whole = run.number("global_batch_size")
        if whole is not None:
            run.set("global_batch", whole, "global_batch_size")

    def _precision(self, run: Builder) -> None:
        half = next((name for name in ("bf16", "fp16") if run.flag(name)), None)
        run.set("dtype", half or "fp32", half or "")
        products = next((name for name in ("fp8_format", "fp8") if run.word(name)), None)
        recipe = run.word("fp8_recipe") or Float8Recipe.DELAYED.value
        if products and half == "bf16" and recipe in MEGATRON_RECIPES:
            run.set("fp8", recipe, products)
        elif products:
            run.leave_out(products, UNKNOWN, f"8-bit products beside {half or 'fp32'} by {recipe[:20]}; 16 bits are counted")
        if run.flag("accumulate_allreduce_grads_in_fp32") and half == "fp16":
            run.leave_out("accumulate_allreduce_grads_in_fp32", MORE, "gradients in fp32; fp16 is counted")
        if (rows := run.number("eval_micro_batch_size")) is not None and rows > int(run.number("micro_batch_size") or rows):
            run.leave_out("eval_micro_batch_size", MORE, "an evaluation of larger batches than training's")
        name = run.word("optimizer") or DEFAULT_OPTIMIZER
        row = OPTIMIZERS.get(known_optimizer(name))
        if row is not None and row.name == STATELESS:
            run.set("optimizer", row.variants["momentum"], "optimizer")
            return
        if row is None or row.torch is None or not row.torch.fused:
            run.leave_out("optimizer", UNKNOWN, f"{name[:40]}; the states of Adam are counted")
        run.set("optimizer", DEFAULT_OPTIMIZER, "optimizer")

    def _model(self, run: Builder) -> dict[str, Any]:
        """Return the model's config: Megatron's names, what is said alone."""
        found: dict[str, Any] = {"model_type": MODEL_TYPE}
        for name, kind in _OWN.items():
            if name in _SPECIAL:
                continue
            value = _typed(run, name, kind)
            if value is not None:
                found[name] = value
        for off, name in _SWITCHED_OFF.items():
            if run.flag(off):
                found[name] = False
        if run.flag("use_rotary_position_embeddings"):
            found["position_embedding_type"] = "rope"
        if run.flag("recompute_activations"):
            found["recompute_granularity"] = "selective"
        if run.flag("use_flash_attn"):
            found.setdefault("attention_backend", "flash")
        fused = "no_bias_swiglu_fusion" if run.flag("swiglu") else "no_bias_gelu_fusion"
        if run.flag(fused):
            run.leave_out(fused, MORE, "bias and activation by several kernels, each with a tensor")
        self._queries(run, found)
        self._experts(run, found)
        modules = run.texts("recompute_modules") or tuple(str(run.data.get("recompute_modules", "")).split())
        if modules and found.get("recompute_granularity") == "selective":
            found["recompute_modules"] = modules
            if left := sorted(set(modules) & {"layernorm", "mla_up_proj", "moe_act"}):
                run.leave_out("recompute_modules", LESS, f"{', '.join(left)} run again, outputs dropped")
        if found.get("recompute_granularity") == "full":
            run.set("gradient_checkpointing", True, "recompute_granularity")
        found["vocab_size"] = self._vocabulary(run, found)
        return found

    def _queries(self, run: Builder, found: dict[str, Any]) -> None:
        groups = run.number("num_query_groups")
        if run.flag("group_query_attention") or (groups is not None and "group_query_attention" not in run.data):
            found["num_query_groups"] = groups or 1

    def _experts(self, run: Builder, found: dict[str, Any]) -> None:
        self._balance(run, found)
        if (factor := run.amount("moe_expert_capacity_factor")) is not None and factor <= 0:
            found.pop("moe_expert_capacity_factor", None)  # which Megatron-LM takes for none
        said, layers = run.value("moe_layer_freq"), found.get("num_layers")
        if said is None or not found.get("num_experts") or not isinstance(layers, int) or layers > 10_000:
            return
        if isinstance(said, int) and said > 0:
            found["moe_layer_freq"] = [int(layer % said == 0) for layer in range(layers)]
            return
        if isinstance(said, list) and all(one in (0, 1) for one in said):
            found["moe_layer_freq"] = said
            return
        text = re.sub(r"\s|^\(|\)$", "", str(said))
        pattern: list[int] = []
        for part in text.split("+"):
            match = _PATTERN.fullmatch(part.strip("()"))
            if match is None:
                raise run.bad("moe_layer_freq", "is no pattern of layers", "write ([0]*3+[1]*58), or a number")
            pattern += [int(one) for one in match[1].split(",")] * int(match[2] or 1)
        found["moe_layer_freq"] = pattern

    def _balance(self, run: Builder, found: dict[str, Any]) -> None:
        """Read the auxiliary loss: a coefficient, or one for each of several; without its type there is none."""
        said, kind = run.value("moe_aux_loss_coeff"), run.value("moe_router_load_balancing_type")
        if not found.get("num_experts"):
            return
        if kind == "sinkhorn":
            run.leave_out("moe_router_load_balancing_type", UNKNOWN, "Sinkhorn's normalisation of the router's scores")
        parts = said if isinstance(said, list) else str(said or 0).split()
        try:
            total = sum(map(float, parts))
        except (TypeError, ValueError):
            raise run.bad("moe_aux_loss_coeff", "is no number", "write a number, or one for each loss") from None
        if 0 < total < 1 and kind not in ("none", "sinkhorn"):
            found["moe_aux_loss_coeff"] = total

    def _vocabulary(self, run: Builder, found: dict[str, Any]) -> int:
        """Return the number of words: said, or that of a tokenizer that is known by its name."""
        said = run.number("padded_vocab_size") or run.number("vocab_size")
        kind = run.text("tokenizer_type")
        if said is not None:
            return said + (kind == "NullTokenizer" and not found.get("padded_vocab_size"))
        words = _VOCABULARIES.get(kind or _TOKENIZER, _WORDS)
        if kind in (None, *_VOCABULARIES):
            run.assume(f"{words:,} words of {kind or _TOKENIZER}")
        else:
            run.leave_out("tokenizer_type", UNKNOWN, f"the words of {str(kind)[:40]} are not known; {words:,} are counted")
        return words

    def _layout(self, run: Builder, model: Mapping[str, Any]) -> None:
        for key, field in _DEGREES.items():
            if (found := run.number(key)) is not None and found > 1:
                run.degree(field, found, key)
        tp, pp = int(run.degrees.get("tp", 1)), int(run.degrees.get("pp", 1))
        if run.flag("sequence_parallel") and tp > 1:
            run.degree("sp", value=True, key="sequence_parallel")
        experts = run.number("expert_tensor_parallel_size")
        if model.get("num_experts") and (experts or tp) > 1:
            run.degree("etp", experts or tp, "expert_tensor_parallel_size")
        self._chunks(run, model, pp)

    def _chunks(self, run: Builder, model: Mapping[str, Any], pp: int) -> None:
        chunks, key = run.number("num_virtual_stages_per_pipeline_rank"), "num_virtual_stages_per_pipeline_rank"
        each = run.number("num_layers_per_virtual_pipeline_stage")
        layers = model.get("num_layers")
        if chunks is None and each is not None and isinstance(layers, int):
            key = "num_layers_per_virtual_pipeline_stage"
            count = layers + sum(bool(model.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
            if count % (pp * each):
                raise BadInput(
                    f"{pp} stages with chunks of {each} layers do not divide {count} layers",
                    where=f"{run.name}: {key}",
                    remedy="use a divisor of a stage's layers",
                )
            chunks = count // (pp * each)
        if chunks is not None and chunks > 1 and pp == 1:
            raise BadInput("chunks without pipeline stages", where=f"{run.name}: {key}", remedy="raise the pipeline's size")
        if chunks is not None and chunks > 1:
            run.degree("vpp", chunks, key)

    def _others(self, run: Builder) -> None:
        """List what is in no figure, by its name; names that Megatron does not have are among them."""
        run.leave_out_flags(_NOT_MODELLED)
        if run.amount("rotary_percent") not in (None, 1.0):
            run.leave_out("rotary_percent", UNKNOWN, "positions of a part of the channels")
        for key in run.data:
            if key not in run.read and not _is_harmless(key, run.data[key]) and run.on(key):
                run.leave_out(key, UNKNOWN, "what it does to memory is not known here")


def known_words(said: Mapping[str, Any]) -> int:
    """Return how many words are counted of a tokenizer that cannot be asked; `said` are a run's arguments."""
    return int(said.get("vocab_size") or _VOCABULARIES.get(said.get("tokenizer_type") or _TOKENIZER, _WORDS))


def _apart(key: str, value: Any) -> tuple[str, Any]:
    """Return name and value of a flag that a script quotes together with its value, which bash splits later on."""
    name, space, said = key.partition(" ")
    return (name, said.strip()) if space and value is True else (key, value)


def _is_harmless(key: str, value: Any) -> bool:
    """Whether an argument that nothing reads moves no memory with this value."""
    if key in moving_in(MegatronLm.name):
        return key in _USUAL and value in (_USUAL[key], [_USUAL[key]])
    return key in names_in(MegatronLm.name) or _HARMLESS.fullmatch(key) is not None


def _typed(run: Builder, name: str, kind: str) -> Any:
    """Read one of the model's keys as the kind that its field has."""
    if kind == "int":
        return run.number(name, least=0)
    if kind == "bool":
        return run.flag(name)
    return run.amount(name) if kind == "float" else run.text(name)
