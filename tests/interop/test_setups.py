"""Other programs' files: what each says in zeroplan's words, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.documents import MOST_ALIASES, dump_yaml, read_document
from zeroplan.core.unmodelled import Effect
from zeroplan.interop.readers import read_setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.planner.merge import merge, with_files
from zeroplan.run.ask import Ask

Cli = Callable[..., tuple[int, str, str]]
ZERO2 = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}

AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
adapter: lora
lora_r: 32
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
flash_attention: true
deepspeed: ds.json
sample_packing: true
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Llama-3.2-1B
stage: sft
finetuning_type: full
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
deepspeed: ds.json
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a file beside a ds.json; returns its path."""
    (tmp_path / "ds.json").write_text(json.dumps(ZERO2))

    def call(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return call


def test_axolotl(write: Callable[[str, str], str]) -> None:
    setup = read_setup(write("a.yaml", AXOLOTL))
    assert (setup.program, setup.value("engine"), setup.ask.model) == ("axolotl", "deepspeed", "meta-llama/Llama-3.2-1B")
    assert (setup.ask.micro_batch, setup.ask.grad_accum, setup.ask.seq_len) == (2, 4, 2048)
    assert (setup.ask.dtype, setup.ask.optimizer, setup.value("attn"), setup.value("gradient_checkpointing")) == (
        "bf16",
        "adamw8bit",
        "flash",
        True,
    )
    assert (setup.ask.value("lora_rank"), setup.ask.value("lora_targets"), setup.ds_config) == (32, (), ZERO2)
    assert (setup.method, setup.ask.model_dtype) == ("lora", "bf16")
    assert not setup.unmodelled


@pytest.mark.parametrize(
    ("text", "more", "left_out"),
    [
        ("llama-factory", "use_unsloth_gc: true\n", None),
        ("llama-factory", "use_unsloth_gc: true\ndeepspeed: z2.json\n", "use_unsloth_gc"),
        ("llama-factory", "use_unsloth_gc: true\nstage: dpo\n", "use_unsloth_gc"),
        ("axolotl", "activation_offloading: legacy\n", None),
        ("axolotl", "activation_offloading: true\n", "activation_offloading"),
        ("axolotl", "activation_offloading: disk\n", "activation_offloading"),
    ],
)
def test_checkpoints_on_the_host_by_a_function_of_the_program(
    text: str, more: str, left_out: str | None, write: Callable[[str, str], str]
) -> None:
    write("z2.json", json.dumps(ZERO2))
    plain = {
        "llama-factory": "model_name_or_path: meta-llama/Llama-3.2-1B\nfinetuning_type: lora\ncutoff_len: 512\ntemplate: x\n",
        "axolotl": "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 9\ngradient_checkpointing: true\n",
    }
    asked = Ask(files=(write("run.yaml", plain[text] + more),), gpu="H100", depth="formula")
    report = estimate_report(asked)
    assert report.workload.get("offload_checkpoints", False) is (left_out is None)
    assert left_out is None or left_out in [one.key for one in report.plans[0].unmodelled]


def test_llama_factory(write: Callable[[str, str], str]) -> None:
    setup = read_setup(write("l.yml", LLAMA_FACTORY))
    assert (setup.program, setup.ask.value("lora_rank"), setup.value("gradient_checkpointing"), setup.ask.seq_len) == (
        "llama-factory",
        None,
        True,
        1024,
    )
    lora = read_setup(write("m.yml", LLAMA_FACTORY.replace("full", "lora") + "lora_target: q_proj,v_proj\n"))
    assert (lora.ask.value("lora_rank"), lora.ask.value("lora_targets")) == (8, ("q_proj", "v_proj"))
    quantised = read_setup(write("n.yml", LLAMA_FACTORY.replace("full", "lora") + "quantization_bit: 4\n"))
    assert (quantised.method, quantised.ask.value("quantize"), quantised.unmodelled) == ("qlora", "nf4", ())


def test_training_arguments_as_yaml_and_json(write: Callable[[str, str], str]) -> None:
    said = {"output_dir": "out", "per_device_train_batch_size": 3, "bf16": True, "deepspeed": "ds.json"}
    setup = read_setup(write("t.json", json.dumps(said)))
    assert (setup.program, setup.value("engine"), setup.ask.micro_batch, setup.ask.dtype) == (
        "hf-trainer",
        "deepspeed",
        3,
        "bf16",
    )
    alone = read_setup({"output_dir": "out", "fp16": True})
    ask = alone.ask
    assert (alone.value("engine"), ask.micro_batch, ask.dtype, alone.value("gradient_checkpointing")) == (
        "ddp",
        8,
        "fp16",
        False,
    )
    assert read_setup({"output_dir": "out", "fsdp": "full_shard"}).value("engine") == "fsdp2"
    older = {"output_dir": "out", "fsdp": "full_shard", "fsdp_config": {"version": 1}}
    request, setup = with_files(Ask(files=(older,)))
    assert (request.engine, request.unmodelled, [one.key for one in setup.unmodelled]) == ("fsdp", (), ["fsdp"])
    adapters = older | {"use_lora": True, "lora_r": 8}
    request, _ = with_files(Ask(files=(adapters,), program="hf-trainer"))
    assert (request.engine, request.unmodelled) == ("fsdp", ())


@pytest.mark.parametrize(("asked", "runs"), [("deepspeed", "deepspeed"), ("zeroplan", "zeroplan")])
def test_an_engine_that_reads_ds_configs_takes_deepspeeds_place(asked: str, runs: str) -> None:
    """The runtime under a Trainer whose arguments name a ds_config; one that reads none contradicts them."""
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}
    arguments = {"output_dir": "out", "per_device_train_batch_size": 2, "deepspeed": config}
    request, _ = with_files(Ask(files=(arguments,), engine=asked))
    assert (request.engine, request.ds_config is not None) == (runs, True)
    with pytest.raises(BadInput, match=r"says deepspeed \(deepspeed\), the flag ddp"):
        with_files(Ask(files=(arguments,), engine="ddp"))


