"""FSDP2 and DDP: a program of plain torch, which reads no file, and accelerate's file for FSDP2."""

from __future__ import annotations

from collections.abc import Callable

from zeroplan.core.workload import DType
from zeroplan.interop.forms.accelerate_config import accelerate_fsdp2
from zeroplan.interop.forms.configuration import Configuration, Form, FormFiles, document_text
from zeroplan.interop.forms.program import adapter_files, must_adapt, must_load, training_notes
from zeroplan.interop.forms.scripts.accelerate import fsdp2_script as accelerate_script
from zeroplan.interop.forms.scripts.parts import taken_by_script
from zeroplan.interop.forms.scripts.torch import ddp_script, fsdp2_script

#: What accelerate 1.15 does otherwise (``utils/fsdp_utils.py``, fsdp2_prepare_model).
_ACCELERATE_DIFFERS = (
    "accelerate also shards the embedding, and the last norm with the head, as units of their own: its peak may differ "
    "from the plan's, which is of blocks and root"
)


def _script_alone(one: Configuration) -> FormFiles:
    """Return the adapters' files alone: the script holds the batch's split."""
    notes = training_notes(one, "the optimizer's lr in the script", taken_by_script(one))
    return FormFiles(adapter_files(one), notes=notes)


def _fsdp2_by_accelerate(one: Configuration) -> FormFiles:
    work = one.workload
    config = accelerate_fsdp2(one.zero, work, one.cluster)
    reduced = ("pass FullyShardedDataParallelPlugin(mixed_precision_policy=…) with reduce_dtype=torch.float32, as planned",)
    return FormFiles(
        {one.output: document_text(one.output, config), **adapter_files(one)},
        environment={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(work.batch.grad_accum)},
        accelerate_config=one.output,
        program_must=(
            *must_load(one),
            f"give its DataLoader batch_size={work.batch.micro_batch}",
            "step in accelerator.accumulate(model)",
            *must_adapt(one),
            "leave the model's own gradient checkpointing off",
            *(reduced if config["mixed_precision"] != "no" and work.numerics.reduce_dtype in (None, DType.FP32) else ()),
            f"step by {work.numerics.optimizer}",
        ),
        notes=(
            _ACCELERATE_DIFFERS,
            *training_notes(one, "the program's optimizer", taken_by_script(one) if one.new_script else ()),
        ),
    )


def _torch(script: Callable[[Configuration], str]) -> Form:
    return Form(_script_alone, main="", script=script)


FSDP2, DDP = _torch(fsdp2_script), _torch(ddp_script)
FSDP2_BY_ACCELERATE = Form(_fsdp2_by_accelerate, ("accelerate", "slurm"), main="accelerate.yaml", script=accelerate_script)
