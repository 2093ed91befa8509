"""transformers' Trainer and TRL's SFTTrainer."""

from __future__ import annotations

from zeroplan.interop.forms.configuration import Configuration
from zeroplan.interop.forms.program import folder_of
from zeroplan.interop.forms.scripts.parts import script

_TRAINER = """
def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])
    model = build_model()  # after the arguments: at stage 3 they have it built in shards
    count = STEPS * arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    data = Tokens(count, model.config.get_text_config().vocab_size)
    if TEXT is None:
        arguments.max_steps = STEPS
    Trainer(model=model, args=arguments, train_dataset=data).train()
    print_peak()
"""

_TRL = """
def main() -> None:
    (arguments,) = HfArgumentParser(SFTConfig).parse_json_file(sys.argv[1])
    model = build_model()  # after the arguments: at stage 3 they have it built in shards
    count = STEPS * arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    tokens = Tokens(count, model.config.get_text_config().vocab_size).tokens.tolist()
    arguments.dataset_kwargs = {"skip_prepare_dataset": True}  # pieces are tokens already
    if TEXT is None:
        arguments.max_steps = STEPS
    SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
        processing_class=AutoTokenizer.from_pretrained(MODEL),@adapters
    ).train()
    print_peak()
"""
_LEARNING_RATE = "the program's default holds until training_arguments.json has learning_rate"


def trainer_script(one: Configuration) -> str:
    """The script for ``transformers.Trainer``, whose one argument is ``training_arguments.json``.

    Raises:
        BadInput: a model that no script can be written for.
    """
    names = "from transformers import HfArgumentParser, Trainer, TrainingArguments"
    return script(one, _TRAINER, standard=("import sys",), others=(names,), checkpoints=False, learning_rate=_LEARNING_RATE)


def trl_script(one: Configuration) -> str:
    """The script for ``trl.SFTTrainer``, whose one argument is ``training_arguments.json``.

    Raises:
        BadInput: a model that no script can be written for.
    """
    lora = one.workload.lora_rank is not None
    adapters = f"\n        peft_config=LoraConfig.from_pretrained({folder_of(one)!r})," if lora else ""
    others = ("import datasets", "from transformers import HfArgumentParser", "from trl import SFTConfig, SFTTrainer")
    return script(
        one,
        _TRL.replace("@adapters", adapters),
        standard=("import sys",),
        others=(*others, *(("from peft import LoraConfig",) if lora else ())),
        checkpoints=False,
        adapts=False,
        learning_rate=_LEARNING_RATE,
    )
