"""The ds_config of a run of ``verify``: the user's file or the flags, with the sections of the degrees that ranks share.

Note [DeepSpeed on a CPU]
    DeepSpeed would compile its own optimizers for a CPU, each on its first use, for minutes. torch's AdamW stands in there for
    its FusedAdam and its DeepSpeedCPUAdam: it keeps the same states. Others of its own are refused, and so are files on a
    disk, whose op is compiled, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import deepspeed_type, find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import DType, GradientCheckpointing
from zeroplan.ds_config.writer import write_ds_config
from zeroplan.engines.case import Case
from zeroplan.engines.verification import optimizer_section

#: Architectures whose layers trainer_pipeline.py lists.
PIPELINED = ("llama", "mistral", "qwen2", "qwen3")
_SHARED = ("sequence_parallel_size", "data_parallel_size")


def run_config(case: Case, ds_config: Mapping[str, Any] | None, *, on_cpu: bool) -> dict[str, Any]:
    """Return the user's file without ``auto`` or, without a file, an explicit config of what the flags say.

    Which ranks the product of the batch sizes counts depends on the kind of parallelism, so it is left out.

    Args:
        ds_config: the user's, or None.
        on_cpu: whether it runs without a GPU. See Note [DeepSpeed on a CPU].

    Raises:
        BadInput: what DeepSpeed runs on GPUs alone.
    """
    optimizer = optimizer_section(case.workload.numerics.optimizer) if "optimizer" not in (ds_config or {}) else None
    config = write_ds_config(case.zero, case.workload, optimizer=optimizer, source=ds_config)
    _require_planned(config, case.layout)
    _write_degrees(config, case)
    if on_cpu:
        _require_on_cpu(case)
        _without_own_kernels(config)
    return config


def _require_planned(config: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Refuse sections by which DeepSpeed would divide the work otherwise than the plan does."""
    experts, stages = config.get("expert_parallel", {}), config.get("pipeline", {}).get("stages")
    asked = {
        "tensor_parallel.autotp_size": config.get("tensor_parallel", {}).get("autotp_size", 0) > 1 and layout.tp == 1,
        "sequence_parallel_size": config.get("sequence_parallel_size", 1) > 1 and layout.ulysses == 1,
        "expert_parallel": bool(experts.get("enabled")) and not layout.auto_ep,
    }
    for key, beyond in asked.items():
        if beyond:
            what = "no plan has this parallelism of the file, and verify holds runs against plans"
            raise BadInput(what, where=key, remedy="remove the section; zeroplan estimate --ds-config FILE says why")
    if isinstance(stages, int) and stages > 1 and layout.pp == 1:
        what = f"the program makes the {stages} stages of a PipelineModule, no file does"
        raise BadInput(what, where="pipeline.stages", remedy=f"give --pp {stages}")


def _write_degrees(config: dict[str, Any], case: Case) -> None:
    layout, work = case.layout, case.workload
    if layout.tp > 1:
        config["tensor_parallel"] = {**config.get("tensor_parallel", {}), "autotp_size": layout.tp}
    if layout.auto_ep:
        config["expert_parallel"] = {**config.get("expert_parallel", {}), "enabled": True, "autoep_size": layout.ep}
    if layout.ulysses > 1:  # the groups are those that transformers' integration hands over (trainer_mesh.py)
        for name in _SHARED:
            config.pop(name, None)
    if layout.pp > 1:
        _require_layers(case)
        together = 0 if (again := work.technique(GradientCheckpointing)) is None else again.interval
        given = {"use_reentrant": work.reentrant, **config.get("pipeline", {})}
        config["pipeline"] = {**given, "activation_checkpoint_interval": together}


def _require_layers(case: Case) -> None:
    """Refuse models whose blocks need more than hidden states and positions."""
    kind, config = case.spec.model_type, case.spec.config
    if kind not in PIPELINED:
        what = f"verify has no list of {kind}'s layers for a PipelineModule"
        raise BadInput(what, where="--pp", remedy=f"of {', '.join(PIPELINED)} it has")
    window = config.get("sliding_window") if config.get("use_sliding_window", kind == "mistral") else None
    if window and (case.workload.batch.seq_len or 0) > window:
        what = f"layers of a PipelineModule get no masks here, and attention looks back {window:,} tokens alone"
        raise BadInput(what, where="--seq-len", remedy=f"use at most {window:,}")


def _require_on_cpu(case: Case) -> None:
    """Refuse what DeepSpeed has for GPUs alone, or would compile for a CPU."""
    written = find_optimizer(case.workload.numerics.optimizer).written
    if written is not None and written.own and written.fused and not written.adam:
        what = f"DeepSpeed's {written.type} is a kernel of its own, which verify does not have compiled for a CPU"
        raise BadInput(what, where="--optimizer", remedy="use adamw, or run it on a GPU")
    if case.workload.numerics.dtype is DType.FP16:
        what = "DeepSpeed has no fp16 on a CPU"
        raise BadInput(what, where="--dtype", remedy="use bf16, or --engine zeroplan")
    zero = case.zero
    if "nvme" in (zero.offload_optimizer.device, zero.offload_param.device):
        what = "DeepSpeed reads and writes NVMe by an op that verify does not have compiled for a CPU"
        raise BadInput(what, where="--offload-optimizer", remedy="use cpu, --engine zeroplan, or a GPU")


def _without_own_kernels(config: dict[str, Any]) -> None:
    """Let torch's Adam step, in one kernel as DeepSpeed's. Muon builds the one for its vectors without that choice."""
    section = config.get("optimizer") or {}
    params, kind = section.get("params") or {}, deepspeed_type(str(section.get("type", "")))
    if kind is not None and kind.torch_adam and not params.get("torch_adam"):
        fused = {"fused": True} if kind.adam else {}
        config["optimizer"] = {**section, "params": {**params, "torch_adam": True, **fused}}
    config["zero_force_ds_cpu_optimizer"] = False
