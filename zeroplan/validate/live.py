"""Verifies a user's own module with a user's own batch: the tape of both, and how they get to the ranks.

Note [How ranks get a module]
    Ranks that this process starts read the module from a file that this process has just written, in a folder that only this
    user may enter. The file is a pickle, which runs code when it is read: code of the script that the module comes from, never
    of a file from elsewhere. Classes are pickled by name. Those of the script itself are made in each rank as
    ``multiprocessing`` makes them in its children: the script is imported under another name than ``__main__``. Within a
    torchrun every rank has built the module itself, and no file is needed.
"""

from __future__ import annotations

import copy
import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zeroplan.core.errors import BadInput
from zeroplan.core.workload import DType
from zeroplan.engines.base import Engine
from zeroplan.engines.case import Case
from zeroplan.models.spec import FUSED_WEIGHT
from zeroplan.planner.tapes import ExpandedTapes, NoTapeError
from zeroplan.tape.expanded import ExpandedTape
from zeroplan.tape.sizes import KernelDevice
from zeroplan.trace.api import trace_module
from zeroplan.trace.example import arguments, shape_of
from zeroplan.validate.run_folder import MAIN, MODULE
from zeroplan_runtime.arena import DTYPES
from zeroplan_runtime.pytree import cast_tensors, map_tensors
from zeroplan_runtime.units import cast_floating

#: In a rank's environment.
RANK = "ZEROPLAN_VERIFY_RANK"
_IN_TORCHRUN = "run the script by torchrun, where every rank builds the module itself"
#: Modules of torch.nn whose kernels keep the same tensors on a CPU as on CUDA.
_ALIKE = ("activation", "container", "linear", "sparse", "normalization", "loss", "module", "transformer", "flatten")


@dataclass(frozen=True)
class LiveModule:
    """A user's module and batch.

    Attributes:
        make: returns a new copy of the module.
        batch: the keyword arguments of one micro batch's forward.
    """

    make: Callable[[], nn.Module]
    batch: dict[str, Any]

    def shape(self) -> tuple[int, int]:
        """Return the batch's number of samples and of positions, for the report."""
        return shape_of(self.batch)

    def batch_on(self, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """A copy of the batch on `device`, floating tensors in `dtype` unless that is None."""
        moved: dict[str, Any] = map_tensors(self.batch, lambda tensor: tensor.to(device, copy=True))
        return cast_tensors(moved, dtype) if dtype is not None else moved


def live_module(module: nn.Module, inputs: Any) -> LiveModule:
    """Return the user's module and batch: a mapping of keyword arguments, a tuple of positional ones, or the first alone.

    Raises:
        BadInput: for a batch that the module's forward does not take, and a module on a GPU, whose memory the run needs.
    """
    if any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers())):
        raise BadInput("the module is on a GPU, and takes memory from the run", where="model", remedy="give module.cpu()")
    batch = arguments(module, inputs)

    def make() -> nn.Module:
        with _disable_current_modes():  # the user's own copy is not part of the run's memory
            return copy.deepcopy(module)

    return LiveModule(make, batch)


# ---------------------------------------------------------------------- the plan


class LiveTapes(ExpandedTapes):
    """The tape of a module for the one batch that it is run with."""

    def __init__(self, engine: Engine, live: LiveModule, module: nn.Module) -> None:
        super().__init__(engine)
        self._engine_of, self._live, self._module = engine, live, module
        self._traced: dict[str, ExpandedTape | NoTapeError] = {}
        #: Whether a CPU's kernels keep other tensors than CUDA's, for which tapes are made.
        self.cpu_differs = any(_differs(part) for part in module.modules())

    def of(self, case: Case) -> ExpandedTape:
        """Return the tape of the module as the engine casts it; see :meth:`ExpandedTapes.of`."""
        options = self._engine_of.trace_options(case)
        if options.key not in self._traced:
            try:
                dtype = case.workload.numerics.dtype if self._engine_of.casts_modules else DType.FP32
                meta = _on_meta(self._module, dtype)
                batch = self._live.batch_on(torch.device("cpu"), DTYPES[dtype] if self._engine_of.casts_modules else None)
                tape = trace_module(meta, lambda: map_tensors(batch, _empty_on_meta), options)
                device = KernelDevice.of(case.cluster.gpu)
                work = case.workload
                self._traced[options.key] = tape.expand(work.batch.micro_batch, work.batch.seq_len or 1, None, device=device)
            except Exception as fault:  # the user's own code runs here
                text = " ".join(str(fault).split())[:160]
                self._traced[options.key] = NoTapeError(f"it cannot be traced ({type(fault).__name__}: {text})")
        found = self._traced[options.key]
        if isinstance(found, NoTapeError):
            raise found
        return found


