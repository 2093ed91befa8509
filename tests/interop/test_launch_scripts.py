"""Launch scripts as repositories hold them are read the same from anywhere, and never by a default that another class decides.

Each case is a small repository of our own writing, after forms that public ones have; a launch script of each is read from the
repository's root, from its own folder, and from elsewhere by its whole path.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.plan import Verdict
from zeroplan.core.unmodelled import may_add
from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.merge import with_files
from zeroplan.report.verdict import unknown_text
from zeroplan.run.ask import Ask

ARGUMENTS = """\
from dataclasses import dataclass, field
import transformers

@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="gpt2")

@dataclass
class TrainingArguments(transformers.TrainingArguments):
    per_device_train_batch_size: int = 3
    model_max_length: int = field(default=768)
    bf16: bool = True

def train():
    parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
"""
WITHOUT_LENGTH = ARGUMENTS.replace("    model_max_length: int = field(default=768)\n", "")
ADAPTS = ARGUMENTS.replace(
    "    bf16: bool = True\n", "    bf16: bool = True\n    use_lora: bool = True\n    lora_r: int = 16\n"
)
BUILDS = """\
import argparse
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--micro", type=int, default=5)
args = parser.parse_args()
trainer = Trainer(model, TrainingArguments(output_dir="o", per_device_train_batch_size=args.micro, bf16=True))
trainer.train()
"""
ELSEWHERE = "from mine.arguments import parse\nargs = parse()\n"
FLAGS = "--output_dir o --gradient_accumulation_steps 2 --learning_rate 1e-5"
DS = '{"zero_optimization": {"stage": 3}}'

#: By name: the repository's files, the launch script among them, and the micro batch, length, dtype, stage of what is read.
READ: dict[str, tuple[dict[str, str], str, tuple[object, ...]]] = {
    "the script at the root": (
        {"train.py": ARGUMENTS, "scripts/run.sh": f"torchrun train.py {FLAGS}\n"},
        "scripts/run.sh",
        (3, 768, "bf16", None),
    ),
    "the script beside it": (
        {"sub/finetune/train.py": ARGUMENTS, "sub/finetune/run.sh": f"torchrun train.py {FLAGS}\n"},
        "sub/finetune/run.sh",
        (3, 768, "bf16", None),
    ),
    "a folder of a package": (
        {
            "pkg/train/train.py": ARGUMENTS,
            "scripts/v1/run.sh": f"deepspeed pkg/train/train.py {FLAGS} --deepspeed c/ds.json\n",
            "c/ds.json": DS,
        },
        "scripts/v1/run.sh",
        (3, 768, "bf16", 3),
    ),
    "a script that imports what parses": (
        {
            "pkg/train/train.py": ARGUMENTS,
            "pkg/train/train_mem.py": "from pkg.train.train import train\ntrain()\n",
            "scripts/run.sh": f"deepspeed pkg/train/train_mem.py {FLAGS}\n",
        },
        "scripts/run.sh",
        (3, 768, "bf16", None),
    ),
    "a module": (
        {"src/pkg/train.py": ARGUMENTS, "scripts/run.sh": f"torchrun --nproc_per_node 2 -m pkg.train {FLAGS}\n"},
        "scripts/run.sh",
        (3, 768, "bf16", None),
    ),
    "a folder that the script goes to": (
        {"train/train.py": ARGUMENTS, "scripts/run.sh": f'cd "$(dirname "$0")/../train"\ntorchrun train.py {FLAGS}\n'},
        "scripts/run.sh",
        (3, 768, "bf16", None),
    ),
    "a path of the script's folder": (
        {
            "scripts/train.py": ARGUMENTS,
            "scripts/run.sh": f'D="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"\ntorchrun "${{D}}/train.py" {FLAGS}\n',
        },
        "scripts/run.sh",
        (3, 768, "bf16", None),
    ),
    "a script that starts another": (
        {
            "train.py": ARGUMENTS,
            "scripts/run.sh": f"torchrun train.py {FLAGS} --model_max_length $2\n",
            "all.sh": "bash scripts/run.sh x 512\n",
        },
        "all.sh",
        (3, 512, "bf16", None),
    ),
    "a script that builds its arguments": (
        {"train.py": BUILDS, "scripts/run.sh": "python train.py --micro 6\n"},
        "scripts/run.sh",
        (6, None, "bf16", None),
    ),
    "adapters by default": (
        {"train.py": ADAPTS, "scripts/run.sh": f"torchrun train.py {FLAGS} --use_lora False\n"},
        "scripts/run.sh",
        (3, 768, "bf16", None),
    ),
}

#: What leaves `fits` null, and the words that say so.
UNKNOWN: dict[str, tuple[dict[str, str], str]] = {
    "the script is not there": (
        {"scripts/run.sh": f"torchrun train.py {FLAGS} --model_max_length 64\n"},
        "the script is not here",
    ),
    "the module is not there": (
        {"scripts/run.sh": f"torchrun -m pkg.train {FLAGS} --model_max_length 64\n"},
        "the script is not here",
    ),
    "arguments are taken in another way": (
        {"train.py": ELSEWHERE, "scripts/run.sh": f"torchrun train.py {FLAGS} --model_max_length 64\n"},
        "takes its arguments in a way that is not read",
    ),
    "no length": (
        {"train.py": WITHOUT_LENGTH, "scripts/run.sh": f"torchrun train.py {FLAGS}\n"},
        "the script's own code decides the length of a sample",
    ),
    "two lengths of a model of one side": (
        {
            "train.py": WITHOUT_LENGTH,
            "scripts/run.sh": f"torchrun train.py {FLAGS} --max_source_length 64 --max_target_length 64\n",
        },
        "the script decides how source and target",
    ),
    "a function that returns an imported class": (
        {
            "train.py": ARGUMENTS.replace("import transformers", "import transformers\nfrom kinds import Kind")
            + "    kind = pick(model_args)\n\ndef pick(args):\n    return Kind\n",
            "scripts/run.sh": f"torchrun train.py {FLAGS} $MORE\n",
        },
        "may hold further arguments",
    ),
    "checkpointing in the script": (
        {
            "train.py": ARGUMENTS + "    model = prepare_model_for_int8_training(model)\n",
            "scripts/run.sh": f"torchrun train.py {FLAGS}\n",
        },
        "it checkpoints blocks",
    ),
    "modules beside adapters": (
        {
            "train.py": ADAPTS + "    config = LoraConfig(r=args.lora_r, modules_to_save=['wte', 'lm_head'])\n",
            "scripts/run.sh": f"torchrun train.py {FLAGS}\n",
        },
        "the script gives it to adapters",
    ),
    "further arguments": (
        {"train.py": ARGUMENTS, "scripts/run.sh": f"torchrun train.py $EXTRA {FLAGS}\n"},
        "may hold further arguments",
    ),
    "the launcher's file is read, and the script's own loop is not": (
        {
            "train.py": "model = Model(Config(\n    1))\nfor batch in data:\n    accelerator.backward(model(batch))\n",
            "configs/multi.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 4\n",
            "scripts/run.sh": "accelerate launch --config_file configs/multi.yaml train.py settings.py lr 1e-5\n",
        },
        "trains by a loop of its own",
    ),
    "a sourced file that is not there": (
        {"train.py": ARGUMENTS, "scripts/run.sh": f"source sizes.sh\ntorchrun train.py {FLAGS}\n"},
        "is not there to be read",
    ),
}


def laid_out(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def said(setup: Setup) -> dict[str, object]:
    """All that a setup says, without paths."""
    plain = replace(setup, files=(), training=replace(setup.training, file=""))
    return {one.name: getattr(plain, one.name) for one in fields(Setup)}


def places(root: Path, elsewhere: Path, script: str) -> list[tuple[Path, str]]:
    return [(root, script), ((root / script).parent, Path(script).name), (elsewhere, str(root / script))]


@pytest.mark.parametrize("kind", READ)
def test_a_script_is_read_the_same_from_anywhere(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, script, expected = READ[kind]
    root, elsewhere = tmp_path / "repo", tmp_path / "elsewhere"
    laid_out(root, files)
    elsewhere.mkdir()
    found = []
    for folder, path in places(root, elsewhere, script):
        monkeypatch.chdir(folder)
        found.append(read_setup(path))
    assert said(found[0]) == said(found[1]) == said(found[2])
    one = found[0]
    stage = ((one.ds_config or {}).get("zero_optimization") or {}).get("stage")
    assert (one.ask.micro_batch, one.ask.seq_len, one.ask.dtype, stage) == expected
    assert one.ask.value("lora_rank") is None


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_another_class_decides_is_unknown_from_anywhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, words = UNKNOWN[kind]
    root, elsewhere = tmp_path / "repo", tmp_path / "elsewhere"
    laid_out(root, files)
    elsewhere.mkdir()
    for folder, path in places(root, elsewhere, "scripts/run.sh"):
        monkeypatch.chdir(folder)
        request, _ = with_files(Ask(model="gpt2", files=(path,), vram="24G"))
        assert may_add(request.unmodelled)
        assert [one for one in request.unmodelled if words in one.says]


def test_a_length_by_flag_closes_what_the_script_leaves_open(tmp_path: Path) -> None:
    laid_out(tmp_path, {"train.py": WITHOUT_LENGTH, "run.sh": f"torchrun --nproc_per_node 2 train.py {FLAGS}\n"})
    request, _ = with_files(Ask(model="gpt2", files=(str(tmp_path / "run.sh"),), vram="24G", seq_len=512))
    assert not may_add(request.unmodelled)


def test_what_the_script_leaves_open_is_settled_by_the_flag_that_gives_it(tmp_path: Path) -> None:
    laid_out(tmp_path, {"train.py": WITHOUT_LENGTH, "scripts/run.sh": f"torchrun train.py {FLAGS}\n"})
    (plan,) = estimate_report(Ask(files=(str(tmp_path / "scripts" / "run.sh"),), gpu="H100")).plans
    assert (plan.verdict, plan.settle) == (Verdict.UNKNOWN, "give --seq-len")
    assert unknown_text(plan) == "The script's own code decides the length of a sample; give --seq-len."


def test_a_repository_ends_where_git_says(tmp_path: Path) -> None:
    laid_out(tmp_path, {"train.py": ARGUMENTS, "repo/.git/HEAD": "", "repo/scripts/run.sh": f"torchrun train.py {FLAGS}\n"})
    assert read_setup(str(tmp_path / "repo/scripts/run.sh")).unmodelled[0].key == "train.py"


def test_neither_a_home_nor_a_temporary_folder_is_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out(tmp_path, {"train.py": ARGUMENTS, "own/scripts/run.sh": f"torchrun train.py {FLAGS}\n"})
    script = str(tmp_path / "own/scripts/run.sh")
    assert not [one for one in read_setup(script).unmodelled if one.key == "train.py"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [one for one in read_setup(script).unmodelled if one.key == "train.py"]


def test_a_config_of_fms_hf_tuning_has_defaults_of_its_own(tmp_path: Path) -> None:
    laid_out(
        tmp_path, {"c.yaml": "model_name_or_path: gpt2\ntraining_data_path: t.json\noutput_dir: o\ndataset_text_field: x\n"}
    )
    assert [one.key for one in read_setup(str(tmp_path / "c.yaml")).unmodelled] == ["training_data_path"]


def test_own_classes_are_no_other_programs(tmp_path: Path) -> None:
    """Arguments that LLaMA-Factory or ms-swift alone has, in a script that parses classes of its own."""
    for words in ("--quantization_bit 4 --flash_attn True", "--freeze_llm True --freeze_vit True"):
        laid_out(tmp_path, {"main.py": ARGUMENTS, "run.sh": f"python main.py {FLAGS} --model_name_or_path m {words}\n"})
        assert read_setup(str(tmp_path / "run.sh")).program == "hf-trainer"


def test_a_model_that_another_argument_names_is_no_default(tmp_path: Path) -> None:
    own = ARGUMENTS.replace(
        'field(default="gpt2")\n', 'field(default="gpt2")\n    input_model_filename: str = field(default="")\n'
    )
    (tmp_path / "train.py").write_text(own)
    (tmp_path / "run.sh").write_text(f"torchrun train.py --input_model_filename meta-llama/Llama-2-7b-hf {FLAGS}\n")
    setup = read_setup(tmp_path / "run.sh")
    assert may_add(one for one in setup.unmodelled if one.key == "input_model_filename")


def test_a_program_whose_flags_tell_nothing_is_not_said_to_train_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("accelerate launch ppo.py --rollout 32\n")
    with pytest.raises(BadInput, match=r"no command whose flags show that it trains.*zeroplan capture -- bash"):
        read_setup(tmp_path / "run.sh")
