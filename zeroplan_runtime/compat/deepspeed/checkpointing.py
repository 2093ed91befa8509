"""``deepspeed.checkpointing``: activation checkpointing by torch's own, and generators of random numbers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from zeroplan_runtime.compat.deepspeed.accelerator import get_accelerator
from zeroplan_runtime.compat.deepspeed.refusals import Refusal

_MODEL_PARALLEL = "model-parallel-rng"
_mpu: Any = None
_is_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Notes that activation checkpointing is wanted.

    Args:
        mpu_: names the tensor-parallel rank, by which :func:`model_parallel_cuda_manual_seed` draws.
        deepspeed_config: has no effect: the engine reads the config's section itself.
        partition_activations, checkpoint_in_cpu: must not be true here.
        contiguous_checkpointing, num_checkpoints, synchronize, profile: have no effect.

    Raises:
        Refusal: for inputs that are divided, or on the host: the ds_config says so.
    """
    global _mpu, _is_configured
    for name, wanted in (("partition_activations", partition_activations), ("cpu_checkpointing", checkpoint_in_cpu)):
        if wanted:
            remedy = f"set {name!r} in the ds_config's section activation_checkpointing"
            raise Refusal(f"{name} is the engine's", where="deepspeed.checkpointing.configure", remedy=remedy)
    _mpu, _is_configured = mpu_, True


def is_configured() -> bool:
    """Returns whether :func:`configure` was called."""
    return _is_configured


def reset() -> None:
    """Does nothing: no buffers are kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """Does nothing: inputs are kept where they are."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function whose activations are computed again in the backward.

    As in DeepSpeed, tensors in lists and dicts are given to it as they are, and numbers are drawn again as the first time.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


class CudaRNGStatesTracker:
    """Named states of the device's generator of random numbers."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Goes on with states by name."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Begins a state.

        Raises:
            Refusal: where the seed or the name was given before.
        """
        if seed in self.seeds_ or name in self.states_:
            raise Refusal(f"the seed {seed} or the state {name!r} is there", where="tracker.add", remedy="call reset() first")
        self.seeds_.add(seed)
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Enters a context that draws by the named state.

        Raises:
            Refusal: for one that was not added.
        """
        if name not in self.states_:
            raise Refusal(f"there is no state {name!r}", where="tracker.fork", remedy="add it first")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the device by `seed`, and the tracker's state of model parallelism by another one for each of its ranks."""
    rank = 0
    if _mpu is not None:
        names = ("get_tensor_model_parallel_rank", "get_model_parallel_rank")
        rank = next(getattr(_mpu, name)() for name in names if hasattr(_mpu, name))
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(_MODEL_PARALLEL, seed + 2718 + rank)
