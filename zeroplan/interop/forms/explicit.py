"""The explicit ds_config: for ``deepspeed.initialize``, for ``zeroplan_runtime.initialize``, and for accelerate."""

from __future__ import annotations

from typing import Any

from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.parallel import ParallelLayout
from zeroplan.core.workload import Compilation, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.ds_config.writer import dump_ds_config, write_ds_config
from zeroplan.interop.forms.accelerate_config import accelerate_deepspeed, accelerate_ranks
from zeroplan.interop.forms.configuration import Configuration, Form, FormFiles, document_text
from zeroplan.interop.forms.program import (
    adapter_files,
    must_adapt,
    must_bring_optimizer,
    must_checkpoint,
    must_compile,
    must_learn,
    must_load,
    training_notes,
)
from zeroplan.interop.forms.scripts.accelerate import deepspeed_script as accelerate_script
from zeroplan.interop.forms.scripts.parts import TRAIN_BY_ENGINE, require_optimizer_of_deepspeed, script

_RUNTIME_LOOP = (
    """
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", required=True)
    config = json.loads(Path(parser.parse_args().deepspeed_config).read_text())
    model = build_model()
    data = Tokens(STEPS * config["train_batch_size"], model.config.get_text_config().vocab_size)
    engine, _, loader, _ = zeroplan_runtime.initialize(model=model, config=config, training_data=data)
"""
    + TRAIN_BY_ENGINE
)


def runtime_script(one: Configuration) -> str:
    """Write the script for ``zeroplan_runtime.initialize``. Raises BadInput: a model that no script can be written for."""
    whole = _RUNTIME_LOOP.replace(TRAIN_BY_ENGINE, "    engine.compile()\n" + TRAIN_BY_ENGINE)
    loop = whole if one.workload.compile is Compilation.MODEL else _RUNTIME_LOOP
    return script(one, loop, standard=("import argparse", "import json"), others=("import zeroplan_runtime",))


_LOOP = (
    """
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", required=True)
    config = json.loads(Path(parser.parse_args().deepspeed_config).read_text())
    deepspeed.init_distributed()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    zero3 = HfDeepSpeedConfig(config)  # while it lives, transformers builds a model of stage 3 in shards
    model = build_model()
    data = Tokens(STEPS * config["train_batch_size"], model.config.get_text_config().vocab_size)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=data,
        config=config,
    )
    del zero3
"""
    + TRAIN_BY_ENGINE
)


def deepspeed_script(one: Configuration) -> str:
    """Write the script for ``deepspeed.initialize``.

    Raises:
        BadInput: a model or an optimizer that no script can be written for.
    """
    require_optimizer_of_deepspeed(one)
    return script(
        one,
        _LOOP,
        standard=("import argparse", "import json"),
        others=("import deepspeed", "from transformers.integrations import HfDeepSpeedConfig"),
    )


def explicit_ds_config(zero: ZeroConfig, workload: Workload, layout: ParallelLayout) -> dict[str, Any]:
    """A ds_config that ``deepspeed.initialize`` takes as it is: no ``auto``, batches, precision and optimizer stated.

    The learning rate and the like are left out: they are the user's to choose, and the optimizer has defaults. Those of a file
    that is read are put in as its configuration is written (:func:`zeroplan.interop.training.trained_config`).
    """
    written = find_optimizer(workload.numerics.optimizer).written_for(zero.deepspeed)
    block = None if written is None else {"type": written.type} | ({"params": written.params} if written.params else {})
    return write_ds_config(zero, workload, world_size=layout.dp, optimizer=block)


def ranks_file(one: Configuration) -> dict[str, str]:
    """accelerate's file that starts the ranks alone, by its path, where accelerate is the launcher."""
    return (
        {one.sibling("accelerate.yaml"): document_text("", accelerate_ranks(one.cluster))}
        if one.launcher == "accelerate"
        else {}
    )


def _explicit(one: Configuration) -> FormFiles:
    started = ranks_file(one)
    return FormFiles(
        {one.output: dump_ds_config(one.explicit), **adapter_files(one), **started},
        ("--deepspeed_config", one.output),
        accelerate_config=next(iter(started), ""),
        program_must=(
            *must_load(one),
            *must_adapt(one),
            *must_checkpoint(one),
            *must_compile(one),
            *must_bring_optimizer(one),
            *must_learn(one),
        ),
        notes=training_notes(one, one.carried),
    )


def _accelerate(one: Configuration) -> FormFiles:
    beside = one.sibling("accelerate.yaml")
    yaml = accelerate_deepspeed(one.zero, one.cluster, one.output)
    micro = one.workload.batch.micro_batch
    return FormFiles(
        {one.output: dump_ds_config(one.explicit), beside: document_text(beside, yaml), **adapter_files(one)},
        accelerate_config=beside,
        program_must=(
            *must_load(one),
            f"give its DataLoader batch_size={micro}",
            *must_adapt(one),
            *must_checkpoint(one),
            *(must_bring_optimizer(one) or ("hand accelerate a DummyOptim: the ds_config names the optimizer",)),
            *must_learn(one),
        ),
        notes=training_notes(one, one.carried),
    )


DEEPSPEED = Form(_explicit, ("deepspeed", "torchrun", "accelerate", "slurm"), script=deepspeed_script)
ACCELERATE = Form(_accelerate, ("accelerate", "slurm"), script=accelerate_script)
RUNTIME = Form(_explicit, script=runtime_script, program="zeroplan")
