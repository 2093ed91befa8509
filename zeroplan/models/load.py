"""A ModelSpec from anything: a catalog or hub id, a folder, a file, a config as a dict, a live module or a bare count."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.tasks import Task, with_task
from zeroplan.models import catalog
from zeroplan.models.from_config import spec_from_config
from zeroplan.models.spec import ModelSpec, SpecUnit, Tensor


def load_model(
    source: Any,
    *,
    token: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    offline: bool | None = None,
    where: str = "MODEL",
    task: Task | None = None,
) -> ModelSpec:
    """Load the model's parameters, from whatever names or holds it.

    Args:
        source: an id of the catalog or the hub, a folder, a ``config.json``, a ``.safetensors`` file or its index, a
            config as a dict, a live ``nn.Module`` on any device, or a ModelSpec (returned as it is).
        token: the hub's token; None uses the one logged in with.
        revision: a branch, tag or commit of the hub; given, the catalog is not asked.
        trust_remote_code: whether code that comes with an unknown architecture may be run.
        offline: True asks only the local cache of the hub; None follows ``HF_HUB_OFFLINE``.
        where: the flag or argument to name in messages.
        task: what it is trained for, where that is not what its config says.

    Raises:
        BadInput: when there is no such model, it cannot be read, it is not understood, or has no head for the task.
    """
    if task is not None:
        return _for_task(
            load_model(source, token=token, revision=revision, trust_remote_code=trust_remote_code, offline=offline), task
        )
    if isinstance(source, ModelSpec):
        return source
    if isinstance(source, Mapping):
        return spec_from_config(
            source, name=_name_of(source), source="config", where=where, trust_remote_code=trust_remote_code
        )
    if hasattr(source, "named_parameters") and not isinstance(source, type):
        from zeroplan.models.live import spec_from_module

        return spec_from_module(source)
    if not isinstance(source, str | os.PathLike):
        raise BadInput(
            f"a {type(source).__name__} is no model", where=where, remedy="give an id, a path, a config dict or an nn.Module"
        )
    text = os.fspath(source)
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    return _from_text(text, token, revision, trust_remote_code, offline, where)


def _for_task(spec: ModelSpec, task: Task) -> ModelSpec:
    """Return the same model with the task's head."""
    if not spec.config or spec.source == "module":
        raise BadInput(
            f"{spec.name} has no config that could take another head",
            where="--task",
            remedy="give its id or config.json, or a module with that head",
        )
    return spec_from_config(with_task(spec.config, task), name=spec.name, source=spec.source, where="--task")


def _from_text(
    text: str, token: str | None, revision: str | None, trust_remote_code: bool, offline: bool | None, where: str
) -> ModelSpec:
    if not text.strip() or "\0" in text or len(text) > 4096:
        raise BadInput(
            f"{text[:60]!r} is no model", where=where, remedy="give an id such as meta-llama/Llama-3.2-1B, or a path"
        )
    if _is_local(text):
        from zeroplan.models.local import spec_from_path

        return spec_from_path(text, where=where, trust_remote_code=trust_remote_code)
    if revision is None:
        entry = catalog.find(text)
        if entry is not None:
            name = entry.id if entry.id.lower() == text.strip().lower() else text.strip()
            return spec_from_config(entry.config, name=name, source="catalog", where=where)
    from zeroplan.models.hub import spec_from_hub

    return spec_from_hub(
        text.strip(), token=token, revision=revision, trust_remote_code=trust_remote_code, offline=offline, where=where
    )


def _is_local(text: str) -> bool:
    """Return whether the text is meant as a path: it exists, or cannot be an id of the catalog or the hub."""
    if text.startswith(("/", "./", "../", "~", "\\")) or text.endswith((".json", ".safetensors")) or text in (".", ".."):
        return True
    try:
        os.lstat(text)
    except (OSError, ValueError):
        return text.count("/") > 1
    return True


def _name_of(config: Mapping[Any, Any]) -> str:
    name = config.get("_name_or_path") or config.get("model_type")
    return name[:200] if isinstance(name, str) else "config"


def bare_params(count: int, *, largest_layer: int | None = None, name: str = "") -> ModelSpec:
    """A model of which only the number of parameters is known; its one unit is a stand-in without shapes.

    Args:
        count: elements of all parameters.
        largest_layer: elements of the largest module's own parameters, where known.
        name: what to call it.

    Raises:
        BadInput: when a count is not above zero, or the largest layer is larger than the model.
    """
    for what, value in (("parameters", count), ("largest layer", largest_layer)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadInput(f"{value!r} is no count above zero", where=what, remedy="write it as 7.5B, 350M or 1235814400")
    if largest_layer is not None and largest_layer > count:
        raise BadInput(
            f"{largest_layer:,} is more than the model's {count:,} parameters",
            where="largest layer",
            remedy="give the elements of one layer",
        )
    unit = SpecUnit("params", (Tensor("all", (count,)),))
    return ModelSpec(name or f"{count:,} parameters", (unit,), "params", largest_module=largest_layer)
