"""Scripts that build DeepSpeed's PipelineModule, read by their text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.programs.pipeline_script import read_pipeline_script
from zeroplan.interop.readers import read_setups
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
}
SCRIPT = """
import argparse, json
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from transformers import AutoConfig, AutoTokenizer

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    args = deepspeed.add_config_arguments(parser).parse_args()
    tokenizer = AutoTokenizer.from_pretrained("another/tokenizer")
    config = AutoConfig.from_pretrained("meta-llama/Llama-3.1-8B")
    layers = [LayerSpec(Embedding, config)] + [LayerSpec(Block, config, i) for i in range(config.num_hidden_layers)]
    layers += [LayerSpec(Norm, config), LayerSpec(Head, config)]
    model = PipelineModule(layers, num_stages=args.stages, partition_method="uniform", activation_checkpoint_interval=1)
    with open("ds.json") as file:
        ds_config = json.load(file)
    engine, *_ = deepspeed.initialize(args=args, model=model, config=ds_config)

raise SystemExit("this script is not run")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_stages_model_and_configuration_are_read(script: Path) -> None:
    setup = read_setups([str(script)])
    assert setup.degrees == {"pp": 4, "partition": "uniform"}
    assert setup.ask.model == "meta-llama/Llama-3.1-8B"
    assert setup.ds_config == CONFIG | {"pipeline": {"activation_checkpoint_interval": 1}}
    assert "the default of --stages" in setup.assumed


def test_the_plan_is_that_of_flags(script: Path) -> None:
    common: dict[str, Any] = {"gpus": 8, "gpu": "H100", "seq_len": 512, "depth": "formula"}
    (plan,) = estimate_report(Ask(files=(str(script),), **common)).plans
    flags: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B",
        "pp": 4,
        "partition": "uniform",
        "gradient_checkpointing": True,
    }
    (asked,) = estimate_report(Ask(ds_config=CONFIG, **flags, **common)).plans
    assert plan.lines == asked.lines
    assert plan.unmodelled == asked.unmodelled


def test_a_command_line_that_starts_such_a_script(script: Path) -> None:
    """Its flags win over the parser's defaults, and the launcher says the machine."""
    text = SCRIPT.replace('"--stages"', '"-p", "--stages"').replace("def main():", 'def main(part="type:decoder"):')
    text = text.replace('partition_method="uniform"', "partition_method=part").replace(", config=ds_config)", ")")
    script.write_text(text)
    run = script.parent / "run.sh"
    for flags in ("-p 2", "--stages=2"):
        run.write_text(f"deepspeed --num_gpus 4 train.py --deepspeed_config ds.json {flags}\n")
        setup = read_setups([str(run)])
        assert setup.degrees == {"pp": 2, "partition": "type:decoder"}
        assert (setup.value("gpus"), setup.ask.model) == (4, "meta-llama/Llama-3.1-8B")
        assert setup.ds_config == CONFIG | {"pipeline": {"activation_checkpoint_interval": 1}}
        assert not any("--stages" in clause for clause in setup.assumed)


def test_check_says_what_was_read(script: Path, cli: Any) -> None:
    run = script.parent / "run.sh"
    run.write_text("deepspeed --num_gpus 8 train.py\n")
    for file in (script, run):
        code, out, _ = cli("check", str(file), "--wide")
        assert code == 0
        assert "num_stages" in out
        assert "meta-llama/Llama-3.1-8B" in out
    script.write_text("print(1)")
    code, _, err = cli("check", str(script))
    assert code == 2
    assert "builds no arguments of the Trainer and no PipelineModule" in err


@pytest.mark.parametrize(
    ("text", "stages", "partition"),
    [
        ("m = PipelineModule(layers=x, num_stages=2)", 2, None),
        ("N = 3\nm = deepspeed.pipe.PipelineModule(x, N, partition_method=f'type:{b}')", None, "partition_method"),
        ("t = PipeDataParallelTopology(num_pp=4, num_dp=2)\nm = PipelineModule(layers=x, topology=t)", 4, None),
        ("m = PipelineModule(x, topology=PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=1))", None, "num_mp"),
        ("def f(n=4):\n  return PipelineModule(x, num_stages=n)\nf()", 4, None),
        ("def f(n=4):\n  return PipelineModule(x, num_stages=n)\nf(8)", 8, None),
        ("def f(n=4):\n  return PipelineModule(x, num_stages=n)\nf(8)\nf(2)", None, "is no number that the text tells"),
        ("N = 3\nm = deepspeed.pipe.PipelineModule(x, N, partition_method='type:' + 'b')", 3, "type:b"),
        ("class G(PipelineModule):\n  def __init__(s):\n    super().__init__(layers=x, num_stages=6)", 6, None),
        ("m = PipelineModule(x, num_stages=int(os.environ['PP']))", None, r"num_stages \(int\(os.environ\['PP'\]\)\)"),
        ("N = 2\nN = 4\nm = PipelineModule(x, num_stages=N)", None, "is no number that the text tells"),
        ("a = PipelineModule(x, num_stages=2)\nb = PipelineModule(x, num_stages=4)", None, "of 2 and 4 stages"),
        ("model = AutoModel.from_pretrained('x')", None, "and it builds none"),
        (
            "def get():\n  p = ArgumentParser()\n  p.add_argument('--pp', default=2)\n  args = p.parse_args()\n  return args\n"
            "def train(args):\n  return PipelineModule(x, num_stages=args.pp)\n"
            "args = get()\nargs.local_rank = 0\ninitialize(args=args)\ntrain(args)",
            2,
            None,
        ),
        ("def (", None, "no Python"),
    ],
)
def test_what_the_text_tells(text: str, stages: int | None, partition: str | None) -> None:
    if stages is None:
        with pytest.raises(BadInput, match=partition):
            read_pipeline_script(text, "train.py")
        return
    found = read_pipeline_script(text, "train.py")
    assert (found.stages, found.partition, found.model, found.config) == (stages, partition, None, None)
