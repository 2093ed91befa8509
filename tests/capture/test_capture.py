"""Scripts run unchanged by ``zeroplan capture``, each in a process of its own: what they allocate, and what they may not do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from zeroplan.capturing.answer import CapturedRun, answer
from zeroplan.capturing.cards import fitting_cards
from zeroplan.capturing.kept import keep
from zeroplan.capturing.result import Captured, as_data, of_data
from zeroplan.capturing.run import capture_command
from zeroplan.core.cluster import Cluster
from zeroplan.core.errors import BadInput
from zeroplan.core.sizes import MIB

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_ranks")


def capture(tmp_path: Path, code: str, *words: str, **options: Any) -> tuple[Captured, CapturedRun]:
    """Capture a script; `words` stand before its name, python if there are none."""
    script = tmp_path / "train.py"
    script.write_text(code)
    captured, cluster = capture_command([*(words or ("python",)), str(script)], Cluster.of(gpu="H100"), **options)
    return captured, answer(captured, cluster)


LOOP = """
import torch
model = torch.nn.Linear(1024, 1024, bias=False).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for step in range(3):
    x = torch.randn(256, 1024, device="cuda")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_plain_loop_comes_to_the_bytes_of_its_tensors(tmp_path: Path) -> None:
    captured, run = capture(tmp_path, LOOP)
    plan = run.report.plans[0]
    assert captured.stopped is None
    assert captured.steps == 3
    assert plan.fits is True
    assert plan.capture is not None
    assert plan.capture.way == "loop"
    weight, batch, workspace = 4 * MIB, MIB, 32 * MIB
    # At the most, in the step: the weight, its gradient, two states and a list of roots, the batch, two workspaces of cuBLAS.
    assert plan.gpu.phases["step"] == 5 * weight + batch + 2 * workspace
    assert plan.gpu.peak_allocated == plan.gpu.phases["step"]


def test_a_recording_is_the_same_after_a_file(tmp_path: Path) -> None:
    captured, run = capture(tmp_path, LOOP)
    again = answer(of_data(as_data(captured), "x"), Cluster.of(gpu="A100-80G"))
    assert again.timeline.peak_allocated == run.timeline.peak_allocated - 2 * (32 * MIB) + 2 * 8_519_680


