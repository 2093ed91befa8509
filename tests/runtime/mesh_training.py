"""One training loop for models on a mesh, and what is planned of them; used by the jobs that a pool of four ranks runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

import zeroplan_runtime
from tests.runtime import models
from zeroplan.core.cluster import Cluster
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.pipeline import Stage
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.core.zero_config import OffloadDevice, OffloadOptimizer, OffloadParam, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.case import Case
from zeroplan.engines.runtime.engine import Runtime
from zeroplan.models.live import spec_from_module

_MESHES: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}

#: Runs one step's micro batches, each with its ``engine.step()``, and gives the rank's loss; NaN where a stage sees none.
Step = Callable[[Any, int], float]


#: Schedules of two chunks a rank.
FOLDED, LOOPED = ("ZBVZeroBubble", "DualPipeV"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble*2")


def chunks_on(kind: str, rank: int, ranks: int = 2) -> tuple[int, ...]:
    """The stages that one of the pipeline ranks has, of as many as there are ranks or of twice as many."""
    if kind in FOLDED:
        return rank, 2 * ranks - 1 - rank
    return (rank, rank + ranks) if kind in LOOPED else (rank,)


def mesh_of(**sizes: int) -> DeviceMesh:
    """The mesh with these dimensions, made once in a process: each makes process groups."""
    key = tuple(sizes.items())
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return _MESHES[key]


def train_on(
    mesh: DeviceMesh, model: nn.Module, config: dict[str, Any], steps: int, step: Step, **given: Any
) -> dict[str, Any]:
    """Trains: losses, norms, counters, the parameters and the Arena's rows."""
    engine, *_ = zeroplan_runtime.initialize(model=model, config=config, mesh=mesh, device="cpu", **given)
    losses, norms = [], []
    for number in range(steps):
        losses.append(step(engine, number))
        norms.append(engine.get_global_grad_norm())
    found = {
        "losses": losses,
        "norms": norms,
        "params": engine.module_state_dict(),
        "rows": engine.arena.measurement(),
        "samples": engine.train_batch_size(),
        "micro_steps": engine.micro_steps,
        "skipped": engine.skipped_steps,
        "scale": engine.loss_scale,
    }
    engine.destroy()
    return found


def on_samples(sample: int, *, length: int = models.LENGTH) -> Step:
    """Steps on the batches of one place in the data, by a model that gives its loss, split or whole."""

    def step(engine: Any, number: int) -> float:
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            tokens = models.batch(number, micro, sample)[:, :length]
            with loss_parallel():
                loss = engine.backward(engine(tokens))
            total += _number(loss)
            engine.step()
        return total

    return step


def on_stages(kind: str, sample: int, *, length: int = models.LENGTH) -> Step:
    """Steps of a pipeline on the batches of one place in the data."""
    schedules: dict[int, Any] = {}

    def step(engine: Any, number: int) -> float:
        if id(engine) not in schedules:
            chunks = {"chunks": 2} if kind in (*FOLDED, *LOOPED) else {}
            schedules[id(engine)] = engine.pipeline_schedule(kind.removesuffix("*2"), loss_of, **chunks)
        schedule, micros = schedules[id(engine)], range(engine.gradient_accumulation_steps())
        tokens = torch.cat([models.batch(number, micro, sample)[:, :length] for micro in micros])
        parts: list[torch.Tensor] = []
        with loss_parallel():
            pp = engine.ranks.pp
            first, last = pp.rank == 0, pp.rank == (0 if kind in FOLDED else pp.world_size - 1)
            schedule.step(*([tokens] if first else []), **({"target": tokens, "losses": parts} if last else {}))
        engine.step()
        return sum(map(_number, parts)) / len(micros) if parts else float("nan")

    return step


def _number(loss: torch.Tensor) -> float:
    return float((loss.full_tensor() if isinstance(loss, DTensor) else loss).detach())


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A micro batch's loss, on the last stage."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class CausalStage(nn.Module):
    """One of two stages of a causal language model of transformers: its blocks under the whole model's names."""

    def __init__(self, whole: Any, index: int) -> None:
        super().__init__()
        self.model = nn.Module()
        half = len(whole.model.layers) // 2
        chosen = range(half) if index == 0 else range(half, 2 * half)
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in chosen})
        self.model.rotary_emb = whole.model.rotary_emb
        if index == 0:
            self.model.embed_tokens = whole.model.embed_tokens
        else:
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self.model, "embed_tokens"):
            x = self.model.embed_tokens(x)
        places = self.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        for block in self.model.layers.values():
            x = block(x, position_embeddings=places)
        return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


class CausalChunks(nn.Module):
    """Stages of a causal language model of transformers, all of one rank's: their blocks under the whole model's names."""

    def __init__(self, whole: Any, stages: tuple[Stage, ...]) -> None:
        super().__init__()
        self.model, self.stages = nn.Module(), stages
        chosen = sorted(i for stage in stages for i in range(stage.first, stage.end))
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in chosen})
        self.model.rotary_emb = whole.model.rotary_emb
        if any(stage.is_first for stage in stages):
            self.model.embed_tokens = whole.model.embed_tokens
        if any(stage.is_last for stage in stages):
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head

    def forward(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        stage = self.stages[chunk]
        if stage.is_first:
            x = self.model.embed_tokens(x)
        places = self.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        for i in range(stage.first, stage.end):
            x = self.model.layers[str(i)](x, position_embeddings=places)
        return self.lm_head(self.model.norm(x)) if stage.is_last else x


def is_causal_block(name: str, _module: nn.Module) -> bool:
    """Names the blocks of a stage, which stand in no list."""
    return name.startswith("model.layers.") and name.count(".") == 2


Rows = dict[tuple[str, str, str], int]


def rows_of(found: dict[str, Any]) -> Rows:
    """The Arena's peaks by buffer, unit and place."""
    return {(row["buffer"], row["unit"], row["place"]): row["peak"] for row in found["rows"]}


def planned_rows(
    model: nn.Module,
    config: dict[str, Any],
    layout: ParallelLayout,
    *,
    pp_rank: int = 0,
    length: int = models.LENGTH,
    schedule: str = "1f1b",
) -> Rows:
    """The planned bytes of a model's owned buffers, by buffer, unit and place."""
    engine = Runtime().with_ds_config(read_ds_config(config, dialect=Dialect.RUNTIME))
    half, section = "bf16" in config, config["zero_optimization"]
    workload = Workload.of(
        micro_batch=models.BATCH,
        seq_len=length,
        grad_accum=config.get("gradient_accumulation_steps", 1),
        dtype=DType.BF16 if half else DType.FP32,
        precision=Precision.MIXED if half else Precision.FP32,
        optimizer=config["optimizer"]["type"].lower(),
    )
    optimizer, param = (
        OffloadDevice(section.get(key, {}).get("device", "none")) for key in ("offload_optimizer", "offload_param")
    )
    zero = ZeroConfig.of(section["stage"], OffloadOptimizer(optimizer), OffloadParam(param))
    case = Case(
        spec_from_module(model), workload, Cluster(gpus=layout.world_size), zero, layout, pp_rank=pp_rank, pipeline=schedule
    )
    engine.require_layout(layout)
    return dict(engine.owned_buffers(case, None).rows)
