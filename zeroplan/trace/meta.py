"""Builds architectures that zeroplan does not describe itself, on transformers' meta device: shapes without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroplan.core.errors import BadInput
from zeroplan.core.model_config import (
    CAUSAL_LM,
    IMAGE_CLASSIFICATION,
    IMAGE_TEXT_TO_TEXT,
    MASKED_LM,
    SEQ2SEQ_LM,
    SPEECH_SEQ2SEQ,
    architectures_of,
    auto_classes_of,
)
from zeroplan.trace.quiet import errors_alone

#: Asked in this order when the config names no architecture.
_AUTO_BY_USE = (
    CAUSAL_LM,
    SEQ2SEQ_LM,
    MASKED_LM,
    IMAGE_CLASSIFICATION,
    IMAGE_TEXT_TO_TEXT,
    SPEECH_SEQ2SEQ,
    "AutoModel",
)
#: Building each module costs about a tenth of a millisecond, so depth is bounded to bound the time.
_DEEPEST = 2_000
_LARGEST_VALUE = 1 << 40


def build_on_meta(
    config: Mapping[Any, Any],
    *,
    where: str = "config",
    repository: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, str]:
    """Build the module that a config describes on the meta device; returns it with the name of the auto class that built it.

    Args:
        config: the contents of a ``config.json``.
        where: the file or model to name in messages.
        repository: the hub id or folder the config came from, where its own code lies, if it brings any.
        revision: of that repository.
        token: for that repository.
        trust_remote_code: whether that code may be run; without it, no code but transformers' own is.

    Raises:
        BadInput: when transformers does not know the architecture, or refuses its values.
    """
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _check_bounds(config, where)
    model_type = config.get("model_type")
    values = {str(key): value for key, value in config.items() if key not in ("model_type", "auto_map", "quantization_config")}
    remote = isinstance(config.get("auto_map"), Mapping)
    try:
        if model_type in CONFIG_MAPPING:
            with errors_alone():
                built = transformers.AutoConfig.for_model(model_type, **values)
        elif remote and trust_remote_code and repository:
            built = transformers.AutoConfig.from_pretrained(repository, revision=revision, token=token, trust_remote_code=True)
        else:
            raise _unknown(str(model_type), remote, where, transformers.__version__)
        auto_class = _auto_class(built, config, where)
        options = {"trust_remote_code": True} if trust_remote_code and repository and remote else {}
        with errors_alone(), torch.device("meta"):
            return getattr(transformers, auto_class).from_config(built, **options), auto_class
    except BadInput:
        raise
    except Exception as error:  # a config of any content reaches transformers' constructors, which raise anything
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BadInput(
            f"transformers cannot build model_type {str(model_type)[:60]!r} from it: {line}",
            where=where,
            remedy="check the config",
        ) from None


def _unknown(model_type: str, remote: bool, where: str, version: str) -> BadInput:
    if remote:
        return BadInput(
            f"model_type {model_type[:60]!r} brings its own code",
            where=where,
            remedy="give --trust-remote-code to run it, if you trust it",
        )
    return BadInput(
        f"model_type {model_type[:60]!r} is unknown to zeroplan and to transformers {version}",
        where=where,
        remedy="install a transformers that knows it, or give --params",
    )


def _auto_class(built: Any, config: Mapping[Any, Any], where: str) -> str:
    """Return the auto class that builds the config's architecture; without one, the first that knows the config.

    Raises:
        BadInput: when transformers has no class of that name for the config's type.
    """
    import transformers

    own = config.get("auto_map")
    remote = own if isinstance(own, Mapping) else {}
    names = architectures_of(config)
    for name in names:
        exact = _auto_class_of(name, built)
        if exact is not None:
            return exact
    heads = list(auto_classes_of({**config, "architectures": names}))
    for auto in (*heads, *_AUTO_BY_USE):
        known = type(built) in getattr(transformers, auto)._model_mapping
        if auto in remote or (known and (not names or auto in heads)):
            return auto
    if names:
        raise BadInput(
            f"transformers {transformers.__version__} has no {names[0][:60]} for model_type {str(built.model_type)[:60]!r}",
            where=where,
            remedy="name one of its classes in architectures",
        )
    return "AutoModel"


def _auto_class_of(name: str, built: Any) -> str | None:
    """Return the auto class that builds the class of that name from the config, heads before the bare model."""
    import transformers

    autos = [auto for auto in dir(transformers) if auto.startswith("AutoModel")]
    for auto in sorted(autos, key=lambda auto: (auto == "AutoModel", _place(auto), auto)):
        found = getattr(getattr(transformers, auto), "_model_mapping", {}).get(type(built), ())
        if name in (made.__name__ for made in (found if isinstance(found, tuple) else (found,))):
            return auto
    return None


def _place(auto: str) -> int:
    return _AUTO_BY_USE.index(auto) if auto in _AUTO_BY_USE else len(_AUTO_BY_USE)


def _check_bounds(value: Any, where: str, key: str = "", depth: int = 0) -> None:
    """Refuses numbers that would take unbounded time or memory to build."""
    if depth > 20:
        raise BadInput("is nested too deeply", where=where, remedy="check the config")
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_bounds(item, where, str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for item in value[:100_000]:
            _check_bounds(item, where, key, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        most = _DEEPEST if "layers" in key or key in ("n_layer", "depth") else _LARGEST_VALUE
        if not abs(value) <= most:
            raise BadInput(f"{key[:60]!r} is out of range", where=where, remedy=f"at most {most:,}")