def test_a_kept_capture_is_answered_for_another_card(tmp_path: Path, cli: Any) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(LOOP)
    code, out, _ = cli("capture", "--gpu", "H100", "-o", str(kept), "--json", "--", "python", str(script))
    assert code == 0
    first = json.loads(out)["plans"][0]
    assert first["capture"] == {"way": "loop", "command": f"python {script}", "steps": 3, "stopped": None, "ended": ""}
    assert json.loads(cli("estimate", "--from", str(kept), "--json")[1])["plans"][0] == first
    code, out, _ = cli("estimate", "--from", str(kept), "--vram", "300M", "--json", "--check")
    assert code == 1
    assert json.loads(out)["plans"][0]["fits"] is False
    assert cli("estimate", "--from", str(kept), "--gpus", "8")[0] == 2


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kept capture of the plain loop."""
    folder = tmp_path_factory.mktemp("kept")
    captured, run = capture(folder, LOOP)
    keep(run, captured, str(folder / "run.json"))
    return folder / "run.json"


LOG = Path(__file__).parents[1] / "logs" / "real" / "oom_trainer.log"


def test_explain_names_the_lines_of_code(kept: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # however long the path is, it stays on its line
    code, out, _ = cli("explain", "--from", str(kept), "--json")
    lines = json.loads(out)["plans"][0]["lines"]
    assert code == 0
    of = {line["buffer"]: line for line in lines}
    assert of["param.full"] == {"buffer": "param.full", "line": f"{kept.parent / 'train.py'}:3", "bytes": 4 * MIB}
    assert of["grad.full"]["line"].endswith(":7")
    assert of["optim.exp_avg"]["line"].endswith(":8")
    assert sum(line["bytes"] for line in lines) == json.loads(out)["plans"][0]["peak_allocated"]
    assert "train.py:8" in cli("explain", "--from", str(kept))[1]
    assert cli("explain", "--from", str(kept), "--line", "logits")[0] == 2


def test_recommend_finds_the_cards_on_which_a_script_runs(kept: Path, cli: Any) -> None:
    code, out, _ = cli("recommend", "--from", str(kept), "--json")
    found = json.loads(out)
    assert code == 0
    assert all(card["fits"] for card in found["cards"])
    assert found["cards"][0]["gpu"] == "T4"
    least = found["least"]
    assert json.loads(cli("estimate", "--from", str(kept), "--vram", str(least), "--json")[1])["plans"][0]["fits"] is True
    less = str(least - 64 * MIB)
    assert json.loads(cli("estimate", "--from", str(kept), "--vram", less, "--json")[1])["plans"][0]["fits"] is not True
    assert cli("recommend", "--from", str(kept), "--vram", "300M")[0] == 1


def test_a_script_in_bf16_is_for_no_card_without_it(tmp_path: Path) -> None:
    code = LOOP.replace('.to("cuda")', '.to("cuda", torch.bfloat16)').replace('device="cuda")', 'device="cuda").bfloat16()')
    captured, _ = capture(tmp_path, code)
    assert captured.stopped is None
    assert fitting_cards(captured, Cluster.of(gpu="H100")).cards[0].gpu.name == "A10G"


def test_check_and_doctor_hold_a_kept_capture_against_a_card_and_a_log(kept: Path, cli: Any) -> None:
    assert cli("check", str(kept))[0] == 0
    assert cli("check", str(kept), "--vram", "300M")[1].startswith("Does not fit")
    code, out, _ = cli("doctor", str(LOG), "--from", str(kept), "--json")
    assert code == 0
    assert "a card of 5.0 GiB" in json.dumps(json.loads(out))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["estimate", "--micro-batch", "3"], "--micro-batch: cannot be varied in a captured run"),
        (["explain", "--stage", "3"], "--stage: cannot be varied in a captured run"),
        (["explain", "--time"], "a recording has allocations, and no times"),
        (["recommend", "--global-batch", "8"], "--global-batch: cannot be searched in a captured run"),
        (["recommend", "--nodes", "2"], "was captured on 1 × 1 GPUs"),
        (["scale"], "without an engine, and tells of no other number"),
        (["tune"], "zeroplan verify -- python"),
        (["verify"], "zeroplan verify -- python"),
    ],
)
def test_what_a_recording_cannot_vary_is_one_line(kept: Path, cli: Any, words: list[str], says: str) -> None:
    code, out, err = cli(*words, "--from", str(kept))
    assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
    assert says in err


def test_writes_go_to_a_temporary_folder_and_are_read_back(tmp_path: Path) -> None:
    code = """
import os, shutil, tempfile, torch
from pathlib import Path
here = Path(__file__).parent
os.makedirs(here / "out" / "deep")
(here / "out" / "deep" / "a.txt").write_text("first")
with open(here / "out" / "deep" / "a.txt", "a") as file:
    file.write(" second")
