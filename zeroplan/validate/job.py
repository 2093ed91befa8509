"""A run as the ranks get it: plain values, written as JSON for processes of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zeroplan.core.errors import BadInput
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.tape_options import auto_class_of
from zeroplan.core.workload import DType
from zeroplan.ds_config.writer import write_ds_config
from zeroplan.engines.base import Case

if TYPE_CHECKING:
    from zeroplan.validate.live import Live

#: Optimizer steps that a run takes; peaks repeat from the second applied one on.
STEPS = 3
#: fp16 begins at this loss scale where no file says otherwise, so that no step is lost to finding it.
_FP16_POWER = 8
#: Small enough that no optimizer leaves the loss's range within the few steps of a run.
_LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One configuration to run. `model` is a transformers config; `ds_config` serves the engines that read one. `live` is the
    user's own module instead, which goes to other processes in a file of its own.
    """

    label: str
    engine: str
    stage: int
    model: dict[str, Any]
    auto_class: str
    micro_batch: int
    seq_len: int
    grad_accum: int
    dtype: str
    optimizer: str
    attn: str
    gradient_checkpointing: bool
    lora_rank: int | None
    lora_targets: tuple[str, ...]
    steps: int
    timeout: float
    ds_config: dict[str, Any] = field(default_factory=dict)
    live: Live | None = None

    @property
    def swap_folders(self) -> tuple[str, ...]:
        """Where the engine keeps its swap files: the optimizer's and the parameters' folder, or none."""
        zero = self.ds_config.get("zero_optimization", {})
        sections = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
        paths = [section.get("nvme_path") for section in sections if section.get("device") == "nvme"]
        return tuple(str(path) for path in paths if path)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the module."""
        return asdict(replace(self, live=None))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> VerifyJob:
        """The inverse of :meth:`to_json`."""
        return cls(**{**values, "lora_targets": tuple(values["lora_targets"])})


def job_of(
    case: Case,
    engine: str,
    label: str,
    *,
    raw: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    timeout: float = 300.0,
    live: Live | None = None,
) -> VerifyJob:
    """The job of a case. `raw` is the ds_config that the case came from, `live` the user's module and batch.

    Raises:
        BadInput: when the model has no config to build it from.
    """
    spec, work = case.spec, case.workload
    if live is None and not spec.config:
        remedy = "give a hub id, a folder or a config.json"
        if spec.source == "module":
            remedy = "give inputs=…, the arguments of one forward, to run the module itself"
        raise BadInput(f"{spec.name} has no config to build it from", where="MODEL", remedy=remedy)
    config: dict[str, Any] = {}
    if engine == "zeroplan":
        config = _runtime_config(case, raw or {}, timeout)
    elif engine == "deepspeed":
        given = _optimizer(work.optimizer) if "optimizer" not in (raw or {}) else None
        config = write_ds_config(case.zero, work, world_size=case.layout.dp, optimizer=given, source=raw)
    return VerifyJob(
        label=label,
        engine=engine,
        stage=case.zero.stage,
        model={} if live else json.loads(json.dumps(dict(spec.config), default=str)),
        auto_class="" if live else spec.auto_class or auto_class_of(spec.config),
        micro_batch=work.micro_batch,
        seq_len=work.seq_len or 1,
        grad_accum=work.grad_accum,
        dtype=work.dtype.value,
        optimizer=work.optimizer,
        attn=work.attn.value,
        gradient_checkpointing=work.gradient_checkpointing,
        lora_rank=work.lora_rank,
        lora_targets=tuple(work.lora_targets),
        steps=steps,
        timeout=timeout,
        ds_config=config,
        live=live,
    )


def _optimizer(name: str) -> dict[str, Any]:
    """The ``optimizer`` section for one of the ledger's names."""
    written = find_optimizer(name).written
    if written is None:
        raise BadInput(
            f"DeepSpeed builds no {name} from a config", where="--optimizer", remedy="give --ds-config, or use adamw"
        )
    return {"type": written.type, "params": {**written.params, "lr": _LEARNING_RATE}}


def _runtime_config(case: Case, raw: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The file as it is, with the batches and the precision made definite; without a file, what the flags say."""
    work = case.workload
    config = {key: value for key, value in raw.items() if key not in ("train_batch_size", "fp16", "bf16")}
    config["train_micro_batch_size_per_gpu"] = work.micro_batch
    config["gradient_accumulation_steps"] = work.grad_accum
    config.setdefault("gradient_clipping", 1.0)
    zero = config.get("zero_optimization")
    config["zero_optimization"] = {**_offload(case), **(zero if isinstance(zero, Mapping) else {}), "stage": case.zero.stage}
    config.setdefault("optimizer", _optimizer(work.optimizer))
    config["zeroplan"] = {"timeout": timeout, **dict(config.get("zeroplan") or {})}
    if work.dtype is not DType.FP32:
        section = raw.get(work.dtype.value)
        own = {"initial_scale_power": _FP16_POWER} if work.dtype is DType.FP16 and not section else {}
        config[work.dtype.value] = {**own, **(section if isinstance(section, Mapping) else {}), "enabled": True}
    return config


def _offload(case: Case) -> dict[str, Any]:
    """The offload sections that flags stand for."""
    optimizer, param = case.zero.offload_optimizer, case.zero.offload_param
    found: dict[str, Any] = {}
    if optimizer:
        found["offload_optimizer"] = {"device": optimizer.device.value, "nvme_path": optimizer.nvme_path}
    if param:
        found["offload_param"] = {"device": param.device.value, "nvme_path": param.nvme_path}
    return found


def ended_early(result: Mapping[str, Any]) -> bool:
    """Whether a rank's result says that its run ended early, so that the other ranks wait for it in vain."""
    return any(key in result for key in ("out_of_memory", "error", "bad_input"))
