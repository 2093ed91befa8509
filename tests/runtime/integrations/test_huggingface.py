"""transformers.Trainer and accelerate, through DeepSpeed's names, equal the same tools in plain torch on two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.patience import PATIENCE
from tests.runtime.integrations import huggingface_runs as runs
from tests.runtime.integrations import save_runs
from tests.runtime.ranks import RankPool
from zeroplan.core.zero_config import DEEPSPEED_VERSION
from zeroplan_runtime.integrations.huggingface import zeroplan_config

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.torch

OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
#: A ds_config as the documents of transformers have it.
UNCHANGED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": OFFLOADED,
}


@pytest.fixture(scope="module", autouse=True)
def ranks_as_they_were(pair: RankPool) -> Iterator[None]:
    yield
    pair.run(2, runs.finish)


def trainer_runs(group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    config = zeroplan_config(2)  # first: without it accelerate would import a DeepSpeed that is installed
    found = {"plain": runs.train(folder / "plain", None), "plain, LoRA": runs.train(folder / "plain-lora", None, lora=True)}
    found["stage 2"] = runs.train(folder / "2", config)
    found["unchanged"] = runs.train(folder / "3", UNCHANGED)
    found["stage 3, LoRA"] = runs.train(folder / "3-lora", zeroplan_config(3), lora=True)
    return found


def loops(group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    configs = {stage: zeroplan_config(stage, gradient_clipping=0.5) for stage in (1, 3)}
    runs.start(deepspeed=False)
    found = {"plain": runs.loop(folder / "loop", None)}
    from accelerate.utils import DeepSpeedPlugin

    for stage, config in configs.items():
        runs.start(deepspeed=True)
        plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2)
        found[f"stage {stage}"] = runs.loop(folder / f"loop-{stage}", plugin)
    return found


@pytest.fixture(scope="module")
def found(pair: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return pair.run(2, trainer_runs, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize(("ours", "plain"), [("stage 2", "plain"), ("unchanged", "plain"), ("stage 3, LoRA", "plain, LoRA")])
def test_trainer_equals_itself_without_the_runtime(found: list[dict[str, Any]], ours: str, plain: str) -> None:
    """Training, evaluation, the best model loaded at the end, prediction, resuming, generating, saving."""
    for rank in found:
        mine, theirs = rank[ours], rank[plain]
        assert len(theirs["loss"]) == 6
        # Where the config names the optimizer the engine steps the schedule: the rates logged are then the next step's.
        rates = (mine["rate"][:-1], theirs["rate"][1:]) if ours == "unchanged" else (mine["rate"], theirs["rate"])
        assert rates[0] == pytest.approx(rates[1])
        for key in ("loss", "norm", "eval_loss"):
            assert mine[key] == pytest.approx(theirs[key], abs=2e-5), key
        assert mine["resumed"] == pytest.approx(theirs["loss"], abs=2e-5)  # three steps of before, three that it took
        assert mine["predict"] == pytest.approx(theirs["predict"], abs=2e-5)
        assert mine["best"] == theirs["best"]
        assert mine["generated"] == theirs["generated"]
        assert mine["final"].keys() == theirs["final"].keys()
        assert max((mine["final"][name] - theirs["final"][name]).abs().max().item() for name in theirs["final"]) < 2e-5


def test_accelerates_own_loop(pair: RankPool, tmp_path: Path) -> None:
    for rank in pair.run(2, loops, tmp_path):
        theirs = rank["plain"]
        for stage in ("stage 1", "stage 3"):
            mine = rank[stage]
            assert mine["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
            assert mine["again"] == pytest.approx(theirs["again"], abs=1e-5)
            if mine["state"] is not None:  # at stage 3 the first rank has it
                assert max((mine["state"][name] - theirs["state"][name]).abs().max().item() for name in theirs["state"]) < 1e-5


@pytest.mark.parametrize("kind", ["whole", "tied", "LoRA", "quantised"])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [*(pytest.param(stage, "", marks=pytest.mark.long) for stage in (0, 1)), (2, "host"), (3, ""), (3, "all on the host")],
)
def test_what_save_pretrained_writes_has_the_logits_that_were_trained(
    pair: RankPool, stage: int, offload: str, kind: str, tmp_path: Path
) -> None:
    logits = pair.run(2, save_runs.saves, stage, offload, kind, str(tmp_path))[0]
    ways = sorted(tmp_path.iterdir())
    assert len(ways) == (2 if kind in ("LoRA", "quantised") else 5) + (stage < 3)
    for way in ways:
        if way.name == "weights":  # accelerate writes no config
            (way / "config.json").write_text((tmp_path / "engine" / "config.json").read_text())
        if way.name == "files":
            index = json.loads((way / "model.safetensors.index.json").read_text())
            assert len(set(index["weight_map"].values())) > 3
        with torch.no_grad():
            again = save_runs.loaded(kind, str(way)).eval()(input_ids=save_runs.TOKENS).logits
        torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5, msg=way.name)


def ask_for_deepspeed(group: dist.ProcessGroup) -> tuple[str, str, str]:
    config = zeroplan_config(3, offload_optimizer=True)
    assert config["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    found = metadata.distribution("deepspeed")
    spec = importlib.util.find_spec("deepspeed")
    return type(found).__module__, found.version, spec.name if spec is not None else ""


def test_deepspeed_need_not_be_installed(pair: RankPool) -> None:
    """What asks for the distribution finds the version whose ways are followed."""
    for module, version, name in pair.run(2, ask_for_deepspeed):
        assert (module, version, name) == ("zeroplan_runtime.compat.deepspeed.install", DEEPSPEED_VERSION, "deepspeed")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["sft", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("dpo", "reward", "grpo"))])
def test_trl_equals_itself_without_the_runtime(kind: str, ranks: int, tmp_path: Path, warm_python: Path) -> None:
    """What TRL adds to the Trainer is its own loss and its data's form; GRPO generates with gathered parameters."""
    pytest.importorskip("trl", reason="TRL is no dependency of the suite")
    script = Path(__file__).with_name("trl_run.py")
    said = []
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    for stage in ("plain", "3"):
        done = subprocess.run(
            [warm_python, *launcher, str(script), stage, str(tmp_path / stage), kind],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        assert done.returncode == 0, done.stderr
        said.append([float(word) for word in done.stdout.splitlines()[-1].split()])
    assert len(said[0]) == (10 if kind == "sft" else 8)
    assert said[1] == pytest.approx(said[0], abs=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_the_trainer_equals_itself_without_the_runtime(tmp_path: Path) -> None:
    """In one process of its own: fp32, stages 2 and 3, against plain torch on the same GPU."""
    code = (
        "import os, sys\nfrom pathlib import Path\nimport torch\nimport torch.distributed as dist\n"
        "from zeroplan_runtime.integrations.huggingface import zeroplan_config\n"
        "from tests.runtime.integrations import huggingface_runs as runs\n"
        "config = {stage: zeroplan_config(stage) for stage in (2, 3)}\n"
        "dist.init_process_group('nccl', rank=0, world_size=1, init_method='file://' + sys.argv[1] + '/store')\n"
        "out = Path(sys.argv[1])\n"
        "plain = runs.train(out / 'plain', None)\n"
        "for stage in (2, 3):\n"
        "    mine = runs.train(out / str(stage), config[stage])\n"
        "    pairs = zip(mine['loss'] + mine['eval_loss'], plain['loss'] + plain['eval_loss'])\n"
        "    print('apart', max(abs(a - b) for a, b in pairs))\n"
    )
    start = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(start, capture_output=True, text=True, check=False, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    apart = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("apart ")]  # the Trainer prints too
    assert len(apart) == 2
    assert max(apart) < 1e-3
