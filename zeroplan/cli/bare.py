"""Questions without a verb: ``zeroplan Llama-3.1-8B 24G``, ``zeroplan train.sh``, ``zeroplan oom.log``, ``zeroplan`` alone."""

from __future__ import annotations

import os
import re
import shlex

from zeroplan.core.errors import BadInput

#: A size such as 24G, 24GB or 80GiB.
_SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]i?B?", re.IGNORECASE)
#: How a GPU's name may have its count: 8xH100.
_COUNTED = re.compile(r"\d+[x×*]\S+")
_LOGS = (".log", ".out", ".err")
_RECIPES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".toml", ".py", ".ipynb", ".json")
#: Files of a folder that are looked at; a project has its own at its top or in ``scripts``.
_MOST_FILES, _MOST_SHOWN = 60, 4


def question(words: list[str]) -> list[str] | None:
    """Return the words with the verb that answers them, and a card's size or name as its flag.

    A log goes to ``doctor``, a ds_config to ``check``, another program's file and a model to ``estimate``.

    Returns:
        None where the first word is neither a file nor a model: it is a verb, or a misspelt one.
    """
    first, *others = words
    if os.path.isfile(first) and os.path.basename(first) != "config.json":
        if first.lower().endswith(_LOGS) or not first.lower().endswith((*_RECIPES, ".safetensors")):
            return ["doctor", first, *_flagged(others)]
        from zeroplan.interop.readers import is_ds_config

        if first.lower().endswith(".json") and is_ds_config(first, by_keys=True):
            return ["check", first, *_flagged(others)]
        if not first.lower().endswith((".safetensors", ".safetensors.index.json")):
            return ["estimate", "--from", first, *_flagged(others)]
    if os.path.exists(first) or _is_model(first):
        return ["estimate", first, *_flagged(others)]
    return None


def _flagged(words: list[str]) -> list[str]:
    """Return the words with the flag before those that are a card's size or name; what stands behind a flag stays."""
    found: list[str] = []
    for at, word in enumerate(words):
        if at and words[at - 1].startswith("--") and "=" not in words[at - 1]:
            found.append(word)
        elif _SIZE.fullmatch(word):
            found += ["--vram", word]
        elif _COUNTED.fullmatch(word) or _is_gpu(word):
            found += ["--gpu", word]
        else:
            found.append(word)
    return found


def _is_gpu(word: str) -> bool:
    from zeroplan.core.gpus import find_gpu
    from zeroplan.core.local_cards import LOCAL

    if word.lower() == LOCAL:
        return True
    try:
        find_gpu(word)
    except BadInput:
        return False
    return not word.startswith("-")


def _is_model(word: str) -> bool:
    """Return whether a word is a hub id, or the name of a model of the catalog."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", word):
        return True
    from zeroplan.models.catalog import find

    return find(word) is not None


def found_here() -> list[list[str]]:
    """Return the commands that could be asked of a folder with a training project: of its logs, launch files and configs."""
    questions = (_question_of(path) for path in _files())
    return [["zeroplan", *asked] for asked in questions if asked is not None][:_MOST_SHOWN]


def _files() -> list[str]:
    """Return the paths of files that may tell of a run, launch scripts first."""
    names = []
    for place in ("", "scripts"):
        try:
            names += [os.path.join(place, name) for name in sorted(os.listdir(place or "."))]
        except OSError:
            continue
    suffixes = (*_RECIPES, *_LOGS)
    kept = [name for name in names if name.lower().endswith(suffixes)]
    kept.sort(key=lambda name: next(at for at, suffix in enumerate(suffixes) if name.lower().endswith(suffix)))
    return kept[:_MOST_FILES]


def _question_of(path: str) -> list[str] | None:
    """Return the question that a file asks; None where it tells of no run."""
    from zeroplan.interop.programs.document import load_document
    from zeroplan.interop.programs.registry import PROGRAMS

    if os.path.basename(path) == "config.json":
        return ["estimate", path, "--gpu", "H100"]
    if path.lower().endswith(_LOGS):
        return ["doctor", path]
    try:
        document = load_document(path)
        owners = [one.name for one in PROGRAMS.values() if one.recognises(document)]
    except (BadInput, OSError):
        return None
    if owners == ["ds_config"]:
        return ["check", path]
    return ["estimate", "--from", path, "--gpu", "H100"] if owners else None


def overview() -> str:
    """Return what was found in this folder and what to ask of it; empty where nothing was."""
    commands = found_here()
    if not commands:
        return ""
    lines = ["This folder has a training project. Ask:", *(f"  {shlex.join(words)}" for words in commands)]
    return "\n".join([*lines, "Other questions: zeroplan --help"])
