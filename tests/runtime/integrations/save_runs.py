"""A model trained under accelerate and saved in every way that transformers, peft, accelerate and DeepSpeed have."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.runtime.integrations.huggingface_runs import LORA, accelerate_with, start
from zeroplan_runtime.integrations.huggingface import zeroplan_config

TOKENS = torch.arange(3, 11)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OFFLOAD: dict[str, dict[str, Any]] = {
    "": {},
    "host": {"offload_optimizer": True},
    "all on the host": {"offload_optimizer": True, "offload_param": True},
}


class Quantised(nn.Linear):
    """A frozen layer whose weight is held in 8 bits, in buffers, as quantised bases hold it."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes: Any = self.weight
        scale: Any = self.scale
        return nn.functional.linear(x, codes.to(x.dtype) * scale.to(x.dtype))


def model(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied"))
    if kind == "quantised":
        for layer in made.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Quantised(getattr(layer.self_attn, name)))
    return adapted(made) if kind in ("LoRA", "quantised") else made


def adapted(made: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", **LORA))


def loaded(kind: str, folder: str) -> Any:
    from transformers import LlamaForCausalLM

    if kind not in ("LoRA", "quantised"):
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel

    return PeftModel.from_pretrained(model(kind).unload(), folder)


def saves(group: dist.ProcessGroup, stage: int, offload: str, kind: str, folder: str) -> torch.Tensor:
    """Saves after three steps: by the model's own method, in several files, by accelerate's and by DeepSpeed's; the logits."""
    config = zeroplan_config(stage, gradient_clipping=1.0, **OFFLOAD[offload])
    start(deepspeed=True)
    from accelerate.utils import DeepSpeedPlugin
    from torch.utils.data import DataLoader

    accelerator = accelerate_with(DeepSpeedPlugin(hf_ds_config=config))
    made = model(kind)
    optimizer: Any = torch.optim.AdamW([one for one in made.parameters() if one.requires_grad], lr=1e-2)
    batches: Any = DataLoader([TOKENS[0]] * 12, 2)  # type: ignore[arg-type]
    engine, optimizer, batches = accelerator.prepare(made, optimizer, batches)
    for batch in batches:
        accelerator.backward(engine(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=TOKENS).logits
    plain = accelerator.unwrap_model(engine)
    ways = {"accelerate": accelerator.get_state_dict(engine), "engine": engine.module_state_dict()}
    for way, state in ways.items():
        if accelerator.is_main_process:
            plain.save_pretrained(f"{folder}/{way}", state_dict=dict(state))  # transformers empties what it is given
            if way == "engine" and kind not in ("LoRA", "quantised"):
                plain.save_pretrained(f"{folder}/files", state_dict=state, max_shard_size="12kB")
    if stage < 3 and accelerator.is_main_process:
        plain.save_pretrained(f"{folder}/plain")
    if kind not in ("LoRA", "quantised"):
        engine.save_16bit_model(f"{folder}/deepspeed")
        accelerator.save_model(engine, f"{folder}/weights")
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    found: torch.Tensor = logits.cpu()
    return found
