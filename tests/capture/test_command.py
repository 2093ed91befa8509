"""Commands as people type them, down to the one process that is captured."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan.capturing.command import Start, start_of
from zeroplan.core.errors import BadInput


@pytest.mark.parametrize(
    ("line", "target", "arguments", "launcher", "local", "nodes"),
    [
        ("python train.py --lr 3", "train.py", ("--lr", "3"), "", None, None),
        ("python3 -u -X utf8 train.py", "train.py", (), "", None, None),
        ("CUDA_VISIBLE_DEVICES=0 nohup python train.py", "train.py", (), "", None, None),
        ("uv run python train.py", "train.py", (), "", None, None),
        ("torchrun --nproc_per_node=8 --nnodes 2 train.py a", "train.py", ("a",), "torchrun", 8, 2),
        ("torchrun --standalone train.py", "train.py", (), "torchrun", 1, None),
        ("python -m torch.distributed.run --nproc-per-node 4 train.py", "train.py", (), "torchrun", 4, None),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "train.py", ("--deepspeed", "ds.json"), "deepspeed", 4, None),
        ("deepspeed --include localhost:0,1 train.py", "train.py", (), "deepspeed", 2, None),
        ("accelerate launch --num_processes 8 --num_machines 2 --multi_gpu train.py x", "train.py", ("x",), "accelerate", 4, 2),
        ("python -m torch.distributed.launch --nproc_per_node=2 --use_env train.py", "train.py", (), "torchrun", 2, None),
        ("srun -N2 --ntasks-per-node=4 --gpus 8 python -u train.py x", "train.py", ("x",), "srun", 4, 2),
        ("srun --exclusive -n 8 python train.py", "train.py", (), "srun", 8, 1),
        ("srun -N 2 torchrun --nnodes 2 --nproc_per_node 8 train.py", "train.py", (), "torchrun", 8, 2),
        ("bash -c 'hostname; srun -n 2 python train.py'", "train.py", (), "srun", 2, 1),
        ("bash -c 'python train.py --a 1'", "train.py", ("--a", "1"), "", None, None),
    ],
)
def test_the_launcher_and_the_script(
    line: str, target: str, arguments: tuple[str, ...], launcher: str, local: int | None, nodes: int | None
) -> None:
    import shlex

    found = start_of(shlex.split(line))
    assert (found.target, found.arguments, found.launcher) == (target, arguments, launcher)
    assert (found.local_ranks, found.nodes) == (local, nodes)


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("deepspeed train.py -x", ("--local_rank=3", "-x")),
        ("deepspeed --no_local_rank train.py -x", ("-x",)),
        ("torchrun train.py -x", ("-x",)),
    ],
)
def test_deepspeed_tells_a_script_its_local_rank(line: str, given: tuple[str, ...]) -> None:
    assert start_of(line.split()).given(3) == given


def test_a_module_and_variables() -> None:
    found = start_of(["A=1", "python", "-m", "package.train", "--x"])
    assert found == Start("package.train", True, ("--x",), environment={"A": "1"})


def test_a_shell_script_is_read_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    script = tmp_path / "run.sh"
    script.write_text(f"touch {mark}\nexport B=2\nLR=5\ntorchrun --nproc_per_node 2 train.py \\\n  --lr $LR\n")
    found = start_of(["bash", str(script)])
    assert (found.target, found.arguments, found.local_ranks) == ("train.py", ("--lr", "5"), 2)
    assert found.environment["B"] == "2"
    assert not mark.exists()


def test_a_shell_script_has_its_arguments_its_environment_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS", "9")
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "scripts"
    inside.mkdir()
    text = 'cd "$(dirname "$0")"\npython ../train.py --rows ${ROWS:-4} --lr ${1:-5} --at $PWD "${@:2}"\n'
    (inside / "run.sh").write_text(text)
    found = start_of(["bash", "scripts/run.sh", "7", "--x"])
    assert found.arguments == ("--rows", "9", "--lr", "7", "--at", str(inside), "--x")
    assert found.folder == str(inside)
    assert "ROWS" not in found.environment  # the process has it
    assert start_of(["ROWS=3", "bash", "scripts/run.sh"]).arguments[:4] == ("--rows", "3", "--lr", "5")
    (inside / "run.sh").write_text("cd nowhere\npython train.py\n")
    with pytest.raises(BadInput, match="line 2: there is no folder"):
        start_of(["bash", "scripts/run.sh"])


@pytest.mark.parametrize(
    "words", [[], ["python"], ["python", "-c", "1"], ["torchrun", "--nproc_per_node", "x", "train.py"], ["no-such-program"]]
)
def test_what_cannot_be_started_is_one_line(words: list[str]) -> None:
    with pytest.raises(BadInput):
        start_of(words)
