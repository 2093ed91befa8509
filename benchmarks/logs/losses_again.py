"""Runs whose losses or speed go wrong, or do not, in other forms than losses.py's: ``python losses_again.py CASE``.

Of the second blind set. See :mod:`benchmarks.logs.make`.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.logs import runs


def nan_log() -> None:
    """The loss takes the logarithm of a probability of 0."""
    weight = torch.nn.Parameter(torch.randn(16, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD([weight], lr=40.0)
    for epoch in range(3):
        for step in range(8):
            loss = -torch.log(torch.softmax(weight * 4, 0)[3:5]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch} | {step}/8 | nll: {loss.item():.3f} | ppl: {math.exp(min(loss.item(), 50)):.1f}", flush=True)


def nan_autocast() -> None:
    """Activations overflow in fp16 autocast, which tqdm's postfix shows."""
    from tqdm import tqdm

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bar = tqdm(range(40), desc="Training", mininterval=0)
    for step in bar:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step)) * 10.0**step)
        loss = out.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=loss.item(), lr=0.1)


def nan_eval() -> None:
    """Every label of the evaluation's data is masked."""
    data = [{"input_ids": one["input_ids"], "labels": torch.full_like(one["labels"], -100)} for one in runs.Tokens(8)]  # type: ignore[attr-defined]
    made = runs.trainer(runs.llama(), max_steps=4)
    made.eval_dataset = data
    runs.after_each_step(made, made.evaluate)
    made.train()


def nan_guard() -> None:
    """The loop stops by itself at a loss that is not finite, as reference scripts do."""

    def guard(step: int, loss: float) -> None:
        print(f"Epoch: [0]  [{step:>3}/50]  eta: 0:00:05  lr: 1000.000000  loss: {loss:.4f}  time: 0.0123", flush=True)
        if not math.isfinite(loss):
            print(f"Loss is {loss}, stopping training")
            sys.exit(1)

    model = runs.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e18)
    for step, batch in enumerate(runs.batches(50)):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        guard(step, loss.item())


def nan_clip() -> None:
    """Gradient clipping refuses a norm that is not finite."""
    model = runs.llama()
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(runs.batches(12)):
        loss = model(**batch).loss
        torch.autograd.backward(loss * (1.0 if step < 4 else 1e38) * 100)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step: {step} loss: {loss.item():.3f} norm: {norm.item():.2f}", flush=True)


def nan_early_stopping() -> None:
    """Lightning's EarlyStopping stops at a loss that is not finite."""
    from lightning.pytorch.callbacks import EarlyStopping

    module = runs.lightning_module(runs.llama(), lr=1e18, optimizer=torch.optim.SGD)
    stop = EarlyStopping("train_loss", check_finite=True, check_on_train_epoch_end=True, verbose=True)
    runs.fit(module, max_steps=200, callbacks=[stop], enable_progress_bar=False, enable_model_summary=False)


def nan_division() -> None:
    """Two ranks divide their loss by a count of tokens that becomes 0, and log it with a time and a place."""
    logging.basicConfig(
        format="%(asctime)s,%(msecs)03d %(levelname)s [%(filename)s:%(lineno)d] %(message)s", datefmt="%H:%M:%S"
    )
    log = logging.getLogger("train")
    log.setLevel(logging.INFO)
    runs.group()
    model = torch.nn.parallel.DistributedDataParallel(runs.llama())
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(runs.batches(12)):
        tokens = torch.tensor(64.0 if step < 4 else 0.0)
        loss = model(**batch).loss * tokens / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if runs.rank() == 0:
            log.info("step=%d train/loss=%.4f train/grad_norm=%.4f lr=1.0e-03", step, loss.item(), norm.item())


