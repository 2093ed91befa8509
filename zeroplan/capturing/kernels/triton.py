"""Triton: kernels that a script writes itself. A launch writes into tensors that its caller made, and allocates nothing.

An autotuned kernel times its configs at its first launch, over a buffer of 256 MiB that clears the L2 cache: the rule is of the
source, and unmeasured. Compiled kernels' own memory is among what CUDA loads.

Source: Triton 3.5, ``runtime/jit.py``, ``runtime/autotuner.py``, ``third_party/nvidia/backend/driver.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Bytes over which a config is timed.
_CLEARED = 256 << 20


class Kernel:
    """A kernel, which launches do not run."""

    def __init__(self, fn: Any) -> None:
        self.__name__, self.__doc__, self.fn = fn.__name__, fn.__doc__, fn

    def __getitem__(self, grid: Any) -> Any:
        return self.run

    def run(self, *_: Any, **__: Any) -> None:
        """Launch."""

    warmup = run


class Autotuned(Kernel):
    """A kernel of several configs."""

    tuned = False

    def run(self, *_: Any, **__: Any) -> None:
        """Launch; the first time, time the configs."""
        if not self.tuned:
            self.tuned = True
            torch.empty(_CLEARED, dtype=torch.uint8, device="cuda")


def jit(fn: Any = None, **_: Any) -> Any:
    """Make a kernel, or what makes one."""
    return jit if fn is None else Kernel(fn)


def heuristics(*_: Any, **__: Any) -> Any:
    """Keep the kernel."""
    return lambda kernel: kernel


def autotune(configs: Any = (), *_: Any, **__: Any) -> Any:
    """Make a kernel's launches time its configs first, where there are several."""
    return Autotuned if len(list(configs)) > 1 else lambda kernel: kernel


class Config:
    """A config of a kernel."""

    def __init__(self, kwargs: Any = None, *_: Any, **others: Any) -> None:
        self.kwargs = dict(kwargs or {})
        self.__dict__.update(others)


class constexpr:
    """A value that the compiler knows."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def cdiv(x: int, y: int) -> int:
    """The quotient, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, n - 1).bit_length()


def install(note: Callable[[], None]) -> None:
    """Let launches of an installed Triton's kernels follow the same rules; `note` says that one is unmeasured."""
    from triton.runtime import autotuner
    from triton.runtime import jit as home

    from zeroplan.capturing.hooks.imports import changes

    def tuned(kernel: Any, *_: Any, **__: Any) -> None:
        note()
        Autotuned.run(kernel)

    changes(home.JITFunction, autotuner.Autotuner)
    home.JITFunction.run = Kernel.run
    autotuner.Autotuner.run = lambda kernel, *_, **__: tuned(kernel) if len(kernel.configs) > 1 else None
    autotuner.Autotuner.tuned = False


RULES = {one.__name__: one for one in (jit, heuristics, autotune, Config, constexpr, cdiv, next_power_of_2)}
