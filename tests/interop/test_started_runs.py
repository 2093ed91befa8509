"""What the printed command starts is what was predicted, by the parsers of the programs themselves."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeroplan.core.digests import DIGESTS
from zeroplan.interop.forms.configuration import Model
from zeroplan.models.load import load_model
from zeroplan.search.files import model_of

Cli = Callable[..., tuple[int, str, str]]
LLAMA = "meta-llama/Llama-3.2-1B"
#: What is asked for by flags: 2 GPUs and a global batch of 64 in micro batches of 4, so 8 accumulated.
ASKED = ("--vram", "80G", "--gpus", "2", "--global-batch", "64", "--micro-batch", "4", "--seq-len", "512")
CASES: dict[str, tuple[str, ...]] = {
    "bf16, checkpointing, stage 3": ("--stage", "3", "--gradient-checkpointing"),
    "fp16, LoRA": ("--stage", "2", "--dtype", "fp16", "--lora-rank", "8", "--no-gradient-checkpointing"),
    "fp32, lion, offload": ("--stage", "2", "--dtype", "fp32", "--optimizer", "lion", "--offload-optimizer", "cpu"),
}


class Started:
    """A recommendation that was written: its JSON, its folder, and the words of its command."""

    def __init__(self, cli: Cli, *words: str) -> None:
        code, out, err = cli("recommend", LLAMA, *ASKED, *words, "--json")
        assert code == 0, err
        answer = json.loads(out[out.index("{") :])  # DeepSpeed, once imported, prints as well
        self.best, self.workload, self.files = answer["ranking"][0], answer["workload"], answer["files"]
        words_of = shlex.split(self.files["start"])
        self.arguments = words_of[words_of.index("train.py") + 1 :] if "train.py" in words_of else []

    @property
    def stage(self) -> int:
        return int(self.best["plan"]["stage"])


def arguments_of(started: Started, *, kind: Any) -> Any:
    """As transformers' own programs read their command line: one .json file, or flags."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(kind)
    if len(started.arguments) == 1 and started.arguments[0].endswith(".json"):
        return parser.parse_json_file(started.arguments[0])[0]
    return parser.parse_args_into_dataclasses(started.arguments)[0]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments refuses 16 bits where there is neither a GPU nor ``use_cpu``; two ranks are there, one is this."""
    pytest.importorskip("deepspeed")
    from transformers import TrainingArguments, training_args

    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    monkeypatch.setattr(TrainingArguments, "_setup_devices", SimpleNamespace(type="cuda", index=0))


@pytest.mark.torch
@pytest.mark.parametrize("new", [False, True], ids=["flags", "one file"])
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_is_told_the_predicted_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_a_gpu: None, case: str, new: bool
) -> None:
    from transformers import TrainingArguments
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    script = ("--new-script", "train.py") if new else ()
    started = Started(cli, *CASES[case], "--form", "trainer", "-o", "out/ds_config.json", *script)
    try:
        read = arguments_of(started, kind=TrainingArguments)
        assert HfDeepSpeedConfig(read.deepspeed).is_zero3() is (started.stage == 3)
        config = read.hf_deepspeed_config.config
    finally:
        unset_hf_deepspeed_config()
    assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (4, 8)
    dtype = started.workload["dtype"]
    assert (read.bf16, read.fp16) == (dtype == "bf16", dtype == "fp16")
    assert read.gradient_checkpointing is started.best["gradient_checkpointing"]
    if read.gradient_checkpointing:
        assert read.gradient_checkpointing_kwargs == {"use_reentrant": False}
    planned = started.best["ds_config"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 8)
    assert config["zero_optimization"] == planned["zero_optimization"]
    assert config["optimizer"]["type"] == planned["optimizer"]["type"]
    assert read.learning_rate == config["optimizer"]["params"]["lr"] == TrainingArguments.learning_rate
    assert {name: (config.get(name) or {}).get("enabled", False) for name in ("bf16", "fp16")} == {
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
    }


@pytest.mark.torch
def test_trl_is_told_what_its_own_defaults_would_turn_round(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_a_gpu: None
) -> None:
    """SFTConfig checkpoints and takes bf16 unless told otherwise."""
    trl = pytest.importorskip("trl")
    from transformers import HfArgumentParser
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    monkeypatch.chdir(tmp_path)
    started = Started(cli, *CASES["fp16, LoRA"], "--form", "trl", "-o", "ds_config.json")
    try:
        config, model = HfArgumentParser((trl.SFTConfig, trl.ModelConfig)).parse_args_into_dataclasses(started.arguments)
    finally:
        unset_hf_deepspeed_config()
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps, config.max_length) == (4, 8, 512)
    assert (config.bf16, config.fp16, config.gradient_checkpointing) == (False, True, False)
    assert (model.use_peft, model.lora_r, model.lora_dropout) == (True, 8, 0.0)
    assert (model.dtype, model.attn_implementation) == ("float16", "sdpa")
    assert model.lora_target_modules == "all-linear"


@pytest.mark.torch
def test_peft_reads_the_adapters(cli: Cli, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    targets = ("--lora-targets", "q_proj,v_proj")
    Started(cli, "--stage", "2", "--lora-rank", "8", *targets, "-o", str(tmp_path / "ds_config.json"))
    read = peft.LoraConfig.from_pretrained(str(tmp_path))
    assert (read.r, read.target_modules, read.lora_dropout, read.bias) == (8, {"q_proj", "v_proj"}, 0.0, "none")


@pytest.mark.parametrize(
    ("engine", "form", "words"),
    [
        ("deepspeed", "explicit", ("gradient_checkpointing_enable", "512 tokens", "get_peft_model", "flash_attention_2")),
        ("deepspeed", "accelerate", ("gradient_checkpointing_enable", "batch_size=4", "DummyOptim")),
        ("deepspeed", "lightning", ("gradient_checkpointing_enable", "batch_size=4", "DeepSpeedStrategy")),
        ("deepspeed", "trainer", ("512 tokens", "get_peft_model")),
        pytest.param(
            *("fsdp2", "accelerate-fsdp2", ("batch_size=4", "reduce_dtype=torch.float32", "step by adamw")),
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_no_file_says_the_answer_does(cli: Cli, tmp_path: Path, engine: str, form: str, words: tuple[str, ...]) -> None:
    asked = (
        "--gradient-checkpointing",
        "--stage",
        "2",
        "--lora-rank",
        "8",
        "--attn",
        "flash",
        "--engine",
        engine,
        "--form",
        form,
    )
    started = Started(cli, *asked, "-o", str(tmp_path / "main.json"))
    said = "\n".join(started.files["program_must"])
    for word in words:
        assert word in said
    script = ("--new-script", str(tmp_path / "train.py"))
    assert Started(cli, *asked, "-o", str(tmp_path / "main.json"), *script).files["program_must"] == []


def test_no_form_makes_up_a_learning_rate(cli: Cli, tmp_path: Path) -> None:
    forms = {"deepspeed": ("explicit", "trainer", "trl", "lightning", "accelerate"), "zeroplan": ("explicit",)}
    for engine, names in forms.items():
        for form in names:
            words = ("--engine", engine, "--form", form, "--optimizer", "adamw", "-o", str(tmp_path / "main.json"))
            started = Started(cli, *words, "--new-script", str(tmp_path / "train.py"))
            for path in started.files["written"]:
                text = Path(path).read_text()
                assert '"lr": "auto"' in text or '"lr"' not in text
                assert '"learning_rate"' not in text
                assert "lr=0" not in text
            said = (*started.files["notes"], *started.files["program_must"])
            assert any("no learning rate is written" in one or one.startswith("set optimizer.params.lr") for one in said)


def test_the_folder_may_be_named_alone_and_slurm_finds_it(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    started = Started(cli, "--form", "trainer", "--launcher", "slurm", "--nodes", "2", "-o", "runs/", "--global-batch", "64")
    assert started.files["start"] == "sbatch runs/train.sbatch"
    text = (tmp_path / "runs" / "train.sbatch").read_text()
    assert "--deepspeed runs/ds_config.json" in text
    assert "--gradient_accumulation_steps 4" in text
    assert {Path(name).name for name in started.files["written"]} | {DIGESTS} == {p.name for p in (tmp_path / "runs").iterdir()}


def test_a_new_script_may_lie_in_the_folder_that_is_made(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started = Started(cli, "-o", "run/", "--new-script", "run/train.py")
    assert "run/train.py" in started.files["written"]
    assert (tmp_path / "run" / "train.py").exists()
    code, _, err = cli("recommend", LLAMA, *ASKED, "-o", "run/", "--new-script", "other/train.py")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no folder other" in err


def test_the_plan_of_trls_form_is_of_its_own_head(cli: Cli, tmp_path: Path) -> None:
    """Its loss is computed in tiles; the Trainer's holds the whole logits."""
    asked = ("--stage", "2", "--offload-optimizer", "none", "--no-gradient-checkpointing", "-o", str(tmp_path / "main.json"))
    peaks = {form: Started(cli, *asked, "--form", form).best["plan"]["gpu"]["peak_allocated"] for form in ("trl", "trainer")}
    logits = 4 * 512 * 128_256
    assert peaks["trainer"] - peaks["trl"] > 4 * logits  # at least one fp32 copy


