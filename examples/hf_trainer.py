"""transformers.Trainer under ZeRO: two lines more than without it.

    python examples/hf_trainer.py                                        # one process, generated data, seconds on a CPU
    torchrun --nproc-per-node 2 examples/hf_trainer.py --stage 3 --lora

A small Llama with random weights learns to continue arithmetic progressions modulo its vocabulary. ``--plain`` trains without
ZeRO. A ds_config.json of yours works in place of ``zeroplan_config(…)``, after ``install()``: docs/programs/hf-trainer.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from causal_lm import Progressions
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from zeroplan import ZeroplanCallback
from zeroplan_runtime.integrations.huggingface import zeroplan_config  # the first line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--plain", action="store_true", help="train without ZeRO")
    parser.add_argument("--offload", action="store_true", help="update the parameters in host memory")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 8")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="trained")
    arguments = parser.parse_args()

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, num_key_value_heads=2, **sizes))
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    config = zeroplan_config(arguments.stage, offload_optimizer=arguments.offload)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            arguments.output,
            deepspeed=None if arguments.plain else config,  # the second line
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=30,
            save_steps=30,
            load_best_model_at_end=True,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Progressions(2048, 16, 128),
        eval_dataset=Progressions(64, 16, 128),
        callbacks=[ZeroplanCallback(seq_len=16)],  # the plan before the first step, measured beside it at the end
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"loss {loss:.4f}")


if __name__ == "__main__":
    main()
