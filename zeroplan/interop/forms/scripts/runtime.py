"""A loop of the included runtime."""

from __future__ import annotations

from zeroplan.core.workload import Compilation
from zeroplan.interop.forms.configuration import Configuration
from zeroplan.interop.forms.scripts.parts import TRAIN_BY_ENGINE, script

_LOOP = (
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
    whole = _LOOP.replace(TRAIN_BY_ENGINE, "    engine.compile()\n" + TRAIN_BY_ENGINE)
    loop = whole if one.workload.compile is Compilation.MODEL else _LOOP
    return script(one, loop, standard=("import argparse", "import json"), others=("import zeroplan_runtime",))
