"""Scripts that do what scripts of strangers do: each ends in an answer, or in one line that names where it stopped."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from tests.capture.test_capture import LOOP, capture
from zeroplan.capturing.run import capture_command
from zeroplan.core.cluster import Cluster

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_ranks")

#: Python's own answer to SIGINT, which a process of a shell in the background ignores.
_HEEDS = "import os, signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
#: What a script finds out about the machine, and how it leaves.
MACHINE = f"""
import os, signal, subprocess, torch
query = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,nounits,noheader"]
assert subprocess.check_output(query, text=True).endswith(", 0\\n")  # nothing of torch's is there yet
signal.signal(signal.SIGTERM, lambda *_: None)
torch.cuda.reset_peak_memory_stats()
{LOOP}
free, total = torch.cuda.mem_get_info()
assert total - free > torch.cuda.memory_allocated() > 0
most = torch.cuda.max_memory_allocated()
assert most == torch.cuda.memory_stats()["allocated_bytes.all.peak"] > torch.cuda.memory_allocated()
all_of_it, used = subprocess.check_output(query, text=True).split(",")
assert int(all_of_it) == total >> 20 and int(used) == total - free >> 20  # the context included
assert os.popen("nvidia-smi -L").read().startswith("GPU 0: NVIDIA H100")
import pynvml
pynvml.nvmlInit()
assert pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free < total
os.system("mkdir -p deep/er")
assert os.path.isdir("deep/er")
os._exit(0)
"""
#: Files in odd places and by odd ways.
FILES = f"""
import bz2, glob, os, pathlib, shutil, sqlite3, tarfile, tempfile
import numpy
{LOOP}
model = torch.compile(model)
torch.save(model._orig_mod.state_dict(), "/etc/model ü.pt")
model.load_state_dict(torch.load("/etc/model ü.pt"))
assert glob.glob("/etc/mode*.pt") and list(pathlib.Path("/etc").glob("mode*.pt"))
with open("log.txt", "a") as file:
    file.write("x")
opened = open("log.txt")
shutil.copy("log.txt", "copy.txt")
with tarfile.open("all.tar.gz", "w:gz") as archive:
    archive.add("log.txt")
os.remove("log.txt")
assert opened.read() == "x" and not os.path.exists("log.txt")
os.makedirs("into", exist_ok=True)
os.chdir("into")
with tarfile.open("../all.tar.gz") as archive:
    archive.extractall(".")
assert os.listdir(".") == ["log.txt"]
os.chdir("..")
numpy.savetxt("table.txt", numpy.ones((2, 3)))
assert numpy.loadtxt("table.txt").sum() == 6
numbers = numpy.memmap("numbers.bin", dtype="uint16", mode="w+", shape=(4,))
sqlite3.connect("runs.db").execute("create table runs (a)")
with bz2.open("a.bz2", "wt") as file:
    file.write("x")
shutil.rmtree("into")
assert not os.path.isdir("into")
shutil.rmtree("kept")
os.makedirs("kept")
assert os.listdir("kept") == [] and not os.path.exists("kept/a.txt")
"""
SPAWNED = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
def work(rank, size):
    dist.init_process_group("nccl", init_method="tcp://localhost:1234", rank=rank, world_size=size)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(8, 1024, device=rank)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""
WORKERS = """
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
class Numbers(IterableDataset):
    def __iter__(self):
        yield from (torch.ones(1024) for _ in range(get_worker_info().id, 10**9, get_worker_info().num_workers))
model = torch.nn.Linear(1024, 1024).cuda()
for batch in DataLoader(Numbers(), 16, num_workers=2, persistent_workers=True, multiprocessing_context="spawn"):
    probs = torch.distributions.Categorical(logits=model(batch.cuda())).sample()
    model(batch.cuda()).sum().backward()
    for param in model.parameters():
        param.data.add_(param.grad, alpha=-0.1)
