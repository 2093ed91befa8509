"""The shipped catalog: config facts and exact parameter counts of models that people train.

One JSON file a family: ``source`` says where its facts come from, ``defaults`` holds what its models share, ``models``
maps each id to its exact parameter count (``params``), its own config values and, where it has them, ``also``: ids of
the same shapes under other names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from typing import Any

_HERE = os.path.dirname(__file__)

#: Words of a model's name that say how it was tuned, not what shape it has.
_TUNING = frozenset({"instruct", "it", "pt", "chat", "base", "hf", "sft", "dpo", "preview"})
#: Organisations that mirror others' models under the same names.
_MIRRORS = frozenset({"unsloth", "nousresearch"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: its id, config facts, exact number of parameters (tied ones once) and where the facts come from.

    `pretrained`: there are weights to begin from.
    """

    id: str
    config: Mapping[str, Any]
    params: int
    source: str
    also: tuple[str, ...] = ()
    pretrained: bool = True


@cache
def _entries() -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for file in sorted(os.listdir(_HERE)):
        if not file.endswith(".json"):
            continue
        with open(os.path.join(_HERE, file), encoding="utf-8") as stream:
            family = json.load(stream)
        source, pretrained = family["source"], family.get("pretrained", True)
        for name, facts in family["models"].items():
            config = {**family["defaults"], **facts["config"]}
            also = tuple(facts.get("also", ()))
            found[name.lower()] = Entry(name, config, facts["params"], source, also, pretrained)
    return found


def _shape_name(name: str, *, dates: bool) -> str:
    """The name without the words that only say how the model was tuned and, if asked, when.

    Only names that state a size (``7b``, ``8x7b``) lose words: in ``bert-base-uncased`` the word ``base`` is the size.
    """
    words = name.split("-")
    if not any(word[-1:] in ("b", "m") and any(ch.isdigit() for ch in word) for word in words):
        return name
    kept = [word for word in words[1:] if word not in _TUNING and not (dates and word.isdigit() and len(word) in (4, 6, 8))]
    return "-".join([words[0], *kept])


@cache
def _index() -> dict[str, Entry]:
    """Return every spelling that resolves to a model: an id beats an alias, both beat names that lost words, and those lost
    dates last.
    """
    entries = _entries().values()
    index = {entry.id.lower(): entry for entry in entries}
    for entry in entries:
        for alias in entry.also:
            index.setdefault(alias.lower(), entry)
    for dates in (False, True):
        for spelling, entry in list(index.items()):
            index.setdefault(_shape_name(spelling, dates=dates), entry)
    for spelling, entry in list(index.items()):
        index.setdefault(spelling.rpartition("/")[2], entry)
    return index


def find(name: str) -> Entry | None:
    """Return the catalog's model of that id, or of that id less its tuning words (``-Instruct``, ``-it``, ``-Chat``, a date).

    Case does not matter, and the organisation may be left out.
    """
    wanted = name.strip().strip("/").lower()
    if wanted in _entries():
        return _entries()[wanted]
    index = _index()
    organisation, _, bare = wanted.rpartition("/")
    if organisation in _MIRRORS:
        wanted = bare
    for spelling in (wanted, _shape_name(wanted, dates=False), _shape_name(wanted, dates=True)):
        if spelling in index:
            return index[spelling]
    return None


def hub_id(name: str) -> str:
    """Return the id at the hub of what :func:`find` takes more loosely: with its organisation, and in the hub's own case."""
    wanted, entry = name.strip().strip("/"), find(name)
    if entry is None:
        return wanted
    organisation, _, bare = entry.id.rpartition("/")
    if wanted.lower() in (entry.id.lower(), bare.lower()):
        return entry.id
    return wanted if "/" in wanted else f"{organisation}/{wanted}"


def ids() -> tuple[str, ...]:
    """Return every id of the catalog."""
    return tuple(entry.id for entry in _entries().values())


def entries() -> Iterator[Entry]:
    """Return every model of the catalog."""
    return iter(_entries().values())


def near_names(name: str) -> str:
    """``"did you mean 'meta-llama/Llama-3.2-1B'?"``, or an empty string when nothing is near."""
    by_bare = {one.rpartition("/")[2].lower(): one for one in ids()}
    words = name.strip()[:200].rpartition("/")[2].lower().split("-")
    shape = "-".join(takewhile(lambda word: word not in _TUNING, words))  # the organisation and the tuning say nothing of it
    near = get_close_matches(shape, by_bare, cutoff=0.75) or get_close_matches("-".join(words), by_bare)
    return f"did you mean {' or '.join(repr(by_bare[one]) for one in near)}?" if near else ""


def catalog_table() -> list[dict[str, Any]]:
    """Return a row for each model, for tables and docs: ``id``, ``family``, ``params``, ``also`` (other ids of its shapes),
    ``source``.
    """
    return [
        {
            "id": entry.id,
            "family": entry.config["model_type"],
            "params": entry.params,
            "also": list(entry.also),
            "source": entry.source,
        }
        for entry in entries()
    ]
