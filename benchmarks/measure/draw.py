"""Draws configurations at random, so that what is measured is not what somebody thought of.

    python -m benchmarks.measure.draw --seed 20261123 --one 60 --two 22 --out benchmarks/measure/specs

writes ``drawn_1gpu.jsonl`` and ``drawn_2gpu.jsonl``. Each axis (model, engine, stage, precision, offload, keys of a ds_config,
optimizer, adapters, lengths, allocator) is drawn by itself, with weights that prefer what people use and what no row of
``ground_truth`` has; combinations that an engine refuses are drawn again. Models are cut to a few layers where they are large.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.measure.spec import Spec

#: Model: (weight, values changed, tokens at most, whether its blocks can be sharded by name, names of adapted layers).
MODELS: dict[str, tuple[float, dict[str, Any], int, bool, list[str]]] = {
    "meta-llama/Llama-3.2-1B": (3, {}, 4096, True, ["q_proj", "v_proj"]),
    "meta-llama/Llama-3.1-8B": (2, {"num_hidden_layers": 4}, 4096, True, ["q_proj", "v_proj"]),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (2, {}, 2048, True, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "HuggingFaceTB/SmolLM2-360M": (1, {}, 8192, True, ["all-linear"]),
    "tiiuae/Falcon3-1B-Base": (1, {"num_hidden_layers": 12}, 4096, True, ["all-linear"]),
    "Qwen/Qwen2.5-0.5B": (2, {}, 4096, True, ["q_proj", "v_proj"]),
    "Qwen/Qwen2.5-1.5B": (2, {}, 4096, True, ["all-linear"]),
    "Qwen/Qwen3-0.6B": (2, {}, 4096, True, ["q_proj", "v_proj"]),
    "Qwen/Qwen3-1.7B": (1, {}, 2048, True, ["gate_proj", "up_proj", "down_proj"]),
    "google/gemma-2-2b": (2, {"num_hidden_layers": 10}, 2048, True, ["q_proj", "v_proj"]),
    "google/gemma-3-1b-pt": (2, {}, 2048, True, ["all-linear"]),
    "google/gemma-2b": (1, {"num_hidden_layers": 8}, 2048, True, ["q_proj", "v_proj"]),
    "mistralai/Mistral-7B-v0.3": (2, {"num_hidden_layers": 6}, 4096, True, ["q_proj", "v_proj"]),
    "microsoft/Phi-3-mini-4k-instruct": (2, {"num_hidden_layers": 10}, 4096, True, ["qkv_proj", "o_proj"]),
    "microsoft/phi-2": (1, {"num_hidden_layers": 12}, 2048, True, ["q_proj", "v_proj", "fc1"]),
    "openai-community/gpt2-medium": (2, {}, 1024, True, ["c_attn"]),
    "openai-community/gpt2-large": (1, {}, 1024, True, ["c_attn"]),
    "facebook/opt-1.3b": (2, {}, 2048, True, ["q_proj", "v_proj"]),
    "facebook/opt-350m": (1, {}, 2048, True, ["q_proj", "v_proj"]),
    "bigscience/bloom-560m": (2, {}, 2048, True, ["query_key_value"]),
    "bigscience/bloom-1b1": (1, {}, 2048, True, ["query_key_value"]),
    "tiiuae/falcon-rw-1b": (1, {}, 2048, True, ["query_key_value"]),
    "tiiuae/falcon-7b": (1, {"num_hidden_layers": 4}, 2048, True, ["query_key_value"]),
    "EleutherAI/pythia-1b": (2, {}, 2048, True, ["query_key_value"]),
    "EleutherAI/gpt-j-6b": (1, {"n_layer": 4}, 2048, False, ["q_proj", "v_proj"]),
    "allenai/OLMo-2-0425-1B": (1, {}, 4096, True, ["q_proj", "v_proj"]),
    "allenai/OLMoE-1B-7B-0924": (1, {"num_hidden_layers": 3}, 2048, False, ["q_proj", "v_proj"]),
    "Qwen/Qwen3-30B-A3B": (1, {"num_hidden_layers": 2}, 2048, False, ["q_proj", "v_proj"]),
    "Qwen/Qwen1.5-MoE-A2.7B": (1, {"num_hidden_layers": 2}, 2048, False, ["q_proj", "v_proj"]),
    "deepseek-ai/DeepSeek-V2-Lite": (1, {"num_hidden_layers": 3}, 2048, False, ["q_proj", "o_proj"]),
    "google-bert/bert-large-uncased": (1, {}, 512, False, ["query", "value"]),
    "FacebookAI/roberta-large": (1, {}, 512, False, ["query", "value"]),
    "answerdotai/ModernBERT-base": (1, {}, 2048, False, ["Wqkv"]),
    "microsoft/deberta-v3-base": (1, {}, 512, False, ["query_proj", "value_proj"]),
    "google/flan-t5-base": (1, {"tie_word_embeddings": True}, 512, False, ["q", "v"]),
    "google-t5/t5-base": (1, {}, 512, False, ["q", "v"]),
    "google/vit-large-patch16-224": (1, {}, 197, False, ["query", "value"]),
    "openai/whisper-small": (1, {}, 256, False, ["q_proj", "v_proj"]),
    "HuggingFaceTB/SmolLM3-3B": (2, {"num_hidden_layers": 12}, 4096, True, ["q_proj", "v_proj"]),
    "ibm-granite/granite-3.3-2b-base": (1, {"num_hidden_layers": 16}, 4096, True, ["q_proj", "v_proj"]),
    "CohereLabs/c4ai-command-r7b-12-2024": (1, {"num_hidden_layers": 4}, 2048, True, ["q_proj", "v_proj"]),
    "stabilityai/stablelm-2-1_6b": (1, {"num_hidden_layers": 16}, 4096, True, ["q_proj", "v_proj"]),
    "zai-org/GLM-4-9B-0414": (1, {"num_hidden_layers": 4}, 2048, True, ["q_proj", "v_proj"]),
    "nvidia/Minitron-4B-Base": (1, {"num_hidden_layers": 6}, 2048, True, ["q_proj", "v_proj"]),
    "openai/gpt-oss-20b": (1, {"num_hidden_layers": 2}, 1024, False, ["q_proj", "v_proj"]),
    "state-spaces/mamba2-780m": (1, {"num_hidden_layers": 8}, 512, False, ["in_proj"]),
    "bigcode/starcoder2-3b": (1, {"num_hidden_layers": 10}, 2048, True, ["q_proj", "v_proj"]),
    "bigcode/starcoderbase-1b": (1, {}, 2048, True, ["c_attn"]),
    "EleutherAI/gpt-neo-1.3B": (1, {}, 1024, True, ["q_proj", "v_proj"]),
    "facebook/bart-large": (1, {}, 512, False, ["q_proj", "v_proj"]),
    "distilbert/distilbert-base-uncased": (1, {}, 512, False, ["q_lin", "v_lin"]),
    "albert/albert-xlarge-v2": (1, {}, 512, False, ["query", "value"]),
    "FacebookAI/xlm-roberta-base": (1, {}, 512, False, ["query", "value"]),
    "LiquidAI/LFM2-1.2B": (1, {}, 2048, True, ["q_proj", "v_proj"]),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (1, {}, 4096, True, ["q_proj", "v_proj"]),
    "tencent/Hunyuan-1.8B": (1, {"num_hidden_layers": 20}, 4096, True, ["q_proj", "v_proj"]),
    "ibm-granite/granite-3.1-1b-a400m-base": (1, {"num_hidden_layers": 12}, 2048, False, ["q_proj", "v_proj"]),
    "Qwen/Qwen3-Next-80B-A3B": (0.5, {}, 1024, False, ["q_proj", "v_proj"]),
}
_EAGER_ALONE = {
    *("openai/gpt-oss-20b", "state-spaces/mamba2-780m", "EleutherAI/gpt-neo-1.3B", "EleutherAI/gpt-j-6b"),
    "microsoft/deberta-v3-base",
}
_LENGTHS = (128, 200, 257, 333, 512, 640, 777, 1000, 1024, 1536, 2048, 3000, 4096)
_QUANTISED = {
    *("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "mistralai/Mistral-7B-v0.3", "microsoft/Phi-3-mini-4k-instruct"),
    *("meta-llama/Llama-3.1-8B", "stabilityai/stablelm-2-1_6b", "microsoft/phi-2"),
}
_ENCODERS = ("bert", "roberta", "ModernBERT", "deberta", "albert")
_BF16, _FP16 = {"enabled": True}, {"enabled": True}


class Draw:
    """One seeded source of configurations."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one_of(self, choices: dict[Any, float]) -> Any:
        """Return a key, by its weight."""
        return self._random.choices(list(choices), weights=list(choices.values()))[0]

    def happens(self, share: float) -> bool:
        """Return true in that share of cases."""
        return self._random.random() < share

    def any_of(self, values: Any) -> Any:
        """Return one of them, all alike."""
        return self._random.choice(list(values))

    def spec(self, name: str, world: int) -> Spec:
        """Return one configuration."""
        engines = {"deepspeed": 0.66, "fsdp2": 0.14, "ddp": 0.2} if world == 1 else {}
        engine = self.one_of(engines or {"deepspeed": 0.6, "fsdp2": 0.18, "ddp": 0.1, "fsdp": 0.12})
        shards = engine in ("fsdp2", "fsdp")
        model = self.one_of({name: row[0] for name, row in MODELS.items() if row[3] or not shards})
        _, changes, longest, _, adapted = MODELS[model]
        fields: dict[str, Any] = {"id": name, "model": model, "engine": engine, "world": world, "steps": 4}
        fields |= {"limit": 75.0, "model_overrides": changes}
        fields |= self._shape(model, longest)
        if self.happens(0.45) and "albert" not in model:  # its class has no checkpoints
            fields |= {"checkpointing": True, "reentrant": self.happens(0.25)}
        if self.happens(0.22):
            fields["lora_rank"] = self.any_of((4, 8, 16, 64, 128))
            fields["lora_targets"] = adapted if self.happens(0.6) else ["all-linear"]
        if any(word in model for word in _ENCODERS) and "albert" not in model and self.happens(0.5):
            fields["task"] = self.any_of(("sequence-classification", "token-classification", "question-answering"))
            fields["task"] = "sequence-classification" if "ModernBERT" in model else fields["task"]
        env = self.one_of(
            {"": 0.76, "expandable_segments:True": 0.14, "max_split_size_mb:128": 0.05, "roundup_power2_divisions:4": 0.05}
        )
        if env:
            fields["env"] = {"PYTORCH_CUDA_ALLOC_CONF": env}
        fields |= getattr(self, f"_{engine}")(fields)
        return Spec.from_dict(fields)

    def _shape(self, model: str, longest: int) -> dict[str, Any]:
        attn = "eager" if model in _EAGER_ALONE or self.happens(0.13) else "sdpa"
        longest = min(longest, 1024) if attn == "eager" else longest
        seq = self.any_of([length for length in _LENGTHS if length <= longest])
        if "vit" in model:
            seq = 197
        batch = self.any_of([b for b in (1, 1, 1, 2, 2, 3, 4, 6, 8, 16) if b * seq <= (2048 if attn == "eager" else 6144)])
        return {"seq_len": seq, "micro_batch": batch, "attn": attn, "grad_accum": self.one_of({1: 0.6, 2: 0.2, 3: 0.1, 4: 0.1})}

    def _deepspeed(self, so_far: dict[str, Any]) -> dict[str, Any]:
        stage = self.one_of({0: 0.1, 1: 0.2, 2: 0.35, 3: 0.35})
        dtype = self.one_of({"bf16": 0.62, "fp16": 0.23, "fp32": 0.15})
        found: dict[str, Any] = {"stage": stage, "dtype": dtype}
        zero = self._offload(stage) | self._buckets(stage, so_far["world"])
        found |= {"zero": zero, "ds": self._top(stage, dtype, scatters=zero.get("reduce_scatter", True))}
        host = "offload_optimizer" in zero
        kinds = {
            "AdamW": 0.62,
            "Adam": 0.1,
            "torch": 0.08,
            "Lion": 0.05,
            "Muon": 0.06,
            "SGD": 0.03,
            "Adagrad": 0.02,
            "Lamb": 0.03,
        }
        kind = self.one_of(kinds)
        if kind == "torch":
            found["optimizer"] = {"torch_adam": True}
        elif kind == "SGD":
            found |= {"optimizer_type": "SGD", "optimizer": {"momentum": 0.9}}
            found["ds"]["zero_allow_untested_optimizer"] = True
        elif (
            kind in ("Adam", "Lion", "Adagrad")
            or (kind == "Lamb" and stage == 0)
            or (kind == "Muon" and not host and dtype == "bf16")
        ):
            found["optimizer_type"] = kind
        if so_far.get("lora_rank") is None and self.happens(0.05):
            found["save"] = "sharded"
        return found

    def _offload(self, stage: int) -> dict[str, Any]:
        pinned = {"device": "cpu", "pin_memory": self.happens(0.7)}
        if stage in (1, 2):
            return {"offload_optimizer": pinned} if self.happens(0.3) else {}
        if stage == 3:
            where = self.one_of({"": 0.5, "optimizer": 0.2, "both": 0.24, "param": 0.06})
            ratio = {"ratio": self.any_of((0.3, 0.6))} if where == "optimizer" and self.happens(0.2) else {}
            held = {"offload_optimizer": pinned | ratio} if where in ("optimizer", "both") else {}
            return held | ({"offload_param": pinned} if where in ("param", "both") else {})
        return {}

    def _buckets(self, stage: int, world: int) -> dict[str, Any]:
        axes: list[tuple[float, str, tuple[Any, ...]]] = []
        if stage in (1, 2):
            axes = [
                (0.3, "reduce_bucket_size", (2_000_000, 50_000_000, 200_000_000)),
                (0.2, "allgather_bucket_size", (20_000_000, 200_000_000)),
                (0.25, "overlap_comm", (True, False)),
                (0.15, "contiguous_gradients", (False,)),
                (0.15, "round_robin_gradients", (True,)),
                (0.1, "reduce_scatter", (False,)),
                (0.08, "allgather_partitions", (False,)),
                (0.08, "use_multi_rank_bucket_allreduce", (False,)),
            ]
        if stage == 3:
            axes = [
                (0.25, "reduce_bucket_size", (2_000_000, 50_000_000, 200_000_000)),
                (0.2, "stage3_prefetch_bucket_size", (0, 5_000_000, 200_000_000)),
                (0.2, "stage3_param_persistence_threshold", (0, 10_000, 10_000_000)),
                (0.15, "stage3_max_live_parameters", (0, 50_000_000, 300_000_000)),
                (0.1, "stage3_max_reuse_distance", (0, 100_000_000)),
                (0.2, "sub_group_size", (50_000_000, 300_000_000)),
                (0.2, "overlap_comm", (True, False)),
                (0.1, "contiguous_gradients", (False,)),
                (0.1, "reduce_scatter", (False,)),
                (0.1, "memory_efficient_linear", (False,)),
                (0.08, "stage3_use_all_reduce_for_fetch_params", (True,)),
                (0.08, "stage3_module_granularity_threshold", (1_000_000,)),
                (0.12 if world > 1 else 0, "zero_hpz_partition_size", (2,)),
            ]
        return {name: self.any_of(values) for share, name, values in axes if self.happens(share)}

    def _top(self, stage: int, dtype: str, *, scatters: bool) -> dict[str, Any]:
        top: dict[str, Any] = {}
        if self.happens(0.15):
            top["gradient_clipping"] = 0.0
        if self.happens(0.07) and dtype != "fp32":
            top["communication_data_type"] = self.any_of(("fp32", "bf16"))
        if self.happens(0.1) and dtype != "fp32":
            top["data_types"] = {"grad_accum_dtype": self.any_of(("fp32", dtype))}
        if self.happens(0.06) and (stage < 2 or not scatters):
            top["prescale_gradients"] = True
        if dtype == "fp16":
            scale = self.one_of({"power": 0.5, "static": 0.25, "": 0.25})
            if scale:
                top["fp16"] = {**_FP16, **({"initial_scale_power": 6} if scale == "power" else {"loss_scale": 64.0})}
        if dtype == "bf16" and self.happens(0.15):
            key = self.any_of(("immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads"))
            top["bf16"] = {**_BF16, key: True}
            if key.startswith("bf16_master"):
                top["bf16"]["bf16_optimizer_states"] = self.happens(0.5)
        if dtype == "fp32" and self.happens(0.3) and stage:
            top["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return top

    def _loop(self, so_far: dict[str, Any]) -> dict[str, Any]:
        kinds = {"AdamW": 0.5, "foreach": 0.1, "Adam": 0.06, "SGD": 0.07, "Adafactor": 0.05, "Adagrad": 0.03, "RMSprop": 0.03}
        eight = {"bitsandbytes.optim.AdamW8bit": 0.08} if so_far["engine"] == "ddp" else {}
        kind = self.one_of(kinds | {"NAdam": 0.03} | eight)
        found: dict[str, Any] = {"optimizer_type": kind}
        if kind == "foreach":
            found = {"optimizer": {"fused": False, "foreach": self.happens(0.7)}}
        if kind == "SGD" and self.happens(0.7):
            found["optimizer"] = {"momentum": 0.9}
        if self.happens(0.1):
            found["set_to_none"] = False
        return found

    def _ddp(self, so_far: dict[str, Any]) -> dict[str, Any]:
        if so_far["model"] in _QUANTISED and self.happens(0.4):
            base = self.one_of({"nf4": 0.6, "nf4-single": 0.2, "int8": 0.2})
            adapters = {"lora_rank": self.any_of((8, 16, 64)), "lora_targets": ["all-linear"]}
            kinds = {"AdamW": 0.5, "bitsandbytes.optim.AdamW8bit": 0.5}
            return {"quantize": base, "dtype": "bf16", "optimizer_type": self.one_of(kinds), **adapters}
        found = {"dtype": self.one_of({"bf16": 0.65, "fp16": 0.15, "fp32": 0.2}), **self._loop(so_far)}
        if found["dtype"] == "bf16" and self.happens(0.3):
            found["precision"] = "pure"
        if so_far["world"] == 1 and found["dtype"] == "bf16" and self.happens(0.1):
            found["compile"] = self.any_of(("blocks", "model"))
        return found

    def _fsdp2(self, so_far: dict[str, Any]) -> dict[str, Any]:
        found = {"stage": self.one_of({3: 0.7, 2: 0.3}), **self._loop(so_far)}
        found |= {"dtype": self.one_of({"bf16": 0.75, "fp16": 0.1, "fp32": 0.15}), "reshard": found["stage"] == 3}
        found.pop("set_to_none", None)
        if found["dtype"] == "bf16" and self.happens(0.3):
            found |= self.any_of(({"precision": "pure"}, {"reduce_dtype": "bf16"}))
        if found["stage"] == 3 and so_far.get("lora_rank") is None and self.happens(0.15):
            found |= {"offload": True, "optimizer_type": "AdamW", "optimizer": {}}
        elif found["dtype"] == "bf16" and self.happens(0.08):
            found["compile"] = "blocks"
        return found

    def _fsdp(self, so_far: dict[str, Any]) -> dict[str, Any]:
        found = {"strategy": self.one_of({"FULL_SHARD": 0.5, "SHARD_GRAD_OP": 0.35, "NO_SHARD": 0.15}), **self._loop(so_far)}
        found |= {"dtype": self.one_of({"bf16": 0.8, "fp32": 0.2}), "orig_params": self.happens(0.7)}
        return {name: value for name, value in found.items() if name != "set_to_none"}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--one", type=int, default=60)
    parser.add_argument("--two", type=int, default=22)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    draw = Draw(asked.seed)
    for world, count, letter in ((1, asked.one, "W"), (2, asked.two, "U")):
        empty = Spec(id="", model="").to_dict()
        lines = []
        for place in range(count):
            made = draw.spec(f"{letter}{place + 1:02}", world).to_dict()
            lines.append(json.dumps({name: value for name, value in made.items() if value != empty[name] or name == "id"}))
        (asked.out / f"drawn_{world}gpu.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