"""
#: A loop that waits for a loss, settings of a service that is not installed, and a stop of the debugger's.
WAITS = """
import torch, wandb
from torch.utils.tensorboard import SummaryWriter
wandb.init(project="x", config={"hidden": 1024})
writer = SummaryWriter("runs")
model = torch.nn.Linear(wandb.config.hidden, wandb.config["hidden"], bias=False).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
loss = torch.tensor(9.0)
while loss > 0.01:
    loss = model(torch.randn(256, 1024, device="cuda")).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("loss", loss, 1)
breakpoint()
"""


@pytest.mark.parametrize("code", [MACHINE, FILES, WORKERS, WAITS], ids=["machine", "files", "workers", "waits"])
def test_an_odd_script_ends_in_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a.txt").write_text("a")
    captured, run = capture(tmp_path, code)
    assert captured.stopped is None, captured.stopped
    assert captured.steps in (3, 4)
    assert run.report.plans[0].fits is (None if "torch.compile" in code else True)
    assert sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")) == ["kept", "kept/a.txt", "train.py"]


def test_a_loop_that_waits_for_a_value_is_ended_at_its_line(tmp_path: Path) -> None:
    captured, _ = capture(tmp_path, WAITS)
    assert (captured.steps, captured.ended) == (3, f"{tmp_path / 'train.py'}:9")


def test_loops_in_functions_and_modules_end_and_what_follows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass over an inner loop takes a step more, and the second ends all loops around it."""
    head, _, body = LOOP.partition("for step in range(3):\n")
    turn = "".join(f"            {line}\n" for line in body.splitlines())
    (tmp_path / "inner.py").write_text(
        f"{head}\ndef train(items, seen):\n    for epoch in range(1000):\n        for item in items():\n{turn}"
        "        seen.append(epoch)\n        torch.empty(1 << 28, device='cuda')\n    else:\n        return 'all'\n"
    )
    code = """
import itertools, inner
def endless():
    while True:
        yield 1
for items in (endless, itertools.count, lambda: enumerate(zip(range(9**9))), lambda: [0] * 100):
    seen = []
    assert inner.train(items, seen) == "all" and len(seen) < 3, seen
import torch
for held in [torch.empty(1 << 28, device="cuda")]:
    break
del held
assert torch.cuda.memory_allocated() < 1 << 28  # nothing keeps a loop's iterator
"""
    monkeypatch.chdir(tmp_path)
    captured, run = capture(tmp_path, code)
    assert captured.stopped is None, captured.stopped
    assert run.timeline.peak_allocated > 1 << 30
    assert run.report.plans[0].fits is True


def test_a_loop_that_cannot_be_ended_leaves_open_what_follows(tmp_path: Path) -> None:
    captured, run = capture(tmp_path, f"text = {LOOP.replace('range(3)', 'range(9)')!r}\nexec(text)\nprint(1)\n")
    assert run.report.plans[0].fits is True
    captured, run = capture(tmp_path, f"text = {LOOP.replace('range(3)', 'range(9)')!r}\nexec(text)\nevaluate()\n")
    assert captured.ended == f"{tmp_path / 'train.py'}:2"
    assert [
        says.endswith(f"{tmp_path / 'train.py'}:3, which follows it, was not run") for _, _, says in captured.unmodelled
    ] == [True]
    assert run.report.plans[0].fits is None


