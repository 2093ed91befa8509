"""Chooses the backend of a device and says why: CUDA kernels, native CPU routines, else plain torch operations."""

from __future__ import annotations

import logging
import os
from functools import cache
from types import ModuleType
from typing import Any

import torch

from zeroplan_runtime.kernels import cuda_backend, native_backend, nvrtc, torch_backend

#: The environment variable: ``torch`` uses plain torch operations everywhere; any other value the best backend that works.
ENVIRONMENT = "ZEROPLAN_KERNELS"

_log = logging.getLogger("zeroplan")


def backend(device: torch.device) -> ModuleType:
    """Returns the module that implements the updates on `device`: one of the three backends."""
    if os.environ.get(ENVIRONMENT) == "torch":
        return torch_backend
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch_backend if cuda_fault(index) else cuda_backend
    if device.type == "cpu" and native_backend.library() is not None:
        return native_backend
    return torch_backend


@cache
def cuda_fault(index: int) -> str:
    """Returns in words why the CUDA kernels cannot be used on GPU `index`; empty if they can. Compiles and runs the cast
    once.
    """
    try:
        device = torch.device("cuda", index)
        source = torch.arange(8, dtype=torch.float32, device=device)
        out = torch.empty(8, dtype=torch.bfloat16, device=device)
        cuda_backend.cast(source, out, 2.0)
        if out.tolist() != [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]:
            return "a first kernel gave a wrong result"
    except Exception as fault:  # whatever it is, torch's own operations still work
        lines = str(fault).strip().splitlines() or [""]
        reason = f"{type(fault).__name__}: {lines[0]}"
        _log.warning("CUDA kernels are not used on cuda:%d, torch operations are: %s", index, reason)
        return reason
    return ""


def backend_report() -> list[dict[str, Any]]:
    """Returns the backend of each device of this machine and why, as JSON objects with ``device``, ``backend`` and
    ``reason``.
    """
    rows = [{"device": "cpu", **_cpu_report()}]
    if torch.cuda.is_available():
        rows += [
            {"device": f"cuda:{i} {torch.cuda.get_device_name(i)}", **_cuda_report(i)} for i in range(torch.cuda.device_count())
        ]
    return rows


def _cpu_report() -> dict[str, str]:
    chosen = backend(torch.device("cpu"))
    if chosen is native_backend:
        threads = torch.get_num_threads()
        return {"backend": "native", "reason": f"libzeroplan_cpu with {native_backend.instructions()}, {threads} threads"}
    if os.environ.get(ENVIRONMENT) == "torch":
        return {"backend": "torch", "reason": f"{ENVIRONMENT}=torch"}
    return {"backend": "torch", "reason": "libzeroplan_cpu was not built or does not load"}


def _cuda_report(index: int) -> dict[str, str]:
    if os.environ.get(ENVIRONMENT) == "torch":
        return {"backend": "torch", "reason": f"{ENVIRONMENT}=torch"}
    fault = cuda_fault(index)
    if fault:
        return {"backend": "torch", "reason": fault}
    version = ".".join(map(str, nvrtc.nvrtc_version()))
    major, minor = torch.cuda.get_device_capability(index)
    return {"backend": "cuda", "reason": f"NVRTC {version} for sm_{major}{minor}, cubins in {nvrtc.cache_folder() or 'memory'}"}
