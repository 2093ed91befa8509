"""Collects the corpus: keys and values of public files, and what their programs would do, derived apart from the readers.

    python -m tests.corpus.collect MIRRORS tests/corpus

MIRRORS holds one folder ``owner+name`` a repository, with its files and a file ``COMMIT``. Defaults are read from each
program's own source (typed fields of its dataclasses and pydantic models), never from ``zeroplan``; tasks, methods and engines
follow from the keys by the rules below, each with the place in the program's source that states it.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

#: Values of these keys are prose or secrets; the key stays, the value does not.
_PROSE = re.compile(
    r"chat_template|system_prompt|prompt|description|token$|wandb|benchmarks|metric_logger|profiler|special_tokens"
)
_LONGEST = 160
Expected = dict[str, Any]


def defaults_of(*sources: Path) -> dict[str, Any]:
    """The constant defaults of all typed fields in these files; a later file overrides an earlier one."""
    found: dict[str, Any] = {}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
                    value = item.value
                    if isinstance(value, ast.Call):
                        value = next((word.value for word in value.keywords if word.arg == "default"), value)
                    if isinstance(value, ast.Constant):
                        found[item.target.id] = value.value
    return found


def shortened(value: Any, key: str = "") -> Any:
    """The value without prose: long texts and those of telling keys are left out."""
    if isinstance(value, Mapping):
        return {str(name): shortened(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [shortened(item, key) for item in value[:4]]
    if isinstance(value, str) and (_PROSE.search(key) or len(value) > _LONGEST):
        return "…"
    return value


def command_words(text: str) -> str:
    """A script as its assignments and commands: continued lines joined, comments and all else left out."""
    lines = []
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        try:
            words = shlex.split(re.sub(r"(^|\s)#.*", "", line))
        except ValueError:
            continue
        if (
            words
            and not re.match(r"\s*-\w\s*\|.*\)\s*$", line)
            and (re.match(r"(export\s+)?\w+=", line.strip()) or any(word.startswith("--") for word in words))
        ):
            lines.append(" ".join(shlex.quote(word) if " " in word and "$" not in word else word for word in words))
    return "\n".join(lines) + "\n"


def flags_of(text: str) -> dict[str, Any]:
    """The flags of the longest command of a script, with its variables and divisions put in."""
    said = re.findall(r"^(?:export )?(\w+)=(\S+)$", text, re.MULTILINE)
    variables = {name: value.strip("\"'") for name, value in said if not re.match(r"[\"']?\$\{?\d", value)}
    line = max(text.splitlines(), key=lambda one: one.count("--"), default="")
    for _ in range(3):
        line = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), line)
    line = re.sub(r"\$\((?:\(|expr)\s*(\d+)\s*/\s*(\d+)\s*\)?\)", lambda match: str(int(match[1]) // int(match[2])), line)
    words = shlex.split(re.sub(r"(^|\s)#.*", "", line))
    found: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            key, has, value = word[2:].partition("=")
            key = key.replace("-", "_")
            found[key] = yaml.safe_load(value) if has else True
        elif key is not None and found[key] is True:
            found[key] = yaml.safe_load(word) if re.fullmatch(r"[\w.+-]+", word) else word
    return found


def _true(value: Any) -> bool:
    return value is True or str(value).lower() == "true"


def _whole(value: Any) -> int | None:
    return int(value) if re.fullmatch(r"\d+", str(value)) else None


def trainer(data: Mapping[str, Any], defaults: Mapping[str, Any], *, bf16: bool = False) -> Expected:
    """What the Trainer's arguments decide. Source: transformers 5.17, training_args.py."""
    said = {**defaults, **{key: value for key, value in data.items() if value is not None}}
    half = "bf16" if _true(said.get("bf16")) else "fp16" if _true(said.get("fp16")) else None
    if half is None and bf16 and "bf16" not in data and "fp16" not in data:
        half = "bf16"
    return {
        "micro_batch": _whole(said["per_device_train_batch_size"]),
        "grad_accum": _whole(said["gradient_accumulation_steps"] or 1),
        "dtype": half or "fp32",
        "gradient_checkpointing": _true(said["gradient_checkpointing"]),
        "optimizer": said.get("optim") or "adamw_torch_fused",
        "engine": "deepspeed" if said.get("deepspeed") else "fsdp2" if said.get("fsdp") else "ddp",
    }


