#!/bin/bash
MODEL=meta-llama/Llama-3.2-1B
torchrun --nproc_per_node 2 train.py \
    --model_name_or_path $MODEL \
    --dtype bfloat16 \
    --train_file data/sft/train.jsonl \
    --block_size 1024 \
    --bf16 True \
    --per_device_train_batch_size 4 \
    --gradient_checkpointing True \
    --learning_rate 1e-5 \
    --max_steps 4 \
    --save_strategy no \
    --report_to none \
    --output_dir out
