"""Every technique in every form: a key, a file or a sentence asks for it, or the form refuses it; none is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.validate.small import CONFIG
from tests.workloads import flat_workload, with_flat
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.evaluation import Evaluation
from zeroplan.core.float8 import Bf16Layers, Float8Recipe
from zeroplan.core.generation import Colocated, Generation
from zeroplan.core.preferences import PairLoss
from zeroplan.core.quantization import parse_quantization
from zeroplan.core.saving import Saver, Saving, StateDict
from zeroplan.core.workload import ChunkedHead, Compilation, DType, Media, Reference, Workload
from zeroplan.core.zero_config import ZeroConfig
from zeroplan.engines.registry import engine_names, find_engine
from zeroplan.interop.forms.configuration import Configuration, FormFiles, Model
from zeroplan.techniques.chunked_head import ChunkedHeadTechnique
from zeroplan.techniques.cut_cross_entropy import CutCrossEntropy
from zeroplan.techniques.dora import Dora
from zeroplan.techniques.ema import AverageDevice, Ema
from zeroplan.techniques.fused_adapters import FusedAdapters
from zeroplan.techniques.label_smoothing import LabelSmoothing
from zeroplan.techniques.liger import Liger
from zeroplan.techniques.modules_to_save import ModulesToSave
from zeroplan.techniques.neftune import Neftune
from zeroplan.techniques.ppo import Rollout
from zeroplan.techniques.synced_passes import SyncedPasses
from zeroplan.techniques.table import TABLE

PLAIN = flat_workload(micro_batch=2, seq_len=64, dtype=DType.BF16)
ADAPTED = with_flat(PLAIN, lora_rank=8)
AGAIN = PLAIN.checkpointed()
EIGHT = PLAIN.with_techniques(Float8Recipe.TENSORWISE)
#: A run with each technique, by its name, and the same run without.
RUNS: dict[str, tuple[Workload, Workload]] = {
    "reduce dtype": (PLAIN.but(reduce_dtype=DType.BF16), PLAIN),
    "kept gradients": (PLAIN.but(set_to_none=False), PLAIN),
    "gradient checkpointing": (with_flat(AGAIN, checkpoint_policy="every:2"), AGAIN),
    "quantised base": (with_flat(ADAPTED, quantize=parse_quantization("nf4")), ADAPTED),
    "LoRA": (ADAPTED, PLAIN),
    "fp8": (EIGHT, PLAIN),
    "blocks in bf16": (EIGHT.with_techniques(Bf16Layers(1, 2)), EIGHT),
    "pair loss": (PLAIN.but(pair_loss=PairLoss.RANKING, pairs=True), PLAIN),
    "reference model": (PLAIN.but(reference=Reference.MODEL, kl_batch=True), PLAIN),
    "PPO": (PLAIN.with_techniques(Rollout(8, 1, 8, 8, 512, 4, 64, 64)), PLAIN),
    "compile": (PLAIN.with_techniques(Compilation.BLOCKS), PLAIN),
    "images": (PLAIN.but(media=Media(images=2)), PLAIN),
    "chunked head": (PLAIN.with_techniques(ChunkedHead()), PLAIN),
    "lengths": (PLAIN.but(lengths=(8, 64)), PLAIN),
    "tiled MLP": (with_flat(PLAIN, tiled_mlp=4), PLAIN),
    "tiled loss": (with_flat(PLAIN, tiled_loss=4), PLAIN),
    "offloaded checkpoints": (with_flat(AGAIN, offload_checkpoints=True), AGAIN),
    "evaluation": (PLAIN.with_techniques(Evaluation(8, 0, casts=False)), PLAIN),
    "generation": (PLAIN.with_techniques(Generation(8, 8)), PLAIN),
    "colocated vLLM": (PLAIN.with_techniques(Colocated(0.3)), PLAIN),
    "whole state dict on each GPU": (PLAIN.with_techniques(Saving(StateDict.FULL, Saver.LOOP, optimizer=True)), PLAIN),
    "optimizers of the runtime": (PLAIN.but(optimizer="adamw4bit"), PLAIN),
    "optimizers of a ds_config": (PLAIN.but(optimizer="onebitadam"), PLAIN),
    "DoRA": (ADAPTED.with_techniques(Dora()), ADAPTED),
    "modules_to_save": (ADAPTED.with_techniques(ModulesToSave(("lm_head",))), ADAPTED),
    "fused adapters": (ADAPTED.with_techniques(FusedAdapters()), ADAPTED),
    "Liger": (PLAIN.with_techniques(Liger()), PLAIN),
    "cut cross-entropy": (PLAIN.with_techniques(CutCrossEntropy()), PLAIN),
    "label smoothing": (PLAIN.with_techniques(LabelSmoothing(wide=False, share=0.2)), PLAIN),
    "NEFTune": (PLAIN.with_techniques(Neftune(5.0)), PLAIN),
    "an average of the weights": (PLAIN.with_techniques(Ema(AverageDevice.CPU)), PLAIN),
    "reduction in each pass": (PLAIN.with_techniques(SyncedPasses()), PLAIN),
}
#: Each engine's forms, with the techniques that it takes.
FORMS = [
    (engine, form, technique.name)
    for engine in engine_names()
    for form in find_engine(engine).forms()
    for technique in TABLE
    if technique.name in RUNS and technique.taken_by(find_engine(engine))
]


def test_each_technique_that_a_search_takes_is_among_them() -> None:
    assert [one.name for one in TABLE if not one.unsearched and one.name not in RUNS] == ["older transformers"]
    for one in TABLE:
        if one.name in RUNS:
            on, off = RUNS[one.name]
            assert (one.of(on) is not None, one.of(off) is not None) == (True, one.name == "gradient checkpointing"), one.name


def configuration(engine_name: str, form: str, work: Workload, *, script: bool) -> Configuration:
    cluster = Cluster.of(gpus=2, vram="80G")
    engine = find_engine(engine_name).for_workload(work)
    zero = ZeroConfig.of(engine.options()[-1].stage)
    model = Model("m", "AutoModelForCausalLM")
    config = engine.ds_config(zero, work, cluster.layout)
    launcher, program = engine.forms()[form].launchers[0], engine.forms()[form].program
    return Configuration(zero, work, cluster, config, "o/main.json", launcher, model, new_script=script, program=program)


def asked(engine: str, form: str, work: Workload) -> FormFiles | None:
    """What a form makes for a program of one's own; None where it refuses."""
    try:
        return find_engine(engine).forms()[form].write(configuration(engine, form, work, script=False))
    except BadInput:
        return None


