"""Rules: settings that DeepSpeed refuses, ignores or changes, one entry each. See :class:`Rule`.

Paths of `source` are within deepspeed/ at 0.19.8. A test runs DeepSpeed's own parser and engine against these entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroplan.core.workload import DType
from zeroplan.core.zero_config import OffloadDevice, ZeroConfig
from zeroplan.ds_config.dialect import Dialect
from zeroplan.ds_config.findings import At, Finding, Severity
from zeroplan.ds_config.runtime_options import RuntimeOptions
from zeroplan.ds_config.training import TrainingSettings
from zeroplan.ds_config.wrappers import as_built_today, bf16_optimizer_takes_stage_1


@dataclass(frozen=True, slots=True)
class View:
    """The config as a rule sees it.

    Attributes:
        zero: the sharding and offload that the file asks for, defaults included.
        training: batches, precision and optimizer; None for what the file leaves open.
        values: the file's coerced values by canonical path.
        autos: canonical paths that stand at ``auto``.
        runtime_options: the ``zeroplan`` section.
    """

    zero: ZeroConfig
    training: TrainingSettings
    values: Mapping[str, Any]
    autos: tuple[str, ...] = ()
    runtime_options: RuntimeOptions = field(default_factory=RuntimeOptions)

    def says(self, path: str, default: Any = None) -> Any:
        """Return the coerced value of a path, or `default` where the file is silent."""
        return self.values.get(path, default)

    def has(self, path: str) -> bool:
        """Return whether the file says anything at that path."""
        return path in self.values

    def in_file(self, path: str) -> bool:
        """Return whether the file has the key, with a value or at ``auto``."""
        return path in self.values or path in self.autos

    @property
    def dtype(self) -> DType:
        """The model's dtype, fp32 where it is left open."""
        return self.training.dtype or DType.FP32

    @property
    def offload(self) -> OffloadDevice:
        """The device to which the optimizer is offloaded."""
        return self.zero.offload_optimizer.device

    @property
    def uses_files(self) -> bool:
        """Whether anything is offloaded to NVMe; DeepSpeed does so at stage 3 only."""
        return self.zero.stage == 3 and OffloadDevice.NVME in (self.offload, self.zero.offload_param.device)

    @property
    def cpu_adam(self) -> bool:
        """Whether the config's optimizer becomes ``DeepSpeedCPUAdam`` itself (not torch's Adam, not ZenFlow's)."""
        return self.training.builds_adam and self.offload is not OffloadDevice.NONE and self.zero.zenflow is None

    @property
    def bf16_optimizer(self) -> bool:
        """Whether ``BF16_Optimizer`` is built at stage 1."""
        return bf16_optimizer_takes_stage_1(as_built_today(self.zero, self.dtype), self.dtype)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule says `what` (formatted with the view as ``v``) about `where`, with the `remedy`, when `applies` holds.

    It is an error of ``deepspeed.initialize`` unless it says otherwise. `dialects` are those of the programs of which it holds.
    """

    id: str
    where: str
    applies: Callable[[View], bool]
    what: str
    remedy: str = ""
    source: str = ""
    severity: Severity = Severity.ERROR
    at: At = At.ENGINE
    dialects: tuple[Dialect, ...] = (Dialect.DEEPSPEED,)

    def finding(self, view: View) -> Finding:
        """Return the rule's finding for this config."""
        return Finding(self.id, self.severity, self.where, self.what.format(v=view), self.remedy, self.source, self.at)


#: The dialects of a rule that holds of DeepSpeed and of zeroplan's runtime.
BOTH = (Dialect.DEEPSPEED, Dialect.RUNTIME)
