"""The version of DeepSpeed by what pins, prints or installs it, and where a plan says that it was read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.interop.deepspeed_version import pinned_version, requested_version, version_in
from zeroplan.interop.readers import read_setups
from zeroplan.logs.reader import parse_log
from zeroplan.planner.failed_run import plan_of_log
from zeroplan.run.ask import Ask

Cli = Callable[..., tuple[int, str, str]]
LOG = "[2025-05-01 10:00:00,000] [INFO] [logging.py:107:log_dist] [Rank 0] DeepSpeed info: version=0.16.9, git-hash=unknown\n"
TRAINER: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B",
    "per_device_train_batch_size": 1,
    "bf16": True,
    "output_dir": "out",
    "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}},
}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("torch\ndeepspeed==0.14.4\n", "0.14.4"),
        ("deepspeed[all] == 0.15.2  # not later", "0.15.2"),
        ("dependencies:\n  - pip:\n    - deepspeed==0.12.6\n", "0.12.6"),
        ("dependencies:\n  - deepspeed=0.13.1\n", "0.13.1"),
        ('[tool.poetry.dependencies]\ndeepspeed = "0.14.2"\n', "0.14.2"),
        ('dependencies = [\n  "deepspeed==0.16.4",\n]', "0.16.4"),
        (LOG, "0.16.9"),
        ("deepspeed info ................... 0.17.1, unknown, unknown\n", "0.17.1"),
        (LOG + LOG.replace("0.16.9", "0.18.9"), "0.18.9"),  # a run that was started again
        ("deepspeed>=0.14.4\n", None),
        ("deepspeed==0.14.*\n", None),
        ("deepspeed-mii==0.3.1\n", None),
        ("# deepspeed==0.14.4\n", None),
        ("mydeepspeed==0.14.4\n", None),
    ],
)
def test_only_an_exact_version_counts(text: str, version: str | None) -> None:
    assert version_in(text) == version


def test_a_projects_files_are_searched_up_to_its_root_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("deepspeed==0.10.0\n")
    project = tmp_path / "project"
    inner = project / "configs" / "sft"
    inner.mkdir(parents=True)
    assert pinned_version(inner) is None
    (project / "requirements-train.txt").write_text("deepspeed==0.14.4\n")
    assert pinned_version(inner) is None  # nothing says that the folders above belong to it
    (project / ".git").mkdir()
    assert pinned_version(inner) == ("0.14.4", "requirements-train.txt")
    (inner / "environment.yml").write_text("dependencies:\n- deepspeed=0.16.9\n")
    assert pinned_version(inner) == ("0.16.9", "environment.yml")


def test_a_plan_of_files_is_for_the_version_that_their_project_pins(tmp_path: Path, cli: Cli) -> None:
    arguments = tmp_path / "args.json"
    arguments.write_text(json.dumps(TRAINER))
    plain = _plan(cli, "--from", str(arguments))
    assert plain["engine_version"] == "0.19.8"
    (tmp_path / "requirements.txt").write_text("deepspeed==0.14.4\n")
    setup = read_setups([str(arguments)], "hf-trainer")
    assert setup.ask.deepspeed_version == "0.14.4"
    assert "DeepSpeed 0.14.4, which requirements.txt pins" in setup.line
    assert _plan(cli, "--from", str(arguments))["engine_version"] == "0.14.4"
    assert _plan(cli, "--from", str(arguments), "--deepspeed-version", "0.16.9")["engine_version"] == "0.16.9"
    (tmp_path / "requirements.txt").write_text("deepspeed==0.19.8\n")
    assert read_setups([str(arguments)], "hf-trainer").ask.deepspeed_version is None  # that is planned anyway


def test_a_log_or_the_installed_package_may_name_it(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    assert requested_version(str(log)) == ("0.16.9", str(log))
    assert requested_version("0.14.2") == ("0.14.2", "")
    flags = ("meta-llama/Llama-3.2-1B", "--stage", "2", "--depth", "formula", "--json", "--deepspeed-version")
    said = json.loads(cli("estimate", *flags, str(log))[1])
    assert said["plans"][0]["engine_version"] == "0.16.9"
    assert any("DeepSpeed 0.16.9, as" in warning for warning in said["warnings"])
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"deepspeed": "0.17.5"}[name])
    assert requested_version("installed") == ("0.17.5", "the installed package")
    log.write_text("nothing of it\n")
    with pytest.raises(BadInput, match="states no version of DeepSpeed; write it"):
        requested_version(str(log))


def test_the_plan_beside_a_failed_log_is_for_the_logs_version() -> None:
    stated = parse_log(LOG + "zero_optimization_stage ...... 2\n").stated
    assert stated.deepspeed == "0.16.9"
    found = plan_of_log(Ask(model="meta-llama/Llama-3.2-1B", depth="formula"), stated, card=None, allowed=None)
    assert found.report.plans[0].engine_version == "0.16.9"
    assert "DeepSpeed 0.16.9" in found.taken


def _plan(cli: Cli, *flags: str) -> dict[str, Any]:
    code, out, err = cli("estimate", *flags, "--program", "hf-trainer", "--depth", "formula", "--json")
    assert code == 0, err
    (plan,) = json.loads(out)["plans"]
    return dict(plan)


def test_a_project_that_pins_an_old_bitsandbytes_leaves_a_quantised_base_open(tmp_path: Path) -> None:
    """Its products kept their inputs."""
    run = {**TRAINER, "use_peft": True, "load_in_4bit": True, "lora_r": 8}
    (tmp_path / "run.json").write_text(json.dumps(run))
    keys = []
    for pin in ("0.40.0", "0.43.2"):
        (tmp_path / "requirements.txt").write_text(f"bitsandbytes=={pin}\n")
        keys.append([one.key for one in read_setups([str(tmp_path / "run.json")], "trl").unmodelled if "bits" in one.key])
    assert keys == [["bitsandbytes 0.40.0"], []]
