"""Files that zeroplan writes: whole or not at all, all of them or none, and never in the place of a device or a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from zeroplan.core.errors import BadInput
from zeroplan.core.plumbing.files import require_writable, write_atomic, write_together


def test_a_pipe_or_a_device_stays_what_it_is(tmp_path: Path) -> None:
    """Renamed over /dev/stdout, a file would be there for every program after."""
    pipe, link = tmp_path / "pipe", tmp_path / "stdout"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for place in (pipe, link):
        for write in (lambda path: write_atomic(path, "x"), lambda path: require_writable(str(path))):
            with pytest.raises(BadInput, match=r"is a pipe, not a file; give the name of a file"):
                write(place)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "file.json")
    write_atomic(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there" / "file.json").read_text() == "new"


def test_files_that_belong_together_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text("old")
    synced: list[int] = []

    def full_at_the_second(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    with pytest.raises(BadInput, match=r"two: cannot be written \(No space left on device\)"):
        write_together({str(tmp_path / "one"): "new", str(tmp_path / "two"): "new"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one": "old", "two": "old"}


def test_a_long_name_of_wide_letters_is_written(tmp_path: Path) -> None:
    name = "界" * 80  # 240 of 255 bytes
    write_atomic(tmp_path / name, "x")
    assert (tmp_path / name).read_text() == "x"


@pytest.mark.parametrize(("path", "said"), [("-", "standard output is no file"), ("no/such/x", "there is no folder")])
def test_what_could_not_be_written_is_refused_before(path: str, said: str) -> None:
    require_writable(None)
    with pytest.raises(BadInput, match=said):
        require_writable(path)
