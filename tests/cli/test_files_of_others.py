"""``recommend`` among other people's files, names and plans: what it writes is what is planned, or one line says why not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from zeroplan.cli.flags import recommend_words
from zeroplan.core.errors import BadInput
from zeroplan.interop.forms.launch import launch, require_hosts
from zeroplan.models.catalog import hub_id
from zeroplan.run.ask import Ask
from zeroplan.simulate.allocator.config import VARIABLES

Cli = Callable[..., tuple[int, str, str]]
LLAMA = "meta-llama/Llama-3.2-1B"
#: One configuration of few seconds; nothing is known to fit at this depth, so the exit code is 1.
ONE = (
    *("--vram", "80G", "--gpus", "2", "--depth", "formula", "--stage", "2", "--offload-optimizer", "none"),
    *("--micro-batch", "2", "--gradient-checkpointing", "--seq-len", "512"),
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", "-"), "-: standard output is no file; give the name of a file, or use --json"),
        (("-o", "pipe"), "pipe: is a pipe, not a file"),
        (("--html", "no/page.html"), "there is no folder no"),
        (("--new-script", "new/"), "--new-script: new/ is a folder; give the name of a file"),
        (("-o", "file/"), "is a file, not a folder"),
        (("-o", "accelerate.yaml", "--form", "accelerate"), "accelerate.yaml is another file that is written there"),
        (("-o", "same", "--new-script", "same"), "same is the name of two files"),
        (("-o", "x.json", "--nodes", "2", "--hosts", "a;id,b"), "'a;id' is no name of a node"),
        (("-o", "x.json", "--nodes", "2", "--hosts", "a,a"), "names a twice"),
        (("-o", "x.json", "--nodes", "2", "--hosts", "a,b", "--launcher", "slurm"), "Slurm names the nodes itself"),
        (("-o", "x.json", "--nodes", "2", "--script", "my train.py"), "'my train.py' to other nodes without quotes"),
        (("-o", "x.json", "--form", "trl", "--task", "dpo"), "trl is SFTTrainer's form"),
        (("--new-script", "t.py", "--form", "trainer", "--task", "dpo"), "no script is written that would train on pairs"),
        (("--new-script", "t.py", "--eval-batch", "4"), "would evaluate in passes of at most 4 samples"),
        (("--new-script", "t.py", "--lengths", "100,400"), "would pad each batch to its longest sample"),
        (("--global-batch", "64", "--grad-accum", "2"), "--global-batch: 64 is not 2 ranks × micro batch 2 × accumulation 2"),
        (("--layouts", "--launcher", "slurm"), "--launcher: cannot stand beside --layouts"),
        (("--layouts", "--format", "csv"), "--format: cannot stand beside --layouts"),
        (("--json", "--format", "html"), "--format html: cannot stand beside --json"),
        (("--format", "csv", "--json"), "--format csv: cannot stand beside --json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_would_not_be_as_planned_is_one_line(cli: Cli, here: Path, words: tuple[str, ...], said: str) -> None:
    import os

    os.mkfifo(here / "pipe")
    (here / "file").write_text("")
    before = sorted(here.iterdir())
    code, out, err = cli("recommend", LLAMA, *ONE, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "words", "theirs"),
    [
        ("hostfile", ("--nodes", "2"), "gpu1 slots=8\ngpu2 slots=8\n"),
        ("adapter_config.json", ("--lora-rank", "8"), '{"peft_type": "LORA", "r": 64, "lora_alpha": 128}'),
        ("accelerate.yaml", ("--form", "accelerate"), "num_processes: 8\n"),
        ("train.sbatch", ("--launcher", "slurm"), "#!/bin/bash\nsrun mine\n"),
    ],
)
def test_files_beside_the_named_one_are_never_others(
    cli: Cli, here: Path, name: str, words: tuple[str, ...], theirs: str
) -> None:
    asked = ("recommend", LLAMA, *ONE, *words, "-o", "ds_config.json")
    (here / name).write_text(theirs)
    code, out, err = cli(*asked)
    assert (code, out) == (2, "")
    assert f"{name} is there already and was not written by recommend" in err
    assert ((here / name).read_text(), (here / "ds_config.json").exists()) == (theirs, False)
    (here / name).unlink()
    assert cli(*asked)[0] == 1
    ours = (here / name).read_text()
    assert cli(*asked, "--seq-len", "256", "--hosts", "a,b")[0] == 1 if name == "hostfile" else cli(*asked)[0] == 1  # our own
    assert ((here / name).read_text() != ours) is (name == "hostfile")


def test_what_a_plan_holds_beside_a_plain_step_is_told(cli: Cli, here: Path) -> None:
    words = ("--task", "dpo", "--eval-batch", "4", "--save", "full", "--save-only-model", "--form", "trainer", "-o", "x.json")
    said = json.loads(cli("recommend", LLAMA, *ONE, *words, "--json")[1])["files"]["program_must"]
    for part in (
        "train on pairs of a chosen and a rejected answer",
        "ask a frozen copy of the model as the reference",
        "evaluate in passes of at most 4 samples a GPU",
        "save full states, the model alone",
    ):
        assert any(part in one for one in said), said


def test_what_is_read_is_not_written_over(cli: Cli, here: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}}'
    (here / "ds.json").write_text(text)
    for place in (("-o", "ds.json"), ("-o", "./ds.json"), ("--html", "ds.json")):
        code, out, err = cli("recommend", LLAMA, *ONE, "--from", "ds.json", *place)
        assert (code, out) == (2, "")
        assert "is what --from reads, and what is written holds nothing of its rates and schedules" in err
    assert (here / "ds.json").read_text() == text


def test_a_model_from_scratch_has_random_weights(cli: Cli, here: Path) -> None:
    assert cli("recommend", LLAMA, *ONE, "--from-scratch", "--new-script", "t.py")[0] == 1
    text = (here / "t.py").read_text()
    assert "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)" in text
    assert "AutoModelForCausalLM.from_pretrained" not in text


@pytest.mark.parametrize("name", ['a"""b', "back\\new", "tail\\", 'ends in "', "d'or $HOME @micro @config", "模型 é"])
def test_a_script_compiles_whatever_the_model_is_named(cli: Cli, here: Path, name: str) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16, "n_positions": 16}
    (here / name).mkdir()
    (here / name / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **config}))
    words = ("--vram", "24", "--depth", "formula", "--stage", "2", "--micro-batch", "1", "--no-gradient-checkpointing")
    script = f"{name}/it.py"
    for form in ("lightning", "explicit"):
        code, _, err = cli("recommend", name, *words, "--form", form, "-o", f"{name}/", "--new-script", script)
        assert code == 1, err
        found: dict[str, str] = {}
        exec(compile("MODEL =" + Path(script).read_text().split("MODEL =")[1].splitlines()[0], script, "exec"), found)
        assert found["MODEL"] == name
        compile(Path(script).read_text(), script, "exec")
        assert form == "explicit" or f"Path({f'{name}/ds_config.json'!r})" in Path(script).read_text()


