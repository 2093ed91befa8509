"""``deepspeed.ops``: DeepSpeed's optimizer classes. Each chooses arithmetic of the runtime; where it runs, the config says."""

from __future__ import annotations

from typing import Any

from zeroplan_runtime.compat.deepspeed.refusals import refusing
from zeroplan_runtime.optim.zero_optimizer import Params, ZeroOptimizer


class _Named(ZeroOptimizer):
    """An optimizer by the class that DeepSpeed has for it; `kind` is its name in a ds_config."""

    kind_of_class = ""

    def __init__(self, model_params: Params, decoupled: bool = True, **hyper: Any) -> None:
        with refusing():
            super().__init__(model_params, self.kind_of_class, hyper, decoupled=decoupled)


class FusedAdam(_Named):
    """Adam, or AdamW if `adam_w_mode`, as DeepSpeed's default is."""

    kind_of_class = "adamw"

    def __init__(self, params: Params, *args: Any, adam_w_mode: bool = True, set_grad_none: bool = True, **hyper: Any) -> None:
        names = ("lr", "bias_correction", "betas", "eps")
        super().__init__(params, decoupled=adam_w_mode, **dict(zip(names, args, strict=False)), **hyper)


class DeepSpeedCPUAdam(_Named):
    """The same optimizer as :class:`FusedAdam`; with ``offload_optimizer`` the config moves it to the host."""

    kind_of_class = "adamw"

    def __init__(self, model_params: Params, *args: Any, adamw_mode: bool = True, **hyper: Any) -> None:
        names = ("lr", "bias_correction", "betas", "eps", "weight_decay")
        super().__init__(model_params, decoupled=adamw_mode, **dict(zip(names, args, strict=False)), **hyper)


class FusedLamb(_Named):
    """LAMB."""

    kind_of_class = "lamb"


class FusedLion(_Named):
    """Lion."""

    kind_of_class = "lion"


class DeepSpeedCPULion(FusedLion):
    """The same optimizer as :class:`FusedLion`; with ``offload_optimizer`` the config moves it to the host."""


#: DeepSpeed's classes by ``optimizer.type`` in lower case, on the device and on the host.
BY_TYPE: dict[str, tuple[type[_Named], type[_Named]]] = {
    "adam": (FusedAdam, DeepSpeedCPUAdam),
    "adamw": (FusedAdam, DeepSpeedCPUAdam),
    "lamb": (FusedLamb, FusedLamb),
    "lion": (FusedLion, DeepSpeedCPULion),
}


class _Builder:
    """A stand-in for what compiles one of DeepSpeed's kernels: the runtime has its own, so nothing is compiled."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns whether the runtime has the kernel's arithmetic on this device."""
        return compatible_ops[self.NAME]


class FusedAdamBuilder(_Builder):
    """Adam on the device."""

    NAME = "fused_adam"


class CPUAdamBuilder(_Builder):
    """Adam on the host."""

    NAME = "cpu_adam"


class FusedLambBuilder(_Builder):
    """LAMB on the device."""

    NAME = "fused_lamb"


class FusedLionBuilder(_Builder):
    """Lion on the device."""

    NAME = "fused_lion"


class CPULionBuilder(_Builder):
    """Lion on the host."""

    NAME = "cpu_lion"


class AsyncIOBuilder(_Builder):
    """Reads and writes of swap files."""

    NAME = "async_io"


#: ``deepspeed.ops.__compatible_ops__``: the kernels that the runtime has.
compatible_ops: dict[str, bool] = {
    builder.NAME: True
    for builder in (FusedAdamBuilder, CPUAdamBuilder, FusedLambBuilder, FusedLionBuilder, CPULionBuilder, AsyncIOBuilder)
}