assert (here / "out" / "deep" / "a.txt").read_text() == "first second"
assert os.listdir(here / "out") == ["deep"] and (here / "out").is_dir()
(here / "kept.txt").write_text("changed")
assert (here / "kept.txt").read_text() == "changed"
os.rename(here / "kept.txt", here / "moved.txt")
assert not (here / "kept.txt").exists() and (here / "moved.txt").exists()
os.remove(here / "gone.txt")
assert "gone.txt" not in os.listdir(here)
torch.save({"a": torch.ones(2).cuda()}, here / "model.pt")
assert torch.load(here / "model.pt")["a"].shape == (2,)
shutil.rmtree(here / "out")
assert not (here / "out").exists()
"""
    (tmp_path / "kept.txt").write_text("kept")
    (tmp_path / "gone.txt").write_text("gone")
    captured, _ = capture(tmp_path, code)
    assert captured.stopped is None
    assert sorted(os.listdir(tmp_path)) == ["gone.txt", "kept.txt", "train.py"]
    assert (tmp_path / "kept.txt").read_text() == "kept"


def test_variables_of_the_command_are_there_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "helper.py").write_text("VALUE = 3\n")
    words = (f"PYTHONPATH={tmp_path / 'beside'}", "PYTORCH_ALLOC_CONF=expandable_segments:True", "python")
    captured, _ = capture(tmp_path, "import helper\nassert helper.VALUE == 3\n", *words)
    assert captured.stopped is None
    assert captured.machine["alloc_conf"] == "expandable_segments:True"


def test_no_network_and_no_other_programs(tmp_path: Path) -> None:
    code = """
import os, socket, subprocess
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", 9)),
    lambda: socket.getaddrinfo("example.com", 80),
    lambda: subprocess.run(["touch", "made"]),
):
    try:
        attempt()
    except OSError:
        continue
    raise SystemExit("went through")
assert "H100" in subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
"""
    captured, _ = capture(tmp_path, code)
    assert captured.stopped is None


def test_a_loop_that_draws_for_ever_is_ended_with_its_line(tmp_path: Path) -> None:
    code = LOOP.replace("for step in range(3):", "while True:") + "after = torch.empty(1 << 30, device='cuda')\n"
    captured, run = capture(tmp_path, code, steps=4)
    assert captured.stopped is None
    assert run.report.plans[0].fits is True
    assert captured.ended == f"{tmp_path / 'train.py'}:5"
    assert run.timeline.peak_allocated > 1 << 32  # what follows the loop has run


def test_a_loader_ends_after_the_steps_and_what_follows_runs(tmp_path: Path) -> None:
    code = LOOP.replace("for step in range(3):\n", "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(torch.randn(64, 256, 1024), batch_size=1, num_workers=2)\nfor batch in loader:\n").replace(
        'torch.randn(256, 1024, device="cuda")', 'batch[0].to("cuda")'
    ) + "after = torch.empty(1 << 30, device='cuda')\n"  # fmt: skip
    captured, run = capture(tmp_path, code, steps=2)
    assert captured.steps == 2
    assert captured.stopped is None
    assert run.timeline.peak_allocated > 1 << 32


def test_a_scaler_never_skips_a_step(tmp_path: Path) -> None:
    code = LOOP.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()").replace(
        "    model(x).sum().backward()",
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x).sum()\n"
        "    scaler.scale(loss).backward()",
    ).replace("for step", "scaler = torch.amp.GradScaler('cuda')\nfor step")  # fmt: skip
    captured, _ = capture(tmp_path, code + "assert len(optimizer.state) == 1\n")
    assert captured.stopped is None
    assert captured.steps == 3


def test_values_of_batches_are_known_and_others_are_noted(tmp_path: Path) -> None:
    code = """
import torch
mask = torch.tensor([1, 1, 0]).cuda()
assert mask.sum().item() == 2
weights = torch.randn(1000, 1000, device="cuda")
if weights.sum() > 3:
    raise SystemExit("an invented condition is false")
