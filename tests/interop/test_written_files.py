"""Every file that a recommendation writes, taken by the program that it is for, and read back to the same plan."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.workloads import flat_workload, with_flat
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.rates import rates_of
from zeroplan.core.workload import DType, Precision, Workload
from zeroplan.ds_config.reader import read_ds_config
from zeroplan.engines.registry import find_engine
from zeroplan.interop.forms.launch import LAUNCHERS, Shell, launch
from zeroplan.interop.readers import read_setup
from zeroplan.models.load import load_model
from zeroplan.search.cost import CostModel
from zeroplan.search.files import Files, Target, files_of
from zeroplan.search.memory import Memory
from zeroplan.search.recommend import rank_all
from zeroplan.search.results import Recommendation, recommendation
from zeroplan.search.space import Candidate

CLUSTER = Cluster.of(gpus=4, nodes=2, vram="24G", cpu_ram="512G", nvme="2T")
WORKLOADS = {
    "bf16": Workload.of(micro_batch=2, seq_len=1024, grad_accum=4),
    "fp16": flat_workload(micro_batch=1, seq_len=1024, dtype=DType.FP16, gradient_checkpointing=True),
    "fp32": Workload.of(micro_batch=1, seq_len=1024, dtype=DType.FP32, precision=Precision.FP32),
}


def recommended(workload: Workload, engine: str = "deepspeed") -> list[Recommendation]:
    """A recommendation of every configuration that the search may name."""
    found = find_engine(engine)
    spec = load_model("meta-llama/Llama-3.2-1B")
    memory = Memory(found, spec, CLUSTER, depth="formula")
    cost = CostModel(found, spec, CLUSTER, rates_of(CLUSTER.gpu))
    given = [Candidate(zero, workload, "", 0, i) for i, (zero, _) in enumerate(found.search_space(CLUSTER, "/local_nvme"))]
    return [recommendation(found, r, 0, CLUSTER.layout) for r in rank_all(given, memory, cost)]


@pytest.mark.parametrize("name", WORKLOADS)
def test_explicit_configs_read_back_to_the_same_plan(name: str) -> None:
    for one in recommended(WORKLOADS[name]):
        config = one.ds_config()
        assert "auto" not in json.dumps(config)
        read = read_ds_config(config, world_size=CLUSTER.layout.dp)
        assert read.zero == one.zero
        assert read.runs_alone
        base = flat_workload(seq_len=1024, gradient_checkpointing=one.workload.gradient_checkpointing)
        assert read.workload(base) == one.workload


@pytest.mark.torch
def test_deepspeed_parses_every_explicit_config(warm_python: Path) -> None:
    pytest.importorskip("deepspeed")
    configs = [one.ds_config() for name in WORKLOADS for one in recommended(WORKLOADS[name])]
    code = (
        "import json, sys, os\n"
        "os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "from unittest.mock import patch\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "for line in sys.stdin:\n"
        "    c = json.loads(line)\n"
        f"    with patch('deepspeed.comm.get_world_size', return_value={CLUSTER.layout.dp}), "
        "patch('deepspeed.comm.get_rank', return_value=0):\n"
        "        d = DeepSpeedConfig(c)\n"
        "    z = d.zero_config\n"
        "    print(json.dumps(['answer', d.train_batch_size, d.train_micro_batch_size_per_gpu,"
        " d.gradient_accumulation_steps, z.stage, z.reduce_bucket_size, str(z.overlap_comm)]))\n"
    )
    run = subprocess.run(
        [warm_python, "-c", code],
        input="\n".join(map(json.dumps, configs)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('["answer"')]
    assert len(answers) == len(configs), run.stderr[-2000:]
    for config, (_, batch, micro, accum, stage, bucket, _) in zip(configs, answers, strict=True):
        assert batch == micro * accum * CLUSTER.layout.dp == config["train_batch_size"]
        assert micro == config["train_micro_batch_size_per_gpu"]
        assert accum == config["gradient_accumulation_steps"]
        assert stage == config["zero_optimization"]["stage"]
        assert bucket == config["zero_optimization"]["reduce_bucket_size"]


@pytest.mark.torch
def test_lightning_takes_its_form(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("lightning")
    logging.getLogger("lightning").setLevel(logging.CRITICAL)
    from lightning.pytorch.strategies import DeepSpeedStrategy

    one = recommended(WORKLOADS["bf16"])[0]
    files = write(one, tmp_path / "ds.json", "lightning")
    form = json.loads(files.texts[str(tmp_path / "ds.json")])
    said = json.loads(files.texts[str(tmp_path / "trainer.json")])
    assert said == {
        "accumulate_grad_batches": 4,
        "precision": "bf16-mixed",
        "gradient_clip_val": 1.0,
        "devices": 4,
        "num_nodes": 2,
        "accelerator": "gpu",
    }
    strategy = DeepSpeedStrategy(config=form)
    assert isinstance(strategy.config, dict)
    assert strategy.config["zero_optimization"] == one.ds_config()["zero_optimization"]


def write(one: Recommendation, path: Path, form: str, **options: Any) -> Files:
    """The files of a form, written."""
    files = files_of(one, CLUSTER, Target(str(path), form, **options))
    for name, text in files.texts.items():
        Path(name).write_text(text)
    return files


def _load_accelerate(path: Path) -> Any:
    from accelerate.commands.config.config_args import load_config_from_file

    return load_config_from_file(str(path))


@pytest.mark.torch
@pytest.mark.parametrize("index", range(4))
def test_accelerate_loads_its_yaml_and_it_reads_back(tmp_path: Path, index: int) -> None:
    pytest.importorskip("accelerate")
    one = recommended(WORKLOADS["bf16"])[index]
    write(one, tmp_path / "ds.json", "accelerate")
    loaded = _load_accelerate(tmp_path / "accelerate.yaml")
    assert str(loaded.distributed_type).endswith("DEEPSPEED")
    assert (loaded.num_processes, loaded.num_machines) == (8, 2)
    assert loaded.deepspeed_config["deepspeed_config_file"] == str(tmp_path / "ds.json")
    assert loaded.deepspeed_config["zero3_init_flag"] is (one.zero.stage == 3)
    setup = read_setup(tmp_path / "accelerate.yaml")
    assert (setup.value("engine"), setup.value("gpus"), setup.value("nodes")) == ("deepspeed", 4, 2)
    assert setup.ds_config is not None
    assert read_ds_config(setup.ds_config, world_size=8).zero == one.zero


@pytest.mark.torch
@pytest.mark.parametrize(("again", "name"), [(False, "accelerate.yaml"), (True, "x.json")])
def test_accelerate_loads_the_fsdp2_variant(tmp_path: Path, again: bool, name: str) -> None:
    pytest.importorskip("accelerate")
    from accelerate.utils import FullyShardedDataParallelPlugin

    for one in recommended(with_flat(WORKLOADS["bf16"], gradient_checkpointing=again), "fsdp2"):
        path = tmp_path / name
        files = write(one, path, "accelerate-fsdp2")
        assert files.start.environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == str(one.workload.batch.grad_accum)
        loaded = _load_accelerate(path)
        assert str(loaded.distributed_type).endswith("FSDP")
        assert loaded.mixed_precision == "bf16"
        block = {key.removeprefix("fsdp_"): value for key, value in loaded.fsdp_config.items()}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=block["version"],
            reshard_after_forward=block["reshard_after_forward"],
            activation_checkpointing=block["activation_checkpointing"],
            state_dict_type=block["state_dict_type"],
        )
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is (one.zero.stage == 3)
        setup = read_setup(path)
        # Without FSDP's own checkpointing the script decides.
        assert (setup.value("engine"), setup.ask.dtype, setup.value("gradient_checkpointing")) == (
            "fsdp2",
            "bf16",
            again or None,
        )
        assert setup.ask.stage == one.zero.stage


def test_deepspeeds_launcher_reads_the_hostfile() -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.launcher.runner import _parse_hostfile, parse_args

    start = launch("deepspeed", gpus=4, nodes=2, hosts=("alpha",), arguments=("--deepspeed_config", "a b.json"))
    assert dict(_parse_hostfile(start.files["hostfile"].splitlines())) == {"alpha": 4, "node1": 4}
    words = shlex.split(start.command)
    read = parse_args(words[1:])
    assert (read.hostfile, read.num_nodes, read.num_gpus, read.user_script) == ("hostfile", 2, 4, "train.py")
    assert read.user_args == ["--deepspeed_config", "a b.json"]


@pytest.mark.torch
@pytest.mark.parametrize("nodes", [1, 3])
def test_torchruns_own_parser_takes_the_command(nodes: int) -> None:
    pytest.importorskip("torch")
    from torch.distributed.run import parse_args

    words = shlex.split(launch("torchrun", gpus=4, nodes=nodes).command)
    read = parse_args(words[1:])
    assert (str(read.nnodes), str(read.nproc_per_node), read.training_script) == (
        "1:1" if nodes == 1 else "3",
        "4",
        "train.py",
    )


@pytest.mark.parametrize("config", ["", "a b.yaml"])
def test_slurm_scripts_are_shell_and_carry_the_allocators_settings(config: str) -> None:
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": Shell("$(nproc)")}
    start = launch("slurm", gpus=8, nodes=4, environment=environment, folder="out/run", accelerate_config=config)
    assert start.command == "sbatch out/run/train.sbatch"
    script = start.files["out/run/train.sbatch"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in script
    assert "export OMP_NUM_THREADS=$(nproc)\n" in script
    assert ("accelerate launch" in script) is bool(config)


@pytest.mark.torch
def test_accelerates_own_parser_takes_the_command_of_many_nodes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    files = write(recommended(WORKLOADS["bf16"])[0], tmp_path / "ds.json", "accelerate")
    words = shlex.split(files.start.command.replace("${NODE_RANK:?}", "1"))
    read, *_ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
    assert (read.machine_rank, read.main_process_ip, read.num_machines, read.num_processes) == (1, "node0", 2, 8)
    assert read.use_deepspeed
    assert read.training_script == "train.py"
    assert "node0 stands for your first node's name: give it by --hosts" in files.notes
    unset = subprocess.run(["bash", "-c", f"true {files.start.command}"], capture_output=True, text=True, check=False)
    assert unset.returncode
    assert "NODE_RANK" in unset.stderr


def test_the_allocators_settings_reach_every_node() -> None:
    """DeepSpeed's launcher hands on what a file says, and nothing that the shell computes."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": Shell("$(nproc)")}
    start = launch("deepspeed", gpus=4, nodes=2, hosts=("a", "b"), environment=environment, folder="out")
    assert start.files["out/deepspeed_env"] == "PYTORCH_ALLOC_CONF=expandable_segments:True\n"
    assert start.shell().startswith("DS_ENV_FILE=out/deepspeed_env deepspeed --hostfile out/hostfile ")
    assert not start.notes
    one_node = launch("deepspeed", gpus=4, environment=environment)
    assert one_node.shell().startswith("PYTORCH_ALLOC_CONF=expandable_segments:True OMP_NUM_THREADS=$(nproc) deepspeed ")


def test_unknown_names_are_refused() -> None:
    one = recommended(WORKLOADS["bf16"])[0]
    with pytest.raises(BadInput, match="--launcher"):
        launch("mpirun", gpus=1)
    with pytest.raises(BadInput, match="--form"):
        files_of(one, CLUSTER, Target("x.json", "yaml"))
    with pytest.raises(BadInput, match="or --engine fsdp2"):
        files_of(one, CLUSTER, Target("x.yaml", "accelerate-fsdp2"))
    with pytest.raises(BadInput, match="deepspeed does not start the form lightning"):
        files_of(one, CLUSTER, Target("x.json", "lightning", "deepspeed"))
    with pytest.raises(BadInput, match=r"--new-script train[.]py, which holds it all, or --form accelerate-fsdp2"):
        files_of(recommended(WORKLOADS["bf16"], "fsdp2")[0], CLUSTER, Target("x.json"))
    assert set(LAUNCHERS) == {"deepspeed", "torchrun", "accelerate", "slurm"}
