"""The ds_config's section ``flops_profiler``: counts one step's floating-point operations, and times the next step.

torch's counter (``torch.utils.flop_counter``) sees every matrix product and attention, forward and backward; attention is
counted whole, causal or not, as in PaLM's appendix B. Model FLOPs leave out what gradient checkpointing runs again, so MFU
(model FLOPs utilization) does not rise with it; HFU (hardware FLOPs utilization) counts all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zeroplan.core.errors import BadInput
from zeroplan.core.gpus import find_gpu
from zeroplan.core.plumbing.files import replace_file
from zeroplan_runtime.compiled import uncompiled
from zeroplan_runtime.config import RuntimeConfig

logger = logging.getLogger("zeroplan_runtime")


@dataclass(frozen=True)
class FlopsProfile:
    """What a step computes on one rank.

    Attributes:
        forward: FLOPs of the step's forwards.
        backward: FLOPs of its backwards, without recomputation.
        recomputed: FLOPs of forwards that gradient checkpointing ran again.
        seconds: of the step that followed; None while it has not ended.
        peak_tflops: of the device in the model's dtype, by its data sheet; None where it is not known.
    """

    forward: int
    backward: int
    recomputed: int
    seconds: float | None = None
    peak_tflops: float | None = None

    @property
    def model_flops(self) -> int:
        """FLOPs that the model needs, whatever is computed twice."""
        return self.forward + self.backward

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: a fraction of the device's peak."""
        return self._of_peak(self.model_flops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization: as :attr:`mfu`, with what was computed twice."""
        return self._of_peak(self.model_flops + self.recomputed)

    def _of_peak(self, flops: int) -> float | None:
        known = self.seconds and self.peak_tflops
        return flops / (self.seconds * self.peak_tflops * 1e12) if known else None  # type: ignore[operator]

    def __str__(self) -> str:
        lines = [
            f"FLOPs of a step on this rank: {self.model_flops:.4g} (forward {self.forward:.4g}, backward {self.backward:.4g})",
            f"recomputed by gradient checkpointing: {self.recomputed:.4g}",
        ]
        if self.seconds:
            lines.append(f"seconds of the next step: {self.seconds:.4g}; TFLOP/s: {self.model_flops / self.seconds / 1e12:.4g}")
        if self.mfu is not None and self.hfu is not None:
            lines.append(f"MFU {self.mfu:.1%}, HFU {self.hfu:.1%} of {self.peak_tflops:.4g} TFLOP/s")
        elif self.seconds:
            lines.append("MFU unknown: the peak of this device in this dtype is not known")
        return "\n".join(lines)


class FlopsProfiler:
    """Counts step `profile_step` (the first is 0), times the next one, and says both once.

    Args:
        section: ``profile_step`` and ``output_file`` of ``flops_profiler``.
        device: this rank's device.
        peak_tflops: of the device; None where it is not known.

    Attributes:
        profile: what was found; None before.
    """

    def __init__(self, section: Mapping[str, Any], device: torch.device, peak_tflops: float | None) -> None:
        self.profile: FlopsProfile | None = None
        self._step = int(section.get("profile_step", 1))
        self._file = section.get("output_file")
        self._device, self._peak = device, peak_tflops
        self._forward = self._backward = self._recomputed = 0
        self._counted_until = 0.0

    @property
    def _done(self) -> bool:
        """Whether nothing is left to count or to time, also where an earlier checkpoint is loaded and its steps come again."""
        return self.profile is not None and self.profile.seconds is not None

    def counting(self, steps: int, *, backward: bool) -> AbstractContextManager[object]:
        """Returns a context that counts a forward or a backward after `steps` steps, if that is the step to profile."""
        return uncompiled(self._count(backward=backward)) if steps == self._step and not self._done else nullcontext()

    @contextmanager
    def _count(self, *, backward: bool) -> Iterator[None]:
        counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        with counter, _forwards(counter) as again:
            yield
        total = counter.get_total_flops()
        if backward:
            self._backward += total - again[0]
            self._recomputed += again[0]
        else:
            self._forward += total

    def stepped(self, steps: int) -> None:
        """Ends a step; `steps` counts it. Waits for the device after the profiled step and after the next one."""
        if steps not in (self._step + 1, self._step + 2) or not self._forward or self._done:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if steps == self._step + 1:
            self._counted_until = now
            self.profile = FlopsProfile(self._forward, self._backward, self._recomputed, peak_tflops=self._peak)
        elif self.profile is not None:
            self.profile = replace(self.profile, seconds=now - self._counted_until)
            self._say(str(self.profile))

    def _say(self, text: str) -> None:
        if self._file:
            replace_file(self._file, f"{text}\n".encode())
        else:
            logger.warning("flops_profiler: %s", text.replace("\n", "; "))


@contextmanager
def _forwards(counter: FlopCounterMode) -> Iterator[list[int]]:
    """Gives the FLOPs within forwards of modules so far; in a backward they are recomputation."""
    found, depth, begun = [0], 0, 0

    def enter(_module: nn.Module, _args: Any) -> None:
        nonlocal depth, begun
        if depth == 0:
            begun = counter.get_total_flops()
        depth += 1

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            found[0] += counter.get_total_flops() - begun

    hooks = nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        # Checkpointing may end a recomputation by an exception, once it has what it needs.
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _cpu_attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _cpu_attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


#: FLOPs of the CPU's attention by the shapes [batch, heads, length, width] of its inputs; torch's table lacks its operators.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


def make_flops_profiler(settings: RuntimeConfig, device: torch.device, *, rank: int) -> FlopsProfiler | None:
    """Returns the profiler that the config asks for, on the first rank; else None."""
    if rank != 0 or settings.flops_profiler is None:
        return None
    return FlopsProfiler(settings.flops_profiler, device, _peak_tflops(device, settings))


def _peak_tflops(device: torch.device, settings: RuntimeConfig) -> float | None:
    """The data sheet's rate of the device in 16 bits; None on a CPU, in fp32 and for a GPU without a preset."""
    if device.type != "cuda" or settings.dtype.bytes != 2:
        return None
    try:
        return find_gpu(torch.cuda.get_device_name(device)).bf16_tflops
    except BadInput:
        return None
