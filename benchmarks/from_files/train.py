"""A user's script on the HF Trainer: causal language modelling on the texts of one JSON-lines file.

``train.py ARGUMENTS.json`` or ``train.py --model_name_or_path … --bf16 …``, by any launcher.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class ModelArguments:
    model_name_or_path: str
    dtype: str = field(default="auto")
    use_lora: bool = field(default=False)
    lora_r: int = field(default=8)
    lora_alpha: int = field(default=16)
    lora_target_modules: str = field(default="all-linear")


@dataclass
class DataArguments:
    train_file: str
    block_size: int = field(default=1024)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    dtype = model_args.dtype if model_args.dtype == "auto" else getattr(torch, model_args.dtype)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=dtype)
    if model_args.use_lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                r=model_args.lora_r,
                lora_alpha=model_args.lora_alpha,
                target_modules=model_args.lora_target_modules,
                task_type="CAUSAL_LM",
            ),
        )
        if training_args.gradient_checkpointing:
            model.enable_input_require_grads()

    def tokenize(rows: dict[str, list[str]]) -> Any:
        tokens = tokenizer(rows["text"], truncation=True, max_length=data_args.block_size)
        return tokens | {"labels": [list(ids) for ids in tokens["input_ids"]]}

    texts = load_dataset("json", data_files=data_args.train_file, split="train")
    data = texts.map(tokenize, batched=True, remove_columns=texts.column_names)
    Trainer(model=model, args=training_args, train_dataset=data, data_collator=default_data_collator).train()


if __name__ == "__main__":
    main()
