"""A mixture whose matrices two ranks share, beside the whole model: a program that torchrun starts, with the config as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from transformers import AutoConfig, AutoModelForCausalLM

from zeroplan.trace.tensor_parallel import parallelize


def main() -> None:
    """Print the largest difference of the loss and of the gradients, by model and layout."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for config, sequence in json.loads(sys.argv[1]):
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
        parallelize(parts, mesh["tp"], sequence=sequence)
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
            off[name] = float((full - param.grad).abs().max() / param.grad.abs().max().clamp(min=1e-6))
        if not dist.get_rank():
            worst = max(off, key=off.__getitem__)
            print(json.dumps([config["model_type"], sequence, worst, off[worst], len(off)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
