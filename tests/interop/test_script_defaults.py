"""Scripts that parse dataclasses of their own: their defaults lie beneath the command line's flags, as in HfArgumentParser."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.interop.readers import read_setup
from zeroplan.interop.setups import Setup

SCRIPT = """
from dataclasses import dataclass, field
import transformers
BATCH = 2
@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="openai-community/gpt2")
{model}
@dataclass
class MyArguments(transformers.TrainingArguments):
    optim: str = field(default="adafactor")
    model_max_length: int = 640
    per_device_train_batch_size: int = BATCH
{own}
parser = transformers.HfArgumentParser((ModelArguments, MyArguments))
model_args, args = parser.parse_args_into_dataclasses()
{after}
"""
FLAGS = "torchrun --nproc_per_node 2 train.py --gradient_accumulation_steps 2 --bf16 True --output_dir o"


def setup_of(folder: Path, flags: str = "", *, model: str = "", own: str = "", after: str = "") -> Setup:
    (folder / "train.py").write_text(SCRIPT.format(model=model, own=own, after=after))
    (folder / "run.sh").write_text(f"{FLAGS} {flags}\n")
    return read_setup(str(folder / "run.sh"))


def test_defaults_of_the_scripts_dataclasses_count(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    assert (setup.ask.model, setup.ask.seq_len, setup.ask.micro_batch) == ("openai-community/gpt2", 640, 2)
    assert (setup.ask.optimizer, setup.ask.grad_accum) == ("adafactor_transformers", 2)
    assert not setup.unmodelled
    assert any("the defaults of train.py: model_max_length" in one for one in setup.assumed)


def test_flags_lie_over_them(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, "--model_max_length 128 --per_device_train_batch_size 4 --optim adamw_torch")
    assert (setup.ask.seq_len, setup.ask.micro_batch, setup.ask.optimizer) == (128, 4, "adamw")


def test_a_recipe_lies_over_them(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text('{"per_device_train_batch_size": 8, "bf16": true, "output_dir": "o"}')
    (tmp_path / "train.py").write_text(SCRIPT.format(model="", own="", after=""))
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 2 train.py args.json\n")
    setup = read_setup(str(tmp_path / "run.sh"), "hf-trainer")
    assert (setup.ask.micro_batch, setup.ask.seq_len, setup.ask.optimizer) == (8, 640, "adafactor_transformers")


UNSURE: dict[str, tuple[dict[str, str], str, str]] = {
    "no literal": ({"own": "    gradient_checkpointing: bool = f()"}, "gradient_checkpointing", "the default f() is not told"),
    "__post_init__": (
        {"own": "    def __post_init__(self):\n        self.gradient_checkpointing = True"},
        "gradient_checkpointing",
        "MyArguments.__post_init__ may change it",
    ),
    "assigned": ({"after": "args.gradient_checkpointing = True"}, "gradient_checkpointing", "is assigned after it was parsed"),
    "another file's class": (
        {"after": "from own import A\ntransformers.HfArgumentParser(A)"},
        "A",
        "the defaults of A stand in another file",
    ),
}


@pytest.mark.parametrize("kind", UNSURE)
def test_what_is_not_sure_is_said_by_its_line(kind: str, tmp_path: Path) -> None:
    parts, key, says = UNSURE[kind]
    (one,) = setup_of(tmp_path, **parts).unmodelled
    assert (one.key, one.effect) == (key, "unknown")
    assert one.says.startswith("line ")
    assert says in one.says


def test_a_flag_settles_a_default_that_is_not_told(tmp_path: Path) -> None:
    own = "    gradient_checkpointing: bool = f()"
    assert not setup_of(tmp_path, "--gradient_checkpointing True", own=own).unmodelled


def test_a_rank_alone_switches_no_adapters_on(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, model="    lora_r: int = 64\n    bits: int = 4")
    assert setup.method in (None, "full")
    assert [one.key for one in setup.unmodelled] == ["lora"]
    switched = setup_of(tmp_path, model="    lora_r: int = 64\n    use_lora: bool = True")
    assert (switched.method, switched.ask.value("lora_rank")) == ("lora", 64)
    assert setup_of(tmp_path, model="    lora_r: int = 64\n    use_lora: bool = False").method in (None, "full")
