"""Host and device memory of a process that has trained nothing yet, step by step.

``python -m benchmarks.measure.host_baseline OUT.json``: starts a fresh interpreter for each sequence of stages, so that one
stage's pages never hide in another's, and records after every stage what the kernel and NVML say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

STAGES: dict[str, str] = {
    "torch": "import torch",
    "transformers": "from transformers import AutoModelForCausalLM; import transformers.models.llama.modeling_llama",
    "peft": "import peft",
    "deepspeed": "import deepspeed",
    "fsdp": "from torch.distributed.fsdp import fully_shard",
    "cuda": "torch.zeros(1, device='cuda'); torch.cuda.synchronize()",
    "matmul": "a = torch.ones(512, 512, device='cuda', dtype=torch.bfloat16); a @ a; torch.cuda.synchronize()",
    "sdpa": "q = torch.ones(1, 8, 512, 64, device='cuda', dtype=torch.bfloat16); "
    "torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True); "
    "torch.cuda.synchronize()",
    "nccl": "import os; os.environ |= dict(RANK='0', WORLD_SIZE='1', MASTER_ADDR='localhost', "
    "MASTER_PORT='29999'); torch.distributed.init_process_group('nccl', "
    "device_id=torch.device('cuda', 0)); "
    "torch.distributed.all_reduce(torch.ones(1024, device='cuda')); torch.cuda.synchronize()",
    "fused_adam": "from deepspeed.ops.adam import FusedAdam; "
    "p = torch.nn.Parameter(torch.ones(4096, device='cuda')); p.grad = torch.ones_like(p); "
    "FusedAdam([p]).step(); torch.cuda.synchronize()",
    "cpu_adam": "from deepspeed.ops.adam import DeepSpeedCPUAdam; "
    "c = torch.nn.Parameter(torch.ones(4096)); c.grad = torch.ones(4096); "
    "DeepSpeedCPUAdam([c]).step()",
    "torch_fused_adamw": "p = torch.nn.Parameter(torch.ones(4096, device='cuda')); "
    "p.grad = torch.ones_like(p); torch.optim.AdamW([p], fused=True).step(); "
    "torch.cuda.synchronize()",
}
SEQUENCES: list[list[str]] = [
    ["torch"],
    ["torch", "transformers"],
    ["torch", "transformers", "deepspeed"],
    ["torch", "transformers", "peft"],
    ["torch", "transformers", "fsdp", "cuda", "matmul", "sdpa", "nccl", "torch_fused_adamw"],
    ["torch", "transformers", "deepspeed", "cuda", "matmul", "nccl", "fused_adam"],
    ["torch", "transformers", "deepspeed", "cuda", "matmul", "nccl", "cpu_adam"],
]
_CHILD = """
import json, sys
sys.path.insert(0, {root!r})
from benchmarks.measure.probe import Device, host_status
rows = [dict(after="python", **host_status())]
gpu = None
for name, code in {stages!r}:
    exec(code, globals())
    row = dict(after=name, **host_status())
    if name in {on_gpu!r}:
        gpu = gpu or Device(0)
        row["nvml_process"] = gpu.used_by_process()
        row["nvml_device"] = gpu.used()
        row["reserved"] = torch.cuda.memory_reserved()
    rows.append(row)
print("ROWS" + json.dumps(rows), flush=True)
import os; os._exit(0)
"""
_ON_GPU = ("cuda", "matmul", "sdpa", "nccl", "fused_adam", "cpu_adam", "torch_fused_adamw")


def run_sequence(stages: list[str]) -> list[dict[str, Any]]:
    """Run the stages in one fresh interpreter; one row after each, the bare one first.

    Raises ``RuntimeError`` with the end of its output when the interpreter fails.
    """
    code = _CHILD.format(
        root=str(Path(__file__).resolve().parents[2]),
        stages=[(name, STAGES[name]) for name in stages],
        on_gpu=_ON_GPU,
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROWS")]
    if not lines:
        raise RuntimeError(f"{stages}: {done.stdout[-500:]} {done.stderr[-1000:]}")
    rows: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("ROWS"))
    return rows


def main(out: Path) -> None:
    """Run every sequence and write one JSON object."""
    from benchmarks.measure.worker import versions

    results: list[dict[str, Any]] = []
    for stages in SEQUENCES:
        try:
            results.append({"stages": stages, "rows": run_sequence(stages)})
        except RuntimeError as error:
            results.append({"stages": stages, "error": str(error)})
        print(stages, results[-1].get("error", "ok"), flush=True)
    out.write_text(json.dumps({"versions": versions(), "sequences": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