@pytest.mark.torch
def test_training_arguments_as_the_object(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=8, report_to=[]
    )
    setup = read_setup(arguments)
    assert (setup.ask.micro_batch, setup.ask.grad_accum, setup.value("engine"), setup.ask.dtype) == (2, 8, "ddp", "fp32")
    assert setup.ask.optimizer == "adamw"


def test_accelerate_with_its_own_keys() -> None:
    setup = read_setup(
        {
            "distributed_type": "DEEPSPEED",
            "num_processes": 8,
            "num_machines": 2,
            "mixed_precision": "bf16",
            "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 1.0},
        }
    )
    assert (setup.value("gpus"), setup.value("nodes")) == (4, 2)
    assert setup.ds_config is not None
    assert setup.ds_config["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert (setup.ask.dtype, setup.ask.zero_init, setup.ds_config["gradient_accumulation_steps"]) == ("bf16", True, "auto")


def test_accelerates_layout() -> None:
    """TRL's own example of context parallelism, and what else ``parallelism_config`` may say."""
    ring = {
        "parallelism_config_tp_size": 1,
        "parallelism_config_cp_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_cp_comm_strategy": "allgather",
    }
    config = {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
        "parallelism_config": ring,
    }
    setup = read_setup(config)
    assert (setup.value("engine"), setup.degrees["cp"], setup.key("cp")) == (
        "fsdp2",
        2,
        "parallelism_config.parallelism_config_cp_size",
    )
    asked = Ask(model="meta-llama/Llama-3.2-1B", seq_len=64, depth="formula", engine="fsdp2", files=[config])
    request, _ = with_files(asked)
    assert request.cp == 2
    assert not [one for one in request.unmodelled if "cp_size" in one.key]
    assert merge(asked, setup).cp == 1  # a search plans data parallelism alone, and lists the key
    assert setup.key("cp") in [one.key for one in merge(asked, setup).unmodelled]
    with pytest.raises(BadInput, match=r"says 2 \(parallelism_config\..*\), the flag 4"):
        with_files(asked.replace(cp=4))
    for changed, said in (
        ({"tp_size": 2, "dp_shard_size": 2}, "leaves the embedding whole"),
        ({"sp_size": 2}, "Ulysses"),
        (ring | {"parallelism_config_cp_comm_strategy": "alltoall"}, "at once"),
    ):
        left = read_setup(config | {"parallelism_config": changed}).unmodelled
        assert any(said in one.says for one in left)
    other = read_setup(config | {"distributed_type": "MULTI_GPU", "fsdp_config": {}})
    assert not other.degrees
    assert "FSDP 2 alone" in other.unmodelled[0].says


def test_accelerates_8_bit_products() -> None:
    config: dict[str, Any] = {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp8"}
    torchao = config | {"fp8_config": {"backend": "AO", "pad_inner_dim": True}}
    assert read_setup(torchao).ask.values.get("fp8") == "tensorwise"
    asked = Ask(model="meta-llama/Llama-3.2-1B", seq_len=64, gpu="H100", depth="formula", files=[torchao])
    filled_in, _ = with_files(asked)
    assert (filled_in.values.get("fp8"), filled_in.engine, filled_in.dtype) == ("tensorwise", "ddp", "bf16")
    for changed, said in (
        ({"fp8_config": {"backend": "TE"}}, "te"),
        ({"fp8_config": {}}, "whichever package"),
        ({"distributed_type": "FSDP", "fp8_config": {"backend": "AO"}}, "under FSDP"),
        ({"fp8_config": {"backend": "AO", "pad_inner_dim": False}}, "copies that padding makes"),
    ):
        setup = read_setup(config | changed)
        assert any(said in one.says for one in setup.unmodelled)
        assert (setup.ask.values.get("fp8") is None) == ("padding" not in said)


def test_accelerates_8_bit_products_under_fsdp2() -> None:
    """Planned where weights are gathered in 16 bits."""
    config: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "fp8"}
    config["fsdp_config"] = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    setup = read_setup(config | {"fp8_config": {"backend": "AO", "enable_fsdp_float8_all_gather": False}})
    assert (setup.ask.values.get("fp8"), setup.value("engine"), setup.unmodelled) == ("tensorwise", "fsdp2", ())


def test_8_bit_products_of_axolotl_and_llama_factory() -> None:
    axolotl: dict[str, Any] = {"base_model": "meta-llama/Llama-3.2-1B", "micro_batch_size": 1, "bf16": True, "fp8": True}
    axolotl |= {"sequence_len": 64, "datasets": []}
    plain = read_setup(axolotl, program="axolotl")
    assert (plain.ask.values.get("fp8"), [one.effect for one in plain.unmodelled]) == ("tensorwise", [Effect.LESS])
    fsdp = {"fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    gathered = read_setup(axolotl | fsdp | {"fp8_enable_fsdp_float8_all_gather": True}, program="axolotl")
    assert [one.says for one in gathered.unmodelled if one.effect is Effect.UNKNOWN] == [
        "weights are gathered in 8 bits; 16 are counted"
    ]
    request, _ = with_files(Ask(files=(axolotl | fsdp,), program="axolotl", gpu="H100"))
    assert (request.values["fp8"], request.engine) == ("tensorwise", "fsdp2")
    factory: dict[str, Any] = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "stage": "sft", "finetuning_type": "full"}
    factory |= {"bf16": True, "fp8": True, "cutoff_len": 64, "template": "llama3"}
    assert read_setup(factory, program="llama-factory").ask.values.get("fp8") == "rowwise"
    other = read_setup(factory | {"fp8_backend": "te"}, program="llama-factory")
    assert (other.ask.values.get("fp8"), [one.key for one in other.unmodelled]) == (None, ["fp8_backend"])


def test_a_plain_ds_config(write: Callable[[str, str], str]) -> None:
    assert read_setup(write("plain.json", json.dumps(ZERO2))).program == "ds_config"


BAD = {
    "wrong type": "base_model: x\nmicro_batch_size: [1, 2]\n",
    "negative": "base_model: x\nmicro_batch_size: -1\n",
    "huge": "base_model: x\nmicro_batch_size: 99999999999999\n",
    "not a flag": "base_model: x\nfp16: maybe\n",
    "no such ds_config": "base_model: x\ndeepspeed: nowhere.json\n",
    "model of another type": "base_model: {a: 1}\n",
    "a list": "- 1\n- 2\n",
    "a scalar": "just words\n",
    "empty": "",
    "unknown": "colour: green\n",
    "broken": "a: [1, 2\n",
    "python object": "base_model: !!python/object/apply:os.system ['true']\n",
    "deep": "a: " + "[" * 60 + "]" * 60 + "\n",
    "many aliases": "a: &a [1]\nb: [" + ", ".join(["*a"] * (MOST_ALIASES + 1)) + "]\n",
    "bomb": "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else '1,1,1,1,1,1,1,1,1'}]\n" for i in range(7)),
    "itself": "a: &a [*a]\n",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line_and_exit_2(write: Callable[[str, str], str], cli: Cli, name: str) -> None:
    path = write("bad.yaml", BAD[name])
    code, out, err = cli("recommend", "meta-llama/Llama-3.2-1B", "--from", path, "--vram", "24G", "--depth", "formula")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("zeroplan: ")


def test_binary_and_missing_files(write: Callable[[str, str], str], tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "b.yaml", tmp_path / "none.yaml", tmp_path):
        with pytest.raises(BadInput):
            read_setup(path)
    with pytest.raises(BadInput, match="int"):
        read_setup(3)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=8,
    ).filter(lambda value: isinstance(value, dict))
)
@settings(max_examples=60)
def test_any_mapping_is_read_or_refused(data: dict[str, Any]) -> None:
    for keys in ({"base_model": "m"}, {"model_name_or_path": "m"}, {"output_dir": "o"}, {"distributed_type": "FSDP"}):
        try:
            read_setup({**data, **keys})
        except BadInput as error:
            assert "\n" not in str(error)


