"""A question of the page: JSON that is checked, the files that came with it, and the command that asks the same."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroplan.core.errors import BadInput, did_you_mean
from zeroplan.core.option import MESH, Option
from zeroplan.core.plumbing.files import write_atomic
from zeroplan.run.ask import OPTIONS, Ask

#: Options that a question may hold. The hub's token and a model's own code are not among them.
_TAKEN = {name: option for name, option in OPTIONS.items() if option.page}
#: What names one plan of a table.
PLAN_KEYS = ("stage", "offload_optimizer", "offload_param")
#: Those of a search: all but what it finds out itself.
_FOR_SEARCH = frozenset(
    name for name, option in _TAKEN.items() if option.taken_by("recommend") and not option.found and option.panel != MESH
) | {"depth", "program"}
VERBS = ("estimate", "map", "recommend", "files", "read")
#: Longest text of a field, in characters; most files; and characters of a file's name that are kept.
_MOST_TEXT, _MOST_FILES, _MOST_NAME = 4096, 8, 80
#: Micro batches of a map's row, at most.
_MOST_BATCHES = 16
_KNOWN = (*_TAKEN, "verb", "files", "show", "form", "global_batch", "batches")


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        verb: estimate, map (what one plan needs at several micro batches), recommend, files (write a plan's) or read (which
            fields the question's files say).
        request: what to plan; every stage and offload is left open.
        show: stage and offloads of the plan that the answer is about; None lets the answer choose.
        words: the command that asks the same, without `show`.
        sources: paths of the files that came with it.
        read: of each file that came with it, its name and whether it is the ``model`` or a ``run``.
        form: of the files to write; None for the usual one.
        global_batch: for a search: sequences a step.
        batches: for a map: its micro batches.
    """

    verb: str
    request: Ask
    show: tuple[int, str, str] | None
    words: tuple[str, ...]
    sources: tuple[str, ...]
    read: tuple[dict[str, str], ...]
    form: str | None = None
    global_batch: int | None = None
    batches: tuple[int, ...] = ()


def read_question(data: Any, folder: str) -> Question:
    """Check a question and put the files that came with it into `folder`.

    Args:
        data: the question as JSON gives it: options of a run under their names; ``files``, a list of ``name`` and
            ``text``; ``show``, an object of ``stage``, ``offload_optimizer`` and ``offload_param``; ``verb``; ``form``;
            ``batches``, a list.
        folder: an empty folder.

    Raises:
        BadInput: no such field, or a value of another type.
    """
    if not isinstance(data, dict):
        raise BadInput("is no object", where="the question", remedy='send {"model": "…", "gpus": 8}')
    for name in data:
        if name not in _KNOWN:
            raise BadInput(f"there is no field {name[:60]!r}", where="the question", remedy=did_you_mean(name, _KNOWN))
    given = {name: _value(one, data[name]) for name, one in _TAKEN.items() if data.get(name) is not None}
    verb = _typed("verb", data.get("verb", "estimate"), str)
    if verb not in VERBS:
        raise BadInput(f"there is no verb {verb[:40]!r}", where="verb", remedy=f"use one of {', '.join(VERBS)}")
    read = _write_files(data.get("files") or [], folder)
    runs = [one["name"] for one in read if one["as"] == "run"]
    models = [one["name"] for one in read if one["as"] == "model"]
    if len(models) > 1:
        raise BadInput(f"{' and '.join(models[:2])} each describe a model", where="files", remedy="leave one out")
    values: dict[str, Any] = given | ({"model": models[0]} if models else {})
    if models:
        values.pop("params", None)
    asked = {name: value for name, value in values.items() if verb != "recommend" or name in _FOR_SEARCH}
    batch = data.get("global_batch")
    words = _words("recommend" if verb == "recommend" else "estimate", asked, runs)
    if verb == "recommend" and batch is not None:
        words += ["--global-batch", str(_typed("global_batch", batch, int))]
    if models:
        asked["model"] = os.path.join(folder, models[0])
    for name in asked:
        if isinstance(asked[name], str) and (reader := OPTIONS[name].read) is not None:
            asked[name] = reader(asked[name], OPTIONS[name].where)
    return Question(
        verb,
        Ask(**asked),
        _shown(data.get("show")),
        tuple(words),
        tuple(os.path.join(folder, name) for name in runs),
        tuple(read),
        None if data.get("form") is None else _typed("form", data["form"], str),
        batch,
        _batches(data.get("batches")),
    )


