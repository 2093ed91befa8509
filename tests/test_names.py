"""Files and Notes that documents, comments and docstrings name exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.conftest import ROOT

_ENDINGS = r"\.(?:py|md|hpp|cpp|cuh|cu|h|sh|jsonl|json|css|js)\b"
#: From the repository's root, or from the root of a package; DeepSpeed's and torch's own paths begin otherwise.
_FROM_ROOT = re.compile(rf"(?<![\w/.<{{-])((?:zeroplan|zeroplan_runtime|csrc|tests|benchmarks|docs)/[\w./-]*\w{_ENDINGS})")
_FROM_PACKAGE = re.compile(
    rf"(?<![\w/.<{{-])((?:cli|core|ds_config|engines|interop|ledger|planner|report|search|simulate|tapes|trace|validate)/[\w./-]*\w{_ENDINGS})"
)
_PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|_[A-Z]{2,}_")
_NOTE = re.compile(r"Note \[([^\]]+)\]")


def _texts() -> dict[Path, list[str]]:
    folders = {
        "docs": "*.md",
        "zeroplan": "*.py",
        "zeroplan_runtime": "*.py",
        "benchmarks": "*.py",
        "csrc": "*.[ch]*",
    }
    files = [ROOT / "README.md", *(path for name, ending in folders.items() for path in sorted((ROOT / name).rglob(ending)))]
    return {path: path.read_text().splitlines() for path in files}


def test_every_file_that_is_named_exists() -> None:
    missing = []
    for path, lines in _texts().items():
        for number, line in enumerate(lines, 1):
            named = [(name, ROOT / name) for name in _FROM_ROOT.findall(line)]
            named += [(name, ROOT / "zeroplan" / name) for name in _FROM_PACKAGE.findall(line)]
            where = f"{path.relative_to(ROOT)}:{number}"
            missing += [f"{where}: {name}" for name, file in named if not (file.exists() or _PLACEHOLDER.search(name))]
    assert not missing, "\n".join(missing)


def test_every_note_that_is_referred_to_is_written() -> None:
    written, referred = set(), {}
    for path, lines in _texts().items():
        for line in lines:
            for match in _NOTE.finditer(line):
                begins = not line[: match.start()].strip(' "/#r')
                if (begins and line[match.end() :].strip(": ") == "") or line[match.end() :].startswith(":"):
                    written.add(match[1])
                else:
                    referred[match[1]] = path
    assert referred.keys() <= written, {name: str(path) for name, path in referred.items() if name not in written}


def test_no_two_test_files_have_one_module_name() -> None:
    """Else pytest collects nothing at all. In a folder without ``__init__.py`` a file's module is named by the file alone."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.stem for path in paths if path.stem.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