def _on_meta(module: nn.Module, dtype: DType) -> nn.Module:
    """Return a copy on the meta device, as the engine casts it."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        target = DTYPES[dtype] if param.is_floating_point() else param.dtype
        memo[id(param)] = nn.Parameter(param.detach().to("meta", target), param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    made = copy.deepcopy(module, memo)
    if dtype is not DType.FP32:
        cast_floating(made, DTYPES[dtype])
    return prepared(made)


def prepared(module: nn.Module) -> nn.Module:
    """Set the module to training mode and switch off a transformers model's key-value cache; return it."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return module.train()


def _empty_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _differs(module: nn.Module) -> bool:
    kind = type(module)
    drops = any(isinstance(rate, float) and rate > 0 for rate in (getattr(module, "p", 0), getattr(module, "dropout", 0)))
    foreign = kind.__module__.startswith("torch.nn.modules.") and kind.__module__.rpartition(".")[2] not in _ALIKE
    return drops or hasattr(module, FUSED_WEIGHT) or (foreign and not kind.__name__.startswith("Dropout"))


# ---------------------------------------------------------------------- see Note [How ranks get a module]


def write_live(folder: Path, live: LiveModule) -> None:
    """Write module and batch to `folder`, for the ranks that will be started on it.

    Raises:
        BadInput: when the module cannot be pickled, or another process cannot import its class.
    """
    module = live.make()
    own = next((type(part) for part in module.modules() if type(part).__module__ == "__main__"), None)
    main = multiprocessing.spawn.get_preparation_data("rank")
    if own is not None and not {"init_main_from_path", "init_main_from_name"} & main.keys():
        raise BadInput(
            f"the class {own.__name__} is known to this session alone",
            where="model",
            remedy=f"put it into a file that can be imported, or {_IN_TORCHRUN}",
        )
    try:
        with (folder / MODULE).open("wb") as file:
            torch.save((module, live.batch), file)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as fault:
        text = (str(fault).splitlines() or [""])[0][:200]
        raise BadInput(f"the module cannot be handed to other processes ({text})", where="model", remedy=_IN_TORCHRUN) from None
    wanted = ["sys_path", *(("init_main_from_path", "init_main_from_name") if own is not None else ())]
    with (folder / MAIN).open("wb") as file:
        pickle.dump({key: main[key] for key in wanted if key in main}, file)


def read_live(folder: Path) -> LiveModule:
    """Read the module and batch that :func:`write_live` wrote.

    Raises:
        BadInput: when the script that the module comes from cannot be imported.
    """
    path = folder / MODULE
    os.environ[RANK] = "1"
    preparation = pickle.loads((folder / MAIN).read_bytes())
    try:
        multiprocessing.spawn.prepare(preparation)
    except SystemExit as fault:
        raise BadInput(f"the script ended ({fault}) when a rank imported it", where="model", remedy=_GUARD) from None

    def make() -> nn.Module:
        # weights_only would refuse the module's class; whose file this is says Note [How ranks get a module].
        found: nn.Module = torch.load(path, map_location="cpu", weights_only=False)[0]
        return found

    return LiveModule(make, torch.load(path, map_location="cpu", weights_only=False)[1])


_GUARD = 'call verify() under if __name__ == "__main__":'


def require_no_rank() -> None:
    """Refuse a call that a rank makes while it imports the user's script."""
    if os.environ.get(RANK) and "__mp_main__" in sys.modules:
        raise BadInput("verify() was called while a rank imported the script", where="model", remedy=_GUARD)
