"""A small Llama over a base that is stored as bitsandbytes stores 4 bits in 16-bit numbers, sharded by torch on gloo ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 36,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 51,
    "tie_word_embeddings": False,
}
LORA_RANK = 3


class StoredLinear(nn.Linear):
    """A frozen linear layer whose weight is one column of a quarter of its elements; the product makes the whole one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.weight.detach().repeat(4, 1).view(self.out_features, self.in_features)
        return nn.functional.linear(x.to(whole.dtype), whole)


def model() -> Any:
    """The model with adapters in fp32, as peft makes them."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(0)
    values = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    base = LlamaForCausalLM(AutoConfig.for_model("llama", **values)).to(torch.bfloat16)
    for module in base.modules():
        if type(module) is nn.Linear and module is not base.get_output_embeddings():
            module.__class__ = StoredLinear
            column = torch.randn(module.weight.numel() // 4, 1, dtype=torch.bfloat16)
            module.weight = nn.Parameter(column, requires_grad=False)
    return get_peft_model(base, LoraConfig(r=LORA_RANK, target_modules="all-linear"))


def _step(wrapped: Any) -> None:
    """One step, which fails where a unit does not take what it is given."""
    ids = torch.arange(12)[None]
    with torch.autocast("cpu", torch.bfloat16):
        wrapped(input_ids=ids, labels=ids).loss.backward()
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad])
    optimizer.step()


def short(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for part in ("_fsdp_wrapped_module.", "base_model.model.", ".base_layer", ".default"):
        name = name.replace(part, "")
    return name


def fsdp1_units(group: dist.ProcessGroup) -> dict[frozenset[str], tuple[int, int, int]]:
    """By a unit's parameters: elements of this rank's part and of the gathered unit, and bytes of one element of the part."""
    from peft.utils.other import fsdp_auto_wrap_policy

    made = model()
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wrapped = FullyShardedDataParallel(
        made,
        process_group=group,
        auto_wrap_policy=fsdp_auto_wrap_policy(made),
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    _step(wrapped)
    found = {}
    for module in FullyShardedDataParallel.fsdp_modules(wrapped):
        if module._has_params:
            flat = module._handle.flat_param
            prefix = next(name for name, one in wrapped.named_modules() if one is module)
            names = frozenset(short(f"{prefix}.{name}".lstrip(".")) for name in flat._fqns)
            found[names] = (flat.numel(), flat._padded_unsharded_size.numel(), flat.element_size())
    return found


def fsdp2_parts(group: dist.ProcessGroup) -> dict[str, tuple[int, int]]:
    """By parameter: elements of this rank's part, and bytes of one."""
    made = model()
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, "cpu"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    }
    for module in made.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, **options)
    fully_shard(made, **options)
    _step(made)
    return {short(name): (p._local_tensor.numel(), p.element_size()) for name, p in made.named_parameters()}
