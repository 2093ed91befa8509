"""transformers' example scripts, as people start them: their names tell the head, lengths, and loops without the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

Read = Callable[[str], Setup]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a command line as a script of one line."""

    def call(line: str) -> Setup:
        path = tmp_path / "train.sh"
        path.write_text(line + " --model_name_or_path google-bert/bert-base-cased --output_dir out\n")
        return read_setup(str(path))

    return call


@pytest.mark.parametrize(
    ("script", "head", "length"),
    [
        ("run_glue.py --task_name mnli --per_device_train_batch_size 2", "sequence-classification", 128),
        ("examples/question-answering/lora_run_qa.py --do_train --per_device_train_batch_size 24", "question-answering", 384),
        ("run_qa.py --max_seq_length 512 --per_device_train_batch_size 8 --do_train", "question-answering", 512),
        ("run_ner.py --do_train --per_device_train_batch_size 16", "token-classification", None),
        ("run_mlm.py --do_train --fp16 --per_device_train_batch_size 8", "masked-lm", None),
        (
            "examples/text-classification/fullhg_run_qnli.py --do_train --fp16 --per_device_train_batch_size 8",
            "sequence-classification",
            128,
        ),
        ("run_seq2seq_qa.py --do_train --fp16 --per_device_train_batch_size 8", "seq2seq", 1024),
        ("train.py --do_train --fp16 --per_device_train_batch_size 8", None, None),
    ],
)
def test_a_scripts_name_tells_its_head_and_length(read: Read, script: str, head: str | None, length: int | None) -> None:
    setup = read(f"python {script}")
    assert (setup.program, setup.ask.head, setup.ask.seq_len) == ("hf-trainer", head, length)
    assert ("seq_len" in setup.open) == (length is None)


def test_the_head_of_the_script_is_planned(tmp_path: Path) -> None:
    """DeBERTa's masked-language-model head over 128,000 words is more than half of such a plan, and no run_qa.py has it."""
    path = tmp_path / "qa.sh"
    path.write_text(
        "torchrun --nproc_per_node 2 run_qa.py --model_name_or_path microsoft/deberta-v3-base --do_train --do_eval --fp16\n"
    )
    report = estimate_report(Ask(files=(str(path),), depth="formula"))
    assert report.model.params == 183_833_090
    flag = estimate_report(Ask(files=(str(path),), depth="formula", task="masked-lm"))
    assert flag.model.params == 184_551_780


def beside_the_script(setup: Setup) -> list[tuple[str, Effect]]:
    """What is left out, but that the script itself is not there."""
    missing, *others = [(one.key, one.effect) for one in setup.unmodelled]
    assert missing[0].endswith(".py")
    assert missing[1] is Effect.UNKNOWN
    return others


def test_a_loop_without_the_trainer(read: Read) -> None:
    glue = read(
        "accelerate launch --num_processes 2 run_glue_no_trainer.py --num_train_epochs 1 --per_device_eval_batch_size 64"
    )
    assert (glue.ask.optimizer, glue.ask.optimizer_kind, glue.ask.value("eval_batch"), glue.ask.seq_len) == (
        "adamw",
        "foreach",
        64,
        128,
    )
    assert (glue.ask.detached_loss, glue.ask.value("saves"), glue.unmodelled) == (False, False, ())
    clm = read("accelerate launch --num_processes 2 run_clm_no_trainer.py --checkpointing_steps epoch --num_train_epochs 1")
    ask = clm.ask
    assert (ask.head, ask.value("dynamic_padding"), ask.value("eval_batch"), ask.value("saves"), ask.value("saver")) == (
        "causal-lm",
        False,
        8,
        True,
        "accelerate",
    )
    assert [(one.key, one.effect) for one in clm.unmodelled] == [("outputs", Effect.MORE)]
    t5 = read(
        "accelerate launch --num_processes 2 run_summarization_no_trainer.py --num_train_epochs 1 --max_source_length 512"
    )
    assert (t5.ask.value("eval_batch"), t5.ask.target_len) == (None, 128)
    assert ("evaluation", Effect.MORE) in [(one.key, one.effect) for one in t5.unmodelled]


def test_a_script_whose_name_speaks_of_what_no_flag_tells(read: Read) -> None:
    qlora = read("python train_qlora.py --lora_r 4 --per_device_train_batch_size 2 --num_train_epochs 1")
    assert beside_the_script(qlora) == [("script", Effect.UNKNOWN)]
    told = read("python train_qlora.py --lora_r 4 --bits 4 --per_device_train_batch_size 2 --num_train_epochs 1")
    assert (told.ask.value("quantize"), beside_the_script(told)) == ("nf4-single", [])
    peft = read("deepspeed --num_gpus 2 run_seq2seq_peft.py --per_device_train_batch_size 2 --num_train_epochs 1")
    assert beside_the_script(peft) == [("script", Effect.LESS)]
