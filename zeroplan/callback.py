"""ZeroplanCallback: a run of transformers' Trainer or of Lightning, planned before it starts and measured at its end.

Neither library is imported here: who passes a callback to a trainer has imported it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from copy import copy
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import MemoryPlan, Report
from zeroplan.core.sizes import format_bytes
from zeroplan.core.workload import Precision
from zeroplan.planner.options import EstimateOptions, require_known
from zeroplan.run.ask import Ask

#: The part of a GPU's memory from which on a run is warned that the next longer batch may not fit.
_NEARLY_FULL = 0.95
_BASES = (("transformers", "TrainerCallback"), ("lightning.pytorch", "Callback"), ("pytorch_lightning", "Callback"))
#: The engine that a strategy of Lightning is; those of DeepSpeed hand over their ds_config.
_STRATEGIES = {"SingleDeviceStrategy": "ddp", "DDPStrategy": "ddp", "ModelParallelStrategy": "fsdp2", "FSDPStrategy": "fsdp"}
#: The stage that a strategy of FSDP 1 is. HYBRID_SHARD's two groups are not modelled.
_FSDP_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}

Say = Callable[[str], None]


class ZeroplanCallback:
    """Plans a run before its first step, warns before it runs out of memory, and prints plan beside measurement at the end.

    For ``transformers.Trainer(callbacks=[ZeroplanCallback(seq_len=2048)])`` and Lightning's ``Trainer(callbacks=[…])``. The
    model, batch, precision, engine and machine are the trainer's; what it does not know (the length of sequences, adapters)
    is given here. A run is never stopped: where it cannot be planned, a line says why.

    Args:
        model: the model to plan in place of the trainer's own: an id, a path or a config.
        say: called with each text; None prints on the first rank.
        options: arguments of :func:`zeroplan.estimate`, which win over the trainer's.

    Attributes:
        report: the plan; None before the run, and where there is none.

    Raises:
        TypeError: an argument that does not exist, with the nearest name.
    """

    report: Report | None = None

    def __new__(cls, *_: Any, **__: Any) -> ZeroplanCallback:
        """Make it a callback of the libraries that are loaded, which check for theirs or call hooks that only theirs has."""
        homes = [(sys.modules.get(home), name) for home, name in _BASES]
        bases = tuple(getattr(module, name) for module, name in homes if getattr(module, name, None) is not None)
        made = type(cls.__name__, (cls, *bases), {"__module__": cls.__module__}) if bases else cls
        return object.__new__(made)

    def __init__(self, model: Any = None, *, say: Say | None = None, **options: Any) -> None:
        require_known(options, EstimateOptions.__annotations__, "ZeroplanCallback")
        self._model, self._options, self._say = model, options, say
        self._warned = False

    # transformers.Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Plan a Trainer's run."""
        self._first = bool(state.is_world_process_zero)
        self._plan(model, {"files": (_on_gpu(args),), **_machine(int(args.world_size)), **_in_place_of_deepspeed()})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Look at the memory of a Trainer's run after each step."""
        self._look()

    # Lightning

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Plan a Lightning run."""
        self._first = bool(trainer.is_global_zero)
        try:
            found = _of_lightning(trainer, _inner(module), engine="engine" in self._options)
        except BadInput as error:
            self._tell(f"zeroplan: no plan: {error}")
            return
        self._plan(_inner(module), found)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Look at the memory of a Lightning run after each micro batch."""
        self._look()

    # both

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Print plan beside measurement."""
        if self.report is not None and len(self.report.plans) == 1:
            self._tell("\n".join(["zeroplan: plan beside measurement", *_figures_here(self.report.plans[0])]))

    _first = True

    def _tell(self, text: str) -> None:
        if self._first:
            (self._say or print)(text)

    def _plan(self, model: Any, found: dict[str, Any]) -> None:
        """Plan the run, and print the verdict; a run that cannot be planned goes on."""
        from zeroplan.planner.estimate import estimate_report
        from zeroplan.report.verdict import peak_sentence, relief_sentence, verdict

        given = {"model": self._model if self._model is not None else _described(model), **found, **_card(), **self._options}
        if "ds_config" in self._options:
            given.pop("files", None)
        try:
            self.report = estimate_report(Ask(**given))
        except BadInput as error:
            self._tell(f"zeroplan: no plan: {error}")
            return
        except Exception as error:  # a fault of ours must not end a training
            self._tell(f"zeroplan: no plan: {type(error).__name__}: {str(error)[:200]}")
            return
        plan = self.report.decisive
        parts = [verdict(self.report), *([peak_sentence(plan)] if plan is not None else [])]
        if plan is not None and plan.fits is False:
            parts = ["This run is about to run out of memory.", *parts, relief_sentence(self.report.reliefs)]
        self._tell("\n".join(f"zeroplan: {text}" for text in parts if text))

    def _look(self) -> None:
        """Warn once where the GPU is nearly full."""
        torch = sys.modules.get("torch")
        if self._warned or torch is None or not torch.cuda.is_available():
            return
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        held = torch.cuda.max_memory_reserved()
        if held > _NEARLY_FULL * total:
            self._warned = True
            reserved = f"{format_bytes(held, digits=1)} of {format_bytes(total, digits=1)} are reserved"
            self._tell(f"zeroplan: {reserved}: a longer batch may not fit; zeroplan recommend names what would help")


def _on_gpu(arguments: Any) -> Any:
    """Return TrainingArguments as of the same run on a GPU: plans are of those, and a trial on a CPU is planned as one."""
    if not getattr(arguments, "use_cpu", False):
        return arguments
    copied = copy(arguments)
    object.__setattr__(copied, "use_cpu", False)
    return copied


def _machine(ranks: int) -> dict[str, int]:
    """Return nodes and GPUs a node of so many ranks, by what the launcher said."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks)
    return {"gpus": local, "nodes": max(1, ranks // max(1, local))}


def _in_place_of_deepspeed() -> dict[str, str]:
    """Return the engine that runs what DeepSpeed's name starts, where the included runtime has taken that name."""
    taken = type(sys.modules.get("deepspeed")).__module__.startswith("zeroplan_runtime.")
    return {"engine": "zeroplan"} if taken else {}


def _card() -> dict[str, int]:
    """Return the limit of this process's GPU, if it has one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"vram": int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)}


def _described(model: Any) -> Any:
    """Return a model's config, by which its tape is found; a module without one is traced itself."""
    config = getattr(model, "config", None)
    return config.to_dict() if config is not None and hasattr(config, "to_dict") else model


def _inner(module: Any) -> Any:
    """Return the transformers model that a LightningModule holds, or the module itself."""
    children = [child for child in module.children() if hasattr(getattr(child, "config", None), "to_dict")]
    return children[0] if len(children) == 1 else module


def _of_lightning(trainer: Any, model: Any, *, engine: bool) -> dict[str, Any]:
    """Return what a Lightning trainer says of its run.

    Args:
        trainer: the trainer.
        model: what it trains.
        engine: whether the user names the engine.

    Raises:
        BadInput: a strategy that is no engine of ours.
    """
    strategy = trainer.strategy
    found: dict[str, Any] = {"gpus": int(trainer.num_devices), "nodes": int(trainer.num_nodes)}
    config = getattr(strategy, "config", None)
    if isinstance(config, dict) and "zero_optimization" in config:
        return {**found, "ds_config": config}
    name = type(strategy).__name__
    if name in _STRATEGIES:
        found["engine"] = _STRATEGIES[name]
    elif not engine:
        raise BadInput(f"{name} is not modelled", where="strategy", remedy="name an engine that is alike: engine='ddp'")
    if name == "FSDPStrategy":
        found |= _of_fsdp(strategy)
    found["grad_accum"] = int(trainer.accumulate_grad_batches)
    precision = str(trainer.precision)
    found["dtype"] = next((name for name, part in (("bf16", "bf16"), ("fp16", "16")) if part in precision), "fp32")
    if precision in ("bf16-true", "16-true"):
        found["precision"] = Precision.PURE
    if getattr(model, "is_gradient_checkpointing", False):
        found["gradient_checkpointing"] = True
    return found


def _of_fsdp(strategy: Any) -> dict[str, Any]:
    """Return what Lightning's strategy of FSDP 1 says.

    Raises:
        BadInput: a sharding that is not modelled, or a model that is one unit: it is gathered whole.
    """
    sharding = strategy.sharding_strategy.name
    if sharding not in _FSDP_STAGES:
        raise BadInput(f"{sharding} is not modelled", where="FSDPStrategy", remedy=f"use one of {', '.join(_FSDP_STAGES)}")
    wrapped = [type(module).__name__ for module in strategy.model.modules()].count("FullyShardedDataParallel")
    if wrapped < 2:
        raise BadInput(
            "the whole model is one unit, which each pass gathers at once; plans are of blocks",
            where="FSDPStrategy",
            remedy="give an auto_wrap_policy with the class of the blocks",
        )
    found: dict[str, Any] = {"stage": _FSDP_STAGES[sharding]}
    if strategy.cpu_offload is not None and strategy.cpu_offload.offload_params:
        found["offload_param"] = "cpu"
    if strategy._activation_checkpointing_kwargs:
        found["gradient_checkpointing"] = True
    return found


def _figures_here(plan: MemoryPlan) -> list[str]:
    """Return a line for each figure that this process can tell."""
    torch = sys.modules.get("torch")
    gpu = plan.gpu
    rows: list[tuple[str, int | None, int | None]] = []
    if torch is not None and torch.cuda.is_available():
        rows += [
            ("GPU, peak allocated", gpu.peak_allocated, int(torch.cuda.max_memory_allocated())),
            ("GPU, peak reserved", gpu.peak_reserved, int(torch.cuda.max_memory_reserved())),
        ]
    else:
        rows += [("GPU, peak allocated", gpu.peak_allocated, None), ("GPU, peak reserved", gpu.peak_reserved, None)]
    rows.append(("host, this process", None, _resident()))
    return [f"  {name:<22}{_cell(planned):>14} planned{_cell(measured):>14} measured" for name, planned, measured in rows]


def _cell(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _resident() -> int | None:
    """Return the most that this process was resident, in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
