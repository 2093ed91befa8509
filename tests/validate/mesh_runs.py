"""verify's trainers on meshes, as a call that a pool of four ranks runs, and the same steps in one process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn

from zeroplan.core.losses import IGNORED_LABEL
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, Workload
from zeroplan.engines import torch_trainer
from zeroplan.engines.fsdp2 import trainer as fsdp2
from zeroplan.engines.fsdp2 import trainer_mesh
from zeroplan.engines.runtime import trainer as runtime
from zeroplan.engines.torch_trainer import make_optimizers
from zeroplan.engines.verification import TrainingRun
from zeroplan.trace.run import loss_of
from zeroplan.validate.job import VerifyJob
from zeroplan.validate.rank.probe import RankDevice
from zeroplan.validate.rank.run import run_job

RATE, STEPS, LENGTH, SAMPLES = 1e-2, 3, 16, 2
#: Engine, layout, model, stage.
Case = tuple[str, ParallelLayout, dict[str, Any], int]


def make(config: dict[str, Any]) -> Any:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    values = dict(config)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    model.config.use_cache = False
    return model.train()


def tokens(config: dict[str, Any], sample: int) -> torch.Tensor:
    """One of the different batches of a step."""
    generator = torch.Generator().manual_seed(100 + sample)
    return torch.randint(0, config["vocab_size"], (SAMPLES, LENGTH), generator=generator)


def train(_group: dist.ProcessGroup, cases: list[Case]) -> list[list[float]]:
    """The losses of this rank's steps, case by case. Routers are not balanced, and weights are those of `make`."""
    return [_train(*case) for case in cases]


def _train(engine: str, layout: ParallelLayout, config: dict[str, Any], stage: int) -> list[float]:
    def here(_dtype: torch.dtype, *, cheap: bool = False) -> Any:
        with torch.device("cpu"):
            model = make(config)
        model.to_empty = lambda **_: model  # what FSDP2's trainer makes on no device is here already
        return model

    zero = {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": SAMPLES}
    run = TrainingRun(
        stage=stage,
        workload=Workload.of(dtype=DType.FP32, grad_accum=1),
        ds_config={**zero, "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}}},
        device=torch.device("cpu"),
        mark=lambda *_: None,
        make_model=here,
        prepare=lambda model: model,
        loss_of=loss_of,
        layout=layout,
        schedule="1f1b",
        partition="",
    )
    with ExitStack() as inside:
        for module, name in ((trainer_mesh, "balance"), (runtime, "balance"), (trainer_mesh, "fill")):
            inside.enter_context(mock.patch.object(module, name))
        inside.enter_context(mock.patch.object(torch_trainer, "LEARNING_RATE", RATE))
        trained = (fsdp2 if engine == "fsdp2" else runtime).build(run)
        ids = tokens(config, layout.sample_of(dist.get_rank()))
        losses = [float(trained.step({"input_ids": ids, "labels": ids}).detach()) for _ in range(STEPS)]
        trained.close()
    return losses


def run(_group: dist.ProcessGroup, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What verify measures of jobs on this rank."""
    return [run_job(VerifyJob.from_json(job), RankDevice.of("cpu", 0), lambda _: None) for job in jobs]


def plain(config: dict[str, Any], samples: int, parts: int) -> list[float]:
    """The mean losses of the same steps in one process: over different batches, and over the parts of each.

    A rank of two has the first and the last of four equal pieces of a sample, the other the two between them.
    """
    model = make(config)
    (optimizer,) = make_optimizers("adamw", list(model.named_parameters()))
    for group in optimizer.param_groups:
        group["lr"] = RATE
    pieces = torch.arange(LENGTH).chunk(2 * parts)
    mine = [torch.cat([pieces[part], pieces[-1 - part]]) for part in range(parts)]
    losses = []
    for _ in range(STEPS):
        total = torch.zeros(())
        for sample in range(samples):
            ids = tokens(config, sample)
            labels = nn.functional.pad(ids, (0, 1), value=IGNORED_LABEL)[:, 1:]
            logits = model(input_ids=ids).logits
            for part in mine:
                loss = nn.functional.cross_entropy(logits[:, part].flatten(0, 1), labels[:, part].flatten())
                total = total + loss / (samples * parts)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    return losses
