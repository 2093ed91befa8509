"""What a capture costs: a ``Trainer`` script of a model of 1 and of 8 billion parameters, from the catalog, three steps.

``python -m benchmarks.capture.speed [MODEL …]`` prints, for each, the CPU seconds of the whole capture, those of the script's
own imports in a process of their own, and the most memory that the captured process held. A busy machine changes CPU seconds
little; the bars are 15 s and 30 s beside the imports, and 3 GiB.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
IMPORTS = """
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
import transformers.trainer, transformers.models.llama.modeling_llama
"""
SCRIPT = (
    IMPORTS
    + """
class Tokens(Dataset):
    def __len__(self): return 64
    def __getitem__(self, at):
        row = torch.zeros(1024, dtype=torch.long)
        return {{"input_ids": row, "labels": row}}
model = AutoModelForCausalLM.from_pretrained("{model}", dtype=torch.bfloat16)
arguments = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, gradient_checkpointing=True, report_to="none")
Trainer(model, arguments, train_dataset=Tokens()).train()
"""
)


def cost(words: list[str], folder: str) -> tuple[float, float, str]:
    """The CPU seconds of a command and of all that it starts, the largest of their processes in GiB, and its last words."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, after.ru_maxrss / (1 << 20), (done.stdout or done.stderr).strip().partition("\n")[0]


def main() -> None:
    """Print a row a model."""
    for model in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            imports, train = Path(folder, "imports.py"), Path(folder, "train.py")
            imports.write_text(IMPORTS)
            train.write_text(SCRIPT.format(model=model))
            alone = cost([sys.executable, str(imports)], folder)[0]
            command = [str(Path(sys.executable).parent / "zeroplan"), "capture", "--gpu", "H100", "--quiet", "--"]
            whole, memory, says = cost([*command, "python", str(train)], folder)
        print(f"{model}: {whole:.1f} s, imports {alone:.1f} s, beside them {whole - alone:.1f} s, {memory:.1f} GiB: {says}")


if __name__ == "__main__":
    main()
