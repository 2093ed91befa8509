"""A mixture whose matrices two ranks share, beside the whole model: a program that torchrun starts, with the config as JSON."""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from zeroplan.trace.tensor_parallel import parallelize
from zeroplan_runtime.expert_parallel import grouped_experts, run_experts


def main() -> None:
    """Print the largest difference of the loss and of the gradients, by model and layout."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for config, sequence, across in json.loads(sys.argv[1]):
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            values = dict(config)
            one = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(values.pop("model_type"), **values), dtype=torch.float32
            )
            made.append(one.train())
        whole, parts = made
        for param in (*whole.parameters(), *parts.parameters()):
            torch.manual_seed(param.numel())
            param.data.normal_(0, 0.2)
        if across:
            _share(parts, mesh)
        parallelize(parts, mesh["tp"], sequence=sequence, across=across)
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
        expected = whole(input_ids=tokens, labels=tokens, use_cache=False).loss
        expected.backward()
        with loss_parallel():
            loss = parts(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        off = {"loss": float((loss.full_tensor() - expected).detach().abs())}
        others = dict(parts.named_parameters())
        for name, param in whole.named_parameters():
            grad = others[name].grad
            if grad is None or param.grad is None:
                assert grad is param.grad is None, name
                continue
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            if across and grad.shape[0] * 2 == param.grad.shape[0]:  # this rank's experts
                both = [torch.empty_like(grad) for _ in range(2)]
                dist.all_gather(both, grad.contiguous())
                full = torch.cat(both)
            off[name] = float((full - param.grad).abs().max() / param.grad.abs().max().clamp(min=1e-6))
        if not dist.get_rank():
            worst = max(off, key=off.__getitem__)
            print(json.dumps([config["model_type"], sequence, across, worst, off[worst], len(off)]), flush=True)
    dist.destroy_process_group()


def _share(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank its experts, whole, and let it exchange tokens with the other."""
    for module in grouped_experts(model):
        for name, param in list(module.named_parameters(recurse=False)):
            count = param.shape[0] // 2
            part = param[dist.get_rank() * count : (dist.get_rank() + 1) * count].detach().clone()
            module.register_parameter(name, nn.Parameter(part))
        module.forward = partial(run_experts, module, mesh.get_group())


if __name__ == "__main__":
    main()