def scripted(engine: str, form: str, work: Workload) -> Any:
    """What a form makes with a script of its own; None where it refuses."""
    found, one = find_engine(engine).forms()[form], configuration(engine, form, work, script=True)
    assert found.script is not None
    try:
        return found.write(one).texts, found.script(one)
    except BadInput:
        return None


@pytest.mark.parametrize(("engine", "form", "name"), FORMS)
def test_no_form_passes_over_a_technique(engine: str, form: str, name: str) -> None:
    on, off = RUNS[name]
    if on.has(ChunkedHead):
        on = on.with_techniques(ChunkedHeadTechnique().under(find_engine(engine)))
    if not find_engine(engine).forms()[form].main:  # a program that reads no file: its script is all
        assert scripted(engine, form, off) is not None
    else:
        made = asked(engine, form, on)
        assert made is None or made != asked(engine, form, off)
    made = scripted(engine, form, on)
    assert made is None or made != scripted(engine, form, off)


def test_the_trainer_gets_its_keys() -> None:
    work = PLAIN.with_techniques(LabelSmoothing(wide=False, share=0.2), Neftune(5.0), Liger())
    made = asked("deepspeed", "trainer", work)
    assert made is not None
    keys = json.loads(made.texts["o/training_arguments.json"])
    found = {key: keys[key] for key in ("label_smoothing_factor", "neftune_noise_alpha", "use_liger_kernel")}
    assert found == {"label_smoothing_factor": 0.2, "neftune_noise_alpha": 5.0, "use_liger_kernel": True}
    assert not any("train with" in one for one in made.program_must)


def test_trl_gets_the_keys_of_adapters_and_a_new_script_none_of_them() -> None:
    work = with_flat(ADAPTED, quantize=parse_quantization("nf4-single")).with_techniques(Dora(), Neftune(5.0))
    one = configuration("deepspeed", "trl", work, script=False)
    made = find_engine("deepspeed").forms()["trl"].write(one)
    command = " ".join(made.arguments)
    for words in (
        "--lora_r 8",
        "--use_dora True",
        "--load_in_4bit True",
        "--use_bnb_nested_quant False",
        "--neftune_noise_alpha 5",
    ):
        assert words in command
    keys = json.loads(made.texts["o/training_arguments.json"])
    assert keys["neftune_noise_alpha"] == 5.0
    assert not keys.keys() & {"lora_r", "use_dora", "load_in_4bit"}


def test_adapters_of_flags_are_not_left_to_a_file_that_trains_all(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file, out = tmp_path / "sft.yaml", tmp_path / "out.yaml"
    file.write_text(f"model_name_or_path: {tmp_path}\ndataset_name: x\nmax_length: 64\nper_device_train_batch_size: 2\n")
    words = ("--program", "trl", "--gpu", "1xH100", "--lora-rank", "4", "--json", "--depth", "formula")
    code, _, error = cli("recommend", "--from", str(file), *words, "-o", str(out))
    assert code in (0, 1), error
    assert {"use_peft: true", "lora_r: 4"} <= set(out.read_text().splitlines())


def test_files_in_use_get_the_keys_of_flags(tmp_path: Path, cli: Any) -> None:
    model, config = tmp_path / "config.json", {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    model.write_text(json.dumps(CONFIG))
    file, out = tmp_path / "args.json", tmp_path / "out.json"
    said = {"model_name_or_path": str(tmp_path), "per_device_train_batch_size": 2, "bf16": True, "deepspeed": config}
    file.write_text(json.dumps(said))
    words = ("--program", "hf-trainer", "--gpu", "1xH100", "--seq-len", "64", "--neftune", "5", "--save", "full", "--json")
    code, text, error = cli("recommend", "--from", str(file), *words, "-o", str(out), "--json")
    assert code in (0, 1), error
    found = json.loads(text)
    assert json.loads(out.read_text())["neftune_noise_alpha"] == 5.0
    assert "save full states in your program" in found["files"]["program_must"]