def _value(option: Option[Any], value: Any) -> Any:
    """Return an option's value; a text is read as the flag's would be."""
    if option.read is not None and isinstance(value, str):
        return _typed(option.name, value, str)
    return _typed(option.name, value, str if option.kind is object else option.kind)


def _typed(name: str, value: Any, kind: type) -> Any:
    """Return the value; refuse one of another type, and numbers and texts beyond any use."""
    checked: Any = value
    if type(value) is not kind:  # True is no integer here
        names = {str: "a text", int: "a whole number", bool: "true or false"}
        raise BadInput(f"{str(value)[:40]!r} is not {names[kind]}", where=name)
    if kind is str and len(checked) > _MOST_TEXT:
        raise BadInput(f"is longer than {_MOST_TEXT} characters", where=name)
    if kind is int and abs(checked) > 1 << 40:
        raise BadInput(f"{str(value)[:40]} is out of range", where=name)
    return checked


def _shown(data: Any) -> tuple[int, str, str] | None:
    if data is None:
        return None
    if not isinstance(data, dict) or set(data) != set(PLAN_KEYS):
        raise BadInput("does not name a plan", where="show", remedy=f"give {', '.join(PLAN_KEYS)}")
    stage, optimizer, param = (_typed(key, data[key], int if key == "stage" else str) for key in PLAN_KEYS)
    return stage, optimizer, param


def _batches(data: Any) -> tuple[int, ...]:
    if data is None:
        return ()
    if not isinstance(data, list) or len(data) > _MOST_BATCHES:
        raise BadInput(f"is no list of at most {_MOST_BATCHES} numbers", where="batches")
    return tuple(_typed("batches", one, int) for one in data)


def _write_files(data: Any, folder: str) -> list[dict[str, str]]:
    """Write the files; returns each one's name and whether it is a model or a run."""
    if not isinstance(data, list) or len(data) > _MOST_FILES:
        raise BadInput(f"is no list of at most {_MOST_FILES} files", where="files")
    read: list[dict[str, str]] = []
    for one in data:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str) or not isinstance(one.get("text"), str):
            raise BadInput("has a file without a name and a text", where="files")
        name = _plain_name(one["name"])
        if any(name == other["name"] for other in read):
            raise BadInput(f"there are two files {name}", where="files", remedy="leave one out")
        write_atomic(os.path.join(folder, name), one["text"])
        read.append({"name": name, "as": "model" if _is_model(name, one["text"]) else "run"})
    return read


def _plain_name(name: str) -> str:
    """Return a file's name without a folder and without characters that a shell or a path gives a meaning."""
    plain = re.sub(r"[^\w.+-]", "_", re.split(r"[/\\]", name)[-1]).lstrip(".-")[-_MOST_NAME:]
    return plain or "file.json"


def _is_model(name: str, text: str) -> bool:
    """Return whether a file is a model's config.json: an object that names its kind of model."""
    if not name.lower().endswith(".json"):
        return False
    from zeroplan.core.plumbing.documents import parse_json

    try:
        data = parse_json(text, name)
    except BadInput:  # whoever owns such a file says what is wrong with it
        return False
    return isinstance(data, dict) and isinstance(data.get("model_type"), str)


def _words(verb: str, given: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    """Return the command of the question: options that have another value than their default, as flags."""
    words = ["zeroplan", verb, *([_not_a_flag(given["model"])] if "model" in given else [])]
    words += Ask(**given).words(name for name in _TAKEN if name != "model")
    return words + [word for name in files for word in ("--from", name)]


def _not_a_flag(model: str) -> str:
    """Return the model as an argument: a name that begins with a dash is a path here."""
    return f"./{model}" if model.startswith("-") else model


def plan_words(show: tuple[int, str, str]) -> list[str]:
    """Return the flags of ``estimate`` that leave this one plan of a table."""
    words = ["--stage", str(show[0])]
    for key, place in zip(PLAN_KEYS[1:], show[1:], strict=True):
        words += [f"--{key.replace('_', '-')}", place] if place != "none" else []
    return words
