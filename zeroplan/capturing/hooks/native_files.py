"""Libraries that open files by code of their own: their paths are translated to where the files are."""

from __future__ import annotations

import builtins
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroplan.capturing.state import Capture


def _place(capture: Capture, path: Any, mode: str = "r") -> Any:
    """Return where a path is read, or written."""
    overlay = capture.overlay
    if overlay is None or not isinstance(path, (str, os.PathLike)):
        return path
    return overlay.writing(path, fresh="w" in mode) if any(one in mode for one in "wa+") else overlay.reading(path)


def install_arrow(capture: Capture, module: Any) -> None:
    """Arrow's own files."""
    memory_map, os_file = module.memory_map, module.OSFile

    def mapped(path: Any, mode: str = "r") -> Any:
        return memory_map(_place(capture, path, mode), mode)

    def opened(path: Any, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        return os_file(_place(capture, path, mode), mode, *args, **kwargs)

    module.memory_map, module.OSFile = mapped, opened


def install_numpy(module: Any) -> None:
    """Text that numpy reads, by an ``open`` that it has kept; `module` is ``numpy.lib._datasource``."""

    def opened(*args: Any, **kwargs: Any) -> Any:
        return builtins.open(*args, **kwargs)

    module._file_openers._file_openers[None] = opened


def install_sqlite(capture: Capture, module: Any) -> None:
    """SQLite's files."""
    own = module.connect

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        inside = database == ":memory:" or kwargs.get("uri")
        return own(database if inside else _place(capture, database, "a"), *args, **kwargs)

    module.connect = connect


def install_parquet(capture: Capture, module: Any) -> None:
    """Parquet's files."""
    own = module.ParquetWriter.__init__

    def init(writer: Any, where: Any, *args: Any, **kwargs: Any) -> None:
        own(writer, _place(capture, where, "w"), *args, **kwargs)

    module.ParquetWriter.__init__ = init
    for name in ("read_table", "ParquetFile"):
        function = getattr(module, name)
        setattr(module, name, _reading(capture, function))


def _reading(capture: Capture, function: Any) -> Any:
    if isinstance(function, type):
        plain: Any = function
        own = plain.__init__

        def init(self: Any, source: Any, *args: Any, **kwargs: Any) -> None:
            own(self, _place(capture, source), *args, **kwargs)

        plain.__init__ = init
        return function
    return lambda source, *args, **kwargs: function(_place(capture, source), *args, **kwargs)


def install_tokenizers(capture: Capture, module: Any) -> None:
    """Tokenizers of transformers, whose files Rust writes."""
    base = module.PreTrainedTokenizerBase
    own = base.save_pretrained

    def save_pretrained(tokenizer: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        os.makedirs(folder, exist_ok=True)
        overlay = capture.overlay
        place = folder if overlay is None or overlay.own(folder) else overlay.of(folder)
        kwargs.pop("push_to_hub", None)
        os.makedirs(place, exist_ok=True)
        return own(tokenizer, place, *args, **kwargs)

    base.save_pretrained = save_pretrained
