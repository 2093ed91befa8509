"""A loop of plain DeepSpeed."""

from __future__ import annotations

from zeroplan.interop.forms.configuration import Configuration
from zeroplan.interop.forms.scripts.parts import TRAIN_BY_ENGINE, require_optimizer_of_deepspeed, script

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
