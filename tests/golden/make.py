"""Makes the golden answers, and says how today's differ: ``python -m tests.golden.make [--check]``.

Every request runs in this process through the command line's own entry, in an empty folder, with empty caches and as if
neither torch nor transformers were installed: an answer follows from the repository alone, on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import lzma
import math
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.golden.requests import FILES, Words, quick_requests, requests
from zeroplan.core.digests import DIGESTS

ANSWERS = Path(__file__).with_name("answers.json.xz")
_DS_CONFIGS = Path(__file__).resolve().parent.parent / "fixtures" / "ds_configs"

#: Packages that only some machines have. None in `sys.modules` makes Python say that they are not installed.
_OPTIONAL = ("torch", "transformers", "peft", "accelerate", "deepspeed", "lightning", "pynvml")
#: What a variable of the user's would change: caches and profiles come from a folder that is empty, the hub is never asked.
_FOLDERS = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE")
_ABSENT = object()
#: Seconds and rates are floats, whose last digits follow Python's `sum` (compensated since 3.12) and libm. Bytes are integers.
_FLOAT_TOLERANCE = 1e-12

Answer = dict[str, Any]
Answers = dict[str, Answer]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where ``--check`` finds a difference, else 0."""
    parser = argparse.ArgumentParser(description="Make the golden answers, or compare with them.")
    parser.add_argument("--check", action="store_true", help="write nothing: print what differs, exit 1 if anything does")
    parser.add_argument("--quick", action="store_true", help="only the quick subset (with --check)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only requests whose line has this in it (with --check)")
    parser.add_argument("--update", metavar="PATTERN", help="make only requests whose line has this in it anew")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="processes (1)")
    parser.add_argument("--lines", type=int, default=60, metavar="N", help="print at most so many differences (60)")
    options = parser.parse_args(arguments)
    if not options.check and (options.quick or options.only):
        parser.error("--quick and --only need --check: the stored file holds every request")
    wanted = quick_requests() if options.quick else requests()
    pattern = options.only if options.check else options.update or ""
    wanted = [words for words in wanted if re.search(pattern, shlex.join(words))]
    if not wanted:
        parser.error(f"no request has {pattern!r} in its line")
    made = make(wanted, jobs=options.jobs)
    if options.check:
        return _check(made, whole=not (options.quick or options.only), most=options.lines)
    if options.update is not None:
        known = {shlex.join(words) for words in requests()}
        made = {**{line: answer for line, answer in stored().items() if line in known}, **made}
    ANSWERS.write_bytes(packed(made))
    print(f"{len(made)} answers, {ANSWERS.stat().st_size:,} bytes in {ANSWERS.name}")
    return 0


def _check(made: Answers, *, whole: bool, most: int) -> int:
    golden = stored()
    found = [line for name, answer in made.items() for line in differences(name, golden.get(name), answer)]
    if whole:
        found += [f"{name}: is stored, and asked no more" for name in golden.keys() - made.keys()]
    for line in found[:most]:
        print(line)
    if len(found) > most:
        print(f"… and {len(found) - most} more differences")
    print(f"{len(made)} answers compared, {len(found)} differences")
    return 1 if found else 0


def make(wanted: Sequence[Words], *, jobs: int = 1) -> Answers:
    """The answers to the requests, by their lines."""
    if jobs == 1:
        answers = _run(wanted)
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            parts = pool.map(_run, [wanted[i::jobs] for i in range(jobs)], chunksize=1)
        answers = {name: answer for part in parts for name, answer in part.items()}
    return {name: answers[name] for name in map(shlex.join, wanted)}


def _run(wanted: Sequence[Words]) -> Answers:
    with apart() as folder:
        return {shlex.join(words): answer_to(words, folder) for words in wanted}


@contextlib.contextmanager
def apart() -> Iterator[Path]:
    """An empty home and the files that requests read, as the working folder. Restores what it changes."""
    modules, before = {name: sys.modules.get(name, _ABSENT) for name in _OPTIONAL}, os.getcwd()
    # A program that runs as `python -m package.program` is named so in messages on its flags.
    named = patch.object(sys.modules["__main__"], "__package__", "")
    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ), named:
        folder = Path(home).resolve() / "work"
        folder.mkdir()
        for name, text in FILES.items():
            (folder / name).write_text(text)
        for path in _DS_CONFIGS.glob("*.json"):
            shutil.copy(path, folder / path.name)
        os.environ.update(dict.fromkeys(_FOLDERS, home), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="80")
        for name in ("HF_ENDPOINT", "HF_TOKEN"):
            os.environ.pop(name, None)
        sys.modules.update(dict.fromkeys(_OPTIONAL))  # type: ignore[arg-type]
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            for name, module in modules.items():
                del sys.modules[name]
                if module is not _ABSENT:
                    sys.modules[name] = module  # type: ignore[assignment]


def answer_to(words: Words, folder: Path) -> Answer:
    """What the command line prints, its exit code, and the files that it writes under ``out``."""
    from zeroplan.cli.main import run

    written = folder / "out"
    written.mkdir()
    out, err, code = io.StringIO(), io.StringIO(), 0
    arguments = sys.argv
    sys.argv = ["zeroplan", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = arguments
    paths = (path for path in sorted(written.rglob("*")) if path.is_file() and path.name != DIGESTS)
    files = {path.relative_to(folder).as_posix(): path.read_text() for path in paths}
    shutil.rmtree(written)
    answer = {
        "code": code,
        "out": _printed(out.getvalue()),
        "err": err.getvalue(),
        "files": {k: _data(v) for k, v in files.items()},
    }
    return json.loads(json.dumps(answer).replace(str(folder), "<folder>"))


def _data(text: str) -> Any:
    """The object of a JSON text; other text by itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _printed(text: str) -> Any:
    """What was printed, without the version and the command that made it."""
    data = _data(text)
    return {key: value for key, value in data.items() if key != "zeroplan"} if isinstance(data, dict) else data


def packed(answers: Answers) -> bytes:
    """The stored form: JSON with sorted keys, a request a line, in an xz stream."""
    lines = [json.dumps({name: answers[name]}, sort_keys=True, ensure_ascii=False) for name in sorted(answers)]
    return lzma.compress(("\n".join(lines) + "\n").encode(), preset=9 | lzma.PRESET_EXTREME)


def stored() -> Answers:
    """The golden answers, by request."""
    answers: Answers = {}
    with lzma.open(ANSWERS, "rt", encoding="utf-8") as lines:
        for line in lines:
            answers.update(json.loads(line))
    return answers


def differences(where: str, old: Any, new: Any) -> list[str]:
    """Where two values differ, a line each: the path, the old value and the new one."""
    if old is None and isinstance(new, dict) and "code" in new:
        return [f"{where}: has no stored answer; make it with --update"]
    return [f"{where}\n    {path or 'answer'}: {_short(a)} → {_short(b)}" for path, a, b in _walk("", old, new)]


def _walk(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from _walk(f"{path}.{key}" if path else key, old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif isinstance(old, list) and isinstance(new, list):
        for i in range(max(len(old), len(new))):
            a, b = (values[i] if i < len(values) else _ABSENT for values in (old, new))
            yield from _walk(f"{path}[{i}]", a, b)
    elif isinstance(old, float) and isinstance(new, float):
        if not math.isclose(old, new, rel_tol=_FLOAT_TOLERANCE):
            yield path, old, new
    elif type(old) is not type(new) or old != new:
        yield path, old, new


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}…"


if __name__ == "__main__":
    raise SystemExit(main())
