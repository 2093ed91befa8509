"""Trains by a trainer of TRL's, at a ZeRO stage or plainly, and prints its losses.

``trl_run.py plain|STAGE FOLDER [sft|dpo|reward|grpo]``, also by torchrun.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch


def main() -> None:
    stage, folder, kind = [*sys.argv[1:], "sft"][:3]
    config = None
    if stage != "plain":
        from zeroplan_runtime.integrations.huggingface import zeroplan_config

        config = zeroplan_config(int(stage))
        if "RANK" not in os.environ:
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
            os.environ |= alone
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 64)}}
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **names)
    generator = torch.Generator().manual_seed(0)

    def rows(count: int, length: int) -> list[list[int]]:
        return torch.randint(3, 64, (count, length), generator=generator).tolist()

    def text(count: int, length: int) -> list[str]:
        return [" ".join(f"w{token}" for token in row) for row in rows(count, length)]

    def dataset(columns: dict[str, Any]) -> Any:
        made = Dataset(InMemoryTable.from_pydict(columns), fingerprint=f"{kind}{len(next(iter(columns.values())))}")
        made.set_format()
        return made

    def data(count: int) -> Any:
        if kind == "sft":
            return dataset({"input_ids": rows(count, 10)})
        if kind == "grpo":
            return dataset({"prompt": text(count, 4)})
        columns = {"chosen": text(count, 5), "rejected": text(count, 5)}
        return dataset({"prompt": text(count, 4), **columns} if kind == "dpo" else columns)

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    labels = {"num_labels": 1} if kind == "reward" else {}
    shape = LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes, **heads, **labels)
    options: dict[str, Any] = {
        "deepspeed": config,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    model: Any = LlamaForSequenceClassification(shape) if kind == "reward" else LlamaForCausalLM(shape)
    given: dict[str, Any] = {"model": model, "train_dataset": data(40), "processing_class": tokenizer}
    if kind == "sft":
        args: Any = trl.SFTConfig(folder, dataset_kwargs={"skip_prepare_dataset": True}, **options, **evaluated)
        trainer: Any = trl.SFTTrainer(args=args, eval_dataset=data(4), **given)
    elif kind == "dpo":
        trainer = trl.DPOTrainer(args=trl.DPOConfig(folder, **options), ref_model=copy.deepcopy(model), **given)
    elif kind == "reward":
        trainer = trl.RewardTrainer(args=trl.RewardConfig(folder, **options), **given)
    else:
        args = trl.GRPOConfig(folder, num_generations=2, max_completion_length=6, **options)

        def length(completions: list[str], **_: Any) -> list[float]:
            return [float(len(set(one.split()))) for one in completions]

        trainer = trl.GRPOTrainer(args=args, reward_funcs=length, **given)
    trainer.train()
    print(*(row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss", "grad_norm") if key in row))


if __name__ == "__main__":
    main()