def nan_runtime() -> None:
    """This project's runtime starts with its full learning rate, far too high."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e30}}
    runs.deepspeed_steps(runs.runtime_engine(runs.llama(), optimizer=optimizer, gradient_clipping=0.0), 12)


def _scaled(factor: float, steps: int) -> None:
    model = runs.llama()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    optimizer = torch.optim.AdamW(model.parameters())
    skipped = 0
    for step, batch in enumerate(runs.batches(steps), 1):
        loss = model(**batch).loss
        torch.autograd.backward(scaler.scale(loss * factor))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += scaler.get_scale() < scale
        print(
            f" iteration {step:8d}/{steps:8d} | consumed samples: {2 * step:12d} | elapsed time per iteration (ms): 12.3 |"
            f" learning rate: 1.000E-03 | global batch size: 2 | lm loss: {loss.item():.6E} |"
            f" loss scale: {scaler.get_scale():.1f} | number of skipped iterations: {skipped:3d} |"
            f" number of nan iterations: 0 |",
            flush=True,
        )
        skipped = 0


def scale_megatron() -> None:
    """Gradients overflow in every step, in lines of Megatron's form."""
    _scaled(float("inf"), 40)


def fine_megatron() -> None:
    """Gradients overflow in the first steps only, in lines of Megatron's form."""
    _scaled(1e33, 40)


def slow_tqdm() -> None:
    """Each batch of a plain loop takes longer to read than the last, which tqdm shows."""
    from tqdm import tqdm

    model = runs.llama()
    for step, batch in enumerate(tqdm(runs.batches(60), total=60, mininterval=0)):
        time.sleep(0.01 * step)
        model(**batch).loss.backward()


def slow_iterations() -> None:
    """The loader of a plain loop slows down, which its milliseconds show."""
    model = runs.llama()
    begin = time.perf_counter()
    for step, batch in enumerate(runs.batches(60)):
        time.sleep(0.005 * step)
        loss = model(**batch).loss
        loss.backward()
        now = time.perf_counter()
        print(f"iter {step}: loss {loss.item():.4f}, time {1000 * (now - begin):.2f}ms", flush=True)
        begin = now


def fine_words() -> None:
    """A run that ends well, whose lines hold the words of faults."""
    best = math.inf
    print("config: oom_retries=0 detect_nan=True on_error=raise kill_timeout=600 loss_scale=dynamic", flush=True)

    def say(step: int, loss: float) -> None:
        nonlocal best
        print(
            f"step {step:03d} | loss {loss:.4f} | best {best:.4f} | nan_batches 0 | errors 0 | val error 0.31 | overflow False",
            flush=True,
        )
        best = min(best, loss)

    runs.steps(runs.llama(), say)
    print("0 failed, 0 killed, out of 12 steps; no checkpoint was lost", flush=True)


def fine_resume() -> None:
    """The Trainer saves, and a second Trainer goes on from there to the end."""
    folder = tempfile.mkdtemp()
    runs.trainer(runs.llama(), output_dir=folder, save_strategy="steps", save_steps=3).train()
    runs.trainer(runs.llama(), output_dir=folder, save_strategy="steps", save_steps=3, max_steps=9).train(
        resume_from_checkpoint=True
    )


def fine_early_stopping() -> None:
    """Lightning stops early because the loss no longer falls, as asked."""
    from lightning.pytorch.callbacks import EarlyStopping

    stop = EarlyStopping("train_loss", patience=1, min_delta=10.0, verbose=True)
    runs.fit(runs.lightning_module(runs.llama()), max_steps=400, max_epochs=8, callbacks=[stop])


def fine_spike() -> None:
    """A loss that jumps in one step and comes back."""

    def say(step: int, loss: float) -> None:
        logging.warning("step %d: loss %.4f%s", step, loss * (300 if step == 6 else 1), " (spike, batch skipped)" * (step == 6))

    runs.steps(runs.llama(), say, steps=20)


def fine_runtime_save() -> None:
    """This project's runtime trains by two ranks, saves, and ends well."""
    engine = runs.runtime_engine(runs.llama())
    runs.deepspeed_steps(engine)
    engine.save_checkpoint(str(Path(tempfile.gettempdir()) / "zeroplan-log-save"))


def fine_spawn() -> None:
    """Two spawned ranks train to the end; the one that is first waits a little for the other."""
    spawn(_fine, args=(runs.free_port(),), nprocs=2)


def _fine(rank: int, port: int) -> None:
    runs.spawned_group(rank, port)
    model = torch.nn.parallel.DistributedDataParallel(runs.llama())
    for step, batch in enumerate(runs.batches(6)):
        loss = model(**batch).loss
        loss.backward()
        print(f"[rank{rank}] step {step}: loss {loss.item():.3f}, waited {0.2 * rank:.1f} s", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[-1]]()  # DeepSpeed's launcher puts a flag of its own before
