"""The page's one function: the command line's own figures, refusals in one line, and nothing of this machine in an answer."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import zipfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.digests import DIGESTS
from zeroplan.core.errors import BadInput
from zeroplan.interop.programs.registry import PROGRAMS
from zeroplan.simulate.allocator import native
from zeroplan.tapes import shipped
from zeroplan.ui.answers import answer, answer_text, names
from zeroplan.ui.asked import PLAN_KEYS

Cli = Callable[..., tuple[int, str, str]]
GPT2 = "openai-community/gpt2"
LLAMA = "meta-llama/Llama-3.2-1B"
DS_CONFIG = json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}})
RECIPE = f"model_name_or_path: {GPT2}\ndataset_text_field: text\nper_device_train_batch_size: 4\n"


def _printed(cli: Cli, command: str) -> dict[str, Any]:
    """What the command of an answer prints as JSON."""
    code, out, err = cli(*shlex.split(command)[1:], "--json")
    assert code in (0, 1), err
    found: dict[str, Any] = json.loads(out)
    del found["zeroplan"]  # the version and this command
    return found


QUESTIONS: list[dict[str, Any]] = [
    {"model": GPT2, "gpus": 2, "gpu": "T4", "engine": "deepspeed"},
    {"model": LLAMA, "gpus": 8, "nodes": 2, "vram": "24G", "micro_batch": 4, "seq_len": 1024, "gradient_checkpointing": True},
    {"params": "7.5B", "gpus": 8, "gpu": "H100", "cpu_ram": "256G", "nvme": "2T"},
    {"model": LLAMA, "gpus": 1, "gpu": "L4", "engine": "ddp", "lora_rank": 8, "quantize": "nf4", "depth": "formula"},
    {"model": GPT2, "gpu": "H100", "gpus": 4, "alloc_conf": "expandable_segments:True", "engine": "fsdp2", "optimizer": "lion"},
    {"model": GPT2, "gpu": "H100", "gpus": 4, "files": [{"name": "folder/ds_config.json", "text": DS_CONFIG}]},
    {"gpu": "H100", "gpus": 4, "files": [{"name": "recipe.yaml", "text": RECIPE}], "program": "trl"},
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: " ".join(map(str, question.values()))[:60])
def test_the_answer_is_that_of_its_command(
    question: dict[str, Any], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in question.get("files", ()):
        (tmp_path / Path(file["name"]).name).write_text(file["text"])
    found = answer(question)
    assert found["report"] == _printed(cli, found["command"])
    code, out, _ = cli(*shlex.split(found["command"])[1:])
    assert code == 0
    said = " ".join(out.split())
    assert f"{found['verdict']}: {found['figures']}" in said
    if found["peak"]:
        assert found["peak"] in said


def test_a_row_is_shown_with_its_own_verdict_timeline_and_knobs(cli: Cli) -> None:
    question = {"model": GPT2, "gpus": 2, "gpu": "T4", "seq_len": 512}
    row = {"stage": 2, "offload_optimizer": "cpu", "offload_param": "none"}
    whole, found = answer(question), answer({**question, "show": row})
    assert whole["report"]["plans"] == found["report"]["plans"]
    plan = found["report"]["plans"][found["chosen"]]
    assert {key: plan[key] for key in row} == row
    printed = _printed(cli, found["command"])
    assert printed["plans"] == [plan]
    assert [{**knob, "change": None} for knob in found["knobs"]] == [{**one, "change": None} for one in printed["reliefs"]]
    timeline = found["timeline"]
    assert max(timeline["allocated"]) == plan["gpu"]["peak_allocated"] == timeline["allocated"][timeline["peak"]]
    assert max(timeline["reserved"]) == plan["gpu"]["peak_reserved"]
    sums = [sum(column) for column in zip(*(layer["bytes"] for layer in timeline["layers"]), strict=True)]
    assert sums == timeline["allocated"]


def test_a_knob_turned_gives_the_total_it_promised() -> None:
    question = {"model": GPT2, "gpus": 2, "gpu": "T4", "micro_batch": 4}
    found = answer(question)
    plan = found["report"]["plans"][found["chosen"]]
    assert {next(iter(knob["change"])) for knob in found["knobs"]} >= {"gradient_checkpointing", "micro_batch", "stage"}
    for knob in found["knobs"]:
        change = dict(knob["change"])
        now = {key: plan[key] for key in PLAN_KEYS}
        if "stage" in change:  # as the page does: flags of a plan leave its other offloads at none
            now = {"offload_optimizer": "none", "offload_param": "none"}
        show = now | {key: change.pop(key) for key in PLAN_KEYS if key in change}
        turned = answer({**question, **change, "show": show})
        assert turned["report"]["plans"][turned["chosen"]]["gpu"]["total"] == knob["total"], knob


@pytest.mark.parametrize("show", [(3, "cpu", "cpu"), (7, "x", "y")])
def test_a_plan_that_no_row_has_is_said(show: tuple[int, str, str]) -> None:
    """No other plan answers in its place."""
    question = {"model": GPT2, "gpus": 2, "gpu": "T4", "engine": "ddp"}
    told: list[dict[str, Any]] = []
    found = answer({**question, "show": dict(zip(PLAN_KEYS, show, strict=True))}, told.append)
    assert (found["verdict"], found["chosen"]) == ("No such plan", None)
    assert found["figures"].startswith(f"DDP has no row for ZeRO-{show[0]}, optimizer")
    assert found["report"]["plans"] == answer(question)["report"]["plans"]
    assert not [one for one in told if "so_far" in one]


@pytest.mark.parametrize("row", [{"seq_len": 256}, {"gpus": 2, "nodes": 2}])
def test_a_row_of_the_map_is_what_each_question_answers(row: dict[str, int]) -> None:
    show = {"stage": 2, "offload_optimizer": "cpu", "offload_param": "none"}
    question = {"model": GPT2, "gpu": "T4", **row}
    cells = answer({**question, "verb": "map", "show": show, "batches": [1, 64, 512]})["cells"]
    assert {cell["verdict"] for cell in cells} == {"fits", "does not fit"}
    for cell in cells:
        found = answer({**question, "micro_batch": cell["batch"], "show": show})
        plan = found["report"]["plans"][found["chosen"]]
        assert (cell["bytes"], cell["verdict"]) == (plan["gpu"]["interval"][1], plan["verdict"])


def test_what_the_line_and_the_verdict_show_is_said_in_words() -> None:
    found = answer({"model": GPT2, "gpus": 2, "gpu": "T4"})
    gpu = found["report"]["plans"][found["chosen"]]["gpu"]
    sizes = (gpu["peak_reserved"], gpu["outside_torch"], gpu["total"])
    assert re.findall(r"([\d.]+) GiB", found["reserved"]) == [f"{size / 2**30:.1f}" for size in sizes]
    # Every layer of the picture has its name in the legend, which is made of these.
    assert {layer["name"] for layer in found["timeline"]["layers"]} > {"activations", "parameters", "optimizer states"}


def test_a_base_in_4_bits_brings_its_adapters() -> None:
    """It is frozen: without adapters nothing would be trained. The engine stays."""
    question = {"model": LLAMA, "gpus": 2, "gpu": "H100", "depth": "formula"}
    found, said = answer({**question, "quantize": "nf4"}), answer({**question, "quantize": "nf4", "lora_rank": 16})
    assert found["report"]["workload"]["lora_rank"] == 16
    assert found["report"]["plans"] == said["report"]["plans"]
    assert {plan["engine"] for plan in found["report"]["plans"]} == {"deepspeed"}
    assert "LoRA adapters of rank 16 are trained beside it" in " ".join(found["report"]["warnings"])
    assert "LoRA" not in " ".join(said["report"]["warnings"])


@pytest.mark.parametrize("show", [None, {"stage": 2, "offload_optimizer": "none", "offload_param": "none"}])
def test_what_is_done_is_told(show: dict[str, Any] | None) -> None:
    told: list[dict[str, Any]] = []
    found = answer({"model": GPT2, "gpus": 2, "gpu": "T4", "show": show}, told.append)
    plans = found["report"]["plans"]
    rows = [one for one in told if "plan" in one]
    assert [one["at"] for one in rows] == [*range(len(plans))] * 2
    assert {one["of"] for one in rows} == {len(plans)}
    formulas, simulated = rows[: len(plans)], rows[len(plans) :]
    assert {one["plan"]["depth"] for one in formulas} == {"formula"}
    assert [one["plan"]["gpu"] for one in simulated] == [plan["gpu"] for plan in plans]
    # The answer stands, but for its knobs and later rows, as soon as its own row is done.
    (at,) = (at for at, one in enumerate(told) if "so_far" in one)
    so_far = told[at]["so_far"]
    assert told[at - 1]["at"] == so_far["chosen"] == found["chosen"] == len(so_far["report"]["plans"]) - 1
    assert so_far["chosen"] < len(plans) - 1
    later = {"report", "knobs"}
    assert {key: so_far[key] for key in found.keys() - later} == {key: found[key] for key in found.keys() - later}
    assert so_far["knobs"] is None
    assert found["knobs"]


def test_what_is_told_names_no_folder() -> None:
    told: list[dict[str, Any]] = []
    answer({"gpu": "H100", "depth": "formula", "files": [{"name": "recipe.yaml", "text": RECIPE}]}, told.append)
    assert "recipe.yaml" in json.dumps(told)
    assert "zeroplan-" not in json.dumps(told)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_what_a_search_finds_can_be_shown_and_written(
    engine: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    question = {"model": GPT2, "gpus": 2, "gpu": "L4", "engine": engine}
    found = answer({**question, "global_batch": 8, "verb": "recommend"})
    printed = _printed(cli, found["command"])
    assert found["report"]["ranking"] == printed["ranking"]
    choice = found["choices"][0]
    change = dict(choice["change"])
    show = {key: change.pop(key, printed["ranking"][0]["plan"][key]) for key in PLAN_KEYS}
    one = {**question, **change, "files": choice["files"], "show": show}
    shown = answer(one)
    assert shown["report"]["plans"][shown["chosen"]]["gpu"] == printed["ranking"][0]["plan"]["gpu"]
    form = "explicit" if engine == "deepspeed" else "torch"
    made = answer({**one, "verb": "files", "form": form})
    output = ["-o", "ds_config.json"] if engine == "deepspeed" else []
    written = cli(*shlex.split(found["command"])[1:], "--form", form, *output, "--new-script", "train.py")
    assert written[0] == 0, written[2]
    assert {file["name"] for file in made["files"]} == {path.name for path in tmp_path.iterdir()} - {DIGESTS}
    for file in made["files"]:
        assert (tmp_path / file["name"]).read_text() == file["text"]
    assert made["start"].split()[-1] in written[1]
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(made["archive"]))) as packed:
        assert {name: packed.read(name).decode() for name in packed.namelist()} == {
            file["name"]: file["text"] for file in made["files"]
        }


def test_a_model_comes_as_its_config(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.dumps(
        {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 3, "vocab_size": 1000, "n_positions": 256}
    )
    (tmp_path / "mine.json").write_text(config)
    found = answer({"model": "forgotten", "depth": "formula", "vram": "8G", "files": [{"name": "mine.json", "text": config}]})
    assert found["read"] == [{"name": "mine.json", "as": "model"}]
    assert found["report"]["model"]["params"] == 1000 * 128 + 256 * 128 + 3 * (12 * 128**2 + 13 * 128) + 2 * 128
    assert found["report"]["plans"] == _printed(cli, found["command"])["plans"]


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("[]", "the question: is no object"),
        ("{", "the question: is not JSON"),
        ('{"modle": "gpt2"}', "did you mean 'model'"),
        ('{"model": "gpt2", "gpus": true}', "gpus: 'True' is not a whole number"),
        ('{"model": "gpt2", "gpus": 99999999999999}', "gpus: 99999999999999 is out of range"),
        ('{"model": "gpt2", "token": "hf_x"}', "there is no field 'token'"),
        ('{"model": "gpt2", "trust_remote_code": true}', "there is no field 'trust_remote_code'"),
        ('{"model": "gpt2", "verb": "verify"}', "verb: there is no verb 'verify'"),
        ('{"model": "gpt2", "show": {"stage": 1}}', "show: does not name a plan"),
        ('{"model": "gpt2", "verb": "map", "gpu": "T4"}', "map: names no plan or no micro batches"),
        ('{"model": "gpt2", "verb": "map", "batches": 3}', "batches: is no list"),
        ('{"model": "gpt2", "vram": "12Q"}', "--vram: '12Q' is not a size"),
        ('{"model": "nobody/nothing", "gpus": 2}', "offline"),
        ('{"model": "gpt2", "files": [{"name": "a"}]}', "files: has a file without a name and a text"),
        ('{"model": "gpt2", "files": [{"name": "a.json", "text": "{"}]}', "a.json: is not JSON"),
        ('{"model": "gpt2", "verb": "files", "gpu": "T4"}', "show: names no plan of the table"),
    ],
)
def test_bad_input_is_one_line(question: str, says: str) -> None:
    found = json.loads(answer_text(question.encode()))
    assert set(found) == {"error"}
    assert says in found["error"]["text"]
    assert "\n" not in found["error"]["text"]
    assert "/tmp" not in found["error"]["text"]


def test_a_tape_that_is_to_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page in a browser has no tape before a question needs it: never are formulas alone the answer for want of one."""
    monkeypatch.setattr(shipped, "DATA", str(tmp_path))
    monkeypatch.setattr(shipped, "FETCHABLE", {"openai-community--gpt2.json.xz"})
    monkeypatch.setattr(shipped.file_of, "__defaults__", (str(tmp_path),))
    monkeypatch.setattr(shipped.path_of, "__defaults__", (str(tmp_path),))
    question = json.dumps({"model": GPT2, "gpus": 2, "gpu": "T4"}).encode()
    assert json.loads(answer_text(question)) == {"fetch": "openai-community--gpt2.json.xz"}
    assert json.loads(answer_text(question.replace(b'"T4"', b'"T4", "verb": "recommend"'))) == {
        "fetch": "openai-community--gpt2.json.xz"
    }


