"""The other side: one rank of the runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroplan_runtime
from benchmarks.fuzz_training.case import Case
from benchmarks.fuzz_training.faults import FAULTS
from benchmarks.fuzz_training.model import make
from benchmarks.fuzz_training.plain import BETAS, EPS, SCALE, TORCHS, Trained, groups_of, optimizer_of, schedule_of
from benchmarks.fuzz_training.script import Seen, play
from zeroplan_runtime.engine import Engine


def ds_config(case: Case, folder: Path) -> dict[str, Any]:
    """Return the config of `case`."""
    zero: dict[str, Any] = {"stage": case.stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accum,
        "gradient_clipping": case.clip,
        "zero_optimization": zero,
        "zeroplan": {
            "wide_numel": case.wide_numel,
            "ring": case.ring,
            "direct_linear": case.direct,
            "audit_steps": case.audit,
            "nvme_in_memory": True,
            "delayed_update": case.delayed,
        },
    }
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    match case.offload:
        case "cpu":
            zero["offload_optimizer"] = {"device": "cpu"}
        case "half":
            zero["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
        case "nvme":
            zero["offload_optimizer"] = nvme
        case "param-cpu":
            zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        case "param-nvme":
            zero |= {"offload_optimizer": nvme, "offload_param": {**nvme, "max_in_cpu": 0}}
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True, **({"loss_scale": SCALE} if case.dtype == "fp16" else {})}
    if case.float8:
        gathers = case.float8 == "gathers"
        config["zeroplan"] |= {"float8": "tensorwise" if gathers else case.float8, "float8_gathers": gathers}
    if case.reduce_dtype:
        config["communication_data_type"] = case.reduce_dtype
    if case.accum_dtype:
        config["data_types"] = {"grad_accum_dtype": case.accum_dtype}
    if not case.given:
        config["optimizer"] = _optimizer(case)
    return config


def _optimizer(case: Case) -> dict[str, Any]:
    match case.optimizer:
        case "lamb":
            return {"type": "Lamb", "params": {"eps": EPS, "betas": list(BETAS)}}
        case "lion":
            return {"type": "Lion", "params": {"betas": list(BETAS)}}
    kind, options = TORCHS[case.optimizer]
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    if case.maximize:
        params["maximize"] = True
    if kind == "Adam":
        params["adam_w_mode"] = False
    return {"type": kind, "params": params}


class EngineTrainer:
    """One rank's trainer."""

    def __init__(self, case: Case, group: dist.ProcessGroup, folder: Path, fault: str) -> None:
        self._case, self._group, self._folder, self._fault = case, group, folder, fault
        self._autocast = case.autocast
        self.rank = dist.get_rank(group)
        model = make(case)
        model.add_weight_hook()
        model.compile_blocks()
        self.start(model)

    def start(self, model: nn.Module) -> None:
        """Makes an engine of `model`."""
        case = self._case
        params = [p for p in model.parameters() if p.requires_grad]
        given: dict[str, Any] = {"model_parameters": groups_of(case, params)}
        schedule: Any = None if case.schedule not in ("step", "cycle") else lambda optimizer: schedule_of(case, optimizer)
        if case.given:
            optimizer = optimizer_of(case, params)
            given = {"optimizer": optimizer}
            schedule = schedule_of(case, optimizer)
        self.engine, *_ = zeroplan_runtime.initialize(
            model=model, config=ds_config(case, self._folder), group=self._group, device="cpu", lr_scheduler=schedule, **given
        )
        if self._fault:
            FAULTS[self._fault](self.engine)

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        assert self.engine.optimizer is not None
        return self.engine.optimizer.param_groups

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        self.engine.backward(loss, retain_graph=retain_graph)

    def model(self, *args: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss: torch.Tensor = self.engine(*args)
            return loss

    def ends(self, accumulation: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(accumulation)

    @contextmanager
    def gathered(self, name: str) -> Iterator[None]:
        with self.engine.gathered(name) if name in self.engine.unit_names() else nullcontext():
            yield

    def before_steps(self, hook: Callable[..., None]) -> None:
        assert self.engine.optimizer is not None
        self.engine.optimizer.register_step_pre_hook(hook)

    def whole_state(self) -> dict[str, torch.Tensor]:
        return self.engine.module_state_dict() or {}

    def anew(self) -> None:
        """Destroys the engine and makes another of the same model."""
        model = self.engine.module
        self.engine.destroy(keep_parameters=True)
        self.start(model)

    def zero_grad(self, by: str) -> None:
        assert self.engine.optimizer is not None
        (self.engine if by == "engine" else self.engine.optimizer).zero_grad()


def train(group: dist.ProcessGroup, case: Case, folder: Path, fault: str = "") -> Trained:
    """Trains `case` as one rank of `group`, with one of :data:`FAULTS`; masters and state are the first rank's.

    Raises:
        BadInput: where the runtime refuses the case.
    """
    seen: Seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = EngineTrainer(case, group, folder, fault)
        try:
            for asked in play(trainer, case, seen):
                match asked:
                    case "step":
                        trainer.engine.step()
                    case "save":
                        trainer.engine.save_checkpoint(folder / "checkpoint")
                    case "load":
                        trainer.engine.load_checkpoint(folder / "checkpoint")
                    case "load without optimizer":
                        trainer.engine.load_checkpoint(folder / "checkpoint", load_optimizer_states=False)
                    case "anew":
                        trainer.anew()
            trainer.engine.drain()
            masters = _masters(trainer.engine)
            state = trainer.engine.module_state_dict() or {}
        finally:
            trainer.engine.destroy()
    return Trained([seen], masters, state)


def _masters(engine: Engine) -> dict[str, torch.Tensor]:
    """The masters that are in memory, whole, by the parameters' names."""
    found: dict[str, torch.Tensor] = {}
    for unit in engine.model_states.units:
        if unit.trainable is None or unit.master is None:
            continue
        flat = unit.trainable.layout
        if engine.model_states.setup.shards_states:
            whole = torch.empty(flat.full, dtype=unit.master.dtype)
            engine.comm.all_gather(whole, unit.master.clone())
        else:
            whole = unit.master.clone()
        views = unit.trainable.views(whole)
        found.update({unit.name_of(i): view.clone() for i, view in enumerate(views)})
    return found
