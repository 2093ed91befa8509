"""Runs of transformers.Trainer and of accelerate's own loop, as one call that a rank makes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from zeroplan_runtime.engine import Engine

WORDS, LENGTH = 64, 8
LORA = {"r": 4, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}


class Tokens(Dataset[Any]):
    """Return the token ids of a batch, the same at each call."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(3, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model(lora: bool = False) -> Any:
    """A Llama of two blocks, or adapters on it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=4, num_key_value_heads=4, **sizes))
    if lora:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(task_type="CAUSAL_LM", **LORA))
    return made


def start(deepspeed: bool) -> None:
    """Lets accelerate begin anew, as it would in a process of its own."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.utils import logging as theirs

    ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    os.environ.update({key: str(value) for key, value in ranks.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(deepspeed).lower()
    for name in ("zeroplan_runtime", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def finish(group: dist.ProcessGroup) -> None:
    """Leaves a rank as it was: while a config of stage 3 lives, transformers makes each later model in another way."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ACCELERATE_USE_DEEPSPEED",
    ):
        os.environ.pop(name, None)


def arguments(folder: Path, ds_config: dict[str, Any] | None, **changes: Any) -> Any:
    """Six steps of two micro batches, with clipping and a linear schedule."""
    from transformers import TrainingArguments

    start(ds_config is not None)
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "adam_epsilon": 1e-4,  # no steps by rounding errors alone
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": [],
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "seed": 0,
        "optim": "adamw_torch",
        "deepspeed": ds_config,
        **changes,
    }
    return TrainingArguments(**given)


def logged(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


def train(folder: Path, ds_config: dict[str, Any] | None, *, lora: bool = False) -> dict[str, Any]:
    """Trains with evaluation, saves, resumes, loads the best, and uses what comes out."""
    from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer

    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    options = {**best, "gradient_checkpointing": lora}
    trainer = Trainer(
        model=model(lora),
        args=arguments(folder, ds_config, **options),
        train_dataset=Tokens(64),
        eval_dataset=Tokens(8),
        callbacks=[EarlyStoppingCallback(1, early_stopping_threshold=1e9)],  # the second evaluation is no gain
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, Engine) is (ds_config is not None)
    found = {
        "loss": logged(trainer, "loss"),
        "norm": logged(trainer, "grad_norm"),
        "rate": logged(trainer, "learning_rate"),
        "eval_loss": [*logged(trainer, "eval_loss"), trainer.evaluate()["eval_loss"]],
        "predict": trainer.predict(Tokens(4)).metrics["test_loss"],
        "best": Path(trainer.state.best_model_checkpoint).name,
    }
    trainer.save_model(str(folder / "final"))
    prompt = torch.tensor([[5, 6, 7]], device=trainer.args.device)
    with torch.no_grad():
        found["generated"] = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    trainer.accelerator.free_memory()
    if ds_config is not None:  # in plain torch, transformers cannot load its optimizer's file on several CPUs
        second = Trainer(
            model=model(lora), args=arguments(folder, ds_config, **options), train_dataset=Tokens(64), eval_dataset=Tokens(8)
        )
        second.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        found["resumed"] = logged(second, "loss")
        second.accelerator.free_memory()
    dist.barrier()  # in plain torch nothing waits for the first rank's files, which the others would read half-written
    if lora:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(model(), folder / "final")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder / "final")
    found["final"] = {name: value.detach() for name, value in loaded.named_parameters() if not lora or "lora" in name}
    return found


def accelerate_with(plugin: Any, **given: Any) -> Any:
    """Returns an Accelerator of all ranks. One that is given ``cpu=True`` leaves its plugin out, and says nothing."""
    from accelerate import Accelerator, PartialState

    PartialState(cpu=not torch.cuda.is_available())
    return Accelerator(cpu=plugin is None and not torch.cuda.is_available(), deepspeed_plugin=plugin, **given)


def loop(folder: Path, plugin: Any) -> dict[str, Any]:
    """accelerate's own loop: accumulation, clipping, a schedule, saving and loading its states."""
    accelerator = accelerate_with(plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    rows = torch.randn(40, 8)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-2)  # so that clipping matters
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    batches: Any = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), 4)
    net, optimizer, batches, schedule = accelerator.prepare(net, optimizer, batches, schedule)
    assert isinstance(net, Engine) is (plugin is not None)
    losses: list[float] = []
    for epoch in range(2):
        for inputs, wanted in batches:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(inputs), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(str(folder))
    found = accelerator.get_state_dict(net)  # up to stage 2 of the parameters themselves, which the load changes
    state = None if found is None else {name: value.clone() for name, value in found.items()}
    accelerator.load_state(str(folder))
    again = [nn.functional.mse_loss(net(inputs), wanted).item() for inputs, wanted in batches][:1]
    accelerator.free_memory()
    return {"losses": losses, "again": again, "state": state}