def test_yaml_that_is_written_reads_back(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    data = {"a": "no", "b": {"c": True, "d": 1, "e": "x y: z", "f": "'q'", "g": "1e3", "h": None}, "i": "", "j": "-k"}
    assert yaml.safe_load(dump_yaml(data)) == data
    path = tmp_path / "y.yaml"
    path.write_text(dump_yaml(data))
    assert read_document(str(path)) == data


def test_a_script_quantises_by_the_names_of_peft(write: Callable[[str, str], str]) -> None:
    """The Trainer's scripts have names of their own: peft's examples, LLaVA's bits; GPTQ's adapters stay out."""
    said = {"output_dir": "out", "per_device_train_batch_size": 1, "bf16": True, "use_peft": True, "lora_r": 8}
    plain = read_setup(said | {"use_4bit_quantization": True}, program="hf-trainer")
    assert (plain.ask.value("quantize"), plain.ask.value("whole_base")) == ("nf4-single", False)
    nested = said | {"use_4bit_quantization": True, "use_nested_quant": True, "bnb_4bit_quant_storage_dtype": "uint8"}
    setup = read_setup(nested, program="hf-trainer")
    assert (setup.ask.value("quantize"), setup.ask.value("whole_base")) == ("nf4", True)
    assert read_setup(said | {"bits": 8}, program="hf-trainer").ask.value("quantize") == "int8"
    gptq = read_setup(said | {"q_lora": True}, program="hf-trainer")
    assert (gptq.ask.value("quantize"), [one.key for one in gptq.unmodelled]) == (None, ["quantisation"])


@pytest.mark.parametrize(
    "file",
    [
        {"output_dir": "o", "deepspeed": {"zero_optimization": {"stage": 3}}, "fsdp": "full_shard"},
        {
            "base_model": "m",
            "micro_batch_size": 1,
            "datasets": [],
            "deepspeed": {"zero_optimization": {"stage": 3}},
            "fsdp": ["full_shard"],
        },
    ],
)
def test_two_engines_in_one_file_are_refused_as_their_programs_do(file: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="stands beside deepspeed"):
        read_setup(file)
