"""``deepspeed.accelerator``: the device by DeepSpeed's names, for CUDA and the CPU."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


class Accelerator:
    """The calls of DeepSpeed's accelerator that scripts make; everything else is looked up in ``torch.cuda``, or
    ``torch.cpu``.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module: Any = getattr(torch, self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._module, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Returns ``cuda``, ``cuda:N`` or ``cpu``."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which `device_index` is the current device; None on the CPU."""
        return torch.cuda.device(device_index) if self._name == "cuda" else None

    def current_device(self) -> int:
        """Returns the current device's number; on the CPU the local rank."""
        return torch.cuda.current_device() if self._name == "cuda" else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """Returns the current device, as torch names it."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Returns the GPUs of this host; on the CPU ``LOCAL_SIZE``, or the number of cores."""
        if self._name == "cuda":
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE", "0")) or len(os.sched_getaffinity(0))

    def set_device(self, device_index: int) -> None:
        """Makes `device_index` the current device; does nothing on the CPU."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        """True: there is a device."""
        return True

    def is_synchronized_device(self) -> bool:
        """Returns whether calls return when their work is done."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        """Returns the backend of torch.distributed."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Returns whether models train in bf16: on GPUs that have it, and on the CPU."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Returns true: models train in fp16 on GPUs and on the CPU."""
        return True

    def is_triton_supported(self) -> bool:
        """Returns whether Triton compiles for this device."""
        return self._name == "cuda"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes that models train in."""
        half = [torch.half] if self.is_fp16_supported() else []
        return [torch.float, *half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        """Returns the device's generator of random numbers."""
        return torch.cuda.default_generators[device_index] if self._name == "cuda" else torch.default_generator

    def manual_seed(self, seed: int) -> Any:
        """Seeds the device's generator."""
        return torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seeds the generators of all devices."""
        return torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Returns the generator's state."""
        if self._name == "cuda":
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Restores :meth:`get_rng_state`."""
        if self._name == "cuda":
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Gives cached memory of the device back."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory in tensors; 0 on the CPU, where torch does not count them."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes that :meth:`memory_allocated` has said."""
        return torch.cuda.max_memory_allocated(device_index) if self._name == "cuda" else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begins :meth:`max_memory_allocated` anew."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes of the device's memory, or of this host's."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties(
                self.current_device() if device_index is None else device_index
            ).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns a copy in pinned memory; the tensor itself without a GPU."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor is on the device."""
        return tensor.device.type == self._name

    def FloatTensor(self, values: Any) -> torch.Tensor:
        """Returns an fp32 tensor on the device."""
        return torch.tensor(values, dtype=torch.float32, device=self._name)


@functools.cache
def get_accelerator() -> Accelerator:
    """Returns the device of this process."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    """Returns true: CUDA and the CPU are."""
    return True
