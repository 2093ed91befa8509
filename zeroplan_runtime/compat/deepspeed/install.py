"""Puts this package in the place of ``deepspeed``: its modules under DeepSpeed's module names, and no others."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from torch import distributed

from zeroplan_runtime.compat import deepspeed
from zeroplan_runtime.compat.deepspeed import (
    accelerator,
    checkpoint_utils,
    checkpointing,
    comm,
    config,
    dataloader,
    engine,
    leaf_modules,
    lr_schedules,
    moe,
    ops,
    tensor_fragment,
    utils,
    zero,
)

#: What a module of DeepSpeed's name takes its attributes from; a name is that of a module which is slow to import.
_SOURCES: Mapping[str, Sequence[Any]] = {
    "deepspeed": (deepspeed,),
    "deepspeed.accelerator": (accelerator,),
    "deepspeed.accelerator.real_accelerator": (accelerator,),
    "deepspeed.checkpoint": (),
    "deepspeed.checkpoint.utils": (checkpoint_utils,),
    "deepspeed.checkpointing": (checkpointing,),
    "deepspeed.comm": (comm, distributed),
    "deepspeed.comm.comm": (comm, distributed),
    "deepspeed.git_version_info": (deepspeed,),
    "deepspeed.moe": (),
    "deepspeed.moe.utils": (moe,),
    "deepspeed.ops": (ops,),
    "deepspeed.ops.adam": (ops,),
    "deepspeed.ops.lamb": (ops,),
    "deepspeed.ops.lion": (ops,),
    "deepspeed.ops.aio": (ops,),
    "deepspeed.ops.op_builder": (ops,),
    "deepspeed.ops.sparse_attention": ("zeroplan_runtime.techniques.sparse_attention",),
    "deepspeed.ops.transformer": ("zeroplan_runtime.techniques.transformer",),
    "deepspeed.ops.transformer.transformer": ("zeroplan_runtime.techniques.transformer",),
    "deepspeed.runtime": (),
    "deepspeed.runtime.activation_checkpointing": (),
    "deepspeed.runtime.activation_checkpointing.checkpointing": (checkpointing,),
    "deepspeed.runtime.config": (config,),
    "deepspeed.runtime.constants": (config,),
    "deepspeed.runtime.dataloader": (dataloader,),
    "deepspeed.runtime.engine": (engine,),
    "deepspeed.runtime.lr_schedules": (lr_schedules,),
    "deepspeed.runtime.precision_config": (config,),
    "deepspeed.runtime.utils": (utils,),
    "deepspeed.runtime.zero": (zero,),
    "deepspeed.runtime.zero.config": (config,),
    "deepspeed.runtime.zero.offload_config": (config,),
    "deepspeed.runtime.zero.partition_parameters": (zero,),
    "deepspeed.utils": (utils,),
    "deepspeed.utils.logging": (utils,),
    "deepspeed.utils.tensor_fragment": (tensor_fragment,),
    "deepspeed.utils.torch": (utils,),
    "deepspeed.utils.z3_leaf_module": (leaf_modules,),
    "deepspeed.utils.zero_to_fp32": ("zeroplan_runtime.checkpoint.zero_to_fp32",),
    "deepspeed.zero": (zero,),
}


class _Version(Distribution):
    """The metadata of an installed DeepSpeed of this version; accelerate and transformers ask for it."""

    def read_text(self, filename: str) -> str | None:
        """Returns the metadata; None for the other files of a distribution."""
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {deepspeed.__version__}\n"

    def locate_file(self, path: Any) -> Any:
        """Refused: nothing is installed under this name."""
        raise FileNotFoundError(path)


class _Refusing(DistributionFinder):
    """Refuses modules of DeepSpeed that are not here, before a DeepSpeed that is installed is found."""

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        """The version of DeepSpeed whose ways are followed, where that package is asked for."""
        return [_Version()] if context is not None and context.name == "deepspeed" else []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "deepspeed":
            return None
        raise ModuleNotFoundError(
            f"zeroplan_runtime.compat.deepspeed has no {name!r}; docs/deepspeed_compat.md lists what it has", name=name
        )


def install() -> ModuleType:
    """Makes ``import deepspeed`` give this package. Call it before anything imports DeepSpeed.

    Returns:
        The module that ``import deepspeed`` gives.

    Raises:
        RuntimeError: when DeepSpeed itself has been imported already.
    """
    present = sys.modules.get("deepspeed")
    if isinstance(present, _Module):
        return present
    if present is not None:
        raise RuntimeError("deepspeed has been imported already: call install() before it")
    for name, sources in _SOURCES.items():
        module = _Module(name, sources)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            sys.modules[parent].__dict__.setdefault(last, module)  # a function of the same name stays, as in DeepSpeed
    sys.modules["deepspeed.ops"].__dict__["__compatible_ops__"] = ops.compatible_ops
    sys.modules["deepspeed"].__dict__["zero"] = sys.modules["deepspeed.zero"]
    sys.meta_path.insert(0, _Refusing())
    return sys.modules["deepspeed"]


class _Module(ModuleType):
    """A module with the attributes of others; one of DeepSpeed's that none of them has is refused by name."""

    def __init__(self, name: str, sources: Sequence[Any]) -> None:
        super().__init__(name, sources[0].__doc__ if sources else None)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self._later = [source for source in sources if isinstance(source, str)]
        for source in sources:
            if not isinstance(source, str):
                self._take(source)

    def _take(self, source: Any) -> None:
        self.__dict__.update({key: value for key, value in vars(source).items() if not _is_own(key, value)})

    def __getattr__(self, name: str) -> Any:
        later = self.__dict__.get("_later", [])
        while later and not name.startswith("__"):
            self._take(importlib.import_module(later.pop()))
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"zeroplan_runtime.compat.deepspeed has no {self.__name__}.{name}; see docs/deepspeed_compat.md")


def _is_own(key: str, value: Any) -> bool:
    """Returns whether an attribute belongs to the module that it comes from, as its name and its submodules do."""
    of_version = key.startswith(("__version", "__git"))
    return (key.startswith("__") and not of_version) or issubclass(type(value), ModuleType)