def test_an_optimizer_on_the_host_gets_its_threads(cli: Cli, tmp_path: Path) -> None:
    words = ("--offload-optimizer", "cpu", "--stage", "2", "--launcher", "torchrun", "-o", str(tmp_path / "ds.json"))
    assert "OMP_NUM_THREADS=$(( ($(nproc) + 1) / 2 )) torchrun " in Started(cli, *words).files["start"]


def test_swap_files_go_where_the_user_says_or_the_answer_tells(cli: Cli, tmp_path: Path) -> None:
    words = (
        "--stage",
        "3",
        "--offload-optimizer",
        "nvme",
        "--offload-param",
        "none",
        "--nvme",
        "2T",
        "-o",
        str(tmp_path / "x.json"),
    )
    assert any("--nvme-path" in note for note in Started(cli, *words).files["notes"])
    assert not any("--nvme-path" in note for note in Started(cli, *words, "--nvme-path", "/disk").files["notes"])


def test_a_program_of_the_users_is_never_overwritten(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    words = (LLAMA, *ASKED, "--new-script", str(script))
    assert cli("recommend", *words)[0] == 0
    assert cli("recommend", *words)[0] == 0  # its own it may
    script.write_text("print('mine')\n")
    code, out, err = cli("recommend", *words)
    assert (code, out) == (2, "")
    assert "train.py is there already and was changed since recommend wrote it" in err
    assert script.read_text() == "print('mine')\n"
    assert cli("recommend", *words, "--force")[0] == 0
    assert script.read_text() != "print('mine')\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("google/vit-base-patch16-224", "--new-script", "t.py"), "no script is written for AutoModelForImageClassification"),
        (("--params", "1B", "--new-script", "t.py"), "needs a model that it can load"),
        (("openai-community/gpt2", "--new-script", "t.py", "--script", "u.py"), "--script: cannot stand beside --new-script"),
        (("openai-community/gpt2", "--hosts", "a,b", "-o", "x.json"), "--hosts: names 2 of 1 nodes"),
        (("openai-community/gpt2", "--hosts", "a"), "--hosts: no file is asked for"),
        (("openai-community/gpt2", "-o", "no/such/x.json"), "there is no folder no/such"),
        (("openai-community/gpt2", "--engine", "ddp", "-o", "x.json"), "give --new-script train.py, which holds it all"),
        (("openai-community/gpt2", "--optimizer", "adamw8bit", "--new-script", "t.py"), "use --form trainer"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("recommend", *words, "--vram", "24G")
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_script_begins_with_the_weights_that_are_there(tmp_path: Path) -> None:
    spec = load_model("openai-community/gpt2")
    assert model_of("openai-community/gpt2", spec) == Model("openai-community/gpt2", "AutoModelForCausalLM", weights=True)
    (tmp_path / "config.json").write_text("{}")
    spec = replace(spec, source="config")  # as of a folder
    for place in (tmp_path, tmp_path / "config.json"):
        assert model_of(place, spec) == Model(str(tmp_path), "AutoModelForCausalLM", weights=False)
    (tmp_path / "model.safetensors").write_text("")
    for place in (tmp_path, tmp_path / "config.json"):
        assert model_of(place, spec).weights
    assert model_of(tmp_path / "model.safetensors", spec).place == ""  # no config to build the model by


#: One configuration to search, where what it is does not matter.
NARROW = {
    engine: ("--engine", engine, "--stage", stage, "--no-gradient-checkpointing")
    for engine, stage in (("deepspeed", "2"), ("fsdp2", "2"), ("ddp", "0"), ("zeroplan", "2"))
}


@pytest.mark.long
def test_scripts_compile_in_every_form(cli: Cli, tmp_path: Path) -> None:
    forms = {
        "deepspeed": ("explicit", "trainer", "trl", "lightning", "accelerate"),
        "fsdp2": ("torch", "accelerate-fsdp2"),
        "ddp": ("torch",),
        "zeroplan": ("explicit",),
    }
    for engine, names in forms.items():
        for form in names:
            script = tmp_path / f"{engine}_{form}" / "train.py"
            script.parent.mkdir()
            Started(cli, *NARROW[engine], "--form", form, "--lora-rank", "8", "--new-script", str(script))
            text = script.read_text()
            compile(text, script.name, "exec")
            for name in ("@", "$"):
                assert name not in text
            assert "SEQ_LEN = 512\n" in text
