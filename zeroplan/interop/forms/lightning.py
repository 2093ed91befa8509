"""Lightning: the config for ``DeepSpeedStrategy(config=…)``, and the Trainer's arguments in ``trainer.json``."""

from __future__ import annotations

import re
from typing import Any

from zeroplan.ds_config.framework_forms import lightning_form
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.interop.forms.configuration import Configuration, Form, FormFiles, json_text
from zeroplan.interop.forms.program import (
    adapter_files,
    must_adapt,
    must_bring_optimizer,
    must_checkpoint,
    must_learn,
    must_load,
    training_notes,
)
from zeroplan.interop.forms.scripts.parts import script

#: The file of the Trainer's arguments, beside the ds_config.
ARGUMENTS = "trainer.json"

_LOOP = '''
class Module(LightningModule):
    """The model's own loss. The ds_config names the optimizer, so there is none to configure."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> None:
        return None


def main() -> None:
    config = json.loads(Path(@config).read_text())
    arguments = json.loads(Path(@arguments).read_text())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    zero3 = HfDeepSpeedConfig(config)  # while it lives, transformers builds a model of stage 3 in shards
    model = build_model()
    del zero3
    micro = config["train_micro_batch_size_per_gpu"]
    ranks = arguments["devices"] * arguments["num_nodes"]
    count = STEPS * micro * arguments["accumulate_grad_batches"] * ranks
    loader = DataLoader(Tokens(count, model.config.get_text_config().vocab_size), batch_size=micro, drop_last=True)
    trainer = Trainer(strategy=DeepSpeedStrategy(config=config), max_epochs=1, enable_checkpointing=False, **arguments)
    trainer.fit(Module(model), loader)
    print_peak()
'''


def lightning_script(one: Configuration) -> str:
    """Write the script for ``lightning.Trainer``. Raises BadInput: a model that no script can be written for."""
    paths = {"@config": one.output, "@arguments": one.sibling(ARGUMENTS)}
    loop = re.sub("@config|@arguments", lambda found: repr(paths[found[0]]), _LOOP)
    others = (
        "from lightning.pytorch import LightningModule, Trainer",
        "from lightning.pytorch.strategies import DeepSpeedStrategy",
        "from torch.utils.data import DataLoader",
        "from transformers.integrations import HfDeepSpeedConfig",
    )
    return script(one, loop, standard=("import json",), others=others)


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
    path, micro = one.sibling(ARGUMENTS), one.workload.batch.micro_batch
    return FormFiles(
        {one.output: dump_ds_config(form), path: json_text(arguments), **adapter_files(one)},
        program_must=(
            f"build Trainer(strategy=DeepSpeedStrategy(config={one.output!r}), **arguments) with the arguments in {path}",
            *must_load(one),
            f"give its DataLoader batch_size={micro}",
            *must_adapt(one),
            *must_checkpoint(one),
            *must_bring_optimizer(one),
            *must_learn(one),
        ),
        notes=training_notes(one, one.carried),
    )


#: Lightning finds its ranks in torchrun's variables; those of DeepSpeed's launcher it does not know.
LIGHTNING = Form(_lightning, ("torchrun", "slurm"), script=lightning_script)
