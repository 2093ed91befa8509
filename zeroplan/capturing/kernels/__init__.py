"""Packages of CUDA kernels: stand-ins that allocate and keep for the backward what the kernels do, one file a package.

Note [Kernels without a GPU]
    None of them runs without a GPU, so a script's own ``import`` of one finds the stand-in, whether the package is installed or
    not. A library that asks whether one is there is told what is true of this machine, since it would take another way if it
    were; bitsandbytes, which libraries call only where they are asked to, is always there, and FlashAttention once a model is
    loaded with it. What has no rule is there by its name, and stops the script where it is called. Each file names its source;
    a script that asks for a rule that no GPU has measured yet is told so, and its verdict stays open.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.hooks.imports import changes
from zeroplan.capturing.recorder import StoppedError
from zeroplan.capturing.source import callers_file, is_users, user_line

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


@dataclass(frozen=True, slots=True)
class Package:
    """A package of kernels.

    Attributes:
        version: whose source the rules are of.
        parts: modules in it that are attributes without an ``import`` of their own.
        always: whether libraries find it, too.
        rules: the file here that holds its rules; empty for the package's own name.
        measured: the rules that a GPU has measured, or that are torch's own operators; None where all are.
        importers: libraries that ask for it without a way around it, and find it like a script.
    """

    version: str
    parts: tuple[str, ...] = ()
    always: bool = False
    rules: str = ""
    measured: frozenset[str] | None = frozenset()
    importers: tuple[str, ...] = ()

    def is_for(self, file: str) -> bool:
        """Return whether code of this file finds the stand-in."""
        return self.always or is_users(file) or any(f"/{one}/" in file for one in self.importers)


PACKAGES = {
    "flash_attn": Package(
        "2.8.3",
        ("flash_attn_interface", "bert_padding", "layers", "ops", "losses"),
        measured=frozenset(("flash_attn_func", "index_first_axis", "unpad_input", "pad_input")),
    ),
    "flash_attn_interface": Package("3.0.0", rules="flash_attn_3"),
    "xformers": Package("0.0.32", ("ops",), measured=frozenset(("LowerTriangularMask",))),
    "bitsandbytes": Package(
        "0.50.2",
        ("nn", "optim", "functional"),
        always=True,
        measured=frozenset(("Linear4bit", "Linear8bitLt", "LinearNF4", "Params4bit", "Int8Params", "GlobalOptimManager")),
    ),
    "apex": Package("0.1", ("normalization", "optimizers", "amp", "parallel")),
    "torchao": Package(
        "0.18.0",
        ("float8", "optim", "quantization"),
        measured=frozenset(
            (
                "Float8LinearConfig",
                "convert_to_float8_training",
                "precompute_float8_dynamic_scale_for_fsdp",
                "config",
                "AdamW8bit",
                "AdamW4bit",
                "AdamWFp8",
            )
        ),
    ),
    "liger_kernel": Package("0.8.5", ("transformers", "chunked_loss"), always=True, measured=None),
    "grouped_gemm": Package("0.3.0", ("ops",)),
    "triton": Package(
        "3.5.0",
        ("language",),
        measured=frozenset(("jit", "heuristics", "Config", "constexpr", "cdiv", "next_power_of_2")),  # which allocate nothing
        importers=("megatron",),
    ),
}


def unmeasured(capture: Capture, what: str) -> None:
    """Note a rule that no GPU has measured: its figures are those of the source, and the verdict stays open."""
    capture.leave_out(f"kernels of {what}", "unknown", "what they allocate is read from their source; no GPU has measured it")


class _Kernels(ModuleType):
    """A module of such a package; all of a package's modules have the same names."""

    #: Where it is noted what a script asks for.
    noting: Capture | None = None

    def __getattr__(self, name: str) -> Any:
        root = self.__name__.partition(".")[0]
        package = PACKAGES[root]
        if name == "__version__":
            return package.version
        if name.startswith("__"):
            raise AttributeError(name)
        rules = importlib.import_module(f"{__name__}.{package.rules or root}").RULES
        if name in rules:
            if package.measured is not None and name not in package.measured and _Kernels.noting is not None:
                unmeasured(_Kernels.noting, root)
            return rules[name]
        if self.__name__ == root and name in package.parts:
            return importlib.import_module(f"{root}.{name}")
        return _without_rule(f"{self.__name__}.{name}")


def _without_rule(name: str) -> type:
    """A class of that name, which scripts may ask of objects; making one, or calling it, stops the script."""

    def stops(*_: Any, **__: Any) -> Any:
        raise StoppedError(f"no rule knows what {name} allocates on a GPU", user_line())

    return type(name.rpartition(".")[2], (), {"__new__": stops, "__module__": name.rpartition(".")[0]})


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = fullname.partition(".")[0]
        package = PACKAGES.get(root)
        if package is None:
            return None
        there = isinstance(sys.modules.get(root), _Kernels)
        if not there and (root != fullname or not package.is_for(callers_file())):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make the module."""
        made = _Kernels(spec.name)
        made.__file__ = __file__
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def provide(name: str) -> None:
    """Let everybody find a package from here on."""
    if not isinstance(sys.modules.get(name), _Kernels):
        finder = next(one for one in sys.meta_path if isinstance(one, _KernelFinder))
        spec = importlib.machinery.ModuleSpec(name, finder, is_package=True)
        made: Any = importlib.util.module_from_spec(spec)
        sys.modules[name] = made


def install(capture: Capture) -> None:
    """Find the stand-ins before what is installed."""
    from torch.utils._triton import has_triton_package

    _Kernels.noting = capture
    if has_triton_package():  # torch keeps the answer, and a stand-in that comes later is not for torch
        from zeroplan.capturing.kernels import triton

        triton.install(lambda: unmeasured(capture, "triton"))
    sys.meta_path.insert(0, _KernelFinder())
    home: Any = importlib.metadata
    own = home.version
    changes(home)

    def version(name: str) -> Any:
        package = PACKAGES.get(name.replace("-", "_"))
        known = package is not None and (package.always or isinstance(sys.modules.get(name.replace("-", "_")), _Kernels))
        return package.version if package is not None and known else own(name)

    home.version = version