@pytest.mark.parametrize(
    "name", ["../../evil.json", "/etc/passwd", "..", "a\\b\\ds config.json", "-rf.json", ".bashrc", "x" * 300]
)
def test_a_files_name_leaves_no_folder(name: str) -> None:
    try:
        read = answer({"model": GPT2, "gpu": "T4", "files": [{"name": name, "text": DS_CONFIG}]})["read"]
    except BadInput as error:  # a name without an ending is read as nobody's file, or as JSON
        assert "/" not in error.where
        return
    assert "/" not in read[0]["name"]
    assert not read[0]["name"].startswith((".", "-"))
    assert len(read[0]["name"]) <= 80


def test_what_files_say_of_model_and_machine() -> None:
    flags = f"--model_name_or_path {GPT2} --per_device_train_batch_size 2 --block_size 256 --output_dir out"
    script = {"name": "train.sh", "text": f"torchrun --nproc_per_node 2 run_clm.py {flags}\n"}
    says = [answer({"verb": "read", "files": files})["says"] for files in ([script], [{"name": "ds.json", "text": DS_CONFIG}])]
    assert says == [["gpus", "model", "nodes"], []]
    assert answer({"verb": "read", "files": [{"name": "config.json", "text": '{"model_type": "gpt2"}'}]})["says"] == ["model"]