def test_the_allocators_settings_hold_in_any_torch_and_shell(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.9 knows the old variable alone, and later ones take it where both are set."""
    asked = ("recommend", LLAMA, *ONE, "-o", "x.json", "--json")
    start = json.loads(cli(*asked, "--alloc-conf", "expandable_segments:True")[1])["files"]["start"]
    assert shlex.split(start)[:2] == [f"{name}=expandable_segments:True" for name in VARIABLES]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    notes = json.loads(cli(*asked)[1])["files"]["notes"]
    assert "the plan is of torch's own allocator settings: unset PYTORCH_CUDA_ALLOC_CONF first" in notes


@pytest.mark.parametrize(
    ("typed", "at_the_hub"),
    [
        ("LLAMA-3.2-1b", LLAMA),
        ("meta-llama/llama-3.2-1b", LLAMA),
        ("Llama-3.2-1B-Instruct", f"{LLAMA}-Instruct"),
        ("unsloth/Llama-3.2-1B", "unsloth/Llama-3.2-1B"),
        ("gpt2", "openai-community/gpt2"),
        ("someone/else", "someone/else"),
    ],
)
def test_a_script_names_the_model_as_the_hub_does(typed: str, at_the_hub: str) -> None:
    assert hub_id(typed) == at_the_hub


def test_the_next_command_is_of_the_same_run() -> None:
    asked = Ask(model="gpt2", gpu="4xH100", micro_batch=2, grad_accum=8, transformers_version="4.40", set_to_none=False)
    words = " ".join(recommend_words(asked))
    assert "--global-batch 64" in words  # which recommend splits anew; without, it would accumulate nothing
    assert "--transformers-version 4.40 --no-set-to-none" in words
    assert "--global-batch" not in recommend_words(asked.replace(files=("x.json",)))  # which says it
    for name, value in {"reduce_dtype": "bf16", "tiled_loss": 4}.items():
        assert recommend_words(asked.replace(**{name: value})) == []
    assert "--fp8 rowwise" in " ".join(recommend_words(asked.replace(fp8="rowwise")))


def test_a_layouts_next_command_plans_it(cli: Cli) -> None:
    out = cli("recommend", LLAMA, "--gpu", "4xA100-80G", "--seq-len", "1024", "--layouts")[1]
    words = shlex.split(out.partition("Next: zeroplan ")[2].partition("\n\n")[0].replace("\\\n", " "))
    assert words[:2] == ["estimate", LLAMA]
    planned = cli(*words, "--depth", "formula", "--json")
    assert planned[0] == 0, planned[2]
    cluster = json.loads(planned[1])["cluster"]
    assert (cluster["ranks"], cluster["gpu"]) == (4, "A100-80G")


def test_names_of_nodes() -> None:
    require_hosts("torchrun", ["gpu-1.cluster.local", "10.0.0.7", "n_2"])
    for name in ("fe80::1", "a b", "$(id)", "-x", ""):
        with pytest.raises(BadInput, match="is no name of a node"):
            require_hosts("torchrun", [name])
    two = launch("deepspeed", gpus=2, nodes=2, hosts=("a", "b"), arguments=("--kwargs", '{"use_reentrant": false}'))
    assert two.files["hostfile"].splitlines()[1:] == ["a slots=2", "b slots=2"]
