"""Trains by TRL's SFTTrainer, at a ZeRO stage or plainly, and prints its losses: ``trl_run.py plain|STAGE FOLDER``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch


def main() -> None:
    stage, folder = sys.argv[1:]
    config = None
    if stage != "plain":
        from zeroplan_runtime.integrations.huggingface import zeroplan_config

        config = zeroplan_config(int(stage))
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 64)}}
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), **names)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 64, (10,), generator=generator).tolist() for _ in range(40)]
    data = [Dataset(InMemoryTable.from_pydict({"input_ids": part}), fingerprint=str(len(part))) for part in (rows, rows[:4])]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    args = SFTConfig(
        folder,
        deepspeed=config,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=1, **sizes, **heads))
    trainer = SFTTrainer(model=model, args=args, train_dataset=data[0], eval_dataset=data[1], processing_class=tokenizer)
    trainer.train()
    print(*(row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row))


if __name__ == "__main__":
    main()
