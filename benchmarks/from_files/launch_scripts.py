"""Eighty launch scripts of public repositories, each read from three places, beside what a person read in them.

    python -m benchmarks.from_files.launch_scripts FOLDER [--only RE] [--write]

FOLDER has the repositories as ``owner+name``, whole, at the commits of ``launch_scripts.jsonl``; their code is not kept here.
Each script is read in its repository's root, in its own folder, and from elsewhere by its whole path: all three have to say the
same. Its model, batch, length, dtype and method are those that the file notes, which were compared by eye with the script; a
line that begins with ``refused`` is what is said in their place. Exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from pathlib import Path
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.interop.readers import read_setups
from zeroplan.planner.estimate import estimate_report
from zeroplan.run.ask import Ask

CASES = Path(__file__).with_name("launch_scripts.jsonl")
_FIELDS = ("model", "micro_batch", "seq_len", "grad_accum", "dtype", "engine", "lora_rank", "quantize")


def read(path: Path, root: Path) -> dict[str, Any]:
    """Return what is read of one script: its fields, what is open, what no figure holds, and whether it would promise a fit.

    Args:
        path: the script.
        root: its repository, absolute: a model beside it is named from their folder on.
    """
    try:
        setup = read_setups([path])
    except BadInput as error:
        return {"refused": _placeless(str(error), path, root)}
    ask = setup.ask
    found: dict[str, Any] = {"program": setup.program, "method": setup.method, "task": setup.task}
    for name in _FIELDS:
        value = ask.values.get(name)
        found[name] = value if isinstance(value, int | str | None) else str(value)
    if isinstance(found["model"], str):
        found["model"] = found["model"].removeprefix(f"{root.parent}/")
    found["unmodelled"] = [one.key for one in setup.unmodelled]
    found["open"] = sorted(setup.open)
    asked = Ask(files=(path,), vram="80G", cpu_ram="2T", offline=True)
    try:
        found["fits"] = _fits(asked)
    except BadInput as error:
        found["plan"] = _placeless(str(error), path, root)
        if found["plan"].startswith("MODEL"):  # one that is not at hand: with another in its place, is a fit promised?
            with contextlib.suppress(BadInput):
                found["fits with Llama 2"] = _fits(asked.replace(model="meta-llama/Llama-2-7b-hf"))
    return found


def _fits(asked: Ask) -> list[str]:
    return sorted({str(plan.fits) for plan in estimate_report(asked).plans})


def _placeless(text: str, path: Path, root: Path) -> str:
    """Return a message without the folders that lead to its files or to one's home: each place and machine has others."""
    folders = sorted({f"{one}/" for one in (path.parent, path.parent.resolve(), root)} - {"./"}, key=len, reverse=True)
    for folder in folders:
        text = text.replace(folder, "")
    return text.replace(f"{Path.home()}/", "~/")[:300]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="RE")
    parser.add_argument("--write", action="store_true", help="note what is read, to be compared by eye")
    args = parser.parse_args()
    cases, differ = [json.loads(line) for line in CASES.read_text().splitlines()], 0
    for case in cases:
        name = f"{case['repository']}/{case['path']}"
        if not re.search(args.only, name):
            continue
        root = (args.folder / case["repository"].replace("/", "+")).resolve()
        whole = root / case["path"]
        places = {"root": (root, Path(case["path"])), "own folder": (whole.parent, Path(whole.name))}
        places["elsewhere"] = CASES.parent, whole
        said = {}
        for place, (folder, path) in places.items():
            with contextlib.chdir(folder):
                said[place] = read(path, root)
        other = [place for place, found in said.items() if found != said["root"]]
        kept = said["root"] if args.write else case["read"]
        changed = {key: (kept.get(key), value) for key, value in said["root"].items() if kept.get(key) != value}
        differ += bool(other or changed)
        print(name, "the same" if not other else f"differs in {', '.join(other)}", changed or "", flush=True)
        for place in other:
            print("   ", place, {key: value for key, value in said[place].items() if said["root"].get(key) != value})
        if args.write:
            case["read"] = said["root"]
    if args.write:
        CASES.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return int(differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