def trl(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> Expected:
    """TRL 1.16: trainer/base_config.py (bf16, checkpointing), trainer/utils.py (get_peft_config, get_quantization_config)."""
    expected = trainer(data, {**defaults, "gradient_checkpointing": True}, bf16=True)
    peft, bits = _true(data.get("use_peft")), _true(data.get("load_in_4bit")) or _true(data.get("load_in_8bit"))
    expected["method"] = ("qlora" if bits else "lora") if peft else "full"
    expected["lora_rank"] = (_whole(data.get("lora_r")) or defaults["lora_r"]) if peft else None
    group = "num_generations" in data
    expected["task"] = "grpo" if group else "cpo" if "gamma_beta_ratio" in data else "dpo" if "beta" in data else "sft"
    if not group:
        expected["seq_len"] = _whole(data.get("max_length") or data.get("max_seq_length") or 1024)
    expected["left_out"] = [key for key in ("load_in_4bit", "load_in_8bit") if _true(data.get(key))]
    return expected


def script(data: Mapping[str, Any], defaults: Mapping[str, Any], words: str) -> Expected:
    """A script of its own on the Trainer: adapters by the words that its arguments have for them, the task by its name."""
    expected = trainer(data, defaults)
    rank = _whole(data.get("lora_rank") or data.get("lora_r"))
    on = [key for key in ("use_lora", "use_peft") if _true(data.get(key))]
    expected["method"] = "lora" if rank or on else "full"
    if rank:
        expected["lora_rank"] = rank
    names = ("max_seq_length", "model_max_length", "max_length", "block_size", "max_source_length")
    lengths = [data[key] for key in names if data.get(key) is not None]
    if lengths:  # of a source and a target the script makes a sample in a way of its own
        sides = "max_target_length" in data and lengths == [data.get("max_source_length")]
        expected["seq_len"] = None if sides else _whole(lengths[0])
    task = re.search(r"[/ _](dpo|orpo|ppo|grpo|reward|rm)_\w+\.py", words)
    expected["left_out"] = [*([f"task {task[1]}"] if task else []), *(on[:1] if on and not rank else [])]
    if _true(data.get("q_lora")) or _true(data.get("load_in_4bit")):
        expected["left_out"].append("quantisation")
    return expected


def llama_factory(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> Expected:
    """LLaMA-Factory 0.9.6: hparams/*.py; model/model_utils/checkpointing.py (checkpointing unless disabled)."""
    expected = trainer(data, defaults)
    said = {**defaults, **data}
    kind = said["finetuning_type"]
    bits = data.get("quantization_bit")
    expected["method"] = ("qlora" if bits else "lora") if kind == "lora" else kind
    expected["lora_rank"] = _whole(said["lora_rank"]) if kind == "lora" else None
    stages = {"pt": "pretrain", "rm": "reward"}
    expected["task"] = stages.get(said["stage"], said["stage"])
    expected["seq_len"] = _whole(said["cutoff_len"])
    expected["gradient_checkpointing"] = not _true(said["disable_gradient_checkpointing"])
    if _true(data.get("pure_bf16")):
        expected["dtype"] = "bf16"
    if _true(data.get("use_muon")):
        expected["optimizer"] = "muon"
    names = ("quantization_bit", "use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_unsloth")
    expected["left_out"] = [key for key in names if data.get(key)]
    return expected


def axolotl(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> Expected:
    """axolotl 0.18: utils/schemas/*.py (defaults), utils/config/__init__.py (bf16: auto is bf16 where the card has it)."""
    said = {**defaults, **{key: value for key, value in data.items() if value is not None}}
    adapter = data.get("adapter")
    bits = _true(data.get("load_in_4bit")) or _true(data.get("load_in_8bit"))
    known = adapter in ("lora", "qlora")
    bf16, fp16 = data.get("bf16", "auto"), _true(data.get("fp16"))
    half = "bf16" if bf16 in (True, "true", "full") or (bf16 in (None, "auto") and not fp16) else "fp16" if fp16 else "fp32"
    if _true(data.get("bfloat16")):
        half = "bf16"
    again = data.get("gradient_checkpointing")
    fsdp = data.get("fsdp_config") or {}
    inside = _true(fsdp.get("activation_checkpointing") or fsdp.get("fsdp_activation_checkpointing"))
    rows = any(str(pattern).endswith("]") for pattern in data.get("unfrozen_parameters") or ())  # of some parameters
    names = ("load_in_4bit", "load_in_8bit", "rl", "lora_modules_to_save", "qat", *(("unfrozen_parameters",) if rows else ()))
    return {
        "micro_batch": _whole(said["micro_batch_size"]),
        "grad_accum": _whole(said["gradient_accumulation_steps"]),
        "seq_len": _whole(said["sequence_len"]),
        "dtype": half,
        "gradient_checkpointing": inside or _true(again) or str(again).startswith("offload"),
        "optimizer": said["optimizer"],
        "engine": "deepspeed" if data.get("deepspeed") else "fsdp2" if data.get("fsdp") or fsdp else "ddp",
        "method": ("qlora" if bits else "lora") if known else adapter or "full",
        "lora_rank": _whole(data.get("lora_r")) if known else None,
        **({"compile": "model"} if data.get("torch_compile") else {}),
        "left_out": [key for key in names if data.get(key) and not (key.startswith("load_in") and not known)],
    }


def torchtune(data: Mapping[str, Any], path: str) -> Expected:
    """torchtune: recipes/*_distributed.py shard by FSDP2, *_single_device.py nothing; dtype is the model's."""
    model = data.get("model", {})
    builder = model.get("_component_", "").rpartition(".")[2]
    lora = builder.startswith(("lora_", "qlora_"))
    tokenizer = data.get("tokenizer") or {}
    single = "single_device" in path or "low_memory" in path
    return {
        "micro_batch": data.get("batch_size"),
        "grad_accum": data.get("gradient_accumulation_steps", 1),
        "seq_len": tokenizer.get("max_seq_len"),
        "dtype": data.get("dtype"),
        "gradient_checkpointing": _true(data.get("enable_activation_checkpointing")),
        "engine": "ddp" if single else "fsdp2",
        "method": ("qlora" if builder.startswith("qlora_") else "lora") if lora else "full",
        "lora_rank": model.get("lora_rank") if lora else None,
        **({"compile": "blocks"} if _true(data.get("compile")) else {}),
        "left_out": [key for key in ("optimizer_in_bwd", "enable_activation_offloading") if _true(data.get(key))],
    }


def open_instruct(data: Mapping[str, Any], defaults: Mapping[str, Any]) -> Expected:
    """open-instruct: finetune.py, FlatArguments; the model loads in bf16, whatever the launcher's precision."""
    said = {**defaults, **data}
    lora = _true(data.get("use_lora")) or _true(data.get("use_qlora"))
    return {
        "micro_batch": _whole(said["per_device_train_batch_size"]),
        "grad_accum": _whole(said["gradient_accumulation_steps"]),
        "seq_len": _whole(said.get("max_seq_length")),
        "dtype": "bf16",
        "gradient_checkpointing": _true(said["gradient_checkpointing"]),
        "method": ("qlora" if _true(data.get("use_qlora")) else "lora") if lora else "full",
        "lora_rank": _whole(said["lora_rank"]) if lora else None,
        "left_out": [key for key in ("use_8bit_optimizer",) if _true(data.get(key))],
    }


def ms_swift(data: Mapping[str, Any], defaults: Mapping[str, Any], program: str) -> Expected:
    """ms-swift 4.6: trainers/arguments.py (micro batch 1, checkpointing), base_args (tuner_type lora), tuner_args (rank 8)."""
    own = {**defaults, "gradient_checkpointing": True, "per_device_train_batch_size": 1}
    expected = trainer(data, own, bf16=True)
    tuner = data.get("tuner_type") or data.get("train_type") or data.get("sft_type") or "lora"
    bits = data.get("quant_bits")
    expected["method"] = ("qlora" if bits else "lora") if tuner == "lora" else tuner
    expected["lora_rank"] = _whole(data.get("lora_rank") or 8) if tuner == "lora" else None
    expected["seq_len"] = _whole(data.get("max_length"))
    kind = data.get("rlhf_type", "dpo")
    expected["task"] = "pretrain" if program == "pt" else ("reward" if kind == "rm" else kind) if program == "rlhf" else "sft"
    weights = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(data.get("torch_dtype")))
    if weights and "bf16" not in data and "fp16" not in data:
        expected["dtype"] = weights
    expected["left_out"] = [key for key in ("quant_bits", "sequence_parallel_size") if data.get(key) not in (None, 1)]
    return expected


def litgpt(data: Mapping[str, Any]) -> Expected:
    """LitGPT 0.5.13: finetune/lora.py (setup, parallelize_fn), finetune/full.py (FSDPStrategy), fabric's precision names."""
    train = data["train"]
    devices, nodes = data.get("devices", 1), data.get("num_nodes", 1)
    several = devices == "auto" or devices * nodes > 1
    micro = train["micro_batch_size"]
    expected = {
        "micro_batch": micro,
        "seq_len": train.get("max_seq_length"),
        "dtype": {"bf": "bf16", "16": "fp16", "32": "fp32"}[(data.get("precision") or "bf16-true")[:2]],
        "engine": "fsdp2" if several else "ddp",
        "gradient_checkpointing": several and "checkpoint_dir" in data,
        "method": ("qlora" if data.get("quantize") else "lora") if "lora_r" in data else "full",
        "lora_rank": data.get("lora_r"),
        "left_out": [key for key in ("quantize",) if data.get(key)],
    }
    if devices != "auto":
        expected["grad_accum"] = max(1, train["global_batch_size"] // (devices * nodes) // micro)
    return expected


def torchtitan(data: Mapping[str, Any]) -> Expected:
    """torchtitan: config/job_config.py (defaults), distributed/parallel_dims.py, models/llama3/infra/parallelize.py."""
    training, layout = data.get("training", {}), data.get("parallelism", {})
    mode = data.get("activation_checkpoint", {}).get("mode", "selective")
    tensor, stages = layout.get("tensor_parallel_degree", 1), layout.get("pipeline_parallel_degree", 1)
    context, replicas = layout.get("context_parallel_degree", 1), layout.get("data_parallel_replicate_degree", 1)
    degrees = {name: size for name, size in (("tp", tensor), ("cp", context), ("dp_replicate", replicas)) if size > 1}
    if tensor > 1 and stages == 1:
        degrees["sp"] = True
    if stages > 1:
        schedule = layout.get("pipeline_parallel_schedule", "1F1B").lower()
        degrees |= {"pp": stages, "schedule": "gpipe" if schedule in ("gpipe", "loopedbfs") else "1f1b"}
        degrees |= {"vpp": 2} if schedule in ("interleaved1f1b", "loopedbfs") else {}
    kept = layout.get("fsdp_reshard_after_forward", "default")
    return {
        "engine": "fsdp2",
        "stage": 2 if kept == "never" or (kept == "default" and stages > 1) else 3,
        "micro_batch": training.get("local_batch_size", 8)
        if stages == 1
        else layout.get("pipeline_parallel_microbatch_size", 1),
        "seq_len": training.get("seq_len", 2048),
        "dtype": "bf16",
        "gradient_checkpointing": mode in ("full", "selective"),
        "degrees": degrees,
        **({"compile": "blocks"} if data.get("compile", {}).get("enable") else {}),
        "left_out": [
            *(["model.converters"] if data.get("model", {}).get("converters") else []),
            *(["parallelism.expert_parallel_degree"] if layout.get("expert_parallel_degree", 1) > 1 else []),
            *(["validation.enable"] if data.get("validation", {}).get("enable") else []),
        ],
    }


def plain_script(text: str) -> str:
    """A script without comments and empty lines; its arrays stay over their lines."""
    bare = (re.sub(r"(^|\s)#[^\n]*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in bare if line.strip()) + "\n"


def megatron_lm(text: str, path: str) -> Expected:
    """Megatron-LM: megatron/training/arguments.py. Flags are found by their names in the whole text, variables put in."""
    said = dict(re.findall(r"^(?:export )?(\w+)=([\w.]+)$", text, re.MULTILINE))
    flags: dict[str, str] = {}
    separator = r":[ \t]*" if path.endswith(".yaml") else r"[ \t=]+"
    prefix = r"^[ \t]*" if path.endswith(".yaml") else r"--"
    for name, value in re.findall(prefix + r"([a-z][\w-]*)(?:" + separator + r"([^\s\\\"')]+))?", text, re.MULTILINE):
        plain = re.sub(r"^\$\{?(\w+)\}?$", lambda match: said.get(match[1], match[0]), value)
        flags.setdefault(name.replace("-", "_"), plain)
    number = {key: int(value) for key, value in flags.items() if re.fullmatch(r"\d+", value)}
    on = {key for key, value in flags.items() if value.lower() not in ("false", "none")}
    degrees: dict[str, Any] = {}
    for field, key in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        size = number.get(f"{key}_parallel_size" if key == "context" else f"{key}_model_parallel_size", 1)
        if size > 1:
            degrees[field] = size
    if "sequence_parallel" in on and degrees.get("tp", 1) > 1:
        degrees["sp"] = True
    return {
        "engine": "megatron",
        "stage": int("use_distributed_optimizer" in on),
        "micro_batch": number["micro_batch_size"],
        "seq_len": number.get("seq_length") or number.get("encoder_seq_length"),
        "dtype": "bf16" if "bf16" in on else "fp16" if "fp16" in on else "fp32",
        **(
            {}
            if any(value.startswith("$") for key, value in flags.items() if "_parallel_size" in key)
            else {"degrees": degrees}
        ),
        **({"global_batch": number["global_batch_size"]} if "global_batch_size" in number else {}),
        "left_out": sorted(key for key in ("rampup_batch_size", "activations_checkpoint_method") if key in on),
    }


def accelerate(data: Mapping[str, Any]) -> Expected:
    """accelerate 1.15: commands/config/config_args.py, utils/dataclasses.py (plugins)."""
    kind = str(data.get("distributed_type", "NO")).upper()
    nodes, processes = data.get("num_machines") or 1, data.get("num_processes")
    block = data.get("deepspeed_config") or {}
    fsdp = {key.removeprefix("fsdp_"): value for key, value in (data.get("fsdp_config") or {}).items()}
    if "XPU" in kind or "CPU" in kind:
        return {"refused": kind}
    expected: Expected = {
        "engine": {"DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}.get(kind, "ddp"),
        "gpus": processes // nodes if processes else 1 if kind == "NO" else None,
        "left_out": ["fsdp_config"] if kind == "FSDP" and int(fsdp.get("version", 1)) == 1 else [],
    }
    if kind == "DEEPSPEED" and "deepspeed_config_file" not in block:
        expected["zero_stage"] = block.get("zero_stage", 2)
        expected["offload"] = str(block.get("offload_optimizer_device", "none")).lower()
        expected["zero_init"] = block.get("zero3_init_flag", expected["zero_stage"] == 3)
    return expected


def ds_config(data: Mapping[str, Any]) -> Expected:
    """DeepSpeed: runtime/zero/config.py; the corpus's test asks DeepSpeed's own parser as well."""
    zero = data.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else int(bool(zero))
    device = ((zero or {}).get("offload_optimizer") or {}).get("device", "none") if isinstance(zero, dict) else "none"
    return {"engine": "deepspeed", "zero_stage": stage, "offload": device, "left_out": []}


# --- which files ----------------------------------------------------------------------------------------------------------

#: Program, repository, a pattern of paths, and how many at most (spread evenly over those that match).
WANTED = (
    ("trl", "huggingface+alignment-handbook", r"recipes/.*(sft|dpo|orpo|gpt2|scan).*\.yaml$", 30),
    ("trl", "huggingface+open-r1", r"recipes/.*/(sft|grpo)/.*\.yaml$", 12),
    ("accelerate", "huggingface+alignment-handbook", r"accelerate_configs/.*\.yaml$", 4),
    ("accelerate", "huggingface+trl", r"accelerate_configs/.*\.yaml$", 16),
    ("accelerate", "huggingface+accelerate", r"examples/config_yaml_templates/.*\.yaml$", 12),
    ("accelerate", "huggingface+peft", r"examples/.*config.*\.yaml$", 8),
    ("llama-factory", "hiyouga+LLaMA-Factory", r"examples/(train_|extras/(?!multi_tokens)).*\.yaml$", 40),
    ("accelerate", "hiyouga+LLaMA-Factory", r"examples/accelerate/.*\.yaml$", 6),
    ("ds_config", "hiyouga+LLaMA-Factory", r"examples/deepspeed/.*\.json$", 6),
    ("ds_config", "axolotl-ai-cloud+axolotl", r"deepspeed_configs/.*\.json$", 9),
    ("ds_config", "haotian-liu+LLaVA", r"scripts/zero.*\.json$", 4),
    ("ds_config", "deepspeedai+DeepSpeedExamples", r"training/.*(ds_config|deepspeed).*\.json$", 16),
    ("ds_config", "lm-sys+FastChat", r".*deepspeed.*\.json$", 3),
    ("axolotl", "axolotl-ai-cloud+axolotl", r"examples/.*\.ya?ml$", 45),
    ("torchtune", "pytorch+torchtune", r"recipes/configs/.*(full|lora).*\.yaml$", 24),
    ("open-instruct", "allenai+open-instruct", r"configs/train_configs/sft/.*\.yaml$", 18),
    ("ms-swift", "modelscope+ms-swift", r"examples/train/.*\.sh$", 36),
    ("litgpt", "Lightning-AI+litgpt", r"config_hub/finetune/.*\.yaml$", 16),
    ("litgpt", "Lightning-AI+litgpt", r"config_hub/pretrain/.*\.yaml$", 3),
    ("torchtitan", "pytorch+torchtitan", r"train_configs/.*\.toml$", 24),
    (
        "megatron-lm",
        "NVIDIA+Megatron-LM",
        r"examples/(gpt3|llama|mixtral|gptoss|megatron_fsdp)/.*(train|gpt_config).*\.(sh|yaml)$",
        8,
    ),
    ("megatron-lm", "bigcode-project+Megatron-LM", r"examples/pretrain_gpt(?!3).*\.sh$", 8),
    ("hf-trainer", "haotian-liu+LLaVA", r"scripts/.*(finetune|pretrain)[^/]*\.sh$", 12),
    ("hf-trainer", "lm-sys+FastChat", r"scripts/train_vicuna.*\.sh$", 3),
    ("hf-trainer", "huggingface+peft", r"examples/sft/run_peft.*\.sh$", 9),
    # Files that nobody had tried when the readers were done.
    ("trl", "princeton-nlp+SimPO", r"training_configs/.*\.yaml$", 7),
    ("trl", "philschmid+deep-learning-pytorch-huggingface", r"training/receipes/.*\.yaml$", 5),
    ("accelerate", "princeton-nlp+SimPO", r"accelerate_configs/.*\.yaml$", 3),
    ("accelerate", "philschmid+deep-learning-pytorch-huggingface", r"accelerate_configs/.*\.yaml$", 4),
    ("accelerate", "OpenBMB+MiniCPM", r"trainer/configs/accelerate/.*\.yaml$", 3),
    ("ds_config", "OpenBMB+MiniCPM", r"finetune/configs/ds_config.*\.json$", 4),
    ("ds_config", "QwenLM+Qwen", r"finetune/ds_config.*\.json$", 2),
    ("ds_config", "QwenLM+Qwen2.5-Coder", r"configs/(ds_config|default_offload).*\.json$", 4),
    ("llama-factory", "NovaSky-AI+SkyThought", r"examples/train_(full|lora)/.*\.yaml$", 10),
    ("open-instruct", "allenai+open-instruct", r"scripts/train/(tulu3|olmo2)/(finetune|dpo|reward|grpo).*\.sh$", 14),
    ("hf-trainer", "yangjianxin1+Firefly", r"train_args/(sft|pretrain|dpo)/.*\.json$", 8),
    ("hf-trainer", "shibing624+MedicalGPT", r"scripts/run_.*\.sh$", 7),
    ("hf-trainer", "QwenLM+Qwen", r"finetune/.*\.sh$", 5),
    (
        "hf-trainer",
        "OpenBMB+MiniCPM",
        r"(finetune/(lora_finetune|lora_finetune_ocnli|sft_dpo_trainer/sft_dpo)|trainer/scripts/.*)\.sh$",
        7,
    ),
    ("hf-trainer", "simplescaling+s1", r"train/(sft|sft_multinode)\.sh$", 2),
)


def chosen(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Program, repository and path of each wanted file."""
    for program, repo, pattern, most in WANTED:
        files = [path for path in sorted((root / repo).rglob("*")) if re.search(pattern, path.as_posix())]
        step = max(1, len(files) / most)
        yield from ((program, repo, files[int(i * step)]) for i in range(min(most, len(files))))


def named_files(data: Mapping[str, Any], words: str, path: Path, repo: Path) -> dict[str, Any]:
    """ds_configs and accelerate's configs that the file names by a path, as found beside it or in the repository."""
    found: dict[str, Any] = {}
    block = data.get("deepspeed_config")
    block = {"deepspeed_config_file": block} if isinstance(block, str) else block
    launcher = re.search(r"--config_file[ =]+[\"']?([^\s\"']+\.yaml)", words)
    if launcher is not None:
        for place in (path.parent / Path(launcher[1]).name, *(folder / launcher[1] for folder in path.parents)):
            if place.is_file():
                found[launcher[1]] = yaml.safe_load(place.read_text())
                break
    for value in (data.get("deepspeed"), block.get("deepspeed_config_file") if isinstance(block, dict) else None):
        if isinstance(value, str) and value.endswith((".json", ".conf")):
            place = next((folder / value for folder in path.parents if (folder / value).is_file()), None)
            if place is not None:
                found[value] = json.loads(place.read_text())
    return found


def main() -> None:
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    source = root / "_sources"
    base = defaults_of(source / "training_args.py")
    known = {
        "trl": {**base, **defaults_of(source / "trl_model_config.py")},
        "llama-factory": {**base, **defaults_of(*sorted(source.glob("lf_*.py")))},
        "axolotl": defaults_of(*sorted(source.glob("axolotl_*.py"))),
        "open-instruct": defaults_of(source / "open_instruct_finetune.py"),
    }
    readers = {"litgpt": litgpt, "accelerate": accelerate, "ds_config": ds_config, "torchtitan": torchtitan}
    rows: dict[str, list[str]] = {}
    for program, repo, path in chosen(root):
        text = path.read_text()
        is_script = path.suffix == ".sh"
        row: dict[str, Any] = {"repo": repo.replace("+", "/"), "path": path.relative_to(root / repo).as_posix()}
        row["commit"] = (root / repo / "COMMIT").read_text().strip()
        words = command_words(text) if is_script else ""
        try:
            parse = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix, yaml.safe_load)
            data = flags_of(words) if is_script else parse(text)
        except (ValueError, yaml.YAMLError):
            continue
        if not isinstance(data, dict) or not data:
            continue
        started = re.search(r"\bswift (sft|pt|rlhf)\b|\bmegatron (sft|pt|rlhf)\b", words)
        if program == "ms-swift" and not started:
            continue
        if is_script:
            row["script"] = words
        elif path.suffix == ".toml":
            row["script"] = "\n".join(line.split("#")[0].rstrip() for line in text.splitlines() if line.split("#")[0].strip())
        else:
            row["keys"] = shortened(data)
        beside = named_files(data, words, path, root / repo)
        if beside:
            row["beside"] = beside
        row["program"] = program
        if program == "megatron-lm":
            if is_script:
                row["script"] = plain_script(text)
            row["expected"] = megatron_lm(row.get("script", text), row["path"])
        elif program == "trl":
            row["expected"] = trl(data, known["trl"])
        elif program == "llama-factory":
            row["expected"] = llama_factory(data, known["llama-factory"])
        elif program == "axolotl":
            row["expected"] = axolotl(data, known["axolotl"])
        elif program == "open-instruct":
            row["expected"] = open_instruct(data, known["open-instruct"])
        elif program == "ms-swift" and started is not None:
            row["expected"] = ms_swift(data, base, started[1] or "megatron") if started[1] else {"refused": "Megatron"}
        elif program == "hf-trainer":
            own = "--" in words and repo in ("huggingface+peft", "haotian-liu+LLaVA", "lm-sys+FastChat")
            row["expected"] = trainer(data, base) if own else script(data, base, words)
            row["expected"] |= next((accelerate(one) for one in beside.values() if "distributed_type" in one), {})
        elif program == "torchtune":
            row["expected"] = torchtune(data, row["path"])
        else:
            row["expected"] = readers[program](data)
        rows.setdefault(program, []).append(json.dumps(row, ensure_ascii=False))
    for program, lines in rows.items():
        (out / f"{program}.jsonl").write_text("\n".join(lines) + "\n")
        print(program, len(lines))


if __name__ == "__main__":
    main()
