"""The forty commonest requests as a person sees them, in one file that is read from top to bottom.

::

    python -m tests.golden.texts            # writes texts.txt anew
    python -m tests.golden.texts --check    # says what differs
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.golden.make import answer_to, apart

TEXTS = Path(__file__).with_name("texts.txt")
_RULE = "=" * 80

_LOG = """Instantaneous batch size per device = 8
Gradient Accumulation steps = 4
Traceback (most recent call last):
  File "/opt/transformers/loss/loss_utils.py", line 36, in fixed_cross_entropy
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 23.65 GiB of which \
1.20 GiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but \
unallocated.
"""
_DS = """{
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true},
        "overlap_comm": true,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": true
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto"
}
"""
_TRAIN = """#!/bin/bash
export WANDB_PROJECT=mine
deepspeed --num_gpus 4 train.py \\
    --model_name_or_path meta-llama/Llama-3.2-1B \\
    --deepspeed zero3.json \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 8 \\
    --max_seq_length 2048 \\
    --bf16 True --gradient_checkpointing True --output_dir out
"""
_FSDP = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
mixed_precision: bf16
num_processes: 8
"""
_FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: mine
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
output_dir: saves
"""
FILES = {
    "zero3.json": _DS,
    "train.sh": _TRAIN,
    "train.py": "from transformers import HfArgumentParser, TrainingArguments\n",
    "fsdp.yaml": _FSDP,
    "fsdp.sh": _TRAIN.replace("deepspeed --num_gpus 4", "accelerate launch --config_file fsdp.yaml").replace(
        "    --deepspeed zero3.json \\\n", ""
    ),
    "ddp.sh": _TRAIN.replace("deepspeed --num_gpus 4", "torchrun --nproc_per_node 2").replace(
        "    --deepspeed zero3.json \\\n", ""
    ),
    "recipe.yaml": _FACTORY,
    "oom.log": _LOG,
    "killed.log": "step 10\nsubprocess died with exit code -9: SIGKILL\n",
    "typo.json": '{"zero_optimisation": {"stage": 2}, "train_batch_size": 8}\n',
}
_8B, _1B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"
#: The commonest requests: what fits, what to take, what a file does, what went wrong, and what is typed wrongly.
REQUESTS = (
    f"estimate {_8B} --gpu 8xH100",
    f"estimate {_8B} --gpu RTX4090",
    f"estimate {_8B} --gpu 8xH100 --stage 3 --micro-batch 4",
    f"estimate {_8B} --gpu 8xH100 --stage 3 --micro-batch 4 --gradient-checkpointing",
    f"estimate {_8B} --gpu RTX4090 --lora-rank 16 --gradient-checkpointing",
    f"estimate {_1B} --vram 24G --stage 2",
    f"estimate {_1B} --stage 2",
    "estimate --params 7B --vram 80G --gpus 8",
    f"estimate {_8B} --gpu 4xA100-80G --engine fsdp2",
    f"estimate {_1B} --gpu RTX4090 --engine ddp --micro-batch 4",
    "estimate meta-llama/Llama-3.1-405B --gpu 8xH100",
    "estimate --from train.sh --gpu 4xA100-80G",
    "estimate --from fsdp.sh --gpu 8xA100-80G",
    "estimate --from recipe.yaml --gpu RTX4090",
    f"estimate {_8B} --gpu 8xH100 --ds-config zero3.json",
    f"recommend {_8B} --gpu 8xH100",
    f"recommend {_8B} --gpu RTX4090",
    f"recommend {_8B} --gpu RTX4090 --lora-rank 16",
    f"recommend {_1B} --gpu RTX4090 -o out/",
    f"recommend {_1B} --gpu 4xA100-80G --global-batch 256 --engine fsdp2",
    f"recommend {_1B} --vram 4G --cpu-ram 16G",
    "recommend meta-llama/Llama-3.1-405B --gpu 8xH100 --cpu-ram 2T",
    "recommend --gpu RTX4090",
    "recommend --from train.sh --gpu 4xA100-80G",
    "recommend --from train.sh --gpu 4xA100-80G -o out/",
    "recommend --from fsdp.sh --gpu 8xA100-80G",
    "recommend --from ddp.sh --gpu 2xRTX4090",
    f"recommend {_8B} --gpu 8xH100 --layouts --seq-len 8k",
    f"scale {_1B} --gpu A100-80G --gpus 1,2,4,8",
    "check zero3.json",
    "check zero3.json train.sh",
    "check typo.json",
    f"check zero3.json {_8B} --gpu 8xH100",
    "doctor oom.log",
    f"doctor oom.log {_1B} --stage 2",
    "doctor killed.log --from train.sh --gpu 4xA100-80G --cpu-ram 64G",
    f"explain {_1B} --stage 2 --gpus 4",
    f"estimate {_8B} --gpu H1000",
    "estimate meta-llama/Llama-3.1-8 --gpu H100",
    f"recommend {_8B} --gpu 8xH100 --micro-bach 4",
)
#: Those that are compared in every run of the tests.
QUICK = tuple(REQUESTS[at] for at in (2, 5, 11, 23, 29, 31, 34, 39))


def texts(requests: Iterable[str]) -> Iterator[str]:
    """Yield what each request prints, below the command."""
    with apart() as folder:
        for name, text in FILES.items():
            (folder / name).write_text(text)
        for line in requests:
            answer = answer_to(shlex.split(line), folder)
            out = answer["out"] if isinstance(answer["out"], str) else ""
            code = f"[exit {answer['code']}]\n" if answer["code"] else ""
            yield f"$ zeroplan {line}\n{out}{answer['err']}{code}"


def kept() -> dict[str, str]:
    """The texts of the file, by the requests' lines."""
    parts = TEXTS.read_text().split(f"{_RULE}\n")
    return {re.match(r"\$ zeroplan (.*)", part)[1]: part for part in parts if part}  # type: ignore[index]


def differing(requests: Iterable[str]) -> list[str]:
    """The lines by which today's texts differ from those kept."""
    known, found = kept(), list[str]()
    for line, text in zip(requests := tuple(requests), texts(requests), strict=True):
        old = known.get(line, "")
        found += difflib.unified_diff(old.splitlines(), text.splitlines(), "kept", "today", lineterm="", n=1)
    return found


if __name__ == "__main__":
    if "--check" in sys.argv:
        different = differing(REQUESTS)
        print("\n".join(different))
        raise SystemExit(bool(different))
    TEXTS.write_text(f"{_RULE}\n".join(texts(REQUESTS)))
