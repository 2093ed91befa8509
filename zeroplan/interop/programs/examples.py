"""transformers' example scripts, by their names: the head that they train, their own lengths, and loops without the Trainer.

Source: transformers, ``examples/pytorch``: ``text-classification/run_glue.py``, ``run_classification.py`` and ``run_xnli.py``,
``question-answering/run_qa.py``, ``token-classification/run_ner.py``, ``language-modeling/run_clm.py`` and ``run_mlm.py``,
``summarization``, ``translation`` and their forms ``*_no_trainer.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zeroplan.core.tasks import Task
from zeroplan.core.unmodelled import Effect
from zeroplan.core.workload import OptimizerKind
from zeroplan.interop.programs.builder import Builder

_NO_TRAINER = "_no_trainer"
#: Words in a script's name that tell of a base or of adapters that its flags may not.
_QUANTISED = re.compile(r"q-?lora|[48][_-]?bit|int[48]|nf4|gptq|awq")
_ADAPTERS = re.compile(r"(?<![a-z])(q?lora|peft|dora|adapters?)(?![a-z])")
#: Heads without a tape or a formula.
_OTHER_HEADS = re.compile(r"(^|/)(multiple-choice/|run_(swag|plm|wav2vec2_pretraining))")


@dataclass(frozen=True, slots=True)
class _Example:
    """What a script trains.

    Attributes:
        name: what its path ends in, or the folder that it stands in.
        head: of the model.
        length: tokens of a sample where no flag says; None for the model's own.
        alone: the same for its form without the Trainer.
        packs: whether texts are joined and cut to one length, unless ``line_by_line``.
        generates: whether its form without the Trainer evaluates by ``generate``.
        whole_logits: whether what the model returns holds logits of every token and word.
    """

    name: re.Pattern[str]
    head: Task
    length: int | None = None
    alone: int | None = None
    packs: bool = False
    generates: bool = False
    whole_logits: bool = False


def _named(*parts: str) -> re.Pattern[str]:
    return re.compile(rf"(^|[/_])({'|'.join(parts)})")


_EXAMPLES = (
    _Example(_named("run_summarization", "run_translation"), Task.SEQ2SEQ, generates=True, whole_logits=True),
    _Example(_named("run_seq2seq_qa"), Task.SEQ2SEQ, 1024, 1024, whole_logits=True),
    _Example(_named("run_qa", "question-answering/"), Task.QUESTION_ANSWERING, 384, 384),
    _Example(
        _named("run_glue", "run_classification", "run_xnli", "text-classification/"), Task.SEQUENCE_CLASSIFICATION, 128, 128
    ),
    _Example(_named("run_ner", "run_pos", "token-classification/"), Task.TOKEN_CLASSIFICATION, None, 128),
    _Example(_named("run_mlm"), Task.MASKED_LM, packs=True, whole_logits=True),
    _Example(_named("run_clm"), Task.CAUSAL_LM, packs=True, whole_logits=True),
    _Example(_named("run_image_classification"), Task.IMAGE_CLASSIFICATION),
)


#: The scripts of ``examples/pytorch`` whose defaults are known here.
_KNOWN = re.compile(
    r"(^|/)run_(summarization|translation|seq2seq_qa|qa|glue|classification|xnli|ner|mlm|clm|image_classification)(_no_trainer)?\.py$"
)


def is_example(program: str) -> bool:
    """Whether a script is one of transformers' by its name."""
    return _KNOWN.search(program) is not None


def read_example(run: Builder) -> None:
    """Set what the name of a script tells, and leave out what it only speaks of; nothing for a file of arguments."""
    command = run.document.command
    if command is None:
        return
    path = command.program.lower()
    alone = _NO_TRAINER in path.rpartition("/")[2]
    found = next((one for one in _EXAMPLES if one.name.search(path)), None)
    if found is not None:
        _example(run, found, alone)
    elif _OTHER_HEADS.search(path):
        run.leave_out(
            "script", Effect.UNKNOWN, "its head is not modelled; the one that the model was published with is counted"
        )
    if alone:
        _own_loop(run, found)
    elif found is not None:
        _small_predictions(run)


def _example(run: Builder, found: _Example, alone: bool) -> None:
    run.set("head", found.head.value, command_key(run))
    length = found.alone if alone else found.length
    if "seq_len" not in run.fields and "max_length" in run.data:
        run.count("seq_len", "max_length")
    elif "seq_len" not in run.fields and length is not None:
        run.assume(f"samples of {length} tokens", seq_len=length)
    if found.packs and not run.flag("line_by_line"):
        run.set("dynamic_padding", False)


def command_key(run: Builder) -> str:
    """Return the name of the script, which stands for the key that said something."""
    return run.document.command.program.rpartition("/")[2] if run.document.command else ""


def _small_predictions(run: Builder) -> None:
    """These scripts keep predictions of classes, or of one word a token: next to nothing beside logits."""
    run.assumed = [clause for clause in run.assumed if not clause.startswith("evaluation keeps no logits")]
    if "eval_batch" in run.fields:
        run.assume("evaluation's predictions, some MiB in all, are not counted")


def _own_loop(run: Builder, found: _Example | None) -> None:
    """A loop over accelerate: torch's AdamW as it comes, an evaluation after each epoch, and no checkpoints unless asked."""
    gone = ("optim ", "no saves", "evaluation keeps no logits")
    run.assumed = [clause for clause in run.assumed if not clause.startswith(gone)]
    run.set("optimizer", "adamw")
    run.set("optimizer_kind", OptimizerKind.FOREACH.value)
    run.set("detached_loss", False)
    run.assume("the script's own loop: torch.optim.AdamW")
    steps = run.value("checkpointing_steps")
    if steps is not None:
        run.set("saves", True, "checkpointing_steps")
        run.set("saver", "accelerate")
    if found is not None and found.generates:
        run.leave_out(
            "evaluation", Effect.MORE, "the script evaluates by generate after each epoch, and its cache is in no figure"
        )
    elif found is not None:
        run.set("eval_batch", run.number("per_device_eval_batch_size") or 8, "per_device_eval_batch_size")
    else:
        run.leave_out("evaluation", Effect.MORE, "what the script's own evaluation takes")
    if found is None or found.whole_logits:
        says = "the loop keeps what the last micro batch returned, its logits among it, until the next forward is done"
        run.leave_out("outputs", Effect.MORE, says)


def read_script_name(run: Builder) -> None:
    """Leave out what the name of a script speaks of where no flag of it tells: a quantised base, adapters."""
    command = run.document.command
    if command is None:
        return
    name = command.program.rpartition("/")[2].lower()
    if _QUANTISED.search(name) and "quantize" not in run.fields:
        run.leave_out("script", Effect.UNKNOWN, f"{name[:60]}: by its name the base is quantised, as no flag says how")
    elif _ADAPTERS.search(name) and "lora_rank" not in run.fields:
        run.leave_out(
            "script", Effect.LESS, f"{name[:60]}: by its name it trains adapters; all parameters are counted as trained"
        )
    if "seq_len" not in run.fields and run.fields.get("head") != Task.IMAGE_CLASSIFICATION.value:
        run.open.setdefault("seq_len", "the script's own code decides the length of a sample; give --seq-len")
