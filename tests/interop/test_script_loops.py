"""Scripts with a training loop of their own: what their text tells, and by line what it does not.

What each would do was taken from running it with recorders in place of torch, transformers, accelerate and DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setup, read_setups
from zeroplan.interop.setups import Setup
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

HEAD = "import argparse, os, torch\nfrom torch.utils.data import DataLoader\nfrom transformers import AutoModelForCausalLM\n"
MODEL = 'model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", dtype=torch.float32)\n'
HALF = MODEL.replace("float32", "bfloat16")
LOADER, STEP = "loader = DataLoader(data, batch_size=4)\n", "opt = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
LOOP = "for i, batch in enumerate(loader):\n    loss = model(**batch).loss\n    loss.backward()\n    opt.step()\n"
TAIL = LOADER + STEP + LOOP
ACCELERATE = "from accelerate import Accelerator\naccelerator = Accelerator({})\n"
PREPARED = (
    LOADER + STEP + "model, opt, loader = accelerator.prepare(model, opt, loader)\nfor batch in loader:\n"
    "    with accelerator.accumulate(model):\n        accelerator.backward(model(**batch).loss)\n        opt.step()\n"
)
CONFIG = 'cfg = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}\n'
ENGINE = "import deepspeed\nengine, *_ = deepspeed.initialize(model=model, config=cfg{})\n"
DRIVEN = LOADER + "for batch in loader:\n    engine.backward(engine(**batch).loss)\n    engine.step()\n"
SHARD = "from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy\n{}for one in model.transformer.h:\n"
SHARD += "    fully_shard(one{})\nfully_shard(model{})\n"
AUTOCAST = TAIL.replace("    loss = model", '    with torch.autocast("cuda", {}):\n        loss = model')


def setup_of(folder: Path, source: str, line: str = "") -> Setup:
    (folder / "loop.py").write_text(HEAD + source)
    (folder / "run.sh").write_text(line + "\n")
    return read_setup(str(folder / ("run.sh" if line else "loop.py")))


def shard(options: str, before: str = "") -> str:
    return SHARD.format(before, options, options)


SURE: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": (
        MODEL + TAIL,
        {"engine": "ddp", "gpus": 1, "dtype": "fp32", "micro_batch": 4, "grad_accum": 1, "optimizer": "adamw"},
    ),
    "16-bit weights": (HALF + TAIL, {"dtype": "bf16", "model_dtype": "bf16", "autocast": False, "optimizer_kind": "foreach"}),
    "autocast": (MODEL + AUTOCAST.format("dtype=torch.bfloat16"), {"dtype": "bf16", "model_dtype": "fp32", "autocast": True}),
    "autocast's own dtype": (MODEL + AUTOCAST.replace(", {}", ""), {"dtype": "fp16", "model_dtype": "fp32"}),
    "a fused step": (MODEL + TAIL.replace("lr=1e-4", "fused=True"), {"optimizer_kind": "fused"}),
    "SGD": (
        MODEL + TAIL.replace("AdamW(model.parameters(), lr", "SGD(model.parameters(), momentum=0.9, lr"),
        {"optimizer": "sgd_momentum"},
    ),
    "accumulation": (MODEL + TAIL.replace("    opt", "    if (i + 1) % 8 == 0 or i == last:\n        opt"), {"grad_accum": 8}),
    "accumulation by not": (MODEL + TAIL.replace("    opt", "    if not (i + 1) % 8:\n        opt"), {"grad_accum": 8}),
    "accelerate": (
        ACCELERATE.format("") + MODEL + PREPARED,
        {"engine": "ddp", "dtype": "fp32", "micro_batch": 4, "grad_accum": 1},
    ),
    "accelerate's arguments": (
        ACCELERATE.format('mixed_precision="bf16", gradient_accumulation_steps=8') + MODEL + PREPARED,
        {"dtype": "bf16", "model_dtype": "fp32", "grad_accum": 8},
    ),
    "accelerate's plugin": (
        "from accelerate import DeepSpeedPlugin\n"
        + ACCELERATE.format("deepspeed_plugin=DeepSpeedPlugin(zero_stage=3)")
        + MODEL
        + PREPARED,
        {"engine": "deepspeed", "zero_init": True},
    ),
    "DeepSpeed": (HALF + CONFIG + ENGINE.format("") + DRIVEN, {"engine": "deepspeed", "zero_init": False, "dtype": None}),
    "zero.Init": (
        "import deepspeed\nwith deepspeed.zero.Init():\n    " + HALF + CONFIG + ENGINE.format("") + DRIVEN,
        {"zero_init": True},
    ),
    "FSDP2": (MODEL + shard("") + TAIL, {"engine": "fsdp2", "stage": 3, "dtype": "fp32"}),
    "FSDP2 that keeps parameters": (MODEL + shard(", reshard_after_forward=False") + TAIL, {"stage": 2}),
    "a policy": (
        MODEL + shard(", **k", "k = {'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16)}\n") + TAIL,
        {"dtype": "bf16", "reduce_dtype": "products"},
    ),
    "DDP": (
        MODEL + "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n" + TAIL,
        {"engine": "ddp", "gpus": None},
    ),
    "checkpointing": (MODEL + "model.gradient_checkpointing_enable()\n" + TAIL, {"gradient_checkpointing": True}),
    "a function": (
        "def main(bs):\n    " + (MODEL + TAIL.replace("=4", "=bs")).replace("\n", "\n    ") + "\nmain(16)\n",
        {"micro_batch": 16, "model": "openai-community/gpt2"},
    ),
    "an evaluation": (
        MODEL + TAIL + "    model.eval()\neval_loader = DataLoader(evals, batch_size=32)\n",
        {"micro_batch": 4, "eval_batch": 32},
    ),
}


@pytest.mark.parametrize("kind", SURE)
def test_what_a_loop_tells(kind: str, tmp_path: Path) -> None:
    source, expected = SURE[kind]
    setup = setup_of(tmp_path, source)
    assert {key: setup.ask.value(key) if isinstance(expected[key], bool) else setup.value(key) for key in expected} == expected
    assert not setup.unmodelled


UNSURE: dict[str, tuple[str, str]] = {
    "a step behind continue": (MODEL + TAIL.replace("    opt", "    if i % 8:\n        continue\n    opt"), "grad_accum"),
    "a step by a name": (MODEL + TAIL.replace("    opt", "    last = i % 8 == 0\n    if last:\n        opt"), "grad_accum"),
    "an inner loop": (
        MODEL
        + LOADER
        + STEP
        + "while True:\n    for batch in loader:\n        model(**batch).loss.backward()\n    opt.step()\n",
        "grad_accum",
    ),
    "accumulation that nothing uses": (
        ACCELERATE.format("gradient_accumulation_steps=8") + MODEL + PREPARED.replace("accumulate", "other"),
        "grad_accum",
    ),
    "a cast": (MODEL + "model.to(torch.bfloat16)\n" + TAIL, "dtype of the model"),
    "a cast in a chain": (MODEL.replace("float32)", "float32).to(torch.bfloat16)") + TAIL, "dtype of the model"),
    "autocast by a flag": (MODEL + AUTOCAST.format("dtype=torch.bfloat16, enabled=os.environ"), "autocast"),
    "no class of torch": (MODEL + LOADER + "opt = getattr(torch.optim, 'SGD')(model.parameters())\n" + LOOP, "optimizer"),
    "two optimizers": (
        MODEL + LOADER + "if x:\n    opt = torch.optim.SGD(model.parameters())\nelse:\n    " + STEP + LOOP,
        "optimizer",
    ),
    "a part is stepped": (MODEL + TAIL.replace("model.parameters", "model.lm_head.parameters"), "optimizer.params"),
    "a loss of its own": (
        MODEL + TAIL.replace("model(**batch).loss", "torch.nn.functional.cross_entropy(model(**batch).logits, y)"),
        "loss",
    ),
    "two passes": (MODEL + TAIL + "    model(**batch).loss.backward()\n", "backward"),
    "what the model returned": (
        MODEL + TAIL.replace("loss = model(**batch).loss", "out = model(**batch)\n    loss = out.loss"),
        "outputs",
    ),
    "a module of its own": (MODEL + "class Net(torch.nn.Module):\n    pass\n" + TAIL, "Net"),
    "averaged weights": (MODEL + "ema = AveragedModel(model)\n" + TAIL, "AveragedModel"),
    "adapters of another kind": (
        MODEL + "from peft import BeftConfig\nmodel = get_peft_model(model, BeftConfig())\n" + TAIL,
        "adapters",
    ),
    "two wrappers": (
        MODEL + "if x:\n    model = DDP(model)\nelse:\n    " + shard("").replace("\n", "\n    ") + "\n" + TAIL,
        "engine",
    ),
    "a mesh": (MODEL + shard(", mesh=mesh") + TAIL, "fully_shard.mesh"),
    "one unit": (MODEL + "fully_shard(model)\n" + TAIL, "fully_shard"),
    "16-bit shards": (
        HALF + shard(", mp_policy=mp", "mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n") + TAIL,
        "dtype",
    ),
    "a plugin": (ACCELERATE.format("fsdp_plugin=x") + MODEL + PREPARED, "Accelerator.fsdp_plugin"),
    "a handler": (ACCELERATE.format("kwargs_handlers=[AORecipeKwargs()]") + MODEL + PREPARED, "kwargs_handlers"),
    "accelerate's ds_config": (
        ACCELERATE.format("") + MODEL + "accelerator.state.deepspeed_plugin.deepspeed_config['x'] = 1\n" + PREPARED,
        "deepspeed_config",
    ),
    "a loader of other batches": (
        HALF + CONFIG + ENGINE.format("") + DRIVEN.replace("=4", "=16"),
        "train_micro_batch_size_per_gpu",
    ),
}


@pytest.mark.parametrize("kind", UNSURE)
def test_what_a_loop_does_beside_a_plain_step_is_listed(kind: str, tmp_path: Path) -> None:
    source, key = UNSURE[kind]
    setup = setup_of(tmp_path, source)
    assert key in {one.key for one in setup.unmodelled}


OPEN: dict[str, tuple[str, str]] = {
    "a sampler of batches": (MODEL + TAIL.replace("batch_size=4", "batch_sampler=s"), "micro_batch"),
    "unknown arguments of the loader": (MODEL + TAIL.replace("batch_size=4", "**kw"), "micro_batch"),
    "two loaders": (MODEL + LOADER + TAIL.replace("=4", "=8"), "micro_batch"),
    "a ds_config that is changed": (
        HALF + CONFIG + "cfg['zero_optimization']['stage'] = 3\n" + ENGINE.format("") + DRIVEN,
        "ds_config",
    ),
}


@pytest.mark.parametrize("kind", OPEN)
def test_what_a_flag_or_a_file_must_say(kind: str, tmp_path: Path) -> None:
    source, field = OPEN[kind]
    assert field in setup_of(tmp_path, source).open


REFUSED = {
    "nothing passes backward": ("import deepspeed\nengine = deepspeed.initialize(model=m)\n", "passes nothing backward"),
    "two engines": (
        "import deepspeed\na = deepspeed.initialize()\nb = deepspeed.initialize()\na.backward(x)\n",
        "makes 2 engines",
    ),
    "diffusers": ("import diffusers\n" + MODEL + TAIL, "a model of diffusers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_loop_of_one_model_is_refused(kind: str, tmp_path: Path) -> None:
    source, words = REFUSED[kind]
    with pytest.raises(BadInput, match=words):
        setup_of(tmp_path, source)


def test_a_command_starts_a_loop_with_its_flags(tmp_path: Path) -> None:
    source = "p = argparse.ArgumentParser()\np.add_argument('--bs', type=int, default=2)\na = p.parse_args()\n"
    source += ACCELERATE.format("") + MODEL + PREPARED.replace("=4", "=a.bs")
    setup = setup_of(tmp_path, source, "accelerate launch --num_processes 2 --mixed_precision bf16 loop.py --bs 16")
    assert (setup.ask.micro_batch, setup.value("gpus"), setup.ask.dtype, setup.value("engine")) == (16, 2, "bf16", "ddp")


def test_accelerates_file_decides_the_engine(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(HEAD + ACCELERATE.format("") + HALF + PREPARED)
    (tmp_path / "a.json").write_text(
        json.dumps(
            {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
        )
    )
    setup = read_setups([str(tmp_path / "loop.py"), str(tmp_path / "a.json")])
    assert (setup.value("engine"), setup.value("gpus"), setup.ask.dtype, setup.ask.autocast, setup.ask.micro_batch) == (
        "fsdp2",
        2,
        "bf16",
        True,
        4,
    )


def test_a_ds_config_fills_what_the_script_leaves_open(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(HEAD + HALF + "cfg = load()\n" + ENGINE.format("") + DRIVEN)
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}))
    files = (str(tmp_path / "loop.py"), str(tmp_path / "ds.json"))
    found = estimate_report(Ask(files=files, gpus=2, vram="24G", seq_len=128, depth="formula"))
    assert [plan.stage for plan in found.plans] == [3]
    assert not any(one.key == "--ds-config" for one in found.plans[0].unmodelled)


def test_a_command_names_the_ds_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}))
    source = "p = argparse.ArgumentParser()\nimport deepspeed\np = deepspeed.add_config_arguments(p)\na = p.parse_args()\n"
    source += HALF + ENGINE.format("").replace("cfg", "a.deepspeed_config") + DRIVEN
    setup = setup_of(tmp_path, source, "deepspeed --num_gpus 2 loop.py --deepspeed --deepspeed_config ds.json")
    assert (setup.value("engine"), setup.value("gpus"), setup.open) == ("deepspeed", 2, {"seq_len": setup.open["seq_len"]})
    assert (setup.ds_config or {})["zero_optimization"] == {"stage": 1}
