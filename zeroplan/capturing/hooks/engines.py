"""What programs on transformers call that a run without a GPU would answer otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zeroplan.capturing.hooks.imports import changes

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def install_trl_kernels(capture: Capture, module: Any) -> None:
    """Let TRL's log-probabilities take what its Triton kernels do.

    ``trl/kernels/chunked_logprob.py`` and ``chunked_divergence.py``: their kernels write into tensors that their caller made,
    and allocate nothing, as torch's path (``_forward_tile`` and the like) would. ``_addmm_fp32`` adds products of 16-bit
    tensors on CUDA in place.
    """
    own: Any = getattr(module, "_addmm_fp32", None)
    tiles = [name for name in vars(module) if name.endswith("_tile")]

    def folded(*_: Any, **__: Any) -> None:
        return None

    def added(acc: Any, a: Any, b: Any) -> None:
        if not getattr(module, "_MM_OUT_DTYPE", False) or a.dtype.itemsize != 2:
            own(acc, a, b)

    if own is None or not tiles or not hasattr(module, "_use_triton"):
        capture.leave_out("triton", "unknown", "this version of TRL computes log-probabilities by kernels without a rule")
        return
    module._use_triton = lambda *_: False
    module._addmm_fp32 = added
    for name in tiles:
        setattr(module, name, folded)


def install_trl_trainer(module: Any) -> None:
    """Let TRL's losses go over the answers' rows alone, as where Triton is there; their kernels are those above."""
    if hasattr(module, "_use_triton"):
        module._use_triton = lambda *_: True


def install_batch_finder(capture: Capture, module: Any) -> None:
    """Say that batches are halved on a GPU where memory runs out (``auto_find_batch_size``), which it does not here."""
    own = module.find_executable_batch_size

    def find(*args: Any, **kwargs: Any) -> Any:
        says = "the batch is made smaller where memory runs out; the first size is planned"
        capture.leave_out("find_executable_batch_size", "less", says)
        return own(*args, **kwargs)

    module.find_executable_batch_size = find


def install_loader(module: Any) -> None:
    """Let an epoch behind the steps have no batch under an accelerate (to 0.34) that yields None where its loader is empty."""
    kind = module.DataLoaderShard
    own = kind.__iter__

    def iterate(loader: Any) -> Iterator[Any]:
        return itertools.takewhile(lambda batch: batch is not None, own(loader))

    changes(kind)
    kind.__iter__ = iterate
