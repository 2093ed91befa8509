"""transformers' Trainer and TRL's SFTTrainer: a ds_config with ``auto`` where they fill, and the arguments that fill it.

The user's own program gets the arguments as flags, since it has others of its own; a script that is written with them reads
``training_arguments.json``, its only argument, by ``HfArgumentParser.parse_json_file``.

Source: transformers 5.17 ``training_args.py``, ``hf_argparser.py`` and ``integrations/deepspeed.py``; TRL 1.16
``trainer/sft_config.py`` and ``trainer/model_config.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import CAUSAL_LM
from zeroplan.core.optimizers import find_optimizer
from zeroplan.core.workload import ChunkedHead, DType
from zeroplan.ds_config.framework_forms import hf_trainer_form
from zeroplan.ds_config.writer import dump_ds_config
from zeroplan.interop.forms.configuration import Configuration, Form, FormFiles, json_text
from zeroplan.interop.forms.explicit import ranks_file
from zeroplan.interop.forms.program import (
    CHECKPOINTING,
    adapter_files,
    asked_for,
    attention,
    folder_of,
    must_adapt,
    must_else,
    must_feed,
    must_load,
    must_quantize,
    training_notes,
)
from zeroplan.interop.forms.scripts.parts import script
from zeroplan.interop.training import ADAPTERS as ADAPTER_VALUES
from zeroplan.techniques.liger import Liger

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


ARGUMENTS = "training_arguments.json"
#: ModelConfig's names; it loads in fp32 unless told otherwise, of which the host would hold twice the planned bytes.
_DTYPES = {DType.BF16: "bfloat16", DType.FP16: "float16", DType.FP32: "float32"}
#: TRL 1.16, ``trainer/sft_trainer.py``: compute_loss asks for ``fused_lm_head``.
_FUSED_HEAD = "the plan is of SFTTrainer's own head and loss, which never hold the whole logits"
_WHOLE_LOGITS = "the plan counts whole logits, which SFTTrainer's own head and loss never hold: ask for --chunked-head"
#: Names of further arguments that a note lists at most.
_MOST_NAMES = 8
_LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "slurm")


def training_arguments(one: Configuration) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ds_config for the Trainer, and its TrainingArguments: all that decides memory and speed, and nothing else.

    Raises:
        BadInput: an optimizer that neither DeepSpeed nor the Trainer builds.
    """
    work = one.workload
    form, arguments = hf_trainer_form(one.explicit)
    arguments |= {"bf16": work.numerics.dtype is DType.BF16, "fp16": work.numerics.dtype is DType.FP16}
    arguments["gradient_checkpointing"] = work.gradient_checkpointing
    if work.gradient_checkpointing:
        arguments["gradient_checkpointing_kwargs"] = CHECKPOINTING
    if "optimizer" not in form:
        row = find_optimizer(work.numerics.optimizer)
        if not row.optim:
            raise BadInput(f"the Trainer builds no {row.name}", where="--form", remedy="use --form explicit")
        arguments["optim"] = row.optim
    arguments |= asked_for(one, model=False)
    scheduler = one.training.scheduler
    if scheduler is not None:
        form["scheduler"] = dict(scheduler)  # as it stands in the file: the Trainer fills what it leaves open
    arguments |= {name: value for name, value in one.training.values.items() if name not in ADAPTER_VALUES}
    return form, arguments | {"deepspeed": one.output}


def flags(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments as HfArgumentParser takes them on a command line: names of a list one by one, objects as JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, Mapping) else value]
        words += [f"--{name}", *map(str, values)]
    return tuple(words)


def _trainer(one: Configuration) -> FormFiles:
    form, arguments = training_arguments(one)
    return _files(one, form, arguments, arguments, (*must_load(one), *must_adapt(one)))


def _trl(one: Configuration) -> FormFiles:
    """Return the arguments of SFTConfig; the user's program gets those of TRL's ModelConfig as well.

    Raises:
        BadInput: a training that is not SFTTrainer's.
    """
    work = one.workload
    if work.batch.pairs or work.objective.reference is not None or one.model.auto_class not in ("", CAUSAL_LM):
        what = "trl is SFTTrainer's form, which trains causal language models on single answers"
        raise BadInput(what, where="--form", remedy="use --form trainer, whose arguments TRL's other trainers take as well")
    form, arguments = training_arguments(one)
    arguments |= {"max_length": work.batch.seq_len, "packing": False, "loss_type": "nll"}
    own = arguments | {"attn_implementation": attention(work), "dtype": _DTYPES[work.numerics.dtype]}
    own |= asked_for(one)
    if work.lora_rank is not None:
        own |= {name: value for name, value in one.training.values.items() if name in ADAPTER_VALUES}
    heads = () if work.has(Liger) else (_FUSED_HEAD,) if work.has(ChunkedHead) else (_WHOLE_LOGITS,)
    return _files(one, form, arguments, own, (*must_feed(one), *must_quantize(one), *must_else(one)), heads)


def _files(
    one: Configuration,
    form: Mapping[str, Any],
    arguments: Mapping[str, Any],
    own: Mapping[str, Any],
    must: tuple[str, ...],
    notes: tuple[str, ...] = (),
) -> FormFiles:
    """The files; `own` are the arguments of the user's program."""
    path, started = one.sibling(ARGUMENTS), ranks_file(one)
    texts = {
        one.output: dump_ds_config(form),
        path: json_text(_as_written(arguments)),
        **adapter_files(one),
        **started,
    }
    return FormFiles(
        texts,
        (path,) if one.new_script else flags(own),
        accelerate_config=next(iter(started), ""),
        program_must=must,
        notes=(
            *notes,
            *_other_arguments(one),
            *training_notes(
                one, one.training.values, where=f"learning_rate in {path}" if one.new_script else "--learning_rate"
            ),
        ),
    )


def _other_arguments(one: Configuration) -> tuple[str, ...]:
    """Return the note on what else the user's program was given."""
    rest = one.training.rest
    if not rest or one.new_script:
        return ()
    names = ", ".join(rest[:_MOST_NAMES]) + (f" and {len(rest) - _MOST_NAMES} more" if len(rest) > _MOST_NAMES else "")
    return (f"the command has what moves memory and training: add {names} of {one.training.file}",)


def _as_written(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of transformers 5, which takes a share of the steps as ``warmup_steps`` below 1."""
    found = dict(arguments)
    ratio = found.pop("warmup_ratio", None)
    if ratio and not found.get("warmup_steps"):
        found["warmup_steps"] = ratio
    return found


TRAINER = Form(_trainer, _LAUNCHERS, script=trainer_script, program="hf-trainer")
TRL = Form(_trl, _LAUNCHERS, script=trl_script, program="trl")
