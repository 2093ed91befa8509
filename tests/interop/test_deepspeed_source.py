"""The command that holds the table of versions against DeepSpeed's own source."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.deepspeed_versions import CLASSES, UNREAD, compared, main, read_source

BF16 = "bf16"


def a_source(folder: Path, *, immediate: str = "False", more: str = "") -> Path:
    """The precision classes of a version, and a constant, in the form of the real files."""
    runtime = folder / "deepspeed" / "runtime"
    runtime.mkdir(parents=True)
    (runtime / "precision_config.py").write_text(
        "class DeepSpeedBF16Config(Base):\n"
        "    enabled: bool = False\n"
        f"    immediate_grad_update: bool = Field({immediate}, alias='x')\n"
        "    check_grad_overflow: bool = True\n"
        "    bf16_master_weights_and_grads: bool = False\n"
        "    bf16_optimizer_states: bool = Field(default_factory=bool)\n" + more
    )
    (runtime / "constants.py").write_text("GRADIENT_CLIPPING = 'gradient_clipping'\nGRADIENT_CLIPPING_DEFAULT = 1.0\n")
    return folder


def test_a_version_as_the_table_has_it_differs_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_source(tmp_path / "deepspeed-0.19.8")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0.19.8: 6 keys of 2 sections, 0 differences\n"


def test_a_default_that_moved_and_a_key_that_is_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = a_source(tmp_path / "v0.16.0", immediate="True")
    declared = read_source(source / "deepspeed" / "runtime")
    assert declared[BF16]["bf16_optimizer_states"] is UNREAD
    del declared[BF16]["enabled"]
    lines = list(compared((0, 16, 0), declared))
    assert "bf16.enabled is not there, the table knows no version that brought it" in lines
    assert "bf16.immediate_grad_update is True, the table says False" in lines
    assert "bf16.check_grad_overflow is there, the table says from 0.17.1 on" in lines
    assert "gradient_clipping is 1.0, the table says 0.0" in lines
    assert main([str(tmp_path)]) == 1
    assert "the table says" in capsys.readouterr().out


def test_a_folder_without_versions_is_an_error(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1
    assert set(CLASSES) >= {"zero/config.py", "zero/offload_config.py"}
