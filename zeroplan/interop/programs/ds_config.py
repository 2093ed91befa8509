"""A ds_config by itself: engine and sharding; what it leaves open, the program that loads it fills.

A script that builds a PipelineModule is DeepSpeed's own, too: it names stages, and often the model and the ds_config.
"""

from __future__ import annotations

from zeroplan.core.unmodelled import Effect
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan.ds_config.source import load_source
from zeroplan.interop.programs.builder import Builder
from zeroplan.interop.programs.document import Document, find_named_file
from zeroplan.interop.programs.pipeline_script import PipelineScript
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
        """Top-level keys of DeepSpeed's own; ``bf16`` and ``fp16`` where they are sections. A script's PipelineModule."""
        if document.pipeline is not None:
            return ("PipelineModule",)
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
        if document.pipeline is not None:
            return _of_script(run, document, document.pipeline)
        run.set("ds_config", load_source(document.data)[0])
        run.set("method", "")
        return run.setup()


def _of_script(run: Builder, document: Document, script: PipelineScript) -> Setup:
    """Read a script that builds a PipelineModule. The interval of its checkpoints stands in the file's ``pipeline`` section,
    which has the last word (runtime/pipe/engine.py, PipelineEngine.__init__).
    """
    if script.stages > 1:
        run.degree("pp", script.stages, "num_stages")
        if script.partition is not None:
            run.degree("partition", script.partition, "partition_method")
    for field, count in (("gpus", script.gpus), ("nodes", script.nodes)):
        if count is not None:
            run.set(field, count, "deepspeed")
    if script.model is not None:
        run.set("model", script.model, "from_pretrained")
    config = script.config
    if isinstance(config, str):
        config = load_source(find_named_file(config, document, "deepspeed.initialize"))[0]
    if config is not None:
        found = load_source(config)[0]
        section = found.get("pipeline")
        if script.interval and (section is None or isinstance(section, dict)):
            section = {"activation_checkpoint_interval": script.interval, **(section or {})}
            found = {**found, "pipeline": section}
        run.set("ds_config", found, "deepspeed.initialize")
    elif script.interval == 1:
        run.set("gradient_checkpointing", True, "activation_checkpoint_interval")
    elif script.interval:
        run.leave_out("activation_checkpoint_interval", Effect.UNKNOWN, "layers are recomputed in groups; none is planned so")
    run.set("method", "full")
    defaults = [f"the default of --{name}" for name in script.defaults]
    for clause in ("layers that are the model's embedding, blocks, norm and head", *defaults):
        run.assume(clause)
    return run.setup()