def test_processes_that_a_script_starts_are_a_world(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    captured, _ = capture_command(["python", str(script)], Cluster.of(gpu="H100", gpus=4))
    assert captured.stopped is None, captured.stopped
    assert captured.engine["engine"] == "ddp"
    assert [key for key, *_ in captured.unmodelled] == []
    assert "torch.multiprocessing.spawn starts 4 processes: the first is captured" in captured.notes


@pytest.mark.parametrize(
    ("code", "line", "says"),
    [
        ("import os\nos._exit(3)", 2, "the script exits with 3"),
        ("import os\nos.abort()", 2, "exit code -6"),
        ("import os, sys\nos.execv(sys.executable, ['python'])", 2, "goes on as another program"),
        (f"{_HEEDS}os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass", 3, "KeyboardInterrupt"),
        ("import torch\ngraph = torch.cuda.CUDAGraph()", 2, "CUDA graphs"),
        ("x = input('go on? ')", 1, "EOFError"),
        ("def f(:\n    pass", 1, "SyntaxError"),
        ("import nobodys_package", 1, "nobodys_package"),
        ("import time\nwhile True:\n    time.sleep(60)", 3, "longer than 1 s"),
    ],
    ids=["exit", "abort", "exec", "interrupt", "graph", "input", "syntax", "package", "sleep"],
)
def test_what_stops_a_script_is_named_with_its_line(tmp_path: Path, code: str, line: int, says: str) -> None:
    captured, _ = capture(tmp_path, code, seconds=1.0 if "sleep" in code else 300.0)
    assert captured.stopped is not None
    assert (captured.stopped.line, says in captured.stopped.why) == (line, True), captured.stopped


def test_what_forked_processes_put_on_a_gpu_is_said(tmp_path: Path) -> None:
    code = "import multiprocessing as mp, torch\ndef work():\n    torch.ones(8, device='cuda')\n"
    code += "process = mp.get_context('spawn').Process(target=work)\nprocess.start()\nprocess.join()\n" + LOOP
    captured, run = capture(tmp_path, code)
    assert any(key == "processes" and ":3 puts tensors" in says for key, _, says in captured.unmodelled), captured.unmodelled
    assert run.report.plans[0].fits is None


def test_no_file_of_the_folder_stands_in_the_way_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong one')\n")
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    captured, _ = capture(tmp_path / "src", LOOP)
    assert captured.stopped is None, captured.stopped


def test_a_full_temporary_folder_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    (tmp_path / "train.py").write_text("pass\n")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    code, out, err = cli("capture", "--gpu", "H100", "--", "python", str(tmp_path / "train.py"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "TMPDIR" in err


def test_a_notebooks_magics_are_left_out(tmp_path: Path) -> None:
    cells = ["!pip install x\n%matplotlib inline\nimport torch", "%%bash\necho a | grep a", "files = !ls\nif True:\n    !ls",
             "import asyncio\nawait asyncio.sleep(0)", LOOP]  # fmt: skip
    path = tmp_path / "sp ace ü.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    captured, _ = capture_command(["python", str(path)], Cluster.of(gpu="H100"))
    assert captured.stopped is None, captured.stopped
    assert captured.steps == 3


def test_under_accelerate_what_follows_the_steps_is_captured(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    code = """
import torch
from accelerate import Accelerator
from accelerate.utils.memory import find_executable_batch_size
from torch.utils.data import DataLoader
accelerator = Accelerator()
@find_executable_batch_size(starting_batch_size=4)
def train(size):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = DataLoader([torch.zeros(64) for _ in range(64)], batch_size=size)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    for row in rows:
        accelerator.backward(model(row).sum())
        optimizer.step()
        optimizer.zero_grad()
    torch.save(accelerator.get_state_dict(model), "model.pt")
train()
print("after")
"""
    captured, run = capture(tmp_path, code)
    assert (captured.stopped, captured.ended, captured.steps) == (None, "", 4)
    assert run.report.plans[0].gpu.phases["save"] > 0
    assert [key for key, *_ in captured.unmodelled] == ["find_executable_batch_size"]


def test_the_kernel_lets_no_library_write_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ctypes.CDLL(None, use_errno=True).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("needs a kernel with Landlock")
    monkeypatch.chdir(tmp_path)
    code = f"""
import ctypes, os, torch
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "scripted.pt")
assert os.path.exists("scripted.pt")
assert ctypes.CDLL(None).creat(b"native.txt", 0o600) < 0  # as a library's own code would
{LOOP}"""
    captured, _ = capture(tmp_path, code)
    assert captured.stopped is None, captured.stopped
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]