def test_every_program_can_be_named() -> None:
    text = (files("zeroplan.ui") / "static" / "index.html").read_text()
    (row,) = re.findall(r'<select data-field="program">(.*)</select>', text)
    assert re.findall(r"<option>([^<]*)</option>", row) == list(PROGRAMS)


def test_names_are_those_of_the_lists(cli: Cli) -> None:
    offered = names()
    assert offered["models"] == json.loads(cli("models", "--json")[1])["models"]
    assert offered["gpus"] == json.loads(cli("gpus", "--json")[1])["gpus"]
    assert offered["compiled"] is native.available()
    assert offered["hub"] is False


def captured_loop(folder: Path) -> Path:
    """A kept capture of a loop on an A10G."""
    torch = pytest.importorskip("torch")
    import zeroplan

    with zeroplan.capture("A10G") as plan:
        model = torch.nn.Linear(1024, 1024, bias=False).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            model(torch.randn(256, 1024, device="cuda")).sum().backward()
            optimizer.step()
    plan.save(str(folder / "run.json"))
    return folder / "run.json"


def test_a_captured_run_is_a_file_like_any_other(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [{"name": "run.json", "text": captured_loop(tmp_path).read_text()}]
    read = answer({"verb": "read", "files": files})
    assert (read["values"], set(read["says"]) >= {"model", "gpus", "nodes"}) == ({"gpu": "A10G"}, True)
    for question in ({}, {"gpu": "T4"}):
        found = answer({"files": files, **question})
        assert found["report"] == _printed(cli, found["command"])
        assert found["verdict"] == "Fits"
        plan = found["report"]["plans"][found["chosen"]]
        assert max(found["timeline"]["allocated"]) == plan["gpu"]["peak_allocated"]
        layers = zip(*(layer["bytes"] for layer in found["timeline"]["layers"]), strict=True)
        assert [sum(one) for one in layers] == found["timeline"]["allocated"]
    for question, says in (
        ({"micro_batch": 4}, "--micro-batch: cannot be varied in a captured run"),
        ({"verb": "recommend"}, "run.json: is a captured run.*zeroplan recommend --from run.json"),
        ({"verb": "map", "batches": [1]}, "run.json: is a captured run"),
    ):
        with pytest.raises(BadInput, match=says):
            answer({"files": files, **question})
    with pytest.raises(BadInput, match="is no file of zeroplan capture"):
        answer({"files": [{"name": "run.json", "text": files[0]["text"].replace('"op": "', '"op": "x')}]})
