"""A small Llama whose matrices tensor-parallel ranks share, while ZeRO shards what each has over the data-parallel ranks.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py                  # 2 × 2 ranks; on a CPU in half a minute
    torchrun --nproc-per-node 8 examples/tensor_parallel.py --tp 4 --stage 3

torch's `parallelize_module` splits the model; what the runtime allocates for a rank's part is planned to the byte.
"""

from __future__ import annotations

import argparse
import os

import torch
from planned import Text, ds_config, plan, print_beside, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main() -> None:
    """Plan, split and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=Text.VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=arguments.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config = ds_config(arguments.micro_batch, arguments.stage, 3e-3, "bf16")
    planned = plan(shape.to_dict(), config, seq_len=arguments.seq_len, tp=arguments.tp, depth="formula")

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (ranks // arguments.tp, arguments.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # what is not split must be the same on all ranks that share a matrix
    model = LlamaForCausalLM(shape)
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], outside)
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for block in model.model.layers:
        names = [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
        inside = {name: ColwiseParallel() for name in names if name.endswith(columns)}
        inside |= {name: RowwiseParallel() for name in names if name.endswith(rows)}
        parallelize_module(block, mesh["tp"], inside)
    engine = train(model, config, Text(arguments.seq_len), arguments.steps, mesh=mesh)
    print_beside(planned, engine)
    engine.destroy()


if __name__ == "__main__":
    main()
