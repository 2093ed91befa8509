"""A ds_config by itself: engine and sharding; what it leaves open, the program that loads it fills."""

from __future__ import annotations

from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.ds_config.source import load_source
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document
from zeroplan.interop.programs.program import Program
from zeroplan.interop.setups import Setup

_ONLY = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
)


class DsConfigFile(Program):
    """``ds_config.json``."""

    name = "ds_config"
    title = "DeepSpeed"
    version = DEEPSPEED_VERSION

    def recognises(self, document: Document) -> tuple[str, ...]:
        """Top-level keys of DeepSpeed's own; ``bf16`` and ``fp16`` where they are sections."""
        sections = tuple(key for key in ("bf16", "fp16", "optimizer", "scheduler") if isinstance(document.data.get(key), dict))
        batch = document.has("train_batch_size") if sections else ()
        return (*document.has(*_ONLY), *(sections if sections[:1] in (("bf16",), ("fp16",)) else ()), *batch)

    def could_own(self, document: Document) -> bool:
        """A batch size alone is enough for DeepSpeed."""
        return "train_batch_size" in document.data

    def read(self, document: Document) -> Setup:
        """The file as it is: :mod:`zeroplan.ds_config` reads it where the model and the ranks are known."""
        run = Builder(document, self.name, self.label)
        run.set("engine", "deepspeed")
        run.set("ds_config", load_source(document.data)[0])
        run.set("method", "")
        return run.setup()
