"""Runs whose losses go wrong, slow down, or do neither: ``python losses.py CASE``. See :mod:`benchmarks.logs.make`."""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.logs import runs


def nan_rate() -> None:
    """The Trainer's learning rate is far too high."""
    runs.trainer(runs.llama(), learning_rate=1e18, max_grad_norm=0.0, max_steps=12, optim="sgd").train()


def nan_half() -> None:
    """A plain loop trains weights in fp16."""
    model = runs.llama().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(runs.batches(20)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"Epoch 0 Step {step}/20 Loss {loss.item():.4f}", flush=True)


def nan_lightning() -> None:
    """Lightning's progress bar shows NaN."""
    module = runs.lightning_module(runs.llama(), lr=1e18, optimizer=torch.optim.SGD)
    runs.fit(module, data=runs.Tokens(64), max_steps=20)


def nan_anomaly() -> None:
    """Torch's anomaly mode stops at the first NaN."""
    torch.autograd.set_detect_anomaly(True)
    model = runs.llama()
    model.model.layers[1].mlp.up_proj.weight.data[0] = float("nan")
    for batch in runs.batches(4):
        model(**batch).loss.backward()


def nan_deepspeed() -> None:
    """DeepSpeed in bf16 meets an inf in the weights."""
    model = runs.llama()
    model.lm_head.weight.data[0] = float("inf")
    runs.deepspeed_steps(runs.deepspeed_engine(model, bf16={"enabled": True}), 12)


def nan_accelerate() -> None:
    """A masked loss under accelerate divides by a mask of zeros."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = runs.llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step, batch in enumerate(runs.batches(12)):
        mask = torch.ones(2) if step < 3 else torch.zeros(2)
        loss = model(**batch).loss * mask.sum() / mask.sum()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print({"step": step, "loss": loss.item()})


def scale_floor() -> None:
    """DeepSpeed's own loss scaler, whose gradients overflow in every step, down to its minimum."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    runs.deepspeed().init_distributed("gloo")
    scaler = DynamicLossScaler(
        init_scale=2**8,
        scale_window=1000,
        min_scale=1,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
    )
    model = runs.llama()
    for step, batch in enumerate(runs.batches(40)):
        loss = model(**batch).loss
        (scaler.loss_scale * loss * float("inf")).backward()
        overflow = any(not torch.isfinite(one.grad).all() for one in model.parameters() if one.grad is not None)
        print(f"step {step} loss {loss.item():.4f} scale {scaler.loss_scale}", flush=True)
        scaler.update_scale(overflow)


def fp16_refused() -> None:
    """DeepSpeed trains no fp16 without a GPU, and says so."""
    runs.deepspeed_steps(runs.deepspeed_engine(runs.llama(), fp16={"enabled": True}))


def scale_plain() -> None:
    """Gradients under torch's own scaler overflow in every step."""
    _scaled(float("inf"))


def scale_settles() -> None:
    """Gradients overflow until torch's scaler has settled, and nothing is wrong."""
    _scaled(1e36)


def _scaled(factor: float) -> None:
    model = runs.llama()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(runs.batches(60)):
        loss = model(**batch).loss
        torch.autograd.backward(scaler.scale(loss * factor))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < before:
            print(f"step {step}: gradient overflow, step skipped, loss scale {before} -> {scaler.get_scale()}", flush=True)
        else:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def slow_trainer() -> None:
    """The Trainer's data loading takes longer and longer."""
    order = iter(range(10_000))
    data = runs.Tokens(400, seconds=lambda _: 0.02 + 0.002 * next(order))
    runs.trainer(runs.llama(), data=data, max_steps=100, logging_steps=10).train()


def slow_memory() -> None:
    """A loop that keeps its graph slows down step by step."""
    model = runs.llama()
    total = torch.zeros(())
    begin = time.perf_counter()
    for step, batch in enumerate(runs.batches(60)):
        total = total + model(**batch).loss
        torch.autograd.backward(total, retain_graph=True)
        now = time.perf_counter()
        print(f"step {step}: loss {total.item() / (step + 1):.4f} {now - begin:.3f}s/it", flush=True)
        begin = now


def fine_cpu_trainer() -> None:
    """The Trainer trains and evaluates to the end."""
    made = runs.trainer(runs.llama())
    made.train()
    print(made.evaluate(runs.Tokens(8)))


def fine_lightning() -> None:
    """Lightning trains to the end, and warns of its data loader."""
    runs.fit(runs.lightning_module(runs.llama()), max_steps=20)


def fine_accelerate() -> None:
    """Accelerate trains to the end by two ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = runs.llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step, batch in enumerate(runs.batches(8)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"{step}: {loss.item():.4f}")
    accelerator.end_training()


def fine_deepspeed() -> None:
    """DeepSpeed trains to the end by two ranks."""
    runs.deepspeed_steps(runs.deepspeed_engine(runs.llama(), steps_per_print=2))


def fine_runtime() -> None:
    """This project's runtime trains to the end by two ranks."""
    runs.deepspeed_steps(runs.runtime_engine(runs.llama()))


def fine_retry() -> None:
    """A run that meets an error, logs it with its traceback, goes on and ends well."""
    import traceback

    model = runs.llama()
    for attempt in range(2):
        try:
            if not attempt:
                raise ConnectionError("the tracking server did not answer")
            for step, batch in enumerate(runs.batches(6)):
                print(f"step {step}: loss {model(**batch).loss.item():.4f}", flush=True)
        except ConnectionError:
            traceback.print_exc()
            print("trying once more without tracking", flush=True)
    print("done, model saved to out/", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[-1]]()  # DeepSpeed's launcher puts a flag of its own before
