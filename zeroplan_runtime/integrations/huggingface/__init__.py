"""transformers, TRL and accelerate drive the runtime: each takes a ds_config, and ``import deepspeed`` gives the runtime.

All three train by accelerate's DeepSpeed path, from which they save, resume, generate and wrap adapters. So one place is taken,
DeepSpeed's own, by :mod:`zeroplan_runtime.compat.deepspeed`; a Trainer or a plugin of ours would repeat that path and part from
it with every release.
"""

from __future__ import annotations

from typing import Any

from zeroplan_runtime.compat.deepspeed.install import install

__all__ = ["zeroplan_config"]


def zeroplan_config(
    stage: int = 2, *, offload_optimizer: bool = False, offload_parameters: bool = False, **sections: Any
) -> dict[str, Any]:
    """Puts the runtime in DeepSpeed's place and returns a ds_config whose other values are the tool's own arguments.

    Give it to ``TrainingArguments(deepspeed=…)``, ``SFTConfig(deepspeed=…)`` or ``DeepSpeedPlugin(hf_ds_config=…)``. Call it
    before anything imports DeepSpeed.

    Args:
        stage: the ZeRO stage, 0 to 3.
        offload_optimizer: keep the masters and the optimizer's states in host memory and update them there.
        offload_parameters: keep the parameters in host memory; stage 3 only.
        sections: more of the ds_config, such as ``gradient_clipping=0.5`` or ``zeroplan={"fused_loss": False}``.

    Raises:
        RuntimeError: when DeepSpeed itself has been imported already.
    """
    install()
    zero: dict[str, Any] = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        **sections,
    }
