"""The requests whose answers are held still: command lines, made by small grids, and the files that they read.

Each request is the words after ``zeroplan``. They name models that tapes are shipped for, and files by their bare names:
:data:`FILES` and the ds_configs of ``tests/fixtures/ds_configs`` lie in the folder in which the requests run.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

Words = tuple[str, ...]

GPT2 = "openai-community/gpt2"
LLAMA_1B = "meta-llama/Llama-3.2-1B"

#: Decoders by family and size, mixtures of experts, encoders, encoder-decoders, vision and speech.
MODELS = (
    GPT2,
    "openai-community/gpt2-xl",
    LLAMA_1B,
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-2-13b-hf",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "mistralai/Mistral-7B-v0.3",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen1.5-MoE-A2.7B",
    "allenai/OLMoE-1B-7B-0924",
    "allenai/OLMo-2-1124-7B",
    "microsoft/phi-2",
    "microsoft/Phi-3-mini-4k-instruct",
    "EleutherAI/pythia-160m",
    "EleutherAI/gpt-j-6b",
    "tiiuae/falcon-7b",
    "bigscience/bloom-1b7",
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-large",
    "microsoft/deberta-v3-base",
    "answerdotai/ModernBERT-base",
    "google-t5/t5-base",
    "openai/whisper-small",
    "WinKawaks/vit-small-patch16-224",
)

#: Every engine, stage and offload: the words that name one plan.
LAYOUTS: tuple[Words, ...] = (
    *(("--engine", "deepspeed", "--stage", str(stage)) for stage in range(4)),
    ("--engine", "deepspeed", "--stage", "1", "--offload-optimizer", "cpu"),
    ("--engine", "deepspeed", "--stage", "2", "--offload-optimizer", "cpu"),
    ("--engine", "deepspeed", "--stage", "3", "--offload-optimizer", "cpu"),
    ("--engine", "deepspeed", "--stage", "3", "--offload-optimizer", "nvme"),
    ("--engine", "deepspeed", "--stage", "3", "--offload-optimizer", "none", "--offload-param", "cpu"),
    ("--engine", "deepspeed", "--stage", "3", "--offload-optimizer", "cpu", "--offload-param", "cpu"),
    ("--engine", "deepspeed", "--stage", "3", "--offload-optimizer", "nvme", "--offload-param", "nvme"),
    ("--engine", "fsdp2", "--stage", "2"),
    ("--engine", "fsdp2", "--stage", "3"),
    ("--engine", "fsdp2", "--stage", "3", "--offload-optimizer", "cpu", "--offload-param", "cpu"),
    ("--engine", "ddp",),
    *(("--engine", "zeroplan", "--stage", str(stage)) for stage in range(4)),
    ("--engine", "zeroplan", "--stage", "2", "--offload-optimizer", "cpu"),
    ("--engine", "zeroplan", "--stage", "3", "--offload-optimizer", "cpu"),
    ("--engine", "zeroplan", "--stage", "3", "--offload-optimizer", "nvme"),
    ("--engine", "fsdp", "--stage", "2"),
    ("--engine", "fsdp", "--stage", "3"),
    ("--engine", "megatron", "--stage", "0"),
    ("--engine", "megatron", "--stage", "1"),
)  # fmt: skip

#: Layouts that every model is asked for.
MODEL_LAYOUTS = tuple(LAYOUTS[i] for i in (0, 2, 3, 5, 9, 12, 14, 18))

WORKLOADS: tuple[Words, ...] = (
    (),
    ("--gradient-checkpointing",),
    ("--lora-rank", "8"),
    ("--dtype", "fp16"),
    ("--dtype", "fp32"),
    ("--gradient-checkpointing", "--lora-rank", "16"),
    ("--gradient-checkpointing", "--dtype", "fp32", "--micro-batch", "2"),
)

OPTIMIZERS = (
    "adamw", "adam", "adamw8bit", "lamb", "onebitadam", "lion", "adagrad", "adafactor", "muon", "nadam", "radam", "adamax",
    "rmsprop", "adadelta", "sgd", "sgd_momentum", "adamw_amsgrad", "adam_amsgrad", "rmsprop_momentum", "rmsprop_centered",
    "rmsprop_centered_momentum", "asgd", "rprop",
    "adafactor_transformers", "adamw4bit", "zerooneadam", "onebitlamb",
)  # fmt: skip
ALIASES = ("fusedadam", "adamw_torch_fused", "paged_adamw_8bit", "FusedLion", "1-bit-adam", "sgdm")


def _estimate(model: str, *words: str) -> Words:
    return ("estimate", model, *words, "--json")


def _models() -> list[Words]:
    """Every model on a few layouts; the workloads take turns, so that each model and each layout meets all of them."""
    found = []
    for (i, model), (j, layout) in product(enumerate(MODELS), enumerate(MODEL_LAYOUTS)):
        found.append(_estimate(model, "--gpus", "8", *layout, *WORKLOADS[(i + j) % len(WORKLOADS)]))
    return found


def _layouts() -> list[Words]:
    """Every layout under every workload on a small model, two ranks."""
    return [_estimate(GPT2, "--gpus", "2", *layout, *work) for layout, work in product(LAYOUTS, WORKLOADS[:5])]


def _optimizers() -> list[Words]:
    """Every optimizer on every engine, and in host memory."""
    places = [LAYOUTS[i] for i in (0, 2, 5, 12, 14, 18)]
    found = [_estimate(GPT2, "--gpus", "4", *where, "--optimizer", name) for name, where in product(OPTIMIZERS, places)]
    return found + [_estimate(GPT2, "--gpus", "4", "--stage", "0", "--optimizer", name) for name in ALIASES]


def _ranks() -> list[Words]:
    """One to 64 ranks, in one node and in several."""
    shapes = ((1, 1), (3, 1), (4, 1), (8, 2), (4, 4), (8, 8))
    layouts = [LAYOUTS[i] for i in (1, 3, 12, 14, 18)]
    return [
        _estimate(LLAMA_1B, "--gpus", str(gpus), "--nodes", str(nodes), *layout)
        for (gpus, nodes), layout in product(shapes, layouts)
    ]


def _sizes() -> list[Words]:
    """Micro batches, lengths, accumulation, attention, checkpointing policies and adapters."""
    words = [
        *(("--micro-batch", batch, "--seq-len", seq) for batch in ("1", "4", "7") for seq in ("128", "1000")),
        *(("--grad-accum", steps) for steps in ("2", "8")),
        *(("--attn", how) for how in ("eager", "flash")),
        *(("--gradient-checkpointing", "--checkpoint-policy", how) for how in ("selective", "every:2", "every:5")),
        ("--lora-rank", "64", "--gradient-checkpointing", "--dtype", "fp16"),
        ("--lora-rank", "8", "--lora-targets", "q_proj,v_proj"),
    ]
    layouts = [LAYOUTS[i] for i in (2, 3, 12)]
    return [_estimate(LLAMA_1B, "--gpus", "4", *layout, *more) for layout, more in product(layouts, words)]


def _machines() -> list[Words]:
    """Cards, capped memory, hosts, disks, the allocator's settings and the formula's depth: all plans at once."""
    found = [
        _estimate(LLAMA_1B, "--gpus", "2", "--stage", "2", "--gpu", gpu)
        for gpu in ("T4", "V100-32G", "A10G", "L4", "RTX4090", "RTX5090", "A100-40G", "A100-80G", "H100", "B200", "MI300X")
    ]
    found += [
        _estimate(model, "--gpus", "4", "--vram", vram, "--engine", engine, "--gradient-checkpointing")
        for model, (vram, engine) in product(
            (GPT2, LLAMA_1B), (("8G", "deepspeed"), ("24G", "deepspeed"), ("8G", "fsdp2"), ("8G", "ddp"), ("8G", "zeroplan"))
        )
    ]
    found += [
        _estimate("meta-llama/Llama-3.1-8B", "--gpus", "8", "--vram", "24G", *layout, "--cpu-ram", "128G", "--nvme", "500G")
        for layout in (LAYOUTS[3], LAYOUTS[9], LAYOUTS[10], LAYOUTS[13], LAYOUTS[21])
    ]
    confs = (
        "expandable_segments:True",
        "max_split_size_mb:128",
        "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:4",
    )
    found += [
        _estimate(GPT2, "--gpus", "2", "--vram", "8G", "--stage", stage, "--alloc-conf", conf)
        for conf, stage in product(confs, "23")
    ]
    found += [
        _estimate(model, "--gpus", "8", "--depth", "formula", "--engine", engine)
        for model, engine in product((GPT2, "meta-llama/Llama-3.1-405B"), ("deepspeed", "fsdp2", "ddp", "zeroplan"))
    ]
    found += [("estimate", "--params", "7.5B", "--gpus", "64", *more, "--json") for more in ((), ("--optimizer", "lion"))]
    found += [
        _estimate("meta-llama/Llama-3.1-405B", "--vram", "8G", "--check", "--depth", "formula"),
        _estimate(GPT2, "--vram", "80G", "--stage", "2", "--check"),
        _estimate(GPT2, "--stage", "2", "--peak"),
        _estimate("tiny_llama.json", "--gpus", "2", "--depth", "formula"),
    ]
    return found


def _ds_configs() -> list[Words]:
    """Each ds_config as the plan of a run, and checked."""
    found: list[Words] = []
    for name, (model, gpus) in product(DS_CONFIGS, ((GPT2, "2"), (LLAMA_1B, "8"))):
        found.append(_estimate(model, "--gpus", gpus, "--ds-config", name))
    for name in DS_CONFIGS:
        found += [("check", name, *more, "--json") for more in ((), ("--gpus", "1"), ("--gpus", "8"))]
    found += [("explain", GPT2, "--gpus", "2", "--ds-config", name, "--json") for name in DS_CONFIGS[4:]]
    return found


def _explain() -> list[Words]:
    """Every layout's lines, the optimizers' and a few models', and the step's time."""
    found: list[Words] = [("explain", GPT2, "--gpus", "4", *layout, "--json") for layout in LAYOUTS]
    found += [
        ("explain", GPT2, "--gpus", "4", "--stage", stage, "--optimizer", name, "--json")
        for name, stage in (("muon", "2"), ("muon", "0"), ("adamw8bit", "2"), ("lion", "1"), ("sgd", "0"), ("adafactor", "3"))
    ]
    found += [
        ("explain", model, "--gpus", "8", "--stage", "3", *more, "--json")
        for model in (LLAMA_1B, "Qwen/Qwen3-30B-A3B", "google-t5/t5-base")
        for more in ((), ("--lora-rank", "8"), ("--time",), ("--time", "--offload-optimizer", "cpu"))
    ]
    found += [("explain", GPT2, "--gpus", "4", *LAYOUTS[i], "--time", "--json") for i in (0, 2, 5, 10, 12, 14, 18)]
    found += [("explain", "--params", "7B", "--gpus", "8", "--json")]
    return found


def _recommend() -> list[Words]:
    """Searches: goals, engines, global batches, adapters, candidates, setups in use, and the files that are written."""
    card = ("--vram", "24G", "--gpus", "4")
    found: list[Words] = [
        (LLAMA_1B, *card),
        (LLAMA_1B, *card, "--goal", "memory"),
        (LLAMA_1B, *card, "--global-batch", "64", "--seq-len", "1024"),
        (LLAMA_1B, "--vram", "8G", "--gpus", "2", "--cpu-ram", "64G", "--nvme", "1T"),
        (LLAMA_1B, *card, "--lora-rank", "16"),
        (GPT2, "--vram", "8G", "--gpus", "2"),
        (GPT2, "--gpu", "RTX4090", "--depth", "formula"),
        ("meta-llama/Llama-3.1-8B", "--gpu", "A100-80G", "--gpus", "8", "--nodes", "2", "--global-batch", "128"),
        ("meta-llama/Llama-3.1-8B", "--vram", "24G", "--cpu-ram", "256G", "--lora-rank", "8", "--seq-len", "1024"),
        ("Qwen/Qwen1.5-MoE-A2.7B", "--gpu", "H100", "--gpus", "8", "--seq-len", "1024", "--depth", "formula"),
        ("google-t5/t5-base", *card, "--seq-len", "512"),
        *((GPT2, *card, "--engine", engine) for engine in ("fsdp2", "ddp", "zeroplan")),
        (GPT2, *card, "--optimizer", "muon"),
        (GPT2, "--gpus", "2", "--vram", "24G", "--candidates", "candidates.jsonl"),
        (GPT2, *card, "--from", "in_use.json"),
        (GPT2, *card, "--profile", "profile.json"),
        (GPT2, *card, "--alloc-conf", "expandable_segments:True"),
        ("meta-llama/Llama-3.1-405B", "--vram", "8G", "--depth", "formula"),
        ("--params", "7B", "--vram", "24G", "--gpus", "8"),
        ("--vram", "24G"),
    ]
    found += [
        (GPT2, *card, "--form", form, "-o", "out/ds_config.json") for form in ("explicit", "trainer", "lightning", "accelerate")
    ]
    found += [
        (GPT2, *card, "--engine", "fsdp2", "--form", "accelerate-fsdp2", "-o", "out/fsdp2.yaml"),
        (GPT2, *card, "--engine", "zeroplan", "-o", "out/ds_config.json"),
        (GPT2, *card, "--nodes", "2", "--launcher", "slurm", "--script", "run.py", "-o", "out/ds_config.json"),
    ]
    return [("recommend", *words, "--json") for words in found]


def _refusals() -> list[Words]:
    """Bad input: the exit code and the one line are the answer."""
    words: list[Words] = [
        ("estimate",),
        ("estimate", GPT2, "--params", "7B"),
        ("estimate", "meta-llama/Llama-3.2-1Bx"),
        ("estimate", "--params", "7.5Q"),
        ("estimate", GPT2, "--vram", "24Q"),
        ("estimate", GPT2, "--gpu", "H1000"),
        ("estimate", GPT2, "--gpus", "0"),
        ("estimate", GPT2, "--stage", "4"),
        ("estimate", GPT2, "--stage", "2", "--offload-param", "cpu"),
        ("estimate", GPT2, "--stage", "0", "--offload-optimizer", "cpu"),
        ("estimate", GPT2, "--engine", "deepsped"),
        ("estimate", GPT2, "--engine", "fsdp2", "--stage", "1"),
        ("estimate", GPT2, "--engine", "ddp", "--stage", "3"),
        ("estimate", GPT2, "--dtype", "int8"),
        ("estimate", GPT2, "--optimizer", "adamx"),
        ("estimate", GPT2, "--attn", "fast"),
        ("estimate", GPT2, "--seq-len", "4096"),
        ("estimate", GPT2, "--lora-targets", "q_proj"),
        ("estimate", LLAMA_1B, "--lora-rank", "8", "--lora-targets", "q_prof"),
        ("estimate", GPT2, "--ds-config", "missing.json"),
        ("estimate", GPT2, "--alloc-conf", "max_split_size_mb:1"),
        ("estimate", GPT2, "--ds-config", "typo.json"),
        ("explain", GPT2, "--stage", "2", "--line", "optim.exp_avgg"),
        ("check", "missing.json"),
        ("check", "broken.json"),
        ("recommend", GPT2, "--vram", "24G", "--goal", "speed"),
        ("recommend", GPT2, "--vram", "24G", "--candidates", "broken.json"),
        ("recommend", GPT2, "--vram", "24G", "--from", "nowhere.yaml"),
    ]
    return [(*one, "--json") for one in words]


def _ds(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero", {})}
    return {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **more}


_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
_NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5}

_JSON_FILES: dict[str, Any] = {
    "stage1_buckets.json": _ds(1, **_ADAM, zero={"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}),
    "stage2_overlap.json": _ds(2, **_ADAM, zero={"overlap_comm": True, "contiguous_gradients": False}),
    "stage2_fp16.json": {
        **_ds(2, optimizer={"type": "Lion", "params": {"lr": 1e-4}}, gradient_accumulation_steps=4),
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
    },
    "stage3_live.json": _ds(
        3, **_ADAM, zero={"stage3_max_live_parameters": 10_000_000, "stage3_prefetch_bucket_size": 1_000_000}
    ),
    "stage3_nvme.json": _ds(
        3, **_ADAM, zero={"offload_optimizer": _NVME, "offload_param": _NVME, "sub_group_size": 50_000_000}
    ),
    "stage2_muon.json": _ds(2, optimizer={"type": "Muon", "params": {"lr": 1e-3}}, gradient_clipping=1.0),
    "stage0_fp32.json": {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
    "stage3_quantized.json": _ds(3, **_ADAM, zero={"zero_quantized_weights": True, "zero_hpz_partition_size": 2}),
    "typo.json": _ds(2, zero={"reduce_bucket_sise": 5}),
    "batches.json": _ds(2, train_batch_size=7, gradient_accumulation_steps=2),
    "in_use.json": _ds(3, **_ADAM, zero={"offload_optimizer": {"device": "cpu"}}, gradient_accumulation_steps=2),
    "profile.json": {
        "schema": 1,
        "gpu": "H100",
        "rates": {"matmul_tflops": 400.0, "hbm_gbs": 2500.0, "pinned_gbs": 40.0},
    },
    "tiny_llama.json": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    },
}

#: Files beside the ds_configs of ``tests/fixtures``, by name.
FILES: dict[str, str] = {
    **{name: json.dumps(content) for name, content in _JSON_FILES.items()},
    "broken.json": "{not json",
    "candidates.jsonl": "\n".join(
        json.dumps({"ds_config": _ds(stage, **_ADAM), "gradient_checkpointing": recompute})
        for stage, recompute in product((1, 2, 3), (False, True))
    ),
}

#: The four of ``tests/fixtures/ds_configs``, then ours.
DS_CONFIGS = (
    "gpt2_zero_true.json",
    "lightning_onebit_stage2_offload.json",
    "slides_top_level_zero.json",
    "zero3_offload_auto.json",
    "stage1_buckets.json",
    "stage2_overlap.json",
    "stage2_fp16.json",
    "stage3_live.json",
    "stage3_nvme.json",
    "stage2_muon.json",
    "stage0_fp32.json",
    "stage3_quantized.json",
    "typo.json",
    "batches.json",
)


def _evaluations_and_lengths() -> list[Words]:
    """Evaluations between steps under each engine, and batches of different lengths."""
    llama = ("estimate", "meta-llama/Llama-3.2-1B", "--gpus", "2", "--vram", "80G", "--seq-len", "1024")
    layouts = ("ddp 0", "deepspeed 2", "deepspeed 3", "fsdp2 3", "fsdp 3", "zeroplan 2")
    found: list[Words] = []
    for layout in layouts:
        engine, stage = layout.split()
        run = (*llama, "--engine", engine, "--stage", stage, "--json")
        found += [(*run, "--eval-batch", "8"), (*run, "--lengths", "300,1024", "--micro-batch", "2")]
    found.append((*llama, "--engine", "ddp", "--eval-batch", "8", "--eval-logits", "3", "--json"))
    found.append((*llama, "--engine", "deepspeed", "--stage", "1", "--lora-rank", "8", "--eval-batch", "16", "--json"))
    found.append((*llama, "--engine", "ddp", "--eval-logits", "3"))
    return found


def _recommended_layouts() -> list[Words]:
    """Degrees that the search keeps to, the smallest cluster, and what cannot be; from shipped tapes alone."""
    llama = ("recommend", "meta-llama/Llama-3.1-8B", "--gpu", "8xH100")
    return [
        (*llama, "--tp", "2", "--pp", "1", "--json"),
        (*llama, "--tp", "1", "--cp", "1", "--json"),
        (*llama, "--nodes", "4", "--tp", "1", "--pp", "1", "--cp", "1", "--json"),
        (*llama, "--tp", "4", "--global-batch", "64", "--gradient-checkpointing"),
        (*llama, "--schedule", "zbv", "--pp", "4"),  # of which no tape is shipped
        (*llama, "--tp", "3"),
        ("recommend", "deepseek-ai/DeepSeek-V2-Lite", "--gpu", "H100", "--smallest", "--ep", "4", "--json"),
    ]


_GROUPS = (
    _models,
    _layouts,
    _optimizers,
    _ranks,
    _sizes,
    _machines,
    _ds_configs,
    _explain,
    _recommend,
    _refusals,
    _evaluations_and_lengths,
    _recommended_layouts,
)


def requests() -> list[Words]:
    """All of them, in a fixed order, none twice."""
    return list(dict.fromkeys(words for group in _GROUPS for words in group()))


def quick_requests() -> list[Words]:
    """A few of every group: what is asked before every change is taken."""
    return [words for group in _GROUPS for words in _spread(group(), 4)]


def _spread(group: list[Words], count: int) -> list[Words]:
    """So many of a group, evenly apart, with the first and the last."""
    return [group[i * (len(group) - 1) // (count - 1)] for i in range(count)]