assert weights.sum().item() == 1.0
"""
    captured, _ = capture(tmp_path, code)
    assert captured.stopped is None
    assert captured.notes == [f"{tmp_path / 'train.py'}:6: a condition on values of the GPU is taken to be false"]


def test_what_stops_a_script_is_named_and_leaves_the_verdict_open(tmp_path: Path) -> None:
    code = LOOP + "import no_such_extension\n"
    captured, run = capture(tmp_path, code)
    assert captured.stopped is not None
    assert (captured.stopped.line, captured.stopped.file) == (10, str(tmp_path / "train.py"))
    plan = run.report.plans[0]
    assert plan.fits is None
    assert plan.gpu.peak_allocated
    assert '"stopped": {' in run.report.to_json()


def test_a_script_that_uses_no_gpu_is_not_called_fitting(tmp_path: Path) -> None:
    _, run = capture(tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(2))\n")
    assert run.report.plans[0].fits is None


def test_a_rank_of_a_world_sees_all_of_it(tmp_path: Path) -> None:
    code = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (9, 16, "1")
x = torch.ones(4, device="cuda")
assert x.device == torch.device("cuda", 1)
dist.all_reduce(x)
found = [None] * 16
dist.all_gather_object(found, "a")
assert found == ["a"] * 16
whole = torch.empty(64, device="cuda")
dist.all_gather_into_tensor(output_tensor=whole, input_tensor=torch.tensor([2.0] * 4, device="cuda"))
assert whole.tolist() == [2.0] * 64
assert torch.ones(3).type_as(whole.half()).device == x.device
assert torch.ones(3).type_as(whole.half()).dtype == torch.float16
"""
    captured, run = capture(tmp_path, code, "torchrun", "--nproc_per_node", "8", "--nnodes", "2", rank=9)
    assert captured.stopped is None
    assert run.report.cluster["ranks"] == 16
    assert run.report.plans[0].fits is None


def test_a_contradicting_number_of_gpus_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["torchrun", "--nproc_per_node", "8", str(tmp_path / "train.py")]
    with pytest.raises(BadInput, match="8 processes"):
        capture_command(words, Cluster.of(gpus=4), explicit_gpus=True)


def test_checkpointing_recomputes_under_the_scripts_autocast(tmp_path: Path) -> None:
    code = """
import torch
from torch.utils.checkpoint import checkpoint
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
seen = []
def block(x):
    y = layer(x)
    seen.append(y.dtype)
    return torch.nn.functional.scaled_dot_product_attention(*[y.view(1, 1, -1, 64)] * 3).sum()
for step in range(2):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = checkpoint(block, torch.randn(8, 64, device="cuda", requires_grad=True), use_reentrant=False)
    loss.backward()
    optimizer.step()
assert seen == [torch.bfloat16] * 4, seen
"""
    captured, _ = capture(tmp_path, code, steps=2)
    assert captured.stopped is None


def test_a_trainer_evaluates_and_saves_once_without_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code = """
import json, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
here = Path(__file__).parent
model = AutoModelForCausalLM.from_pretrained(str(here / "model"), dtype=torch.float32)
data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(64)]
arguments = TrainingArguments(str(here / "out"), per_device_train_batch_size=2, num_train_epochs=9, bf16=True, report_to=[],
    eval_strategy="epoch", save_strategy="steps", save_steps=500, disable_tqdm=True)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
assert (here / "out" / "checkpoint-3" / "config.json").exists()
assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 1
"""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(vocab_size=512, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path / "model")
    captured, run = capture(tmp_path, code)
    assert captured.stopped is None
    assert captured.steps == 3
    assert {"forward", "backward", "step", "evaluation", "save"} <= run.report.plans[0].gpu.phases.keys()
    assert not (tmp_path / "out").exists()
    assert captured.model["params"] == 2 * 512 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)


def test_weights_loaded_onto_a_gpu_lie_in_one_block(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1, "num_attention_heads": 16}
    LlamaConfig(vocab_size=512, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path / "model")
    code = """
from pathlib import Path
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(str(Path(__file__).parent / "model"), device_map="auto")
"""
    _, run = capture(tmp_path, code)
    params = 2 * 512 * 1024 + 4 * 1024 * 1024 + 3 * 1024 * 2816 + 3 * 1024
    # One by one, each of the three matrices of 11 MiB would take a segment of 12.
    assert 4 * params <= run.timeline.peak_allocated < 4 * params + 2 * MIB
