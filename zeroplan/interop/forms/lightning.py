"""Lightning: the config for ``DeepSpeedStrategy(config=…)``, and the Trainer's arguments in ``trainer.json``."""

from __future__ import annotations

from typing import Any

from zeroplan.ds_config.framework_forms import lightning_form
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.interop.forms.configuration import Configuration, Form, FormFiles, json_text
from zeroplan.interop.forms.program import (
    adapter_files,
    must_adapt,
    must_bring_optimizer,
    must_checkpoint,
    must_load,
    training_notes,
)
from zeroplan.interop.forms.scripts.lightning import ARGUMENTS, lightning_script


def trainer_arguments(one: Configuration) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ds_config as Lightning takes it, and what its Trainer is given beside the strategy.

    Lightning clips by ``gradient_clip_val`` and refuses a ds_config that is at odds with it.
    """
    form, arguments = lightning_form(one.explicit)
    clipping = form.get("gradient_clipping")
    if clipping:
        arguments["gradient_clip_val"] = clipping
    return form, arguments | {"devices": one.cluster.gpus, "num_nodes": one.cluster.nodes, "accelerator": "gpu"}


def _lightning(one: Configuration) -> FormFiles:
    form, arguments = trainer_arguments(one)
    path, micro = one.beside(ARGUMENTS), one.workload.batch.micro_batch
    return FormFiles(
        {one.output: dump_ds_config(form), path: json_text(arguments), **adapter_files(one)},
        program_must=(
            f"build Trainer(strategy=DeepSpeedStrategy(config={one.output!r}), **arguments) with the arguments in {path}",
            *must_load(one),
            f"give its DataLoader batch_size={micro}",
            *must_adapt(one),
            *must_checkpoint(one),
            *must_bring_optimizer(one),
        ),
        notes=training_notes(one, "optimizer.params.lr", one.carried),
    )


#: Lightning finds its ranks in torchrun's variables; those of DeepSpeed's launcher it does not know.
LIGHTNING = Form(_lightning, ("torchrun", "slurm"), script=lightning_script)
